"""Things to be done: materials, dirt, machines, dishes, walls and plants.

The tables of ``instructions.txt`` say which tool or place is right; a model can learn them. Each
function of ``SITUATIONS`` draws one situation: the fields of its sentences, and the numbers that
decide which sentences are chosen.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from collab_llm_lab.training.text import names, phrasebook
from collab_llm_lab.training.text.world import World

Situation = tuple[dict[str, str], tuple[int, ...]]
BOOK = phrasebook.read(Path(__file__).with_name("instructions.txt"))
_DIRT, _MATERIALS = BOOK["dirt"].table, BOOK["materials"].table
_MACHINES, _PARTS = BOOK["machines"].table, BOOK["parts"].table
_DISHES, _HEAT = BOOK["dishes"].table, BOOK["heat"].table
_ROBOT_PARTS, _WALLS, _PLANTS = (BOOK[name].table for name in ("robot parts", "walls", "plants"))
_PADDING = {kind: padding for kind, (padding,) in BOOK["padding"].table.items()}
_HUNG = ("mirror", "shelf", "clock", "lamp", "rack", "cabinet", "poster")


def key(text: str) -> int:
    """Return the small number of `text` among the keys of a voice."""
    return zlib.crc32(text.encode()) % 64


def clean(world: World) -> Situation:
    fields = world.row(_DIRT, "dirt agent tool wait")
    fields |= world.row(_MATERIALS, "material enemy finish nouns")
    material, noun = fields.pop("material"), world.any(fields.pop("nouns").split())
    fields |= {"thing": f"{material} {noun}", "noun": noun, "room": world.room()}
    fields["a_tool"] = names.with_article(fields["tool"])
    return fields, (key(fields["dirt"]), key(material))


def replace(world: World) -> Situation:
    fields = world.row(_MACHINES, "machine prepare sign") | world.row(_PARTS, "part hold insert")
    fields |= {"code": world.code(), "room": world.room()}
    return fields, (key(fields["machine"]), key(fields["part"]))


def cook(world: World) -> Situation:
    fields = world.row(_DISHES, "dish ingredients way spice vessel")
    fields["heat"], fields["time"], fields["sign"] = _HEAT[fields["way"]]
    guests = world.whole(2, 12)
    fields |= {"guests": str(guests), "person": world.first_name()}
    fields["first"] = fields["ingredients"].split(",")[0]
    return fields, (key(fields["dish"]), guests)


def robot(world: World) -> Situation:
    fields = world.row(_ROBOT_PARTS, "part soil tool sign")
    tool = fields["tool"]
    fields["a_tool"] = tool if tool == "tweezers" else names.with_article(tool)
    fields |= {"room": world.room(), "weekday": world.weekday(), "robot": world.robot()}
    return fields, (key(fields["part"]), names.WEEKDAYS.index(fields["weekday"]))


def hang(world: World) -> Situation:
    fields = world.row(_WALLS, "wall drill plug how")
    colour, thing = world.colour(), world.any(_HUNG)
    fields |= {"noun": thing, "thing": f"{colour} {thing}", "room": world.room()}
    return fields, (key(fields["wall"]), key(thing))


def assemble(world: World) -> Situation:
    thing = world.thing("furniture")
    fields = {"thing": thing.name, "noun": thing.noun, "room": world.room(), "code": world.code()}
    return fields | {"person": world.first_name()}, (key(thing.noun), key(thing.name.split()[0]))


def repot(world: World) -> Situation:
    thing = world.thing("plant")
    soil, light, water = _PLANTS[thing.noun]
    weekday = world.weekday()
    fields = {"thing": thing.name, "noun": thing.noun, "soil": soil, "light": light}
    fields |= {"water": water, "room": world.room(), "weekday": weekday}
    return fields, (key(thing.noun), names.WEEKDAYS.index(weekday))


def pack(world: World) -> Situation:
    kind = world.any(tuple(_PADDING))
    thing, weekday = world.thing(kind), world.weekday()
    fields = {"thing": thing.name, "noun": thing.noun, "person": world.person().name}
    fields |= {"code": world.code(), "weekday": weekday, "padding": _PADDING[kind]}
    return fields, (key(kind), names.WEEKDAYS.index(weekday))


SITUATIONS: Mapping[str, Callable[[World], Situation]] = {
    draw.__name__: draw for draw in (clean, replace, cook, robot, hang, assemble, repot, pack)
}
"""How the situations of each family of ``instructions.txt`` are drawn."""
WORDS = (
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
