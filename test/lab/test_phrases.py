"""Sentence templates and the voices that fill them in."""

from __future__ import annotations

import random

import pytest
from templates import sentences

from collab_llm_lab.phrases import (
    Grammar,
    Phrase,
    Voice,
    compiled,
    pick,
    say,
    says,
    words,
)


def test_alternatives_optional_parts_and_fields() -> None:
    assert sentences("(Go|Walk) [slowly ]to the {room}.", {"room": "attic"}) == {
        "Go to the attic.",
        "Walk to the attic.",
        "Go slowly to the attic.",
        "Walk slowly to the attic.",
    }


def test_alternatives_may_hold_alternatives() -> None:
    assert sentences("(a (b|c)|d)") == {"a b", "a c", "d"}


def test_brackets_and_bars_outside_alternatives_stand_for_themselves() -> None:
    assert sentences("{a} | 3 | (net) and (x|y)", {"a": "lamp"}) == {
        "lamp | 3 | (net) and x",
        "lamp | 3 | (net) and y",
    }


@pytest.mark.parametrize("text", ["(a|b", "a)", "[a", "a]b", "{a b}", "{a"])
def test_a_broken_template_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="bracket|template"):
        Phrase(text)


def test_a_voice_without_freedom_says_the_same_for_the_same_keys() -> None:
    phrases = compiled("(one|two|three) and (four|five|six)", "(seven|eight) and (nine|ten)")

    def spoken(keys: tuple[int, ...]) -> str:
        said = {say(phrases, Voice(random.Random(i), keys, 0), {}) for i in range(20)}
        assert len(said) == 1
        return said.pop()

    assert len({spoken((key, other)) for key in range(7) for other in range(6)}) > 8


def test_every_alternative_can_be_chosen_by_a_key() -> None:
    for site in (7, 12345, 0xDEADBEEF):
        for count in (2, 3, 4):
            chosen = {Voice(random.Random(0), (k,), 0).choose(site, count) for k in range(64)}
            assert chosen == set(range(count))


def test_the_last_wording_is_held_out() -> None:
    phrases = compiled("a", "b", "c")
    voice = Voice(random.Random(5))
    assert {pick(phrases, voice, {}, False) for _ in range(50)} == {"A", "B"}
    assert {pick(phrases, voice, {}, True) for _ in range(50)} == {"C"}


def test_a_text_at_the_start_of_a_request_keeps_its_small_letter() -> None:
    phrases = compiled("{text}\nRepeat that.", "{thing}, please.")
    voice, fields = Voice(random.Random(5)), {"text": "red mug", "thing": "mug"}
    assert pick(phrases, voice, fields, False) == "red mug\nRepeat that."
    assert pick(phrases, voice, fields, True) == "Mug, please."


def test_a_grammar_knows_its_words_but_no_fields() -> None:
    grammar = Grammar()
    grammar("(Open|Don't open) the {room}'s door[ now].")
    grammar.add_words("half an hour")
    assert grammar.words == {"open", "don't", "the", "door", "now", "half", "an", "hour"}


def test_words_keep_codes_times_and_amounts_whole() -> None:
    text = "At 14:20, Mia's code is K4-77; pay 12.50."
    assert words(text) == ["at", "14:20", "mia", "code", "is", "k4-77", "pay", "12.50"]
    assert says(text, "pay 12.50")
    assert not says(text, "12.5")
