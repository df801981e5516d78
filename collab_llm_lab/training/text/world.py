"""The world of one sample: people, robots, rooms, things, times, prices and codes from a seed.

Within one sample no name, thing, room or code is drawn twice, so a question about one of them has
one answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from collab_llm_lab.training.text import names
from collab_llm_lab.training.text.names import is_held_out

T = TypeVar("T")

_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
_SIZES = ("", "", "", "small ", "large ", "old ", "new ")
_HALLS = ("room", "hall", "wing", "suite", "studio", "lounge")
_ENDINGS_OF_PRICES = (0, 50, 0, 50, 20, 25, 75, 80, 90, 95, 99)


@dataclass(frozen=True)
class Thing:
    """An object of the house; `name` is unique in its sample."""

    name: str
    noun: str
    kind: str


@dataclass(frozen=True)
class Person:
    """A person with first and family name."""

    first: str
    family: str

    @property
    def name(self) -> str:
        return f"{self.first} {self.family}"


class World:
    """Draws the names, things and numbers of one sample.

    Args:
        rng: source of all draws.
        held_out: draw names, codes and pairs of words that training never shows.
        new_wordings: ask in wordings that training never shows; None: as `held_out`.
    """

    def __init__(
        self, rng: random.Random, held_out: bool = False, new_wordings: bool | None = None
    ) -> None:
        self.rng = rng
        self.held_out = held_out
        self.new_wordings = held_out if new_wordings is None else new_wordings
        self._used: set[str] = set()

    def any(self, items: Sequence[T]) -> T:
        """Return one of `items`, all equally probable."""
        return items[int(self.rng.random() * len(items))]

    def chance(self, share: float) -> bool:
        """Return True in `share` of the draws."""
        return self.rng.random() < share

    def whole(self, low: int, high: int) -> int:
        """Return a whole number from `low` to `high`, both included."""
        return low + int(self.rng.random() * (high - low + 1))

    def row(self, table: Mapping[str, tuple[str, ...]], columns: str) -> dict[str, str]:
        """Return the cells of one row of a table by the names of the columns."""
        name = self.any(tuple(table))
        return dict(zip(columns.split(), (name, *table[name]), strict=True))

    def _fresh(self, draw: Callable[[], str], split: bool = True) -> str:
        """Draw until the text is new in this sample and, if `split`, of the wanted part."""
        for _ in range(1000):
            text = draw()
            if text not in self._used and (not split or is_held_out(text) == self.held_out):
                self._used.add(text)
                return text
        raise RuntimeError("a sample needs more names than the world has")

    def _syllables(self, count: int) -> str:
        text = "".join(self.any(names.ONSETS) + self.any(names.VOWELS) for _ in range(count))
        return (text + self.any(names.ENDINGS)).capitalize()

    def _name(self, known: names.Split, syllables: int) -> str:
        """Return a known name or, in half of the draws, an invented one."""
        if self.chance(0.5):
            return self.any(known.parts[self.held_out])
        return self._syllables(self.whole(1, syllables))

    def first_name(self) -> str:
        """Return a first name."""
        return self._fresh(lambda: self._name(names.FIRST_NAMES, 1))

    def person(self) -> Person:
        """Return a person whose names are new in this sample."""
        first = self.first_name()
        return Person(first, self._fresh(lambda: self._name(names.FAMILY_NAMES, 2)))

    def robot(self) -> str:
        """Return the name of a robot."""
        return self._fresh(lambda: self._name(names.ROBOT_NAMES, 1))

    def thing(self, kind: str = "") -> Thing:
        """Return a thing, of the class `kind` or of any."""
        kind = kind or self.any(tuple(names.THINGS))
        nouns, materials = names.THINGS[kind]
        while True:
            noun, material = self.any(nouns), self.any(materials)
            colour = self.any(names.COLOURS)
            form = self.rng.random()
            if form < 0.6:
                name = f"{colour} {noun}"
            elif form < 0.8:
                name = f"{material} {noun}"
            else:
                name = f"{colour} {material} {noun}"
            if is_held_out(name) == self.held_out and name not in self._used:
                self._used.add(name)
                return Thing(name, noun, kind)

    def like(self, name: str) -> str:
        """Return another thing with the same noun, for which it may be mistaken."""
        noun = name.split()[-1]
        return self._fresh(
            lambda: f"{self.any(_SIZES)}{self.any(names.COLOURS)} {noun}", split=not self.held_out
        )

    def room(self) -> str:
        """Return a room: plain, with a side, or with an invented name."""
        while True:
            room = self._fresh(self._room, split=False)
            if " " not in room or is_held_out(room) == self.held_out:
                return room

    def _room(self) -> str:
        form = self.rng.random()
        if form < 0.4:
            return self.any(names.ROOMS)
        if form < 0.8:
            return f"{self.any(names.ROOM_SIDES)} {self.any(names.ROOMS)}"
        return f"{self._syllables(1)} {self.any(_HALLS)}"

    def place(self) -> str:
        """Return a place within a room, with its preposition: "on the shelf"."""
        place = self.any(names.PLACES)
        return f"{'in' if place in names.CONTAINERS else 'on'} the {place}"

    def colour(self) -> str:
        """Return a colour."""
        return self.any(names.COLOURS)

    def weekday(self) -> str:
        """Return a day of the week."""
        return self.any(names.WEEKDAYS)

    def minutes(self, low: int = 6 * 60, high: int = 21 * 60) -> int:
        """Return a time of day in minutes after midnight, in steps of five."""
        return 5 * self.whole(low // 5, high // 5)

    def clock(self, low: int = 6 * 60, high: int = 21 * 60) -> str:
        """Return a time of day that is new in this sample: "14:20"."""
        return self._fresh(lambda: clock(self.minutes(low, high)), split=False)

    def date(self) -> str:
        """Return a day of the year: "4 May"."""
        return self._fresh(lambda: f"{self.whole(1, 28)} {self.any(names.MONTHS)}", split=False)

    def metres(self) -> str:
        """Return a coordinate: "-1.4"."""
        return f"{self.whole(-99, 99) / 10:.1f}"

    def code(self) -> str:
        """Return a door code or part number, in one of several forms."""
        return self._fresh(self._code)

    def _code(self) -> str:
        form = self.whole(0, 4)
        letter, other = self.any(_LETTERS), self.any(_LETTERS)
        if form == 0:
            return f"{self.whole(1000, 9999)}"
        if form == 1:
            return f"{letter}{self.whole(1, 9)}-{self.whole(10, 99)}"
        if form == 2:
            return f"{letter}{other}-{self.whole(100, 9999)}"
        if form == 3:
            return f"{self.whole(10, 99)}{letter}{self.whole(10, 99)}{other}"
        return f"{self.whole(100, 999)}-{letter}{other}{self.any(_LETTERS)}"

    def price(self) -> str:
        """Return a price that is new in this sample: "12.50"."""
        return self._fresh(
            lambda: money(100 * self.whole(1, 60) + self.any(_ENDINGS_OF_PRICES)), split=False
        )

    def number(self) -> str:
        """Return a count of two to 99, in most draws one that is new in this sample."""
        for _ in range(20):
            text = str(self.whole(2, 99))
            if text not in self._used:
                break
        self._used.add(text)
        return text


def clock(minutes: int) -> str:
    """Return minutes after midnight as "14:20"."""
    return f"{minutes // 60 % 24:02d}:{minutes % 60:02d}"


def money(cents: int) -> str:
    """Return an amount of cents as "12.50"."""
    return f"{cents // 100}.{cents % 100:02d}"
