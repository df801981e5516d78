"""The sub-domain `reports`: formal reports on stock, cost, patrols, energy, service and deliveries.

The question gives the data, one record a line or in one sentence. The report repeats them as a
table, with the computed column and its sum so far, and comments on them in formal language. The
sentences are in ``reports.txt``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from collab_llm_lab.training.text import names, phrasebook
from collab_llm_lab.training.text.figures import FIGURES, NUMBERS, Figures
from collab_llm_lab.training.text.phrases import Grammar, Voice, pick, say
from collab_llm_lab.training.text.tasks import Part, Task, parts_of
from collab_llm_lab.training.text.world import World
from collab_llm_nodes.models.turns import Turn

GRAMMAR = Grammar()
"""The words of the reports."""
DEPARTMENTS = ("Finance", "Facilities", "Security", "Logistics", "Catering", "Research")
_BOOK = phrasebook.read(Path(__file__).with_suffix(".txt"))


@dataclass(frozen=True)
class Kind:
    """A kind of report: its data and its own sentences."""

    name: str
    subject: str
    figures: Callable[[World], Figures]
    parts: tuple[Part, ...]


KINDS = tuple(
    Kind(
        name,
        book["subject"].texts[0],
        FIGURES[book["figures"].texts[0]],
        parts_of(book["parts"], GRAMMAR),
    )
    for name, book in _BOOK["kinds"].sections.items()
)
_SYSTEM, _QUESTION = _BOOK["system"].phrases(), _BOOK["question"].phrases()
_HEADING, _SIGNATURE = _BOOK["heading"].phrases(GRAMMAR), _BOOK["signature"].phrases(GRAMMAR)
_PURPOSE, _METHOD, _REVIEW = parts_of(_BOOK["parts of all"], GRAMMAR)
for _kind in KINDS:
    GRAMMAR.add_words(_kind.name, _kind.subject)
GRAMMAR.add_words(*_BOOK["words of tables"].words, *NUMBERS)


def draw(world: World, freedom: float = 0.1) -> Task:
    """Return a request for a report with the report."""
    kind = world.any(KINDS)
    figures = kind.figures(world)
    weekday, department = world.weekday(), world.any(DEPARTMENTS)
    fields = figures.fields | {
        "kind": kind.name,
        "a_kind": names.with_article(kind.name),
        "KIND": kind.name.upper(),
        "subject": kind.subject,
        "room": world.room(),
        "robot": world.robot(),
        "weekday": weekday,
        "date": world.date(),
        "department": department,
    }
    keys = (
        names.WEEKDAYS.index(weekday),
        DEPARTMENTS.index(department),
        len(figures.rows),
    )
    writer, user = Voice(world.rng, keys, freedom), Voice(world.rng)
    turns = []
    if world.chance(0.4):
        turns.append(Turn("system", say(_SYSTEM, user, {})))
    data = "\n".join(figures.given) if world.chance(0.6) else "; ".join(figures.given) + "."
    turns.append(
        Turn("user", pick(_QUESTION, user, fields, world.new_wordings) + "\nData:\n" + data)
    )
    parts = (_PURPOSE, _METHOD, *kind.parts, _REVIEW)
    points = tuple(part.say(writer, fields) for part in parts)
    heading, signature = say(_HEADING, writer, fields), say(_SIGNATURE, writer, fields)
    table = "\n".join((figures.header, *figures.rows))

    def join(texts: Sequence[str]) -> str:
        before, after = " ".join(texts[:2]), " ".join(texts[2:])
        return "\n".join((heading, before, table, after, signature))

    mentions = (fields["room"], fields["robot"], department, *figures.rows, *figures.derived)
    return Task(tuple(turns), points, join, mentions, points, len(points))
