"""Templates of the text grammar read backwards: which sentence says what."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from collab_llm_lab.training.text import names

_TOKEN = re.compile(r"\{(\w+)\}|[()\[\]|]|[^()\[\]|{}]+")


def _any(words: tuple[str, ...] | list[str]) -> str:
    return "|".join(sorted(map(re.escape, words), key=len, reverse=True))


_PERSON = r"[\w'-]+(?: [\w'-]+)?"
_THING = r"[\w-]+(?: [\w-]+){0,3}"
_ROOM = (
    rf"(?:(?:{_any(names.ROOM_SIDES)}) )?(?:{_any(names.ROOMS)})"
    r"|\w+ (?:room|hall|wing|suite|studio|lounge)"
)
_SLOTS: Mapping[str, str] = {
    "room": _ROOM,
    "second_room": _ROOM,
    "place": r"(?:in|on) the [\w-]+",
    "person": _PERSON,
    "other": _PERSON,
    "robot": r"[\w'-]+",
    "thing": _THING,
    "second_thing": _THING,
    "time": r"\d\d:\d\d",
    "second_time": r"\d\d:\d\d",
    "weekday": _any(names.WEEKDAYS),
    "number": r"\d+",
    "price": r"\d+\.\d\d",
    "code": r"[A-Z0-9-]+",
    "colour": _any(names.COLOURS),
    "event": _any(names.EVENTS),
    "machine": _any(names.MACHINES),
    "part": _any(names.PARTS),
    "job": _any(names.JOBS),
    "a_job": rf"an? (?:{_any(names.JOBS)})",
    "items": r"\w+s",
    "second_items": r"\w+s",
    "noun": r"\w+",
}
"""Forms of the fields' values."""


@cache
def _shape(template: str) -> str:
    """Return the regular expression of a template; a field becomes ``\\x00field\\x00``."""
    parts: list[str] = []
    depth: list[str] = []
    closing = _bracket_kinds(template)
    for match in _TOKEN.finditer(template):
        token, at = match.group(), match.start()
        if match[1]:
            parts.append(f"\x00{match[1]}\x00")
        elif token in ("(", "["):
            choice = closing.get(at, False) or token == "["
            parts.append("(?:" if choice else re.escape(token))
            depth.append("x" if not choice else token)
        elif token in (")", "]"):
            opened = depth.pop() if depth else "x"
            parts.append({"x": re.escape(token), "(": ")", "[": ")?"}[opened])
        elif token == "|":
            parts.append("|" if depth and depth[-1] != "x" else re.escape(token))
        else:
            parts.append(re.escape(token))
    return "".join(parts)


def _bracket_kinds(template: str) -> dict[int, bool]:
    """Return for each round bracket's place whether it is a choice: one without | is itself."""
    opened: list[tuple[int, bool]] = []
    found: dict[int, bool] = {}
    for at, character in enumerate(template):
        if character == "(":
            opened.append((at, False))
        elif character == "|" and opened:
            opened[-1] = (opened[-1][0], True)
        elif character == ")" and opened:
            place, choice = opened.pop()
            found[place] = choice
    return found


@cache
def pattern(template: str, fixed: tuple[tuple[str, str], ...] = ()) -> re.Pattern[str]:
    """Return the expression that ``template`` matches as a whole, with a group for each field.

    Args:
        fixed: fields and their values, which then have no group.
    """
    values = dict(fixed)
    seen: set[str] = set()

    def filled(match: re.Match[str]) -> str:
        name = match[1]
        if name in values:
            return re.escape(values[name])
        if name in seen:
            return f"(?P={name})"
        seen.add(name)
        return f"(?P<{name}>{_SLOTS[name]})"

    return re.compile(re.sub("\x00(\\w+)\x00", filled, _shape(template)), re.IGNORECASE)
