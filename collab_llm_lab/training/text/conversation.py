"""The sub-domain `conversation`: chatty talk with the robot of the house.

A talk has a mood, up to two earlier exchanges and a last message on two or three topics. The
answer takes up each topic in the message's order, remembers one earlier topic and says good-bye.
The sentences are in ``conversation.txt``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from collab_llm_lab import phrasebook
from collab_llm_lab.phrasebook import Section
from collab_llm_lab.phrases import Grammar, Phrase, Voice, pick, say
from collab_llm_lab.training.text import names
from collab_llm_lab.training.text.tasks import Part, Task, parts_of
from collab_llm_lab.training.text.world import World, clock
from collab_llm_nodes.models.turns import Turn

GRAMMAR = Grammar()
"""The words of the robot."""
_BOOK = phrasebook.read(Path(__file__).with_suffix(".txt"))


@dataclass(frozen=True)
class Topic:
    """A subject of a message.

    Attributes:
        fields: draws the topic's names, given the minutes after midnight.
        lines: wordings of the user; the last is held out of training.
        parts: the parts of the robot's answer, in order.
        recall: the sentence with which the robot comes back to the topic later.
        must: fields that every answer names.
    """

    fields: Callable[[World, int], dict[str, str]]
    lines: tuple[Phrase, ...]
    parts: tuple[Part, ...]
    recall: Part
    must: tuple[str, ...]


_HIDING, _PRAISE = _BOOK["hiding"].table, _BOOK["praise"].table
_DISHES, _WEATHER = _BOOK["dishes"].table, _BOOK["weather"].table
_CARRIED = tuple(_HIDING)
"""Classes of things that are small enough to be carried."""


def _appointment(world: World, now: int) -> dict[str, str]:
    """Draw a person, a room, a place, a later time and an event, which most topics need."""
    event = world.any(names.EVENTS)
    return {
        "person": world.first_name(),
        "room": world.room(),
        "place": world.place(),
        "time": world.clock(now + 30, 23 * 60 + 55),
        "event": event,
        "an_event": names.with_article(event),
    }


def _thing(world: World, kind: str = "") -> dict[str, str]:
    thing = world.thing(kind or world.any(_CARRIED))
    hiding, praise = _HIDING[thing.kind], _PRAISE[thing.kind]
    return {
        "thing": thing.name,
        "a_thing": names.with_article(thing.name),
        "noun": thing.noun,
        "a_noun": names.with_article(thing.noun),
        "hiding": hiding[0],
        "hiding2": hiding[1],
        "praise": praise[0],
        "praise2": praise[1],
    }


_DRAWS: Mapping[str, Callable[[World], dict[str, str]]] = {
    "thing": _thing,
    "toy": lambda world: _thing(world, "toy"),
    "plant": lambda world: {"thing": world.thing("plant").name},
    "price": lambda world: {"price": world.price()},
    "dish": lambda world: world.row(_DISHES, "dish ingredients trick"),
    "weather": lambda world: world.row(_WEATHER, "weather wear danger"),
}
_RETURN = GRAMMAR("Remember the earlier talk", "Come back to before")


def _topic(book: Section) -> Topic:
    draws = [_DRAWS[name] for name in book["draws"].words]

    def fields(world: World, now: int) -> dict[str, str]:
        found = _appointment(world, now)
        for draw in draws:
            found |= draw(world)
        return found

    return Topic(
        fields,
        book["lines"].phrases(),
        parts_of(book["parts"], GRAMMAR),
        Part(_RETURN, book["recall"].phrases(GRAMMAR)),
        book["must"].words,
    )


TOPICS = tuple(_topic(book) for book in _BOOK["topics"].sections.values())
MOODS = _BOOK["moods"].phrases_by_name()
_MOOD_NAMES = tuple(MOODS)
_SYSTEM, _HELLO = _BOOK["system"].phrases(), _BOOK["hello"].phrases()
_GREETING = GRAMMAR("Greet {user} warmly", "Answer the {mood} mood")
_FIRST = {
    mood: Part(_GREETING, opening)
    for mood, opening in _BOOK["openings"].phrases_by_name(GRAMMAR).items()
}
_LAST = Part(
    GRAMMAR("Say good-bye kindly", "End with good wishes"),
    _BOOK["status"].phrases(GRAMMAR),
    _BOOK["closings"].phrases(GRAMMAR),
)
_PARTS_OF_DAY = ("morning", "afternoon", "evening")
GRAMMAR.add_words(*MOODS, *_PARTS_OF_DAY, *names.WEEKDAYS)
for _table in (_HIDING, _PRAISE, _DISHES, _WEATHER):
    for _name, _cells in _table.items():
        GRAMMAR.add_words(_name, *_cells)


def draw(world: World, freedom: float = 0.1) -> Task:
    """Return a talk with its answer."""
    rng = world.rng
    weekday = world.weekday()
    minutes = world.minutes(6 * 60, 20 * 60)
    part = _PARTS_OF_DAY[(minutes >= 12 * 60) + (minutes >= 18 * 60)]
    mood = world.any(_MOOD_NAMES)
    common = {
        "robot": world.robot(),
        "user": world.first_name(),
        "weekday": weekday,
        "clock": clock(minutes),
        "part": part,
        "here": world.room(),
        "mood": mood,
    }
    keys = (
        names.WEEKDAYS.index(weekday),
        _MOOD_NAMES.index(mood),
        _PARTS_OF_DAY.index(part),
    )
    robot, user = Voice(rng, keys, freedom), Voice(rng)
    count = world.any((2, 2, 3))
    earlier = world.any((0, 0, 0, 1, 1, 2))
    topics = rng.sample(TOPICS, count + earlier)
    fields = [common | topic.fields(world, minutes) for topic in topics]

    def ask(i: int) -> str:
        return pick(topics[i].lines, user, fields[i], world.new_wordings)

    turns = [Turn("system", say(_SYSTEM, user, common))]
    for i in range(earlier):
        hello = pick(_HELLO, user, common, world.new_wordings) + " " if i == 0 else ""
        turns.append(Turn("user", hello + ask(i)))
        reply = [say(p.text, robot, fields[i]) for p in topics[i].parts]
        turns.append(Turn("assistant", " ".join(reply)))
    hello = "" if earlier else pick(_HELLO, user, common, world.new_wordings) + " "
    message = [ask(i) for i in range(earlier, earlier + count)]
    feeling = pick(MOODS[mood], user, common, world.new_wordings)
    turns.append(Turn("user", hello + feeling + " " + " ".join(message)))

    points = [_FIRST[mood].say(robot, common)]
    for topic, names_of in list(zip(topics, fields, strict=True))[earlier:]:
        points += [part.say(robot, names_of) for part in topic.parts]
    mentions = [common["user"]]
    mentions += [
        fields[i][name] for i in range(earlier, earlier + count) for name in topics[i].must
    ]
    if count == 2 and earlier:
        points.append(topics[0].recall.say(robot, fields[0]))
    points.append(_LAST.say(robot, common))
    return Task(tuple(turns), tuple(points), " ".join, tuple(mentions), tuple(points), len(points))
