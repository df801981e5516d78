"""Words of strangers: what a terminal or a log is shown of them."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collab_llm_nodes.errors import CollabError, Unavailable, printable

COPIES = "\x1b]52;c;cm0gLXJm\x07"
"""Writes to the clipboard of many terminals."""
REVERSED = "\u202egnp.exe"
FORGED = "no room\n[WARN] [motion_guard]: emergency stop released by operator"


@given(st.text())
def test_nothing_is_left_that_a_terminal_obeys(text: str) -> None:
    for shown in (printable(text), printable(text, lines=True).replace("\n", "").replace("\t", "")):
        shown.encode()
        assert not {unicodedata.category(c) for c in shown} & {"Cc", "Cs", "Zl", "Zp"}
        assert not {unicodedata.bidirectional(c) for c in shown} & {
            *("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
        }
        assert printable(shown) == shown


@pytest.mark.parametrize(
    "text",
    ["Guten Tag, schönes Wetter!", "日本\u3000語", "👩\u200d🚒", "مرحبا", "a\xa0b", "C:\\x1b"],
)
def test_what_people_write_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


def test_what_is_taken_out_can_be_read() -> None:
    assert printable(COPIES) == r"\x1b]52;c;cm0gLXJm\x07"
    assert printable(REVERSED) == r"\u202egnp.exe"
    assert printable("two\nlines\tand\r") == r"two\nlines\tand\r"
    assert printable("two\nlines\tand\r", lines=True) == "two\nlines\tand\\r"


@pytest.mark.parametrize("words", [COPIES, REVERSED, FORGED])
def test_an_error_is_one_harmless_line(words: str) -> None:
    """Its words may be a verifier's or a worker's, and are told in logs and statuses."""
    for error in (
        CollabError(words, field="link", remedy="wait"),
        Unavailable("gone", field=words),
        Unavailable("gone", remedy=words),
    ):
        assert str(error) == printable(str(error))
        assert printable(words) in str(error)
