"""The sub-domain `reports`: formal reports on stock, cost, patrols, energy, service and deliveries.

The question gives the data, one record a line or in one sentence. The report repeats them as a
table, with the computed column and its sum so far, and comments on them in formal language.
"""

from __future__ import annotations

from collections.abc import Sequence

from collab_llm_lab.training.text import names
from collab_llm_lab.training.text.phrases import Grammar, Voice, pick, say
from collab_llm_lab.training.text.report_kinds import GRAMMAR, KINDS
from collab_llm_lab.training.text.tasks import Part, Task
from collab_llm_lab.training.text.world import World
from collab_llm_nodes.models.turns import Turn

_g, _ask = GRAMMAR, Grammar()

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
        "{date}, and is (addressed|submitted) to {department}.",
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
        "The next review is (scheduled|due) on the following {weekday}; until then the "
        "(present|above) figures (remain valid|shall apply).",
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
_HEADING = _g(
    "{KIND} REPORT\nLocation: {room}. Date: {weekday}, {date}.",
    "{KIND} REPORT, {date}\nLocation: {room}.",
    "REPORT: {KIND}\nDate: {weekday}, {date}. Location: {room}.",
)


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
