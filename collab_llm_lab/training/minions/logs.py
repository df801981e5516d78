"""Long logs of a robot, made from a seed: facts for questions, near misses, and unrelated lines.

A log has one statement a line, some lines a paragraph, some paragraphs a day. Its names are those
of the text grammar. Each kind of line has one form, as in a log that a machine writes. Only the
planted lines can answer a question.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from collab_llm_lab.phrases import Voice, say
from collab_llm_lab.training.text.facts import KINDS, Fields, Kind, fields_of
from collab_llm_lab.training.text.passages import FILLERS
from collab_llm_lab.training.text.world import World
from collab_llm_nodes.protocols.minions.embedded.queries import FACTS, Query

STYLE = "reports"
_LEFT_OUT = ("job", "work", "view")
"""Each of the first two states the fact that the other asks for; the third has no form in a log."""
_SINGLE = {kind.name: kind for kind in KINDS if kind.name not in _LEFT_OUT}
_EVENTS: Mapping[str, Callable[[World], Fields]] = {
    "alarm": fields_of("room", "time"),
    "seen": fields_of("thing", "room", "time"),
}
_REST = {
    "where": " {room}, {place}.",
    "spot": ": {place}.",
    "who": ": {person}.",
    "when": ": {time}.",
    "day": ": {weekday}.",
    "how many": ": {number}.",
    "price": ": {price}.",
    "paid": ": {price}.",
    "door code": ": {code}.",
    "part number": ": {code}.",
    "colour": ": {colour}.",
    "charge": " {number} percent.",
    "serial": " {code}.",
    "gift": ": {thing}.",
    "patrol": " {room}.",
    "temperature": " {number} degrees.",
    "repair": ": {person}.",
    "alarm": ": {time}.",
    "seen": ": {room}, {time}.",
}
FORMS: Mapping[str, str] = {name: FACTS[name].task + rest for name, rest in _REST.items()}
"""The form of each kind of entry, as a template."""
ENTRY_OF: Mapping[str, str] = {name: "paid" if name == "spent" else name for name in FACTS}
"""The kind of entries that states a fact of ``queries.FACTS``."""
VALUE_OF: Mapping[str, str] = {
    **{name: kind.value for name, kind in _SINGLE.items()},
    "spent": "price",
    "alarm": "time",
    "seen": "room",
}
"""The field that answers the task for a fact."""
_ENTITIES = ("thing", "person", "other", "robot")
"""Fields whose values, once reserved for a question, stand in no other entry by chance."""
_REMARKS = 0.12
"""Share of lines that state nothing."""
_LINES_OF_A_WORLD = 40
_PARAGRAPH = (5, 8)
_PARAGRAPHS_OF_A_DAY = 8


@dataclass(frozen=True)
class Entry:
    """One line of a log; ``kind`` is empty for a remark that states nothing."""

    kind: str
    fields: Mapping[str, str]
    text: str

    def key(self, fact: str) -> tuple[str, ...] | None:
        """Return the key under which this entry states ``fact``; None if it does not."""
        if self.kind != ENTRY_OF[fact]:
            return None
        return tuple(self.fields[name] for name in FACTS[fact].keys)


@dataclass(frozen=True)
class Log:
    """A log in paragraphs; a paragraph that begins a day has a heading.

    Attributes:
        headings: by number of the paragraph.
    """

    paragraphs: tuple[tuple[Entry, ...], ...]
    headings: Mapping[int, str]

    @property
    def text(self) -> str:
        """The whole log."""
        parts = []
        for number, entries in enumerate(self.paragraphs):
            if number in self.headings:
                parts.append(self.headings[number])
            parts.append("\n".join(entry.text for entry in entries))
        return "\n\n".join(parts)

    @property
    def entries(self) -> list[Entry]:
        """All lines in order."""
        return [entry for paragraph in self.paragraphs for entry in paragraph]


class LogWriter:
    """Draws entries; none answers a question by chance.

    Args:
        held_out: use names and codes that training never shows.
    """

    def __init__(self, rng: random.Random, *, held_out: bool = False) -> None:
        self.rng, self._held_out = rng, held_out
        self._voice = Voice(rng)
        self._world = World(rng, held_out)
        self._drawn = 0
        self._keys: set[tuple[str, ...]] = set()  # kind of entry, then the key of a fact
        self._entities: set[str] = set()

    @property
    def world(self) -> World:
        """The world to draw from; it is renewed regularly, since names run out."""
        self._drawn += 1
        if self._drawn % _LINES_OF_A_WORLD == 0:
            self._world = World(self.rng, self._held_out)
        return self._world

    def draw(self, kind: str) -> Fields:
        """Return the fields of a new entry that answers no question."""
        while True:
            world = self.world
            fields = _EVENTS[kind](world) if kind in _EVENTS else _SINGLE[kind].draw(world)
            if not self._speaks_of_asked(kind, fields):
                return fields

    def near(self, kind: str, fields: Mapping[str, str]) -> Fields:
        """Return the fields of a near miss: an entry easily mistaken for that with ``fields``."""
        while True:
            found = self._near(kind, dict(fields))
            if not any((ENTRY_OF[fact], *key) in self._keys for fact, key in _keys(kind, found)):
                return found

    def _near(self, kind: str, fields: Fields) -> Fields:
        world = self.world
        if kind == "alarm":
            return fields | {"room": world.room(), "time": world.clock()}
        if kind == "seen":
            thing = world.like(fields["thing"])
            return fields | {"thing": thing, "room": world.room(), "time": world.clock()}
        return _SINGLE[kind].near(world, fields)

    def reserve(self, fact: str, fields: Mapping[str, str]) -> None:
        """Keep the key of ``fact``, and the names in it, for entries that are planted."""
        self._keys.add((ENTRY_OF[fact], *(fields[name] for name in FACTS[fact].keys)))
        self._entities |= {fields[name] for name in FACTS[fact].keys if name in _ENTITIES}

    def miss(self, kind: str, fields: Mapping[str, str]) -> Entry:
        """Return a near miss of the entry with ``fields``; no later question asks for it."""
        entry = self.state(kind, self.near(kind, fields))
        self._keys |= {(ENTRY_OF[fact], *key) for fact, key in _keys(kind, entry.fields)}
        return entry

    def state(self, kind: str, fields: Mapping[str, str]) -> Entry:
        """Return the entry with ``fields``."""
        return Entry(kind, fields, FORMS[kind].format(**fields))

    def line(self) -> Entry:
        """Return a line that is unrelated to all questions."""
        if self.rng.random() < _REMARKS:
            return Entry("", {}, say(FILLERS[STYLE], self._voice, {}))
        kind = self.rng.choice(tuple(FORMS))
        return self.state(kind, self.draw(kind))

    def heading(self) -> str:
        """Return the heading of a day."""
        world = self.world
        return f"# {world.weekday()}, {self.rng.randint(1, 28)} {world.date().split()[1]}"

    def _speaks_of_asked(self, kind: str, fields: Mapping[str, str]) -> bool:
        if not self._entities.isdisjoint(fields.values()):
            return True
        return any((ENTRY_OF[fact], *key) in self._keys for fact, key in _keys(kind, fields))

    def log(
        self, planted: Sequence[Sequence[Entry]], tokens: int, count: Callable[[str], int]
    ) -> Log:
        """Return a log of about ``tokens`` tokens that holds all planted entries.

        Args:
            planted: groups of entries; the entries of a group are far from each other.
            count: returns the number of tokens of a text.
        """
        extra = [entry for group in planted for entry in group]
        left = tokens - count("\n".join(entry.text for entry in extra))
        paragraphs: list[list[Entry]] = []
        headings: dict[int, str] = {}
        while left > 0 or not paragraphs:
            if len(paragraphs) % _PARAGRAPHS_OF_A_DAY == 0:
                headings[len(paragraphs)] = self.heading()
                left -= count(headings[len(paragraphs)])
            paragraphs.append([self.line() for _ in range(self.rng.randint(*_PARAGRAPH))])
            left -= count("\n".join(entry.text for entry in paragraphs[-1]))
        for group in planted:
            # One place in the middle of each of as many equal parts keeps them apart.
            width = len(paragraphs) / len(group)
            order = list(group)
            self.rng.shuffle(order)
            for part, entry in enumerate(order):
                place = min(int((part + self.rng.uniform(0.2, 0.8)) * width), len(paragraphs) - 1)
                lines = paragraphs[place]
                lines.insert(self.rng.randint(0, len(lines)), entry)
        return Log(tuple(map(tuple, paragraphs)), headings)


def single(name: str) -> Kind:
    """Return the kind of fact called ``name``, which has one statement per key."""
    return _SINGLE[name]


def _keys(kind: str, fields: Mapping[str, str]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the facts, each with its key, that an entry states."""
    return [
        (fact, tuple(fields[name] for name in FACTS[fact].keys))
        for fact in FACTS
        if ENTRY_OF[fact] == kind
    ]


def stating(entries: Sequence[Entry], query: Query) -> list[list[Entry]]:
    """Return the entries that state each operand of ``query``, in the order of the text."""
    return [[e for e in entries if e.key(query.fact) == keys] for keys in query.of]


def values(entries: Sequence[Entry], query: Query) -> list[list[str]]:
    """Return the answers to each task of ``query`` that ``entries`` give."""
    place = VALUE_OF[query.fact]
    return [[entry.fields[place] for entry in own] for own in stating(entries, query)]
