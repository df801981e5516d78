"""The sub-domain `reports`: formal reports on stock, cost, patrols, energy, service and deliveries.

The question gives the data, one record a line or in one sentence. The report repeats them as a
table, with the computed column and its sum so far, and comments on them in formal language. The
sentences are in ``reports.txt``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from collab_llm_lab import phrasebook
from collab_llm_lab.phrases import Grammar, Voice, pick, say
from collab_llm_lab.training.text import names
from collab_llm_lab.training.text.tasks import Part, Task, parts_of
from collab_llm_lab.training.text.world import World, clock, money
from collab_llm_nodes.models.turns import Turn

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")


@dataclass(frozen=True)
class Figures:
    """The data of one report.

    Attributes:
        given: one line of the question for each record.
        header: names of the table's columns.
        rows: the table, computed columns included.
        fields: values of the fields in sentences.
        derived: computed numbers, all of which the report must state.
    """

    given: tuple[str, ...]
    header: str
    rows: tuple[str, ...]
    fields: dict[str, str]
    derived: tuple[str, ...]


def _figures(
    header: str,
    labels: Sequence[str],
    given: Sequence[str],
    cells: Sequence[tuple[str, ...]],
    values: Sequence[int],
    written: Callable[[int], str] = str,
) -> Figures:
    """Return the figures of labelled records, with the sum of their values so far as last column.

    Args:
        cells: of each record, the columns before the sum.
    """
    sums = [written(total) for total in accumulate(values)]
    most = max(values)
    fields = {
        "total": sums[-1],
        "top": labels[values.index(most)],
        "most": written(most),
        "first": labels[0],
        "last": labels[-1],
        "count": _NUMBERS[len(labels)],
    }
    rows = tuple(" | ".join((*row, end)) for row, end in zip(cells, sums, strict=True))
    return Figures(tuple(given), f"{header} | sum", rows, fields, (sums[-1],))


def _with_values(figures: Figures, values: Sequence[str]) -> Figures:
    """Return ``figures`` of a report that must state each value, not only their sum."""
    return replace(figures, derived=(*values, *figures.derived))


def _items(world: World, count: int) -> list[str]:
    return [names.plural(noun) for noun in world.rng.sample(names.SUPPLIES, count)]


def stock(world: World) -> Figures:
    """Draw items in stock, needed and missing."""
    given, cells, missing = [], [], []
    items = _items(world, world.whole(3, 5))
    for item in items:
        stock = world.whole(2, 40)
        lack = world.whole(0, 15) if world.chance(0.8) else 0
        missing.append(lack)
        given.append(f"{item}: {stock} in stock, {stock + lack} needed")
        cells.append((item, str(stock), str(stock + lack), str(lack)))
    figures = _figures("item | in stock | needed | missing", items, given, cells, missing)
    return _with_values(figures, [str(lack) for lack in missing])


def cost(world: World) -> Figures:
    """Draw items with count and unit price."""
    given, cells, costs = [], [], []
    items = _items(world, world.whole(2, 4))
    for item in items:
        count, price = world.whole(2, 9), 50 * world.whole(1, 24)
        costs.append(count * price)
        given.append(f"{item}: {count} at {money(price)}")
        cells.append((item, str(count), money(price), money(count * price)))
    figures = _figures("item | count | unit price | total", items, given, cells, costs, money)
    return _with_values(figures, [money(cost) for cost in costs])


_FINDINGS = (
    "window open", "door unlocked", "light left on", "water on the floor", "smoke alarm silent",
    "blocked exit", "broken glass", "strange noise",
)  # fmt: skip


def patrol(world: World) -> Figures:
    """Draw the stations of a round, with findings."""
    minutes, given, rows, findings, times = world.minutes(), [], [], [], []
    count = world.whole(3, 6)
    for _ in range(count):
        finding = world.any(_FINDINGS) if world.chance(0.5) else "in order"
        room = world.room()
        if finding != "in order":
            findings.append((room, finding))
        times.append(clock(minutes))
        given.append(f"{times[-1]} {room}: {finding}")
        rows.append(f"{times[-1]} | {room} | {finding} | {len(findings)}")
        minutes += world.whole(3, 25)
    top, finding = findings[-1] if findings else ("none", "no finding")
    total = str(len(findings))
    fields = {"total": total, "top": top, "most": finding, "first": times[0], "last": times[-1]}
    fields["count"] = _NUMBERS[count]
    fields["result"] = (
        f"The most recent finding concerns the {top}: {finding}."
        if findings
        else "No finding was recorded in any of the rooms."
    )
    return Figures(tuple(given), "time | room | finding | open", tuple(rows), fields, (total,))


def energy(world: World) -> Figures:
    """Draw the charge of robots before and after the day."""
    given, cells, uses = [], [], []
    robots = [world.robot() for _ in range(world.whole(2, 4))]
    for robot in robots:
        start = world.whole(50, 100)
        used = world.whole(3, 45)
        uses.append(used)
        given.append(f"{robot}: {start} percent at start, {start - used} percent at end")
        cells.append((robot, str(start), str(start - used), str(used)))
    figures = _figures("robot | start | end | used", robots, given, cells, uses)
    return _with_values(figures, [str(used) for used in uses])


def service(world: World) -> Figures:
    """Draw machines with a new part and the hours of work."""
    given, cells, hours = [], [], []
    machines = world.rng.sample(names.MACHINES, world.whole(2, 4))
    for machine in machines:
        part, code, hour = world.any(names.PARTS), world.code(), world.whole(1, 9)
        hours.append(hour)
        given.append(f"{machine}: {part} {code}, {hour} hours")
        cells.append((machine, part, code, str(hour)))
    return _figures("machine | part | number | hours", machines, given, cells, hours)


def deliveries(world: World) -> Figures:
    """Draw parcels received, with sender and time."""
    minutes, given, cells, parcels = world.minutes(360, 700), [], [], []
    senders = [world.person().family for _ in range(world.whole(3, 5))]
    for sender in senders:
        count = world.whole(1, 12)
        parcels.append(count)
        given.append(f"{clock(minutes)} {sender}: {count} parcels")
        cells.append((clock(minutes), sender, str(count)))
        minutes += world.whole(10, 90)
    return _figures("time | sender | parcels", senders, given, cells, parcels)


_FIGURES: Mapping[str, Callable[[World], Figures]] = {
    draw.__name__: draw for draw in (stock, cost, patrol, energy, service, deliveries)
}
"""Functions that draw the data of each kind of report."""


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
        _FIGURES[book["figures"].texts[0]],
        parts_of(book["parts"], GRAMMAR),
    )
    for name, book in _BOOK["kinds"].sections.items()
)
_SYSTEM, _QUESTION = _BOOK["system"].phrases(), _BOOK["question"].phrases()
_HEADING, _SIGNATURE = _BOOK["heading"].phrases(GRAMMAR), _BOOK["signature"].phrases(GRAMMAR)
_PURPOSE, _METHOD, _REVIEW = parts_of(_BOOK["parts of all"], GRAMMAR)
for _kind in KINDS:
    GRAMMAR.add_words(_kind.name, _kind.subject)
GRAMMAR.add_words(*_BOOK["words of tables"].words, *_NUMBERS)


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
