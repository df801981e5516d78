"""Questions about a log in many wordings, with the entries that answer them; and their scorer."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from collab_llm_lab import phrasebook
from collab_llm_lab.phrases import Phrase, Voice, pick
from collab_llm_lab.training.minions.logs import ENTRY_OF, Entry, LogWriter, single, values
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

_BOOK = phrasebook.read(Path(__file__).with_suffix(".txt"))
WORDINGS: Mapping[Shape, tuple[Phrase, ...]] = {
    (kind, fact): single(fact).questions if kind == LOOKUP else _BOOK[f"{kind} {fact}"].phrases()
    for shapes in SHAPES.values()
    for kind, fact in shapes
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
    """Return a question of a class, with entries to plant; reserve its keys in ``writer``."""
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
        sides += [writer.draw(ENTRY_OF[fact]) | shared for _ in range(count - 1)]
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
    """Return the right answer to ``query``, given all ``entries`` that are relevant to it."""
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
    """Score an answer: a number within 1 %, a choice, or a span; a list must be complete."""
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
