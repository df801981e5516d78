"""Log lines are limited by what they say."""

from __future__ import annotations

from collab_llm_nodes.ros.logs import Repeats


def test_a_line_is_logged_once_a_second_whatever_is_logged_beside_it() -> None:
    repeats = Repeats()
    assert repeats.admit("a", 0.0)
    assert repeats.admit("b", 0.1)
    assert not repeats.admit("a", 0.9)
    assert repeats.admit("a", 1.0)
    assert not repeats.admit("b", 1.05)
    assert repeats.admit("b", 1.1)


def test_callers_cannot_fill_the_log_with_lines_of_their_own() -> None:
    repeats = Repeats(most=3)
    lines = [(f"line {i}", i / 64.0) for i in range(192)]
    logged = [line for line, now in lines if repeats.admit(line, now)]
    assert logged == [f"line {i}" for i in (0, 1, 2, 64, 65, 66, 128, 129, 130)]
