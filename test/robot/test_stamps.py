"""Stamps that are old, ahead, missing or standing still are named as what they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from collab_llm_nodes.robot.guard import Guard, GuardConfig, Source
from collab_llm_nodes.robot.stamps import Stamps


@pytest.mark.parametrize(
    ("stamp", "named"),
    [
        (lambda now: now - 10.0, "stamped 10.0 s ago"),
        (lambda now: now + 10.0, "stamped 10.0 s ahead"),
        (lambda now: 1000.0, "stamped alike for 0.4 s"),
        (lambda now: 0.0, "not stamped"),
        (lambda now: now - 0.3, ""),
        (lambda now: now + 0.3, ""),
        (lambda now: now - now % 0.1, ""),  # a driver that repeats each stamp a few times
    ],
)
def test_stamps_are_judged(stamp: Callable[[float], float], named: str) -> None:
    stamps = Stamps()
    told = [stamps.trouble(stamp(1000.0 + 0.02 * i), 1000.0 + 0.02 * i, 0.5) for i in range(20)]
    assert told[-1].startswith(named)
    assert bool(told[-1]) == bool(named)


def test_a_clock_that_stands_still_is_no_fault_of_the_stamps() -> None:
    stamps = Stamps()  # a simulator that pauses
    assert not any(stamps.trouble(5.0, 5.0, 0.5) for _ in range(1000))


def test_the_guard_says_what_is_wrong_with_the_stamps() -> None:
    guard = Guard(GuardConfig())
    guard.troubles[Source.ODOMETRY] = "stamped 10.0 s ago: do the clocks agree?"
    text = guard.state(1.0).text
    assert "no fresh odometry: its messages are stamped 10.0 s ago: do the clocks agree?" in text
    assert "no fresh picture: is camera_ingest running" in text
    guard.troubles[Source.ODOMETRY] = ""
    assert "stamped" not in guard.state(1.0).text
