"""Questions about a log in many wordings, with the entries that answer them; and their scorer."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from collab_llm_lab.training.minions.logs import ENTRY_OF, Entry, LogWriter, single, values
from collab_llm_lab.training.text.phrases import Grammar, Phrase, Voice, pick
from collab_llm_nodes.protocols.minions.embedded.queries import (
    CHANGE,
    COUNT,
    FACTS,
    LARGEST,
    LOOKUP,
    RATIO,
    RECALL,
    SMALLEST,
    SUM,
    Query,
)
from collab_llm_nodes.protocols.minions.plan import number

_ask = Grammar()
_TOLERANCE = 0.01

CLASSES = ("lookup", "comparison", "sum", "ratio", "count", "change", "recall")
"""Classes of questions, as results name them."""
Shape = tuple[str, str]
"""Kind and fact of a query."""
SHAPES: Mapping[str, tuple[Shape, ...]] = {
    "lookup": tuple((LOOKUP, name) for name, fact in FACTS.items() if not fact.series),
    "comparison": (
        (LARGEST, "price"),
        (SMALLEST, "price"),
        (LARGEST, "how many"),
        (LARGEST, "temperature"),
    ),
    "sum": ((SUM, "spent"),),
    "ratio": ((RATIO, "price"), (RATIO, "how many")),
    "count": ((COUNT, "alarm"),),
    "change": ((CHANGE, "temperature"), (CHANGE, "charge")),
    "recall": ((RECALL, "seen"),),
}
HELD_OUT_SHAPES: frozenset[Shape] = frozenset({(LARGEST, "how many"), (RATIO, "price")})
"""Shapes that the planner is never trained on."""

WORDINGS: Mapping[Shape, tuple[Phrase, ...]] = {
    **{(LOOKUP, name): single(name).questions for _, name in SHAPES["lookup"]},
    (SUM, "spent"): _ask(
        "How much did {person} pay in total?",
        "What is the sum of all that {person} paid?",
        "Add up the expenses of {person}.",
        "How much money did {person} spend altogether?",
        "What did {person} spend in all?",
        "What do all payments of {person} come to?",
    ),
    (COUNT, "alarm"): _ask(
        "How many alarms were there in the {room}?",
        "How often did the alarm of the {room} go off?",
        "How many times is an alarm in the {room} mentioned?",
        "How many alarms went off in the {room}?",
        "Count the alarms in the {room}.",
    ),
    (RECALL, "seen"): _ask(
        "In which rooms was the {thing} seen?",
        "List all rooms in which the {thing} was seen.",
        "Name every room where somebody saw the {thing}.",
        "Where has the {thing} been seen, in all?",
        "Which rooms did the {thing} turn up in?",
    ),
    (LARGEST, "price"): _ask(
        "Which costs more, the {thing} or the {second_thing}?",
        "What is more expensive, the {thing} or the {second_thing}?",
        "Is the {thing} or the {second_thing} dearer?",
        "Which has the higher price, the {thing} or the {second_thing}?",
    ),
    (SMALLEST, "price"): _ask(
        "Which costs less, the {thing} or the {second_thing}?",
        "What is cheaper, the {thing} or the {second_thing}?",
        "Which has the lower price, the {thing} or the {second_thing}?",
    ),
    (LARGEST, "how many"): _ask(
        "Where are more {items}, in the {room} or in the {second_room}?",
        "Which has more {items}, the {room} or the {second_room}?",
        "Does the {room} or the {second_room} have more {items}?",
    ),
    (LARGEST, "temperature"): _ask(
        "Which was warmer at {time}, the {room} or the {second_room}?",
        "At {time}, was it warmer in the {room} or in the {second_room}?",
        "Which had the higher temperature at {time}, the {room} or the {second_room}?",
    ),
    (RATIO, "price"): _ask(
        "How many times the price of the {second_thing} is that of the {thing}?",
        "What is the price of the {thing} divided by that of the {second_thing}?",
        "What is the ratio of the price of the {thing} to that of the {second_thing}?",
    ),
    (RATIO, "how many"): _ask(
        "How many times as many {items} as {second_items} are in the {room}?",
        "In the {room}, what is the number of {items} divided by that of {second_items}?",
        "How many {items} are there for each of the {second_items} in the {room}?",
        "What is the ratio of {items} to {second_items} in the {room}?",
    ),
    (CHANGE, "temperature"): _ask(
        "By how many degrees did the {room} warm up from {second_time} to {time}?",
        "How much warmer was the {room} at {time} than at {second_time}?",
        "How did the temperature of the {room} change between {second_time} and {time}?",
        "What is the change of temperature in the {room} from {second_time} to {time}?",
    ),
    (CHANGE, "charge"): _ask(
        "How many percentage points did {robot} gain from {second_time} to {time}?",
        "By how much did the charge of {robot} rise from {second_time} to {time}?",
        "How did the charge of {robot} change between {second_time} and {time}?",
        "What is the change of {robot}'s charge from {second_time} to {time}?",
    ),
}
"""Wordings of each shape; the last is held out of training."""

_VARIED: Mapping[Shape, str] = {
    (LARGEST, "price"): "thing",
    (SMALLEST, "price"): "thing",
    (RATIO, "price"): "thing",
    (LARGEST, "how many"): "room",
    (RATIO, "how many"): "items",
    (LARGEST, "temperature"): "room",
    (CHANGE, "temperature"): "time",
    (CHANGE, "charge"): "time",
}
"""The field in which the two operands differ."""
_NUMERIC = {SUM, COUNT, RATIO, CHANGE}
_SERIES = (2, 4)
_NEAR = (1, 3)


@dataclass(frozen=True)
class Asked:
    """A question with its answer.

    Attributes:
        group: one of ``CLASSES``.
        planted: the entries that answer it, each group far apart in the log, and near misses.
    """

    text: str
    query: Query
    group: str
    answer: str
    planted: tuple[tuple[Entry, ...], ...]


def draw(
    writer: LogWriter, group: str, *, shape: Shape | None = None, held_out_wording: bool = False
) -> Asked:
    """Return a question of a class, with entries to plant; ``writer`` reserves its keys."""
    shape = shape or writer.rng.choice(SHAPES[group])
    kind, fact = shape
    varied = _VARIED.get(shape)
    first = writer.draw(ENTRY_OF[fact])
    sides = [first]
    if varied is not None:
        sides.append(_other_side(writer, fact, first, varied))
    elif FACTS[fact].series:
        shared = {name: first[name] for name in FACTS[fact].keys}
        count = writer.rng.randint(*_SERIES)
        sides += [_event(writer, fact) | shared for _ in range(count - 1)]
    for fields in sides:
        writer.reserve(fact, fields)
    keys = tuple(
        dict.fromkeys(tuple(fields[name] for name in FACTS[fact].keys) for fields in sides)
    )
    query = Query(kind, fact, keys)
    entries = tuple(writer.state(ENTRY_OF[fact], fields) for fields in sides)
    misses = tuple(
        writer.miss(ENTRY_OF[fact], fields)
        for fields in (sides if varied else sides[:2])
        for _ in range(writer.rng.randint(*_NEAR))
    )
    text = wording(writer.rng, query, held_out=held_out_wording)
    return Asked(text, query, group, gold(query, entries), (entries, misses))


def gold(query: Query, entries: Sequence[Entry]) -> str:
    """Return the right answer to ``query`` where ``entries`` are all that bears on it."""
    answer = query.answer(values(entries, query))
    assert answer is not None, "the entries do not answer the question"
    return answer


def wording(rng: random.Random, query: Query, *, held_out: bool = False) -> str:
    """Return ``query`` in words."""
    names = FACTS[query.fact].keys
    fields = dict(zip(names, query.of[0], strict=True))
    if len(query.of) > 1:
        fields |= {f"second_{name}": key for name, key in zip(names, query.of[1], strict=True)}
    return pick(WORDINGS[query.kind, query.fact], Voice(rng), fields, held_out)


def _event(writer: LogWriter, fact: str) -> dict[str, str]:
    return writer.draw(ENTRY_OF[fact])


def _other_side(
    writer: LogWriter, fact: str, first: Mapping[str, str], varied: str
) -> dict[str, str]:
    """Return the fields of a second statement that differs in one key and in its value."""
    value = single(fact).value
    while True:
        other = writer.draw(fact)
        if other[varied] != first[varied] and other[value] != first[value]:
            shared = {name: first[name] for name in FACTS[fact].keys if name != varied}
            return {**other, **shared}


_WORD = re.compile(r"[\w.:%-]*\w")
_ARTICLES = frozenset({"the", "a", "an", "in", "on", "at"})


def is_right(asked: Asked, answer: str) -> bool:
    """Score an answer: a number within 1 %, a choice, or a span; a list needs all and no more."""
    kind = asked.query.kind
    if kind in _NUMERIC:
        if len(set(re.findall(r"\d+(?:[.,]\d+)*", answer))) != 1:
            return False
        said, right = number(answer), number(asked.answer)
        assert right is not None
        return said is not None and abs(said - right) <= _TOLERANCE * max(abs(right), 0.5)
    if kind == RECALL:
        return _parts(answer) == _parts(asked.answer)
    return _plain(answer) == _plain(asked.answer)


def _parts(text: str) -> frozenset[str]:
    return frozenset(plain for part in re.split(r"[;,\n]", text) if (plain := _plain(part)))


def _plain(text: str) -> str:
    return " ".join(word for word in _WORD.findall(text.lower()) if word not in _ARTICLES)
