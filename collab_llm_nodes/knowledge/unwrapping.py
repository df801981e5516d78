"""Paragraphs that were wrapped at a right margin, as `man` and RFCs print them, made whole again.

    The port of the default listener. If it is     a line that had no room for the next word
    0, any free port is taken.                     goes on in the next one

A line end stays where a line had room, where the indentation changes, before the items of a list,
in tables, and between records, which begin alike: a log with one record a line stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

WRAP = "\N{LINE SEPARATOR}"
"""Stands for the end of a line within a paragraph: a blank, also for ``str.split``."""

_NARROWEST = 40
"""Narrower lines are not taken for wrapped text [characters]."""
_MARGIN_SHARE, _FULL = 0.9, 0.85
"""Share of lines left of the margin, and of the margin that a full line reaches: it is ragged."""
_WRAPPED_SHARE = 1 / 3
"""Share of full lines, followed by one in lower case, that makes a document a wrapped one."""
_ITEM = re.compile(r"(?:[-*+o\N{BULLET}\N{MIDDLE DOT}\N{EN DASH}]|\(?[0-9a-z]{1,3}[.)])[ ]+(?=\S)")
_COLUMN_GAP = re.compile(r"\S[ ]{3,}(?=\S)")
_NUMBER = re.compile(r"\d+")
_SENTENCE_ENDS = (".", "!", "?", ":")
_BLANKS = re.compile(rf"[ \t\r{WRAP}]+")
_SOFT_HYPHEN = re.compile(rf"(?<=\w)\N{{HYPHEN}}\r?{WRAP}[ \t]*")
_HARD_HYPHEN = re.compile(rf"(?<=\w)-\r?{WRAP}[ \t]*")


class _Line(NamedTuple):
    """A line that is not blank.

    Attributes:
        column: of its text, after the mark of an item or the first column of a table.
        whole: it has one column.
    """

    length: int
    indent: int
    column: int
    first: str
    is_item: bool
    whole: bool
    ends_sentence: bool


def unwrapped(text: str) -> str:
    """Return ``text`` with ``WRAP`` for each line end within a paragraph; its length is the same.

    Takes time linear in the text.
    """
    raw = text.split("\n")
    lines = [_read(line) for line in raw]
    margin = _margin(line.length for line in lines if line is not None)
    if margin < _NARROWEST:
        return text
    going_on = [
        number
        for number, (line, following) in enumerate(pairwise(lines))
        if line is not None and following is not None and _may_go_on(line, following)
    ]
    full = {number for number in going_on if _is_full(lines, number, margin)}
    in_lower_case = sum(raw[number + 1].lstrip()[0].islower() for number in full)
    if in_lower_case < _WRAPPED_SHARE * len(going_on):  # records begin in upper case
        return text
    ends = [WRAP if number in full else "\n" for number in range(len(raw) - 1)] + [""]
    return "".join(part for pair in zip(raw, ends, strict=True) for part in pair)


def tidy(text: str) -> str:
    """Return ``text`` with one space for each run of blanks within a line or paragraph."""
    text = _SOFT_HYPHEN.sub("", text)
    return _BLANKS.sub(" ", _HARD_HYPHEN.sub("-", text))


def _read(raw: str) -> _Line | None:
    text = raw.expandtabs().rstrip()
    body = text.lstrip(" ")
    if not body or "\f" in raw:
        return None
    indent = len(text) - len(body)
    item, gap = _ITEM.match(body), _COLUMN_GAP.search(body)
    column = item.end() if item is not None else gap.end() if gap is not None else 0
    whole = _COLUMN_GAP.search(body, column) is None and (gap is None or item is not None)
    first = body.split(" ", 1)[0]
    ends = text.endswith(_SENTENCE_ENDS)
    return _Line(len(text), indent, indent + column, first, item is not None, whole, ends)


def _margin(lengths: Iterable[int]) -> int:
    """Return the length that most lines do not exceed [characters]."""
    found = sorted(lengths)
    return found[int(_MARGIN_SHARE * (len(found) - 1))] if found else 0


def _may_go_on(line: _Line, following: _Line) -> bool:
    """Return True if nothing but the width of ``line`` says that it ends a paragraph or record."""
    return (
        following.indent == line.column
        and following.whole
        and not (following.is_item or line.ends_sentence)
        and not _begin_alike(line.first, following.first)
    )


def _begin_alike(one: str, other: str) -> bool:
    """Return True for the first words of two records: times, marks, ``INFO``, ``robot7``."""
    if one.isalpha() and one.islower():
        return False
    return _NUMBER.sub("0", one) == _NUMBER.sub("0", other) or (
        not one[0].isalnum() and one[0] == other[0]
    )


def _is_full(lines: Sequence[_Line | None], number: int, margin: int) -> bool:
    line, following = lines[number], lines[number + 1]
    assert line is not None
    assert following is not None
    return line.length + 1 + len(following.first) > _FULL * margin
