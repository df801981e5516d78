"""The sub-domain `reports`: formal reports on stock, cost, patrols, energy, service and deliveries.

The question gives the data, one record a line or in one sentence. The report repeats them as a
table, with the computed column and its sum so far, and comments on them in formal language.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.training.text import names
from collab_llm_nodes.training.text.phrases import Grammar, Voice, pick, say
from collab_llm_nodes.training.text.tasks import Part, Task
from collab_llm_nodes.training.text.world import World, clock, money

GRAMMAR = Grammar()
_g = GRAMMAR
_ask = Grammar()

DEPARTMENTS = ("Finance", "Facilities", "Security", "Logistics", "Catering", "Research")
_SYSTEM = _ask(
    "You write formal reports.",
    "Reports are formal, complete and correct to the cent.",
    "You are the reporting service of the building.",
    "Write reports with a table and a summary.",
)
_QUESTION = _ask(
    "(Write|Prepare|Draw up) the {kind} report of the {room} for {department}, {weekday}, {date}. "
    "Author: {robot}.",
    "{department} requests the {kind} report, {room}, dated {weekday}, {date}; author {robot}.",
    "{weekday}, {date}. Compile the {kind} report for {department} on the {room}, signed by "
    "{robot}.",
    "Please submit {a_kind} report. Location {room}, recipient {department}, author {robot}, date "
    "{weekday}, {date}.",
    "Kind: {kind} report. Location: {room}. Recipient: {department}. Date: {weekday}, {date}. "
    "Author: {robot}.",
    "For {department}: the {kind} report on the {room}, {weekday}, {date}, as drafted by {robot}.",
)
_PURPOSE = Part(
    _g("Purpose of the report", "Scope and recipient"),
    _g(
        "The present report (documents|records) the {subject} of the {room} as of {weekday}, "
        "{date}, "
        "and is (addressed|submitted) to {department}.",
        "At the request of {department}, the {subject} of the {room} (was reviewed|has been "
        "examined) on {weekday}, {date}.",
        "This document (summarises|states) the {subject} of the {room} on {weekday}, {date}, for "
        "(the attention|the records) of {department}.",
    ),
)
_METHOD = Part(
    _g("Method of the survey", "Basis of the figures"),
    _g(
        "All figures were (recorded on site|verified twice) by {robot} and (comply|agree) with the "
        "(applicable|internal) guidelines.",
        "The data (originate|derive) from the records of {robot} and have been (checked for "
        "completeness|reconciled with the register).",
        "{robot} collected the data (without interruption|according to schedule), and no "
        "(deviation|irregularity) in the procedure was (noted|observed).",
    ),
)
_REVIEW = Part(
    _g("Next review date", "Further procedure"),
    _g(
        "The next review is (scheduled|due) on the following {weekday}; until then the (present|"
        "above) figures (remain valid|shall apply).",
        "{department} is (kindly requested|asked) to (confirm receipt|approve the figures) before "
        "the following {weekday}.",
        "Subject to the approval of {department}, the (measures|findings) (take effect|will be "
        "closed) on the following {weekday}.",
    ),
)
_SIGNATURE = _g(
    "Signed: {robot}, (for|on behalf of) {department}.",
    "Prepared by {robot}. (Copy|Distribution) to {department}.",
    "Respectfully submitted by {robot} to {department}.",
)


@dataclass(frozen=True)
class _Figures:
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


@dataclass(frozen=True)
class _Kind:
    """A kind of report: its data and its own sentences."""

    name: str
    subject: str
    figures: Callable[[World], _Figures]
    parts: tuple[Part, ...]


def _items(world: World, count: int) -> list[str]:
    return [names.plural(noun) for noun in world.rng.sample(names.SUPPLIES, count)]


def _table(rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return tuple(" | ".join(row) for row in rows)


def _stock(world: World) -> _Figures:
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
    fields |= {"first": items[0], "last": items[-1], "count": _NUMBERS[len(items)]}
    derived = tuple(str(lack) for lack in missing) + (str(total),)
    return _Figures(
        tuple(given), "item | in stock | needed | missing | sum", _table(rows), fields, derived
    )


def _cost(world: World) -> _Figures:
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
    fields |= {"first": items[0], "last": items[-1], "count": _NUMBERS[len(items)]}
    derived = tuple(money(cost) for cost in costs) + (money(total),)
    return _Figures(
        tuple(given), "item | count | unit price | total | sum", _table(rows), fields, derived
    )


_FINDINGS = (
    "window open", "door unlocked", "light left on", "water on the floor", "smoke alarm silent",
    "blocked exit", "broken glass", "strange noise",
)  # fmt: skip


def _patrol(world: World) -> _Figures:
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
    fields |= {"first": rows[0][0], "count": _NUMBERS[count]}
    fields["result"] = (
        f"The most recent finding concerns the {top}: {finding}."
        if findings
        else "No finding was recorded in any of the rooms."
    )
    derived = (str(open_points),)
    return _Figures(tuple(given), "time | room | finding | open", _table(rows), fields, derived)


def _energy(world: World) -> _Figures:
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
    fields |= {"first": robots[0], "last": robots[-1], "count": _NUMBERS[len(robots)]}
    derived = tuple(str(used) for used in uses) + (str(total),)
    return _Figures(tuple(given), "robot | start | end | used | sum", _table(rows), fields, derived)


def _service(world: World) -> _Figures:
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
    fields |= {"first": machines[0], "last": machines[-1], "count": _NUMBERS[len(machines)]}
    return _Figures(
        tuple(given), "machine | part | number | hours | sum", _table(rows), fields, (str(total),)
    )


def _deliveries(world: World) -> _Figures:
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
    fields |= {"first": senders[0], "last": senders[-1], "count": _NUMBERS[len(senders)]}
    return _Figures(
        tuple(given), "time | sender | parcels | sum", _table(rows), fields, (str(total),)
    )


_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")


def _parts(*pairs: tuple[tuple[str, ...], tuple[str, ...]]) -> tuple[Part, ...]:
    return tuple(Part(_g(*titles), _g(*texts)) for titles, texts in pairs)


_KINDS = (
    _Kind(
        "inventory",
        "stock of consumables",
        _stock,
        _parts(
            (
                ("Total of missing items", "Overall shortage"),
                (
                    "Across {count} articles, a total of {total} units is (missing|lacking) "
                    "against "
                    "the (required|target) quantity.",
                    "The (overall|accumulated) shortage of the {count} articles amounts to {total} "
                    "units.",
                ),
            ),
            (
                ("Largest single shortage", "Most affected article"),
                (
                    "The largest (single|individual) shortage concerns {top}, of which {most} "
                    "(units "
                    "are|pieces are) outstanding.",
                    "With {most} units (below target|outstanding), {top} (constitute|represent) "
                    "the "
                    "most (critical|affected) article.",
                ),
            ),
            (
                ("Recommended purchase order", "Measures to be taken"),
                (
                    "It is (recommended|advised) that a purchase order for {top} be "
                    "(placed|issued) "
                    "(without delay|in the current week), while {first} should be (monitored|"
                    "recounted).",
                    "Procurement of {top} (takes precedence|has priority); the (level|quantity) of "
                    "{last} is to be (reassessed|verified) at the next count.",
                ),
            ),
        ),
    ),
    _Kind(
        "cost",
        "expenditure",
        _cost,
        _parts(
            (
                ("Total expenditure", "Sum of all costs"),
                (
                    "Total expenditure for {count} (articles|positions) amounts to {total}, (taxes "
                    "included|excluding discounts).",
                    "The {count} positions (result in|add up to) a (total|sum) of {total}, which "
                    "is "
                    "(within|covered by) the budget.",
                ),
            ),
            (
                ("Largest cost item", "Most expensive position"),
                (
                    "The (highest|largest) share is (attributable|due) to {top} at {most}, "
                    "(followed "
                    "by|ahead of) the remaining positions.",
                    "{top} (account for|constitute) the largest position with {most} and (require|"
                    "merit) (particular|separate) attention.",
                ),
            ),
            (
                ("Proposals for saving", "Advice on the budget"),
                (
                    "Savings (may be achieved|appear possible) by (bundling orders|comparing "
                    "suppliers) for {top}; the price of {first} (is considered|remains) (adequate|"
                    "stable).",
                    "It is (proposed|suggested) to (renegotiate|review) the terms for {top} and to "
                    "(maintain|confirm) the present supplier of {last}.",
                ),
            ),
        ),
    ),
    _Kind(
        "patrol",
        "security patrol",
        _patrol,
        _parts(
            (
                ("Number of open findings", "Summary of findings"),
                (
                    "In {count} rooms (inspected|visited) between {first} and {last}, {total} "
                    "(findings|incidents) were recorded.",
                    "The patrol (covered|comprised) {count} rooms from {first} to {last} and (led "
                    "to|yielded) {total} findings.",
                ),
            ),
            (
                ("Most recent finding", "Latest incident"),
                (
                    "{result} (The responsible staff|The duty officer) (has been|was) (informed|"
                    "notified).",
                    "{result} (Photographs|Details) are (attached|available) (on request|in the "
                    "archive).",
                ),
            ),
            (
                ("Safety measures required", "Required follow-up"),
                (
                    "All open findings (must|shall) be (remedied|closed) (before the next round|"
                    "within one day); access (remains|is) (restricted|permitted) (meanwhile|until "
                    "then).",
                    "A repeat inspection (is ordered|will be conducted) for rooms with findings, "
                    "(beginning|starting) at {first} (on the next day|of the next shift).",
                ),
            ),
        ),
    ),
    _Kind(
        "energy",
        "energy consumption",
        _energy,
        _parts(
            (
                ("Total energy consumption", "Overall consumption"),
                (
                    "The {count} robots (consumed|required) {total} percent of battery capacity "
                    "(in "
                    "total|altogether).",
                    "Consumption of the {count} robots (adds up|amounts) to {total} percentage "
                    "points.",
                ),
            ),
            (
                ("Highest single consumption", "Robot with highest use"),
                (
                    "The highest (consumption|demand) was (measured|registered) for {top} with "
                    "{most} percent, (presumably|probably) owing to (stairs|long distances).",
                    "{top} shows the (greatest|highest) demand at {most} percent; (a battery "
                    "test|an "
                    "inspection of the drive) is (indicated|advisable).",
                ),
            ),
            (
                ("Charging plan adjustment", "Advice on charging"),
                (
                    "It is recommended to (charge|dock) {top} (twice a day|at noon) and to (retain|"
                    "keep) the (schedule|charging plan) of {first}.",
                    "The charging plan (should|is to) be (adapted|revised) for {top}, whereas "
                    "{last} "
                    "may (continue|operate) (unchanged|as before).",
                ),
            ),
        ),
    ),
    _Kind(
        "maintenance",
        "technical condition",
        _service,
        _parts(
            (
                ("Total hours of work", "Overall working time"),
                (
                    "Maintenance of {count} machines (required|took) {total} working hours (in "
                    "total|including travel).",
                    "For {count} machines, {total} (hours of labour|working hours) (were "
                    "logged|are "
                    "charged).",
                ),
            ),
            (
                ("Most extensive repair", "Longest single repair"),
                (
                    "The most (extensive|demanding) repair concerned the {top} with {most} hours, "
                    "(caused by|as a result of) (wear|corrosion).",
                    "At {most} hours, the {top} (required|caused) the (longest|greatest) effort; "
                    "its "
                    "(condition|function) is now (satisfactory|restored).",
                ),
            ),
            (
                ("Spare parts and warranty", "Advice on replacement"),
                (
                    "Replacement of the {top} should be (considered|budgeted) (in the medium "
                    "term|for "
                    "the coming year); the {first} (requires|needs) no further (action|measures).",
                    "Spare parts for the {top} are to be (reordered|kept available), and the "
                    "{last} "
                    "(remains|is) under (warranty|observation).",
                ),
            ),
        ),
    ),
    _Kind(
        "delivery",
        "receipt of goods",
        _deliveries,
        _parts(
            (
                ("Total number of parcels", "Overall deliveries"),
                (
                    "A total of {total} parcels (was|has been) (accepted|received) from {count} "
                    "senders.",
                    "The {count} senders (delivered|supplied) {total} parcels (in "
                    "total|altogether) "
                    "(during|within) the (period|shift).",
                ),
            ),
            (
                ("Largest single delivery", "Main sender"),
                (
                    "The largest (consignment|delivery) with {most} parcels (came|originated) from "
                    "{top} and was (stored|registered) (at once|separately).",
                    "{top} (accounts for|contributed) the largest share with {most} parcels, all "
                    "of "
                    "them (intact|undamaged).",
                ),
            ),
            (
                ("Storage and forwarding", "Handling of the goods"),
                (
                    "Goods from {first} (are|have been) (forwarded|released), whereas those from "
                    "{last} (await|are subject to) (inspection|customs clearance).",
                    "The consignment from {top} is to be (unpacked|distributed) (first|with "
                    "priority); {last} (will receive|is owed) a (receipt|confirmation).",
                ),
            ),
        ),
    ),
)
for _kind in _KINDS:
    GRAMMAR.know(_kind.name, _kind.subject, "report item in stock needed missing sum count unit")
GRAMMAR.know("price total time room finding open robot start end used machine part number hours")
GRAMMAR.know("sender parcels location date no was recorded any of the rooms most recent concerns")
GRAMMAR.know(*_NUMBERS)
_HEADING = _g(
    "{KIND} REPORT\nLocation: {room}. Date: {weekday}, {date}.",
    "{KIND} REPORT, {date}\nLocation: {room}.",
    "REPORT: {KIND}\nDate: {weekday}, {date}. Location: {room}.",
)


def draw(world: World, freedom: float = 0.1) -> Task:
    """Return a request for a report with the report."""
    kind = world.any(_KINDS)
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
    turns.append(Turn("user", pick(_QUESTION, user, fields, world.held_out) + "\nData:\n" + data))
    parts = (_PURPOSE, _METHOD, *kind.parts, _REVIEW)
    points = tuple(part.say(writer, fields) for part in parts)
    heading, signature = say(_HEADING, writer, fields), say(_SIGNATURE, writer, fields)
    table = "\n".join((figures.header, *figures.rows))

    def join(texts: Sequence[str]) -> str:
        before, after = " ".join(texts[:2]), " ".join(texts[2:])
        return "\n".join((heading, before, table, after, signature))

    mentions = (fields["room"], fields["robot"], department, *figures.rows, *figures.derived)
    return Task(tuple(turns), points, join, mentions, points, len(points))
