"""Figures of one answer: rounds, jobs, and both ledgers, in all and by round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from collab_llm_nodes.metrics import GenerationMetrics
from collab_llm_nodes.protocols.minions.jobs import Job


@dataclass
class MinionsMetrics(GenerationMetrics):
    """Figures by name; those of one round have its number behind a dot: ``kept.2``.

    Attributes:
        own: see docs/minions.md for the names.
        jobs: the last round's, with their outputs but not the texts that they were about; no
            figures.
    """

    own: Mapping[str, float] = field(default_factory=dict)
    jobs: tuple[Job, ...] = ()

    def figures(self) -> Mapping[str, float]:
        """Return the figures beyond those of every protocol."""
        return self.own

    def add(self, other: MinionsMetrics) -> None:
        """Sum ``other`` into this one, but for what belongs to single rounds and jobs."""
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
    """Return the figures that belong to a round, by its number, in order."""
    rounds: dict[int, dict[str, float]] = {}
    for name, value in figures.items():
        what, _, number = name.rpartition(".")
        if what and number.isascii() and number.isdigit() and len(number) < 4:
            rounds.setdefault(int(number), {})[what] = value
    return dict(sorted(rounds.items()))
