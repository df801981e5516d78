"""Arithmetic over the worker's answers, done here instead of by the remote. Ours, not the paper's.

The remote then reads one number in place of all outputs: fewer tokens, and less is disclosed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from collab_llm_nodes.protocols.minions.jobs import Job

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_MAX_CHARACTERS = 200


@dataclass(frozen=True)
class Rule:
    """A way to make one number of several tasks' answers.

    Attributes:
        tasks: number of tasks that it takes.
        of: takes the answers of each task, at least one each.
    """

    tasks: int
    of: Callable[[list[list[float]]], float]


def _ratio(answers: list[list[float]]) -> float:
    above, below = map(_usual, answers)
    return above / below if below else math.nan


RULES: dict[str, Rule] = {
    "sum": Rule(1, lambda answers: math.fsum(answers[0])),
    "count": Rule(1, lambda answers: float(len(answers[0]))),
    "max": Rule(1, lambda answers: max(answers[0])),
    "ratio": Rule(2, _ratio),
    "diff": Rule(2, lambda answers: _usual(answers[0]) - _usual(answers[1])),
}


@dataclass(frozen=True)
class Reduction:
    """A rule and the tasks that it takes, in order."""

    rule: str
    tasks: tuple[str, ...]

    def of(self, jobs: Iterable[Job]) -> float | None:
        """Return the number; None where a task has no number as its answer.

        Samples of one task over one chunk count once, as the number most of them give. Chunks
        that overlap count each: with ``sum`` and ``count`` they must not.
        """
        samples: dict[str, dict[int, list[float]]] = {task: {} for task in self.tasks}
        for job in jobs:
            value = number(job.output.answer or "")
            if value is not None and job.manifest.task in samples:
                chunks = samples[job.manifest.task]
                chunks.setdefault(job.manifest.chunk_id, []).append(value)
        answers = [[_usual(values) for values in samples[task].values()] for task in self.tasks]
        if not all(answers):
            return None
        value = RULES[self.rule].of(answers)
        return value if math.isfinite(value) else None


def number(text: str) -> float | None:
    """Return the first number in ``text``, such as 1,234.5; None without one."""
    match = _NUMBER.search(text[:_MAX_CHARACTERS])
    return float(match.group().replace(",", "")) if match else None


def _usual(values: list[float]) -> float:
    """Return the value that occurs most often; the first of those."""
    return Counter(values).most_common(1)[0][0]
