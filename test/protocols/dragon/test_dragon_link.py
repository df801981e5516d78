"""The device's patience with the cloud, event by event."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from collab_llm_nodes.protocols.dragon.link import DeviceLink, PatienceConfig, Step

CONFIG = PatienceConfig(patience_s=8.0, silence_s=5.0)


def test_a_cloud_that_never_comes_is_given_up() -> None:
    link = DeviceLink(CONFIG, 100.0)
    assert link.next_time == 108.0
    link.on_lost(101.0)
    assert link.next_time == 101.05
    assert link.on_time(101.04) is None
    assert link.on_time(101.05) is Step.OPEN
    assert link.reopened == 1
    assert link.on_time(107.9) is None
    assert link.on_time(108.0) is Step.GIVE_UP
    assert link.next_time == math.inf
    assert link.on_time(200.0) is None


def test_a_cloud_that_was_absent_is_waited_for_less_until_it_is_back() -> None:
    config = PatienceConfig(patience_s=8.0, absent_s=2.0)
    link = DeviceLink(config, 0.0, absent=True)
    assert link.on_time(1.9) is None
    assert link.on_time(2.0) is Step.GIVE_UP
    back = DeviceLink(config, 0.0, absent=True)
    back.on_opened(1.0)
    back.on_wait(True, 1.0)
    assert back.on_time(4.0) is None
    eager = PatienceConfig(patience_s=1.0, absent_s=2.0)
    assert DeviceLink(eager, 0.0, absent=True).on_time(1.0) is Step.GIVE_UP


def test_a_stream_that_is_lost_is_opened_again_with_new_patience() -> None:
    link = DeviceLink(CONFIG, 0.0)
    link.on_opened(1.0)
    link.on_heard()
    link.on_wait(False, 1.0)
    assert link.next_time == math.inf
    link.on_lost(50.0)
    assert link.on_time(50.1) is Step.OPEN
    assert link.on_time(57.9) is None
    link.on_opened(57.9)
    link.on_heard()
    assert link.on_time(60.0) is None


def test_silence_is_counted_only_while_the_cloud_owes_something() -> None:
    link = DeviceLink(CONFIG, 0.0)
    link.on_opened(0.0)
    link.on_wait(False, 0.0)
    assert link.on_time(100.0) is None
    link.on_wait(True, 100.0)
    link.on_wait(True, 104.0)
    assert link.next_time == 105.0
    link.on_heard()
    link.on_wait(True, 104.5)
    assert link.on_time(105.0) is None
    assert link.on_time(109.5) is Step.OPEN


def test_a_cloud_that_opens_again_and_again_and_brings_nothing_is_given_up() -> None:
    """To take part is not enough: patience ends where no draft and no target comes."""
    link = DeviceLink(PatienceConfig(patience_s=8.0, silence_s=2.0), 0.0)
    now, opened = 0.0, 0
    while True:
        link.on_opened(now)
        opened += 1
        link.on_wait(True, now)
        now = link.next_time
        if link.on_time(now) is Step.GIVE_UP:
            break
    assert now == 8.0
    assert opened == 4


def test_a_refusal_is_final() -> None:
    link = DeviceLink(CONFIG, 0.0)
    link.on_refused()
    assert link.given_up
    assert link.on_time(1e6) is None


@settings(max_examples=200)
@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(["opened", "lost", "waits", "idle", "time"]), st.floats(0.0, 3.0)
        ),
        max_size=40,
    )
)
def test_every_wait_ends(events: list[tuple[str, float]]) -> None:
    """The end comes in time with a cloud that brings nothing more, whatever has happened before."""
    link, now = DeviceLink(CONFIG, 0.0), 0.0
    for kind, after in events:
        now += after
        if kind == "opened" and not link.given_up:
            link.on_opened(now)
        elif kind == "lost" and not link.given_up:
            link.on_lost(now)
        elif kind == "time":
            link.on_time(now)
        else:
            link.on_wait(kind == "waits", now)
    link.on_wait(True, now)
    end = now + CONFIG.patience_s
    while not link.given_up:
        now = max(now, link.next_time)
        assert now <= end
        link.on_time(now)
