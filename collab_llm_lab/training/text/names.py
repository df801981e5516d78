"""Word lists of the robot's world. A tenth of each open list is held out of training."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path

from collab_llm_lab import phrasebook


def is_held_out(text: str) -> bool:
    """Return True for the tenth of all names, codes and pairs that training never shows."""
    return zlib.crc32(text.encode()) % 10 == 0


class Split:
    """A list in two parts: `parts[False]` for training, `parts[True]` held out."""

    def __init__(self, items: Iterable[str]) -> None:
        listed = list(items)
        self.parts = {
            held_out: tuple(item for item in listed if is_held_out(item) == held_out)
            for held_out in (False, True)
        }


_BOOK = phrasebook.read(Path(__file__).with_suffix(".txt"))
FIRST_NAMES = Split(_BOOK["first names"].words)
FAMILY_NAMES = Split(_BOOK["family names"].words)
ROBOT_NAMES = Split(_BOOK["robot names"].words)
ONSETS, VOWELS = _BOOK["onsets"].words, _BOOK["vowels"].words
ENDINGS = _BOOK["endings"].words
COLOURS = _BOOK["colours"].words
WEEKDAYS, MONTHS = _BOOK["weekdays"].words, _BOOK["months"].words
DIRECTIONS, DISTANCES = _BOOK["directions"].texts, _BOOK["distances"].texts
"""The navigation models' words for directions and distances."""
ROOMS, ROOM_SIDES = _BOOK["rooms"].words, _BOOK["room sides"].words
PLACES, CONTAINERS = _BOOK["places"].words, _BOOK["containers"].words
"""Places within a room; a thing is in one of the containers, and on one of the others."""
THINGS = {
    kind: (tuple(nouns.split()), tuple(materials.split()))
    for kind, (nouns, materials) in _BOOK["things"].table.items()
}
"""Nouns of each class of things, with the materials that the class is made of."""
SUPPLIES = _BOOK["supplies"].words
EVENTS, JOBS = _BOOK["events"].words, _BOOK["jobs"].words
MACHINES, PARTS = _BOOK["machines"].words, _BOOK["parts"].words
_PLURALS = {"battery": "batteries", "brush": "brushes", "box": "boxes", "switch": "switches"}


def plural(noun: str) -> str:
    """Return the plural of one of the supplies."""
    return _PLURALS.get(noun, noun + "s")


def with_article(noun: str) -> str:
    """Return `noun` with "a" or "an"."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun
