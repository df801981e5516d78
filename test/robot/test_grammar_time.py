"""The action grammar takes time in proportion to the text."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from grammar_texts import OTHER_WORDS

from collab_llm_nodes.robot import grammar
from collab_llm_nodes.robot.grammar import Code, GrammarConfig, StreamingParser, parse

PIECES = (
    *(
        "\n",
        " ",
        ".",
        ". ",
        "so, ",
        "so ",
        "the next ",
        "the next action is ",
        "move forward ",
        "9",
    ),
    *(
        "9 ",
        "9.",
        "by ",
        "rotate ",
        "turn left 3",
        "turn left 30 degree ",
        "stop ",
        "not ",
        "'",
        '"',
    ),
    *(
        "if ",
        "the ball is ",
        "the ball is ahead. ",
        "on ",
        "a ",
        "i see ",
        "no ",
        "and ",
        "on and ",
        "it's ",
    ),
    *(
        "ball ",
        "2 m ",
        "stop sign ",
        "some way ",
        "red and ",
        "there is ",
        "[",
        "{",
        '{"action":',
        "\\",
        "\u0436",
    ),
)
FRAMES = (
    "{}",
    "{}. the next action is stop.",
    "{}. the next action is reply.",
    "the next action is{}stop",
    "the next action is turn left{}30 degree",
    "the next action is turn left 30{}degree",
    "the next action is stop{}x",
    "turn left 30 degree{}",
    "rotate{}",
    "```{}",
    "```json{}```",
    '{{"action": "stop", "reason": "{}"}}',
    '{{"action": {}',
)


def effort(read: Any, size: int) -> float:
    """CPU time [s]."""
    before = time.process_time()
    read(size)
    return time.process_time() - before


def assert_linear(read: Any, what: str, size: int = 1_000) -> None:
    """Three doublings take less than 20 times as long; a quadratic reading takes 64 times.

    What else the machine does only adds to a time, so the best of several tries counts.
    """
    for _ in range(10):
        short = effort(read, size)
        if effort(read, 8 * size) < 20 * short + 0.005:
            return
    raise AssertionError(what)


@pytest.mark.parametrize("words", ["its own", "configured"])
def test_reading_takes_time_in_proportion_to_the_text(words: str) -> None:
    config = GrammarConfig()
    if words == "configured":
        things = tuple("a" * n for n in range(1, 100))
        config = replace(OTHER_WORDS, reason="plain", stop=("stop here",), things=things)
    config = replace(config, max_characters=100_000, json=True)
    for frame in FRAMES:
        for piece in PIECES:

            def read(size: int) -> None:
                filled = piece * (size // len(piece))  # noqa: B023
                parse(frame.format(filled), config)  # noqa: B023

            assert_linear(read, f"{frame!r} of {piece!r}")


@pytest.mark.parametrize("piece", [". ", "the next action is ", "!", "the next action is 0.", " "])
def test_a_stream_takes_time_in_proportion_to_the_text(piece: str) -> None:
    """The size of the pieces in which it comes does not matter."""

    def read(size: int) -> None:
        parser = StreamingParser(GrammarConfig(max_characters=100_000))
        for character in piece * (size // len(piece)):
            parser.push(character)

    assert_linear(read, piece, 2_000)


def test_a_text_that_is_too_long_is_not_read_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_compiled", None)
    monkeypatch.setattr(grammar, "_parse_json", None)
    for text in ("```" + " " * 4_000, "{" * 4_000, " " * 4_000):
        assert parse(text, GrammarConfig(json=True)).code is Code.UNREADABLE
