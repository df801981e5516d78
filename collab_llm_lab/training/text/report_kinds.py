"""Kinds of reports: their data and their own sentences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from collab_llm_lab.training.text import figures
from collab_llm_lab.training.text.figures import Figures
from collab_llm_lab.training.text.phrases import Grammar
from collab_llm_lab.training.text.tasks import Part
from collab_llm_lab.training.text.world import World

GRAMMAR = Grammar()
"""The words of the reports."""
_g = GRAMMAR


@dataclass(frozen=True)
class Kind:
    """A kind of report: its data and its own sentences."""

    name: str
    subject: str
    figures: Callable[[World], Figures]
    parts: tuple[Part, ...]


def _parts(*pairs: tuple[tuple[str, ...], tuple[str, ...]]) -> tuple[Part, ...]:
    return tuple(Part(_g(*titles), _g(*texts)) for titles, texts in pairs)


KINDS = (
    Kind(
        "inventory",
        "stock of consumables",
        figures.stock,
        _parts(
            (
                ("Total of missing items", "Overall shortage"),
                (
                    "Across {count} articles, a total of {total} units is (missing|lacking) "
                    "against the (required|target) quantity.",
                    "The (overall|accumulated) shortage of the {count} articles amounts to {total} "
                    "units.",
                ),
            ),
            (
                ("Largest single shortage", "Most affected article"),
                (
                    "The largest (single|individual) shortage concerns {top}, of which {most} "
                    "(units are|pieces are) outstanding.",
                    "With {most} units (below target|outstanding), {top} (constitute|represent) "
                    "the most (critical|affected) article.",
                ),
            ),
            (
                ("Recommended purchase order", "Measures to be taken"),
                (
                    "It is (recommended|advised) that a purchase order for {top} be "
                    "(placed|issued) (without delay|in the current week), while {first} should be "
                    "(monitored|recounted).",
                    "Procurement of {top} (takes precedence|has priority); the (level|quantity) of "
                    "{last} is to be (reassessed|verified) at the next count.",
                ),
            ),
        ),
    ),
    Kind(
        "cost",
        "expenditure",
        figures.cost,
        _parts(
            (
                ("Total expenditure", "Sum of all costs"),
                (
                    "Total expenditure for {count} (articles|positions) amounts to {total}, (taxes "
                    "included|excluding discounts).",
                    "The {count} positions (result in|add up to) a (total|sum) of {total}, which "
                    "is (within|covered by) the budget.",
                ),
            ),
            (
                ("Largest cost item", "Most expensive position"),
                (
                    "The (highest|largest) share is (attributable|due) to {top} at {most}, "
                    "(followed by|ahead of) the remaining positions.",
                    "{top} (account for|constitute) the largest position with {most} and "
                    "(require|merit) (particular|separate) attention.",
                ),
            ),
            (
                ("Proposals for saving", "Advice on the budget"),
                (
                    "Savings (may be achieved|appear possible) by (bundling orders|comparing "
                    "suppliers) for {top}; the price of {first} (is considered|remains) "
                    "(adequate|stable).",
                    "It is (proposed|suggested) to (renegotiate|review) the terms for {top} and to "
                    "(maintain|confirm) the present supplier of {last}.",
                ),
            ),
        ),
    ),
    Kind(
        "patrol",
        "security patrol",
        figures.patrol,
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
                    "{result} (The responsible staff|The duty officer) (has been|was) "
                    "(informed|notified).",
                    "{result} (Photographs|Details) are (attached|available) (on request|in the "
                    "archive).",
                ),
            ),
            (
                ("Safety measures required", "Required follow-up"),
                (
                    "All open findings (must|shall) be (remedied|closed) (before the next "
                    "round|within one day); access (remains|is) (restricted|permitted) "
                    "(meanwhile|until then).",
                    "A repeat inspection (is ordered|will be conducted) for rooms with findings, "
                    "(beginning|starting) at {first} (on the next day|of the next shift).",
                ),
            ),
        ),
    ),
    Kind(
        "energy",
        "energy consumption",
        figures.energy,
        _parts(
            (
                ("Total energy consumption", "Overall consumption"),
                (
                    "The {count} robots (consumed|required) {total} percent of battery capacity "
                    "(in total|altogether).",
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
                    "test|an inspection of the drive) is (indicated|advisable).",
                ),
            ),
            (
                ("Charging plan adjustment", "Advice on charging"),
                (
                    "It is recommended to (charge|dock) {top} (twice a day|at noon) and to "
                    "(retain|keep) the (schedule|charging plan) of {first}.",
                    "The charging plan (should|is to) be (adapted|revised) for {top}, whereas "
                    "{last} may (continue|operate) (unchanged|as before).",
                ),
            ),
        ),
    ),
    Kind(
        "maintenance",
        "technical condition",
        figures.service,
        _parts(
            (
                ("Total hours of work", "Overall working time"),
                (
                    "Maintenance of {count} machines (required|took) {total} working hours (in "
                    "total|including travel).",
                    "For {count} machines, {total} (hours of labour|working hours) (were "
                    "logged|are charged).",
                ),
            ),
            (
                ("Most extensive repair", "Longest single repair"),
                (
                    "The most (extensive|demanding) repair concerned the {top} with {most} hours, "
                    "(caused by|as a result of) (wear|corrosion).",
                    "At {most} hours, the {top} (required|caused) the (longest|greatest) effort; "
                    "its (condition|function) is now (satisfactory|restored).",
                ),
            ),
            (
                ("Spare parts and warranty", "Advice on replacement"),
                (
                    "Replacement of the {top} should be (considered|budgeted) (in the medium "
                    "term|for the coming year); the {first} (requires|needs) no further "
                    "(action|measures).",
                    "Spare parts for the {top} are to be (reordered|kept available), and the "
                    "{last} (remains|is) under (warranty|observation).",
                ),
            ),
        ),
    ),
    Kind(
        "delivery",
        "receipt of goods",
        figures.deliveries,
        _parts(
            (
                ("Total number of parcels", "Overall deliveries"),
                (
                    "A total of {total} parcels (was|has been) (accepted|received) from {count} "
                    "senders.",
                    "The {count} senders (delivered|supplied) {total} parcels (in "
                    "total|altogether) (during|within) the (period|shift).",
                ),
            ),
            (
                ("Largest single delivery", "Main sender"),
                (
                    "The largest (consignment|delivery) with {most} parcels (came|originated) from "
                    "{top} and was (stored|registered) (at once|separately).",
                    "{top} (accounts for|contributed) the largest share with {most} parcels, all "
                    "of them (intact|undamaged).",
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
for _kind in KINDS:
    GRAMMAR.know(_kind.name, _kind.subject, "report item in stock needed missing sum count unit")
GRAMMAR.know("price total time room finding open robot start end used machine part number hours")
GRAMMAR.know("sender parcels location date no was recorded any of the rooms most recent concerns")
GRAMMAR.know(*figures.NUMBERS)
