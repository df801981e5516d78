"""Which instructions only ask to stop."""

from __future__ import annotations

import pytest

from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.navigation.stop_words import STOP_WORDS, asks_to_stop, check_stop_words


@pytest.mark.parametrize("word", STOP_WORDS)
def test_every_word_asks_to_stop_however_it_is_written(word: str) -> None:
    for frame in ("{}", " {}!!\n", "please {}", "{} now, robot", "Could you {} right away?"):
        assert asks_to_stop(frame.format(word))
        assert asks_to_stop(frame.format(word).upper())


@pytest.mark.parametrize(
    "instruction",
    [
        "stop stop stop",
        "Stop! Don't move!",
        "don\u2019t move",
        "dont move",
        "stop the robot",
        "STOP_NOW",
        "s\u200btop",
        "\uff53\uff54\uff4f\uff50",
        "arrete-toi",
        "\u00a1Alto!",
        "no, stop it",
    ],
)
def test_asks_to_stop(instruction: str) -> None:
    assert asks_to_stop(instruction)


@pytest.mark.parametrize(
    "instruction",
    [
        "find the stop sign",
        "go to the bus stop",
        "stop at the door",
        "find the ball and stop",
        "do not stop",
        "don't stop",
        "never stop",
        "wait for me",
        "turn right now",
        "paragraph",
        "please",
        "no",
        "",
        "?!",
    ],
)
def test_says_something_else(instruction: str) -> None:
    assert not asks_to_stop(instruction)


@pytest.mark.parametrize("words", [(), ("",), ("please",), ("stop", "!?")])
def test_words_that_are_none_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="stop_words"):
        check_stop_words(words)
