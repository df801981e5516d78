"""Templates of the text grammar as regular expressions, to read sentences back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from collab_llm_lab.phrases import Choice, Parts, Phrase
from collab_llm_lab.training.text import names


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
def pattern(template: str, fixed: tuple[tuple[str, str], ...] = ()) -> re.Pattern[str]:
    """Return the expression that ``template`` matches as a whole, with a group for each field.

    Args:
        fixed: fields and their values, which then have no group.
    """
    return re.compile(_expression(Phrase(template).parts, dict(fixed), set()), re.IGNORECASE)


def _expression(parts: Parts, fixed: Mapping[str, str], seen: set[str]) -> str:
    found = []
    for part in parts:
        if isinstance(part, str):
            found.append(re.escape(part))
        elif isinstance(part, Choice):
            options = (_expression(option, fixed, seen) for option in part.alternatives)
            found.append(f"(?:{'|'.join(options)})")
        elif part.name in fixed:
            found.append(re.escape(fixed[part.name]))
        elif part.name in seen:
            found.append(f"(?P={part.name})")
        else:
            seen.add(part.name)
            found.append(f"(?P<{part.name}>{_SLOTS[part.name]})")
    return "".join(found)
