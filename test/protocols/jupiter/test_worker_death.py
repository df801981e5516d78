"""A worker that dies during an answer: the others continue, and the answer is the same."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from jupiter_bed import (
    PATIENT,
    WAIT_S,
    alone,
    assert_exact,
    control,
    expand,
    folder,
    prompt,
    settings,
    workers,
)
from waiting import wait_for

from collab_llm_lab.bench.jupiter.local_workers import local_workers
from collab_llm_lab.bench.link.proxy import LinkProxy
from collab_llm_nodes.errors import Busy, ConfigError, ModelError, Unavailable
from collab_llm_nodes.processes import free_port
from collab_llm_nodes.protocols.base import Control
from collab_llm_nodes.protocols.jupiter import pipeline, worker
from collab_llm_nodes.protocols.jupiter.generation import answer
from collab_llm_nodes.protocols.jupiter.lane import DecodeConfig, LaneAnswer
from collab_llm_nodes.protocols.jupiter.link import LinkConfig, StageLink
from collab_llm_nodes.protocols.jupiter.messages import WorkerInfo
from collab_llm_nodes.protocols.jupiter.monitors import SilenceMonitor
from collab_llm_nodes.protocols.jupiter.partition import Placement
from collab_llm_nodes.protocols.jupiter.pipeline import (
    Pipeline,
    PipelineConfig,
    equal_parts,
)

TOKENS = 16
WATCHFUL = LinkConfig(silence_s=3.0, connect_s=20.0)
"""A silent worker is found soon, one that a busy machine holds up for a second is not lost."""


def after(tokens: int, then: Callable[[], object]) -> Callable[[Sequence[LaneAnswer]], None]:
    """Return a listener that calls ``then`` once, when there are so many tokens."""
    done = threading.Event()

    def on_tokens(lanes: Sequence[LaneAnswer]) -> None:
        if sum(len(lane.tokens) for lane in lanes) >= tokens and not done.is_set():
            done.set()
            then()

    return on_tokens


def used_by(made: Pipeline) -> set[str]:
    """Return the workers of the chain in use."""
    chain = made.current
    return {part.device for part in chain.parts} if chain is not None else set()


def config_of(addresses: Sequence[str], link: LinkConfig = WATCHFUL) -> PipelineConfig:
    return PipelineConfig(tuple(addresses), link)


def test_a_silent_peer_is_lost_after_the_ticks_it_has_and_no_sooner() -> None:
    monitor = SilenceMonitor(7)
    assert [monitor.tick() for _ in range(7)] == [False] * 7
    monitor.reset()
    assert [monitor.tick() for _ in range(8)] == [*[False] * 7, True]
    monitor.reset()
    assert [monitor.tick(2.0) for _ in range(10)] == [*[False] * 9, True]


def test_by_default_a_silent_worker_is_lost_within_a_second() -> None:
    assert LinkConfig().silence_s + 0.1 <= 0.9


@pytest.mark.exhaustive  # without processes: the tests below
@pytest.mark.timeout(400)
def test_processes_that_are_killed_or_stopped_are_replaced() -> None:
    ids = prompt(30)
    right = alone(ids, TOKENS)
    with local_workers(3, str(folder())) as running:
        addresses = [one.address for one in running]
        killed, stopped = running[1], running[2]
        with Pipeline(config_of(addresses)) as made:
            for victim, kind in ((killed, signal.SIGKILL), (stopped, signal.SIGSTOP)):
                begun = time.monotonic()
                strike = partial(os.kill, victim.process.pid, kind)
                found = answer(made, ids, DecodeConfig(TOKENS), control(), after(3, strike))
                assert found.tokens == right
                loss = made.losses[-1]
                assert loss.device == victim.address
                assert begun < loss.found_at <= loss.arranged_at
            assert [part.device for part in made.chain(control().due).parts] == addresses[:1]
            assert made.missing == addresses[1:]
            os.kill(stopped.process.pid, signal.SIGCONT)  # it lives again, and gets layers again
            wait_for(lambda: used_by(made) == {addresses[0], stopped.address}, WAIT_S)
            assert answer(made, ids, DecodeConfig(TOKENS), control()).tokens == right
            assert [loss.device for loss in made.losses] == [killed.address, stopped.address]
            assert made.missing == [killed.address]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_worker_behind_a_cut_link_is_replaced(which: int) -> None:
    ids = prompt(30)
    with workers(3) as (_, addresses), LinkProxy(addresses[which]) as link:
        shown = [link.address if i == which else a for i, a in enumerate(addresses)]
        with Pipeline(config_of(shown)) as made:
            assert_exact(made, ids, TOKENS, after(3, link.half_open))
            assert [loss.device for loss in made.losses] == [link.address]


def test_without_any_worker_left_an_answer_ends_soon(caplog: pytest.LogCaptureFixture) -> None:
    ids = prompt(30)
    with workers(1) as (_, addresses), LinkProxy(addresses[0]) as link:
        config = replace(config_of([link.address]), alone_s=0.5)
        short = replace(config.link, connect_s=0.5)
        with Pipeline(replace(config, link=short)) as made:
            made.chain(control().due)
            with pytest.raises(Unavailable, match="no worker answers"):
                answer(made, ids, DecodeConfig(TOKENS), control(), after(3, link.half_open))
            for _ in range(2):
                with pytest.raises(Unavailable):
                    made.chain(control().due)
    assert caplog.text.count("no worker answers") == 1


def test_a_cut_between_two_workers_is_found_by_the_one_that_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The coordinator reaches both; the one that cannot be sent to is not used any more."""
    ids = prompt(30)
    with workers(2, next=WATCHFUL) as (_, addresses), LinkProxy(addresses[1]) as between:

        def through(config: LinkConfig, address: str, *others: Any) -> StageLink:
            assert address == addresses[1]
            return StageLink(config, between.address, *others)

        monkeypatch.setattr(worker, "StageLink", through)
        with Pipeline(config_of(addresses, PATIENT)) as made:
            assert_exact(made, ids, TOKENS, after(3, between.half_open))
            assert [loss.device for loss in made.losses] == [addresses[1]]


