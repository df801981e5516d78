"""Quotes in replies follow the lines that they quote."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from collab_llm_nodes.chat.quoting import Quoting

_PIECES = [
    "",
    "Gem",
    "ma",
    " F",
    "uller",
    " left",
    ":",
    " 7",
    " 9",
    "; ",
    '"',
    "{",
    '"citation": "',
]
_TEXT = "Gemma Fuller: 7\n\n  Gem left: 9\nGem left: 7"


def _encode(texts: list[str]) -> list[list[int]]:
    return [[0, *_ids(text)] for text in texts]  # 0: a mark without text, at a line's begin


def _ids(text: str) -> list[int]:
    ids: list[int] = []
    while text:
        piece = max((p for p in _PIECES if p and text.startswith(p)), key=len)
        ids.append(_PIECES.index(piece))
        text = text.removeprefix(piece)
    return ids


def _decode(ids: Sequence[int]) -> str:
    return "".join(_PIECES[i] for i in ids)


def _follow(reply: str, text: str = _TEXT) -> set[str]:
    """Return the pieces that may follow ``reply``, which is written token by token."""
    quoting = Quoting(text, _encode, _decode)
    found: set[int] = set()
    ids = _ids(reply)
    for length in range(len(ids) + 1):
        found = quoting.next_tokens(ids[:length])
    return {_PIECES[i] for i in found}


@pytest.mark.parametrize(
    ("reply", "following"),
    [
        ('{"citation": "Gem', {"ma", " left"}),
        ('{"citation": "Gemma', {" F"}),
        ('{"citation": "Gemma F', {"uller"}),
        ('{"citation": "Gem left', {":"}),
        ('{"citation": "Gem left: 9; Gemma F', {"uller"}),
    ],
)
def test_a_line_goes_on_as_it_does_in_the_text(reply: str, following: set[str]) -> None:
    assert _follow(reply) == following


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "Gemma F",  # no quote
        '{"citation": "',
        '{"citation": "Gem left: 9; ',
        '{"citation": "Gemma Fuller:',  # the last token may be merged with the closing mark
        '{"citation": "Gemma Fuller: 7',
        '{"citation": " left',  # no line begins so
        '{"citation": "Gemma left',
        '{"citation": "Gem left: 9"Gemma F',  # after the quote
    ],
)
def test_elsewhere_anything_may_follow(reply: str) -> None:
    assert _follow(reply) == set()


def test_a_text_without_lines_constrains_nothing() -> None:
    assert _follow('{"citation": "Gem', "\n \n") == set()
