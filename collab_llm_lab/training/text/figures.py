"""Data of reports: stock, cost, patrols, energy, service and deliveries, with right sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from collab_llm_lab.training.text import names
from collab_llm_lab.training.text.world import World, clock, money

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")


@dataclass(frozen=True)
class Figures:
    """The data of one report.

    Attributes:
        given: one line of the question for each record.
        header: names of the table's columns.
        rows: the table, computed columns included.
        fields: what the sentences speak of.
        derived: computed numbers, every one of which the report has to state.
    """

    given: tuple[str, ...]
    header: str
    rows: tuple[str, ...]
    fields: dict[str, str]
    derived: tuple[str, ...]


def _items(world: World, count: int) -> list[str]:
    return [names.plural(noun) for noun in world.rng.sample(names.SUPPLIES, count)]


def _table(rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return tuple(" | ".join(row) for row in rows)


def stock(world: World) -> Figures:
    """Items in stock, needed and missing."""
    given, rows, missing, total = [], [], [], 0
    items = _items(world, world.whole(3, 5))
    for item in items:
        stock = world.whole(2, 40)
        lack = world.whole(0, 15) if world.chance(0.8) else 0
        total += lack
        missing.append(lack)
        given.append(f"{item}: {stock} in stock, {stock + lack} needed")
        rows.append((item, str(stock), str(stock + lack), str(lack), str(total)))
    most = items[missing.index(max(missing))]
    fields = {"total": str(total), "top": most, "most": str(max(missing))}
    fields |= {"first": items[0], "last": items[-1], "count": NUMBERS[len(items)]}
    derived = tuple(str(lack) for lack in missing) + (str(total),)
    return Figures(
        tuple(given), "item | in stock | needed | missing | sum", _table(rows), fields, derived
    )


def cost(world: World) -> Figures:
    """Items with count and unit price."""
    given, rows, costs, total = [], [], [], 0
    items = _items(world, world.whole(2, 4))
    for item in items:
        count, price = world.whole(2, 9), 50 * world.whole(1, 24)
        costs.append(count * price)
        total += count * price
        given.append(f"{item}: {count} at {money(price)}")
        rows.append((item, str(count), money(price), money(count * price), money(total)))
    most = items[costs.index(max(costs))]
    fields = {"total": money(total), "top": most, "most": money(max(costs))}
    fields |= {"first": items[0], "last": items[-1], "count": NUMBERS[len(items)]}
    derived = tuple(money(cost) for cost in costs) + (money(total),)
    return Figures(
        tuple(given), "item | count | unit price | total | sum", _table(rows), fields, derived
    )


_FINDINGS = (
    "window open", "door unlocked", "light left on", "water on the floor", "smoke alarm silent",
    "blocked exit", "broken glass", "strange noise",
)  # fmt: skip


def patrol(world: World) -> Figures:
    """Stations of a round with findings."""
    minutes, given, rows, open_points, findings = world.minutes(), [], [], 0, []
    count = world.whole(3, 6)
    for _ in range(count):
        finding = world.any(_FINDINGS) if world.chance(0.5) else "in order"
        room = world.room()
        open_points += finding != "in order"
        if finding != "in order":
            findings.append((room, finding))
        given.append(f"{clock(minutes)} {room}: {finding}")
        rows.append((clock(minutes), room, finding, str(open_points)))
        last = clock(minutes)
        minutes += world.whole(3, 25)
    top, finding = findings[-1] if findings else ("none", "no finding")
    fields = {"total": str(open_points), "top": top, "most": finding, "last": last}
    fields |= {"first": rows[0][0], "count": NUMBERS[count]}
    fields["result"] = (
        f"The most recent finding concerns the {top}: {finding}."
        if findings
        else "No finding was recorded in any of the rooms."
    )
    derived = (str(open_points),)
    return Figures(tuple(given), "time | room | finding | open", _table(rows), fields, derived)


def energy(world: World) -> Figures:
    """Charge of robots before and after the day."""
    given, rows, uses, total = [], [], [], 0
    robots = [world.robot() for _ in range(world.whole(2, 4))]
    for robot in robots:
        start = world.whole(50, 100)
        used = world.whole(3, 45)
        uses.append(used)
        total += used
        given.append(f"{robot}: {start} percent at start, {start - used} percent at end")
        rows.append((robot, str(start), str(start - used), str(used), str(total)))
    most = robots[uses.index(max(uses))]
    fields = {"total": str(total), "top": most, "most": str(max(uses))}
    fields |= {"first": robots[0], "last": robots[-1], "count": NUMBERS[len(robots)]}
    derived = tuple(str(used) for used in uses) + (str(total),)
    return Figures(tuple(given), "robot | start | end | used | sum", _table(rows), fields, derived)


def service(world: World) -> Figures:
    """Machines with a new part and the hours of work."""
    given, rows, hours, total = [], [], [], 0
    machines = world.rng.sample(names.MACHINES, world.whole(2, 4))
    for machine in machines:
        part, code, hour = world.any(names.PARTS), world.code(), world.whole(1, 9)
        hours.append(hour)
        total += hour
        given.append(f"{machine}: {part} {code}, {hour} hours")
        rows.append((machine, part, code, str(hour), str(total)))
    most = machines[hours.index(max(hours))]
    fields = {"total": str(total), "top": most, "most": str(max(hours))}
    fields |= {"first": machines[0], "last": machines[-1], "count": NUMBERS[len(machines)]}
    return Figures(
        tuple(given), "machine | part | number | hours | sum", _table(rows), fields, (str(total),)
    )


def deliveries(world: World) -> Figures:
    """Parcels received, with sender and time."""
    minutes, given, rows, parcels, total = world.minutes(360, 700), [], [], [], 0
    senders = [world.person().family for _ in range(world.whole(3, 5))]
    for sender in senders:
        count = world.whole(1, 12)
        parcels.append(count)
        total += count
        given.append(f"{clock(minutes)} {sender}: {count} parcels")
        rows.append((clock(minutes), sender, str(count), str(total)))
        minutes += world.whole(10, 90)
    most = senders[parcels.index(max(parcels))]
    fields = {"total": str(total), "top": most, "most": str(max(parcels))}
    fields |= {"first": senders[0], "last": senders[-1], "count": NUMBERS[len(senders)]}
    return Figures(
        tuple(given), "time | sender | parcels | sum", _table(rows), fields, (str(total),)
    )