@pytest.mark.parametrize(("least_mbps", "lost"), [(0.002, False), (20.0, True)])
def test_a_link_that_gets_slow_is_no_dead_worker(
    least_mbps: float, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states take longer than silence may last; that is no silence of the worker."""
    ids = prompt(30)
    watchful = replace(WATCHFUL, silence_s=0.5, least_mbps=least_mbps)
    with workers(2, next=watchful) as (_, addresses), LinkProxy(addresses[1]) as between:

        def through(config: LinkConfig, address: str, *others: Any) -> StageLink:
            return StageLink(config, between.address, *others)

        monkeypatch.setattr(worker, "StageLink", through)
        with Pipeline(config_of(addresses, PATIENT)) as made:
            made.chain(control().due)
            between.throttle(20_000.0)  # the prompt's states: 30 x 32 float32
            found = answer(
                made, ids, DecodeConfig(4), control(), after(1, lambda: between.throttle(0.0))
            )
            assert found.tokens == alone(ids, 4)
            assert bool(made.losses) == lost


def test_lanes_are_rebuilt_with_the_prompt_that_they_share() -> None:
    shared, requests = prompt(40, 3), [prompt(4, 20 + i) for i in range(3)]
    with workers(3) as (handles, addresses), Pipeline(config_of(addresses)) as made:
        listener = after(12, lambda: end(handles[2]))
        found, expected = expand(made, shared, requests, DecodeConfig(TOKENS), listener)
        assert found == expected
        assert [loss.device for loss in made.losses] == [addresses[2]]


@pytest.fixture
def no_upkeep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_UPKEEP_S", 3600.0)


def end(handle: object) -> None:
    """Stop a worker of this process, in another thread: the caller serves it."""
    threading.Thread(target=handle.stop).start()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("no_upkeep")
def test_a_worker_that_comes_back_is_used_when_no_request_is_under_way() -> None:
    ids = prompt(30)
    with workers(1) as (_, first), ExitStack() as stack:
        late = f"127.0.0.1:{free_port()}"
        config = config_of([*first, late], PATIENT)
        made = stack.enter_context(Pipeline(config))
        assert_exact(made, ids, TOKENS)
        assert (used_by(made), made.missing) == ({*first}, [late])
        made.renew()
        assert used_by(made) == {*first}, "it is not there yet"
        stack.enter_context(workers(1, address=late))
        with made.lanes(1, control().due):
            made.renew()
            assert used_by(made) == {*first}, "a request is in progress"
        made.renew()
        assert (used_by(made), made.missing) == ({*first, late}, [])
        assert_exact(made, ids, TOKENS)


@pytest.mark.usefixtures("no_upkeep")
def test_a_worker_that_comes_back_with_other_weights_is_not_used() -> None:
    with workers(1) as (_, first), ExitStack() as stack:
        late = f"127.0.0.1:{free_port()}"
        config = config_of([*first, late], PATIENT)
        made = stack.enter_context(Pipeline(config))
        made.chain(control().due)
        other = replace(settings().model, path=str(folder(1)))
        stack.enter_context(workers(1, address=late, model=other))
        made.renew()
        assert (used_by(made), made.missing) == ({*first}, [late])


@pytest.mark.usefixtures("no_upkeep")
def test_workers_are_looked_for_after_the_first_request_only() -> None:
    with Pipeline(config_of(["127.0.0.1:9"])) as made:
        made.renew()
        with pytest.raises(Unavailable):
            made.chain(time.monotonic())
        made.renew()
        assert made.current is None
        assert made.missing == ["127.0.0.1:9"]


def test_a_plan_that_finds_no_room_is_reported() -> None:
    def plan(devices: Sequence[str], info: WorkerInfo) -> list[Placement]:
        if len(devices) < 2:
            raise ConfigError("too little memory", field="workers", remedy="add a worker")
        return equal_parts(devices, info)

    with workers(2) as (handles, addresses), Pipeline(config_of(addresses), plan) as made:
        listener = after(3, lambda: end(handles[1]))
        with pytest.raises(ConfigError, match="too little memory"):
            answer(made, prompt(30), DecodeConfig(TOKENS), control(), listener)


def test_missing_workers_are_reported_within_the_deadline() -> None:
    with Pipeline(config_of(["127.0.0.1:9"])) as made:
        with pytest.raises(Unavailable, match="no worker answers") as refused:
            answer(made, prompt(5), DecodeConfig(2), Control(time.monotonic() + 0.5))
        assert refused.value.remedy


def test_workers_that_do_not_belong_together_are_refused() -> None:
    other = replace(settings().model, path=str(folder(1)))
    with ExitStack() as stack:
        _, first = stack.enter_context(workers(1))
        _, second = stack.enter_context(workers(1, model=other))
        made = stack.enter_context(Pipeline(config_of([*first, *second])))
        with pytest.raises(ModelError, match="different weights"):
            made.chain(control().due)
    with workers(2) as (handles, addresses), Pipeline(config_of(addresses)) as made:
        service = handles[1].service
        service.info = replace(service.info, version="0.0.0")
        with pytest.raises(ConfigError, match="version"):
            made.chain(control().due)


def test_a_worker_serves_one_coordinator_at_a_time() -> None:
    ids = prompt(5)
    with workers(1) as (_, addresses):
        config = config_of(addresses, PATIENT)
        with Pipeline(config) as made, Pipeline(config) as other:
            made.chain(control().due)
            with pytest.raises(Busy, match="another coordinator"):
                other.chain(control().due)
        with Pipeline(config) as other:  # the first has left, which the worker may still learn

            def served() -> bool:
                try:
                    return answer(other, ids, DecodeConfig(3), control()).tokens == alone(ids, 3)
                except Busy:
                    return False

            wait_for(served, WAIT_S)
