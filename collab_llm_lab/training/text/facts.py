"""Facts that a passage states and a question asks for: one kind each, in three styles.

A fact is a record of fields. Its `key` fields stand in the question, its `value` is the answer.
The sentences of each kind are in ``facts.txt``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from collab_llm_lab import phrasebook
from collab_llm_lab.phrasebook import Section
from collab_llm_lab.phrases import Grammar, Phrase
from collab_llm_lab.training.text import names
from collab_llm_lab.training.text.world import World

Fields = dict[str, str]
STYLES = ("conversation", "instructions", "reports")
GRAMMAR = Grammar()
"""The words of replies in whole sentences."""


@dataclass(frozen=True)
class Kind:
    """A kind of fact.

    Attributes:
        draw: returns the fields of a new fact.
        key: fields that the question names.
        value: the field that answers it.
        statements: wordings in each style.
        questions: wordings of the question; the last is held out of training.
        reply: the answer as a whole sentence; it names the key and the value.
    """

    name: str
    draw: Callable[[World], Fields]
    key: tuple[str, ...]
    value: str
    statements: Mapping[str, tuple[Phrase, ...]]
    questions: tuple[Phrase, ...]
    reply: tuple[Phrase, ...]

    def about(self, fields: Fields) -> str:
        """Return the subject of a question on this fact: "the lamp and the kitchen"."""
        return " and ".join(named(name, fields) for name in self.key)

    def near(self, world: World, fact: Fields) -> Fields:
        """Return another fact of this kind that agrees with `fact` in a part of its key."""
        other = self.draw(world)
        shared = world.any(self.key) if len(self.key) > 1 else ""
        if shared:
            other[shared] = fact[shared]
        elif self.key == ("thing",) and world.chance(0.6):
            other["thing"] = world.like(fact["thing"])
        if all(other[name] == fact[name] for name in self.key):
            return self.near(world, fact)
        return other


def named(name: str, fields: Fields) -> str:
    """Return a field as it stands in a sentence: with "the", unless it is a name or a time."""
    proper = name in ("person", "other", "robot", "time")
    return fields[name] if proper else f"the {fields[name]}"


def fields_of(*wanted: str) -> Callable[[World], Fields]:
    """Return a function that draws the wanted fields."""

    def draw(world: World) -> Fields:
        fields = {name: _DRAW[name](world) for name in wanted}
        if "job" in fields:
            fields["a_job"] = names.with_article(fields["job"])
        return fields

    return draw


def _called(world: World) -> str:
    return world.person().name if world.chance(0.4) else world.first_name()


_BELONGINGS = ("coat", "scarf", "hat", "bag", "car", "door", "bicycle", "folder", "badge", "key")
_DRAW: Mapping[str, Callable[[World], str]] = {
    "thing": lambda world: world.thing().name,
    "room": World.room,
    "place": World.place,
    "person": _called,
    "other": _called,
    "event": lambda world: world.any(names.EVENTS),
    "time": World.clock,
    "weekday": World.weekday,
    "items": lambda world: names.plural(world.any(names.SUPPLIES)),
    "number": World.number,
    "price": World.price,
    "code": World.code,
    "machine": lambda world: world.any(names.MACHINES),
    "part": lambda world: world.any(names.PARTS),
    "noun": lambda world: world.any(_BELONGINGS),
    "colour": World.colour,
    "job": lambda world: world.any(names.JOBS),
    "robot": World.robot,
    "spot": lambda world: f"({world.metres()}, {world.metres()})",
    "direction": lambda world: world.any(names.DIRECTIONS),
    "distance": lambda world: world.any(names.DISTANCES),
    "day": lambda world: f"2026-{world.whole(1, 12):02d}-{world.whole(1, 28):02d}",
}


def _kind(name: str, book: Section) -> Kind:
    return Kind(
        name,
        fields_of(*book["fields"].words),
        book["key"].words,
        book["value"].texts[0],
        {style: book[style].phrases() for style in STYLES},
        book["questions"].phrases(),
        book["reply"].phrases(GRAMMAR),
    )


_BOOK = phrasebook.read(Path(__file__).with_suffix(".txt"))
KINDS = tuple(_kind(name, section) for name, section in _BOOK.sections.items())
KINDS_BY_NAME = {kind.name: kind for kind in KINDS}
