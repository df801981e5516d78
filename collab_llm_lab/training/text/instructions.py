"""The sub-domain `instructions`: numbered how-to answers for house, workshop and robot.

A question names a task, its object and the situation: material, dirt, part, machine. The answer
lists tools, numbered steps, a warning and the sign that the work is done. The situation decides
which tools and steps are right. The sentences are in ``instructions.txt``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from collab_llm_lab import phrasebook
from collab_llm_lab.phrasebook import Section
from collab_llm_lab.phrases import Grammar, Phrase, Voice, pick, say
from collab_llm_lab.training.text import names
from collab_llm_lab.training.text.tasks import Part, Task, parts_of
from collab_llm_lab.training.text.world import World
from collab_llm_nodes.models.turns import Turn

Situation = tuple[dict[str, str], tuple[int, ...]]
_BOOK = phrasebook.read(Path(__file__).with_suffix(".txt"))
_DIRT, _MATERIALS = _BOOK["dirt"].table, _BOOK["materials"].table
_MACHINES, _PARTS = _BOOK["machines"].table, _BOOK["parts"].table
_DISHES, _HEAT = _BOOK["dishes"].table, _BOOK["heat"].table
_ROBOT_PARTS, _WALLS, _PLANTS = (_BOOK[name].table for name in ("robot parts", "walls", "plants"))
_PADDING = {kind: padding for kind, (padding,) in _BOOK["padding"].table.items()}
_HUNG = ("mirror", "shelf", "clock", "lamp", "rack", "cabinet", "poster")


def _key(text: str) -> int:
    """Return the small number of `text` among the keys of a voice."""
    return zlib.crc32(text.encode()) % 64


def clean(world: World) -> Situation:
    fields = world.row(_DIRT, "dirt agent tool wait")
    fields |= world.row(_MATERIALS, "material enemy finish nouns")
    material, noun = fields.pop("material"), world.any(fields.pop("nouns").split())
    fields |= {"thing": f"{material} {noun}", "noun": noun, "room": world.room()}
    fields["a_tool"] = names.with_article(fields["tool"])
    return fields, (_key(fields["dirt"]), _key(material))


def replace(world: World) -> Situation:
    fields = world.row(_MACHINES, "machine prepare sign") | world.row(_PARTS, "part hold insert")
    fields |= {"code": world.code(), "room": world.room()}
    return fields, (_key(fields["machine"]), _key(fields["part"]))


def cook(world: World) -> Situation:
    fields = world.row(_DISHES, "dish ingredients way spice vessel")
    fields["heat"], fields["time"], fields["sign"] = _HEAT[fields["way"]]
    guests = world.whole(2, 12)
    fields |= {"guests": str(guests), "person": world.first_name()}
    fields["first"] = fields["ingredients"].split(",")[0]
    return fields, (_key(fields["dish"]), guests)


def robot(world: World) -> Situation:
    fields = world.row(_ROBOT_PARTS, "part soil tool sign")
    tool = fields["tool"]
    fields["a_tool"] = tool if tool == "tweezers" else names.with_article(tool)
    fields |= {"room": world.room(), "weekday": world.weekday(), "robot": world.robot()}
    return fields, (_key(fields["part"]), names.WEEKDAYS.index(fields["weekday"]))


def hang(world: World) -> Situation:
    fields = world.row(_WALLS, "wall drill plug how")
    colour, thing = world.colour(), world.any(_HUNG)
    fields |= {"noun": thing, "thing": f"{colour} {thing}", "room": world.room()}
    return fields, (_key(fields["wall"]), _key(thing))


def assemble(world: World) -> Situation:
    thing = world.thing("furniture")
    fields = {"thing": thing.name, "noun": thing.noun, "room": world.room(), "code": world.code()}
    return fields | {"person": world.first_name()}, (_key(thing.noun), _key(thing.name.split()[0]))


def repot(world: World) -> Situation:
    thing = world.thing("plant")
    soil, light, water = _PLANTS[thing.noun]
    weekday = world.weekday()
    fields = {"thing": thing.name, "noun": thing.noun, "soil": soil, "light": light}
    fields |= {"water": water, "room": world.room(), "weekday": weekday}
    return fields, (_key(thing.noun), names.WEEKDAYS.index(weekday))


def pack(world: World) -> Situation:
    kind = world.any(tuple(_PADDING))
    thing, weekday = world.thing(kind), world.weekday()
    fields = {"thing": thing.name, "noun": thing.noun, "person": world.person().name}
    fields |= {"code": world.code(), "weekday": weekday, "padding": _PADDING[kind]}
    return fields, (_key(kind), names.WEEKDAYS.index(weekday))


_SITUATIONS: Mapping[str, Callable[[World], Situation]] = {
    draw.__name__: draw for draw in (clean, replace, cook, robot, hang, assemble, repot, pack)
}
"""Functions that draw the situations of each family of ``instructions.txt``."""
_WORDS = (
    *(text for name, row in _MATERIALS.items() for text in (name, *row[:2])),
    *_PADDING.values(),
    *(
        text
        for table in (_DIRT, _MACHINES, _PARTS, _DISHES, _HEAT, _ROBOT_PARTS, _WALLS, _PLANTS)
        for name, row in table.items()
        for text in (name, *row)
    ),
)
"""All names and values that the tables give to answers."""

GRAMMAR = Grammar()
"""The words of the answers."""
GRAMMAR.add_words(*_WORDS)


@dataclass(frozen=True)
class HowTo:
    """A family of how-to questions.

    Attributes:
        fields: draws the names and the situation; returns also the numbers that decide choices.
        questions: wordings of the question; the last is held out of training.
        intro, warning, done: lines around the steps.
        steps: all steps; which of the `optional` ones are given depends on the situation.
        must: fields that every answer names.
    """

    fields: Callable[[World], Situation]
    questions: tuple[Phrase, ...]
    intro: tuple[Phrase, ...]
    steps: tuple[Part, ...]
    optional: frozenset[int]
    warning: tuple[Phrase, ...]
    done: tuple[Phrase, ...]
    must: tuple[str, ...]


def _family(name: str, book: Section) -> HowTo:
    steps = book["steps"]
    return HowTo(
        _SITUATIONS[name],
        book["questions"].phrases(),
        book["intro"].phrases(GRAMMAR),
        parts_of(steps, GRAMMAR),
        frozenset(i for i, title in enumerate(steps.sections) if title.startswith("[")),
        book["warning"].phrases(GRAMMAR),
        book["done"].phrases(GRAMMAR),
        book["must"].words,
    )


FAMILIES = tuple(_family(name, book) for name, book in _BOOK["families"].sections.items())
_SYSTEM = _BOOK["system"].phrases()


def draw(world: World, freedom: float = 0.1) -> Task:
    """Return a how-to question with its answer."""
    family = world.any(FAMILIES)
    fields, keys = family.fields(world)
    for name in ("thing", "noun"):
        if name in fields:
            fields[f"a_{name}"] = names.with_article(fields[name])
    if "vessel" in fields:
        fields["vessel_noun"] = fields["vessel"].split()[-1]
    writer, user = Voice(world.rng, keys, freedom), Voice(world.rng)
    turns = []
    if world.chance(0.4):
        turns.append(Turn("system", say(_SYSTEM, user, {})))
    turns.append(Turn("user", pick(family.questions, user, fields, world.new_wordings)))
    possible = tuple(step.say(writer, fields) for step in family.steps)
    points = tuple(
        point
        for i, point in enumerate(possible)
        if i not in family.optional or writer.choose(_key(point.part.title[0].text) + 97 * i, 3)
    )
    intro = say(family.intro, writer, fields)
    end = say(family.warning, writer, fields) + "\n" + say(family.done, writer, fields)

    def join(texts: Sequence[str]) -> str:
        numbered = [f"{i}. {text}" for i, text in enumerate(texts, 1)]
        return "\n".join([intro, *numbered, end])

    mentions = tuple(fields[name] for name in family.must)
    least = len(possible) - len(family.optional)
    return Task(tuple(turns), points, join, mentions, possible, least)
