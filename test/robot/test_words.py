"""Plain words for synonyms and misspellings."""

from __future__ import annotations

import time

import pytest

from collab_llm_lab.home.wording import HELD_OUT_SLIPS, SLIPS, SYNONYMS
from collab_llm_nodes.robot.words import plain_word, plain_words


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Find the crimson CUPS!", "find the red mug!"),
        ("the jet-black coffee cup", "the black mug"),
        ("a trafic cone by the room divider", "a cone by the partition"),
        ("don\N{RIGHT SINGLE QUOTATION MARK}t go", "don\N{RIGHT SINGLE QUOTATION MARK}t go"),
        ("don't go close, please", "don't go close, please"),
        ("the cup's place", "the mug's place"),
        ("go back to my pal and the cat", "go back to my pal and the cat"),
        ("the shoes and the classes", "the shoes and the classes"),
        ("", ""),
    ],
)
def test_synonyms_and_misspellings_have_plain_words(text: str, plain: str) -> None:
    assert plain_words(text) == plain


@pytest.mark.parametrize("plain", SYNONYMS)
def test_every_synonym_of_the_requests_is_known(plain: str) -> None:
    for synonym in SYNONYMS[plain]:
        assert plain_words(synonym) == plain
        if " " not in synonym and "-" not in synonym:
            assert plain_word(f"{synonym}s") == plain


def test_every_misspelling_of_the_requests_is_read_but_for_those_that_are_words() -> None:
    slips = {s: word for table in (SLIPS, HELD_OUT_SLIPS) for word in table for s in table[word]}
    unread = {s for s, word in slips.items() if plain_words(s) != plain_words(word)}
    assert len(slips) > 900
    assert unread <= {
        *("bra", "cartoon", "cub", "cue", "dive", "fin", "had", "lad", "lap", "led", "net", "pal"),
        *("reed", "rub", "sand", "scarlett", "snow", "tack", "thin"),
    }


@pytest.mark.parametrize("piece", ["jet-", "water bottle ", "a", "'", "cups "])
def test_it_takes_linear_time(piece: str) -> None:
    begun = time.process_time()
    plain_words(piece * (100_000 // len(piece)))
    assert time.process_time() - begun < 2.0
