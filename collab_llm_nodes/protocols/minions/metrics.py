"""Figures of one answer: rounds, jobs and both ledgers, in total and by round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from collab_llm_nodes.metrics import GenerationMetrics
from collab_llm_nodes.protocols.minions.jobs import Job
from collab_llm_nodes.protocols.minions.messages import Mark

MARKED = "marked_"
"""Prefix of the figures that stand for a ``Mark``."""


@dataclass
class MinionsMetrics(GenerationMetrics):
    """Figures by name; those of one round end in its number: ``kept.2``.

    Attributes:
        own: figures by the names in docs/minions.md.
        jobs: jobs of the last round with their outputs but without their chunks.
    """

    own: Mapping[str, float] = field(default_factory=dict)
    jobs: tuple[Job, ...] = ()

    def figures(self) -> Mapping[str, float]:
        """Return the figures of this protocol."""
        return self.own

    def add(self, other: MinionsMetrics) -> None:
        """Add the totals of ``other``, and drop figures of rounds and jobs."""
        for common in fields(GenerationMetrics):
            value = getattr(self, common.name) + getattr(other, common.name)
            setattr(self, common.name, value)
        total: dict[str, float] = {}
        for figures in (self.own, other.own):
            for name in figures:
                if "." not in name:
                    total[name] = total.get(name, 0.0) + figures[name]
        self.own, self.jobs = total, ()


def by_round(figures: Mapping[str, float]) -> dict[int, dict[str, float]]:
    """Return the figures of each round by its number, in order."""
    rounds: dict[int, dict[str, float]] = {}
    for name, value in figures.items():
        base, _, number = name.rpartition(".")
        if base and number.isascii() and number.isdigit() and len(number) < 4:
            rounds.setdefault(int(number), {})[base] = value
    return dict(sorted(rounds.items()))


def marks_in(figures: Mapping[str, float]) -> frozenset[Mark]:
    """Return the marks of the answer with these figures."""
    return frozenset(mark for mark in Mark if figures.get(MARKED + mark.value))
