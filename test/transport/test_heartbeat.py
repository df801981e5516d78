"""A verifier that falls silent is known to be lost within a bound, at a small cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_models import FakeEngine, as_engine, encode
from hypothesis import given
from hypothesis import strategies as st

from collab_llm_lab.bench.link import LinkProfile, LinkProxy
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server
from collab_llm_nodes.protocols.edge_cloud.verifier_client import (
    ClientLinkConfig,
    LinkStatus,
    VerifierClient,
)
from collab_llm_nodes.transport.heartbeat import Heartbeat, HeartbeatConfig


@pytest.mark.parametrize(
    "values",
    [{"interval_s": 0.21}, {"timeout_s": 0.46}, {"interval_s": 0.2, "timeout_s": 0.3}],
)
def test_no_configuration_is_more_patient(values: dict[str, float]) -> None:
    assert HeartbeatConfig(0.2, 0.45)
    with pytest.raises(ConfigError):
        HeartbeatConfig(**values)


@given(st.lists(st.floats(0.0, 0.6), max_size=40), st.floats(0.02, 0.2))
def test_silence_is_asked_after_and_known_in_time(heard: list[float], interval: float) -> None:
    """Run by its own clock, against signs of life at any times."""
    beat = Heartbeat(HeartbeatConfig(interval, 0.4))
    signs, now = [0.0], 0.0
    for pause in heard:
        signs.append(signs[-1] + pause)
    ends = signs[-1] + 2.0
    due, questions = list(signs), []
    while now < ends:
        while due and due[0] <= now:
            beat.on_heard(due.pop(0))
        ask, _ = beat.on_time(now)
        if ask:
            questions.append(now)
        last = max(s for s in signs if s <= now)
        assert beat.lost == (now >= last + 0.4)
        assert beat.next_time > now
        now = min([beat.next_time, *due[:1], ends])
    assert beat.lost
    assert len([q for q in questions if q > signs[-1]]) >= int(2.0 / interval) - 1
    for a, b in zip(questions, questions[1:], strict=False):
        assert b - a >= interval - 1e-9


class Watched:
    """A client with a heartbeat over a link that can fall silent."""

    def __init__(self, link: LinkProxy) -> None:
        self.states: list[tuple[float, LinkStatus]] = []
        self._changed = threading.Condition()
        self.client = VerifierClient(
            ClientLinkConfig(address=link.address), self._on_state, HeartbeatConfig()
        )

    def _on_state(self, status: LinkStatus) -> None:
        with self._changed:
            self.states.append((time.monotonic(), status))
            self._changed.notify_all()

    def wait(self, condition: Callable[[], Any]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout=30.0), self.states

    def is_up(self) -> bool:
        return self.client.status.state == "UP"


@pytest.fixture
def link() -> Iterator[LinkProxy]:
    config = VerifierConfig(address="127.0.0.1:0")
    with (
        start_server(config, as_engine(FakeEngine()), encode) as server,
        LinkProxy(f"127.0.0.1:{server.port}", LinkProfile(delay_s=0.02)) as proxy,
    ):
        yield proxy


def test_a_cut_link_is_known_and_so_is_its_return(link: LinkProxy) -> None:
    watched = Watched(link)
    with watched.client:
        watched.wait(watched.is_up)
        accepted = link.accepted
        link.half_open()
        cut = time.monotonic()
        watched.wait(lambda: not watched.is_up())
        at, status = watched.states[-1]
        assert at - cut < 5.0  # how soon is for the benchmark; gRPC's own keepalive takes 4 s
        assert (status.state, status.error_code) == ("CONNECTING", "DEADLINE_EXCEEDED")
        assert "nothing heard" in status.error_msg
        link.heal()
        watched.wait(watched.is_up)
        assert link.accepted == accepted  # the connection, and what runs over it, is still there
        assert watched.client.status.error_msg == ""


def test_a_background_thread_that_is_stuck_is_no_link(link: LinkProxy) -> None:
    watched, go_on = Watched(link), threading.Event()
    with watched.client:
        watched.wait(watched.is_up)
        watched.client._loop.call_soon_threadsafe(go_on.wait, 30.0)
        deadline = time.monotonic() + 20.0
        while watched.is_up() and time.monotonic() < deadline:
            time.sleep(0.01)
        status = watched.client.status
        go_on.set()
        assert (status.state, status.error_code) == ("CONNECTING", "DEADLINE_EXCEEDED")
        watched.wait(watched.is_up)


def test_it_costs_little(link: LinkProxy) -> None:
    watched = Watched(link)
    with watched.client:
        watched.wait(watched.is_up)
        before, began = link.bytes_up + link.bytes_down, time.monotonic()
        with watched._changed:
            watched._changed.wait(1.0)
        rate = (link.bytes_up + link.bytes_down - before) / (time.monotonic() - began)
    assert 100.0 < rate < 4000.0  # byte/s; it asks, and not more than that
