"""Queries: questions about a robot's logs in short form, as a kind, a fact and its keys.

    {"plan": "ratio", "fact": "how many", "of": "cups | kitchen; plates | kitchen"}

A query determines its simple tasks, one for each entry of ``of``, and how their answers make the
answer. The embedded remote can plan nothing else.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collab_llm_nodes.chat.structured import last_object
from collab_llm_nodes.protocols.minions.plan import number

_MAX_KEY = 80
_OPERANDS, _KEYS = "; ", " | "


@dataclass(frozen=True)
class Fact:
    """A kind of line in a log.

    Attributes:
        keys: fields that identify a line, or a series of lines, of this kind.
        task: beginning of the line, with places for the keys; the worker finds the rest.
        series: several lines of a log may have the same keys, and all of them count.
    """

    keys: tuple[str, ...]
    task: str
    series: bool = False


FACTS: Mapping[str, Fact] = {
    "where": Fact(("thing",), "Item {thing} located in"),
    "spot": Fact(("thing", "room"), "Spot of the {thing} in the {room}"),
    "who": Fact(("thing",), "Recipient of the {thing}"),
    "when": Fact(("event", "person"), "Start of the {event} of {person}"),
    "day": Fact(("machine", "person"), "Check of the {machine} by {person}"),
    "how many": Fact(("items", "room"), "Stock of {items} in the {room}"),
    "price": Fact(("thing",), "Unit price of the {thing}"),
    "paid": Fact(("person", "items"), "Expense of {person}, {items}"),
    "door code": Fact(("room",), "Access code {room}"),
    "part number": Fact(("part", "machine"), "Number of the {part} of the {machine}"),
    "colour": Fact(("noun", "person"), "Colour of the {noun} of {person}"),
    "charge": Fact(("time", "robot"), "{time} {robot}: battery"),
    "serial": Fact(("robot",), "Robot {robot}, serial"),
    "gift": Fact(("person", "other"), "Transfer from {person} to {other}"),
    "patrol": Fact(("time", "robot"), "{time} {robot} entered the"),
    "temperature": Fact(("time", "room"), "{time} {room}:"),
    "repair": Fact(("machine", "room"), "Repair of the {machine} in the {room}"),
    "spent": Fact(("person",), "Expense of {person}", series=True),
    "alarm": Fact(("room",), "Alarm in the {room}", series=True),
    "seen": Fact(("thing",), "Sighting of the {thing}", series=True),
}
"""Kinds of lines. A robot writes each in one form, and the task quotes its beginning."""

LOOKUP, SUM, COUNT, RECALL = "lookup", "sum", "count", "recall"
LARGEST, SMALLEST, RATIO, CHANGE = "largest", "smallest", "ratio", "change"
OPERANDS: Mapping[str, int] = {
    **dict.fromkeys((LOOKUP, SUM, COUNT, RECALL), 1),
    **dict.fromkeys((LARGEST, SMALLEST, RATIO, CHANGE), 2),
}
"""Kinds of questions, and the number of statements or series that each needs."""

_REDUCE = {SUM: "sum", COUNT: "count", RATIO: "ratio", CHANGE: "diff"}


@dataclass(frozen=True)
class Query:
    """A question in short form.

    Attributes:
        kind: a key of ``OPERANDS``; a change is the first statement minus the second.
        of: keys of each statement or series, in the order of ``Fact.keys``.
    """

    kind: str
    fact: str
    of: tuple[tuple[str, ...], ...]

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks, one for each entry of ``of``."""
        fact = FACTS[self.fact]
        return tuple(
            fact.task.format(**dict(zip(fact.keys, keys, strict=True))) for keys in self.of
        )

    def to_json(self) -> str:
        """Return the short form, as a planner writes it."""
        # Without nested brackets and names that are new to the small model: the planner has the
        # frozen target's embedding, which does not separate such tokens.
        of = _OPERANDS.join(_KEYS.join(keys) for keys in self.of)
        return json.dumps({"plan": self.kind, "fact": self.fact, "of": of}, ensure_ascii=False)

    def plan(self, chunker: str, *, size: int = 0, reduce: bool = False) -> dict[str, Any]:
        """Return the plan for ``protocols.minions.plan``.

        Args:
            reduce: have the robot compute, if the plan language has a rule for the kind.
        """
        found: dict[str, Any] = {
            "tasks": [{"task": task} for task in self.tasks],
            "chunker": chunker,
            "size": size,
        }
        if reduce and self.kind in _REDUCE:
            numbers = list(range(1, len(self.of) + 1))
            found["reduce"] = {"rule": _REDUCE[self.kind], "tasks": numbers}
        return found

    def answer(self, found: Sequence[Sequence[str]]) -> str | None:
        """Return the answer to the question.

        Args:
            found: answers to each task, in the order of the text.

        Returns:
            None if a task has no usable answer. So a count is never 0: without any finding, the
            worker may have failed.
        """
        if not all(found):
            return None
        if self.kind == LOOKUP:
            return _most_frequent(found[0])
        if self.kind == RECALL:
            return "; ".join(dict.fromkeys(found[0]))
        if self.kind == COUNT:
            return str(len(found[0]))
        values = [[v for v in map(number, answers) if v is not None] for answers in found]
        if not all(values):
            return None
        if self.kind == SUM:
            return format_number(math.fsum(values[0]))
        first, second = (Counter(own).most_common(1)[0][0] for own in values)
        if self.kind == RATIO:
            return format_number(first / second) if second else None
        if self.kind == CHANGE:
            return format_number(first - second)
        larger = 0 if first >= second else 1
        return self.names[larger if self.kind == LARGEST else 1 - larger]

    @property
    def names(self) -> tuple[str, ...]:
        """Possible answers of a comparison: the key in which the two sides differ."""
        differing = [i for i, keys in enumerate(zip(*self.of, strict=True)) if len(set(keys)) > 1]
        place = differing[0] if differing else 0
        return tuple(keys[place] for keys in self.of)


def format_number(value: float) -> str:
    """Return a number with up to four decimals, such as 12.5."""
    text = f"{value:.4f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def read_query(text: str) -> Query | None:
    """Return the query in a planner's reply; None if it has the wrong form."""
    found = last_object(text, ("plan",))
    if found is None or found.mended or set(found.content) != {"plan", "fact", "of"}:
        return None
    kind, fact, of = (found.content[name] for name in ("plan", "fact", "of"))
    if not (isinstance(kind, str) and isinstance(fact, str) and isinstance(of, str)):
        return None
    if kind not in OPERANDS or fact not in FACTS:
        return None
    if FACTS[fact].series != (kind in (SUM, COUNT, RECALL)):
        return None
    keys = tuple(tuple(each.split(_KEYS)) for each in of.split(_OPERANDS))
    if len(keys) != OPERANDS[kind] or any(len(each) != len(FACTS[fact].keys) for each in keys):
        return None
    if not all(key.strip() and len(key) <= _MAX_KEY for each in keys for key in each):
        return None
    return Query(kind, fact, keys)


def _most_frequent(answers: Sequence[str]) -> str:
    """Return the most frequent answer, in its first spelling."""
    counts = Counter(answer.lower() for answer in answers)
    return max(answers, key=lambda answer: counts[answer.lower()])
