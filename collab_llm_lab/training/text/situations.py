"""Things to be done: materials, dirt, machines, dishes, walls and plants.

Which tool or place is right follows from the tables of ``instructions.txt``, which a model can
learn. Each function of ``SITUATIONS`` draws one situation: the fields of its sentences, and the
numbers that decide which sentences are chosen.
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
    """Return a small number that stands for `text` among the keys of a voice."""
    return zlib.crc32(text.encode()) % 64


def clean(world: World) -> Situation:
    dirt, material = world.any(tuple(_DIRT)), world.any(tuple(_MATERIALS))
    enemy, finish, nouns = _MATERIALS[material]
    noun = world.any(nouns.split())
    agent, tool, wait = _DIRT[dirt]
    fields = {"dirt": dirt, "thing": f"{material} {noun}", "noun": noun, "agent": agent}
    fields |= {"tool": tool, "a_tool": names.with_article(tool), "wait": wait, "enemy": enemy}
    return fields | {"finish": finish, "room": world.room()}, (key(dirt), key(material))


def replace(world: World) -> Situation:
    machine, part = world.any(tuple(_MACHINES)), world.any(tuple(_PARTS))
    prepare, sign = _MACHINES[machine]
    hold, insert = _PARTS[part]
    fields = {"machine": machine, "part": part, "prepare": prepare, "sign": sign, "hold": hold}
    fields |= {"insert": insert, "code": world.code(), "room": world.room()}
    return fields, (key(machine), key(part))


def cook(world: World) -> Situation:
    dish = world.any(tuple(_DISHES))
    ingredients, way, spice, vessel = _DISHES[dish]
    heat, time, sign = _HEAT[way]
    guests = world.whole(2, 12)
    fields = {"dish": dish, "ingredients": ingredients, "way": way, "spice": spice, "heat": heat}
    fields |= {"vessel": vessel, "time": time, "sign": sign, "guests": str(guests)}
    fields |= {"person": world.first_name(), "first": ingredients.split(",")[0]}
    return fields, (key(dish), guests)


def robot(world: World) -> Situation:
    part = world.any(tuple(_ROBOT_PARTS))
    soil, tool, sign = _ROBOT_PARTS[part]
    room = world.room()
    weekday = world.weekday()
    fields = {"part": part, "soil": soil, "tool": tool, "a_tool": names.with_article(tool)}
    fields |= {"sign": sign, "robot": world.robot(), "room": room, "weekday": weekday}
    if tool == "tweezers":
        fields["a_tool"] = "tweezers"
    return fields, (key(part), names.WEEKDAYS.index(weekday))


def hang(world: World) -> Situation:
    wall = world.any(tuple(_WALLS))
    drill, plug, how = _WALLS[wall]
    colour, thing = world.colour(), world.any(_HUNG)
    fields = {"wall": wall, "drill": drill, "plug": plug, "how": how, "noun": thing}
    fields |= {"thing": f"{colour} {thing}", "room": world.room()}
    return fields, (key(wall), key(thing))


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
