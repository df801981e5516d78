"""Plans: decompositions as plain JSON, for remotes that cannot or may not write programs.

    {
      "tasks": [{"task": "Extract the total revenue of 2015.", "advice": "Look for a table."}],
      "over": "documents",
      "chunker": "chunk_by_section", "size": 3000,
      "samples": 1,
      "reduce": {"rule": "ratio", "tasks": [1, 2]}
    }

Each task is done over each chunk, as in the paper's examples of programs. With "answered" as
``over``, only the chunks in which a job of the last round found something are cut again.
``reduce`` is not in the paper: the robot computes a number from the answers, and the remote reads
it in place of them, which needs fewer tokens and discloses less.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from collab_llm_nodes.models.guide import Guide
from collab_llm_nodes.protocols.minions.chunkers import CHUNKERS
from collab_llm_nodes.protocols.minions.jobs import (
    MAX_SAMPLES,
    Fault,
    Job,
    JobList,
    RequestedJob,
)
from collab_llm_nodes.protocols.minions.reading import find_object
from collab_llm_nodes.protocols.minions.sandbox.limits import MAX_CHUNK, MAX_TASK

T = TypeVar("T")

_MAX_TASKS = 64
_MAX_SIZE = 1_000_000
_MOST_SAMPLES = 64
"""Samples in a plan, of which ``MAX_SAMPLES`` are taken; more are a mistake."""
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_LISTED = re.compile(r"; | \+ ")
_NUMBER_WITHIN = 200
"""Characters of an answer in which its number is searched."""


@dataclass(frozen=True)
class Rule:
    """Rule that computes one number from the answers to tasks.

    Attributes:
        tasks: number of tasks.
        compute: takes the answers to each task, at least one each.
    """

    tasks: int
    compute: Callable[[list[list[float]]], float]


def _ratio(answers: list[list[float]]) -> float:
    above, below = map(_most_frequent, answers)
    return above / below if below else math.nan


RULES: dict[str, Rule] = {
    "sum": Rule(1, lambda answers: math.fsum(answers[0])),
    "count": Rule(1, lambda answers: float(len(answers[0]))),
    "max": Rule(1, lambda answers: max(answers[0])),
    "ratio": Rule(2, _ratio),
    "diff": Rule(2, lambda answers: _most_frequent(answers[0]) - _most_frequent(answers[1])),
}


@dataclass(frozen=True)
class Reduction:
    """A rule and its tasks, in order."""

    rule: str
    tasks: tuple[str, ...]

    def of(self, jobs: Iterable[Job]) -> float | None:
        """Return the number; None if a task has no number among its answers.

        Samples of one task over one chunk count once, as the numbers that most of them give: an
        answer may list several, as in "12.50; 30.25". Overlapping chunks count each, so ``sum``
        and ``count`` need disjoint ones.
        """
        samples: dict[str, dict[int, list[tuple[float, ...]]]] = {task: {} for task in self.tasks}
        for job in jobs:
            values = numbers(job.output.answer or "")
            if values and job.manifest.task in samples:
                chunks = samples[job.manifest.task]
                chunks.setdefault(job.manifest.chunk_id, []).append(values)
        answers = [
            [value for given in samples[task].values() for value in _most_frequent(given)]
            for task in self.tasks
        ]
        if not all(answers):
            return None
        value = RULES[self.rule].compute(answers)
        return value if math.isfinite(value) else None


def number(text: str) -> float | None:
    """Return the first number in ``text``, such as 1,234.5; None without one."""
    match = _NUMBER.search(text[:_NUMBER_WITHIN])
    return float(match.group().replace(",", "")) if match else None


def numbers(text: str) -> tuple[float, ...]:
    """Return the numbers of a list such as "12.50; 30.25"; of other texts the first, if any."""
    parts = [number(part) for part in _LISTED.split(text[:_NUMBER_WITHIN])]
    values = [value for value in parts if value is not None]
    return tuple(values if len(values) == len(parts) else values[:1])


def _most_frequent(values: list[T]) -> T:
    """Return the value that occurs most often, and the first of several."""
    return Counter(values).most_common(1)[0][0]


@dataclass(frozen=True)
class Plan:
    """A decomposition (see the module docstring).

    Attributes:
        tasks: pairs of a task and its advice.
        answered: cut only the chunks that gave an answer in the last round.
    """

    tasks: tuple[tuple[str, str], ...]
    chunker: str
    size: int = 0
    samples: int = 1
    answered: bool = False
    reduction: Reduction | None = None


def plan_form(chunkers: Collection[str], *, reduce: bool) -> Guide:
    """Return the form of the remote's reply; arguments as of :func:`read_plan`."""
    text = {"type": "string", "minLength": 1}
    task = {"type": "object", "properties": {"task": text, "advice": {"type": "string"}}}
    properties: dict[str, Any] = {
        "tasks": {
            "type": "array",
            "items": {**task, "required": ["task"], "additionalProperties": False},
            "minItems": 1,
            "maxItems": _MAX_TASKS,
        },
        "over": {"enum": ["documents", "answered"]},
        "chunker": {"enum": [*chunkers]},
        "size": {"type": "integer", "minimum": 0, "maximum": _MAX_SIZE},
        "samples": {"type": "integer", "minimum": 1, "maximum": MAX_SAMPLES},
    }
    if reduce:
        number = {"type": "integer", "minimum": 1, "maximum": _MAX_TASKS}
        rule = {"rule": {"enum": [*RULES]}, "tasks": {"type": "array", "items": number}}
        reduction = {"type": "object", "properties": rule, "required": [*rule]}
        properties["reduce"] = {
            "anyOf": [{"type": "null"}, {**reduction, "additionalProperties": False}]
        }
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return Guide("json", json.dumps({**schema, "required": ["tasks", "over", "chunker"]}))


def read_plan(text: str, chunkers: Collection[str], *, reduce: bool) -> Plan | Fault:
    """Return the plan in the remote's reply.

    Args:
        chunkers: names of the allowed ones; the first is the default.
        reduce: reductions are allowed.
    """
    fields = find_object(text)
    if fields is None:
        return Fault.NOT_A_PLAN
    try:
        return _plan(fields, chunkers, reduce)
    except _Wrong:
        return Fault.NOT_A_PLAN


def jobs_of(
    plan: Plan,
    documents: Sequence[str],
    last_jobs: Sequence[Job],
    *,
    chunk_size: int,
    max_jobs: int,
) -> JobList | Fault:
    """Return the jobs of ``plan``.

    Args:
        last_jobs: jobs of the last round with their outputs.
        chunk_size: replaces the plan's own, unless 0.
        max_jobs: further jobs are left out.
    """
    texts: Sequence[str] = documents
    if plan.answered:
        texts = list(dict.fromkeys(job.manifest.chunk for job in last_jobs if job.output.answer))
    chunker = CHUNKERS[plan.chunker]
    jobs: list[RequestedJob] = []
    left_out = 0
    for text in texts:
        for chunk in chunker(text, chunk_size or plan.size):
            for task, advice in plan.tasks:
                if len(jobs) < max_jobs and len(chunk) <= MAX_CHUNK:
                    jobs.append(RequestedJob(chunk, task, advice, plan.samples))
                else:
                    left_out += 1
    return JobList(tuple(jobs), left_out) if jobs else Fault.NO_JOBS


class _Wrong(Exception):
    """The plan has the wrong form."""


def _plan(fields: Mapping[str, Any], chunkers: Collection[str], reduce: bool) -> Plan:
    known = {"tasks", "over", "chunker", "size", "samples"} | ({"reduce"} if reduce else set())
    _check(set(fields) <= known)
    tasks = fields.get("tasks")
    _check(isinstance(tasks, list) and 0 < len(tasks) <= _MAX_TASKS)
    chunker = fields.get("chunker", next(iter(chunkers)))
    _check(isinstance(chunker, str) and chunker in chunkers)
    over = fields.get("over", "documents")
    _check(over in ("documents", "answered"))
    size = _integer(fields.get("size", 0), 0, _MAX_SIZE)
    samples = min(_integer(fields.get("samples", 1), 1, _MOST_SAMPLES), MAX_SAMPLES)
    parsed = tuple(map(_task, tasks or ()))
    reduction = None
    if fields.get("reduce") is not None:
        reduction = _reduction(fields["reduce"], [task for task, _ in parsed])
    return Plan(parsed, chunker, size, samples, over == "answered", reduction)


def _task(value: Any) -> tuple[str, str]:
    value = {"task": value} if isinstance(value, str) else value
    _check(isinstance(value, dict) and set(value) <= {"task", "advice"})
    task, advice = value.get("task"), value.get("advice") or ""
    _check(isinstance(task, str) and isinstance(advice, str) and bool(task.strip()))
    _check(max(len(task), len(advice)) <= MAX_TASK)
    return task, advice


def _reduction(value: Any, tasks: Sequence[str]) -> Reduction:
    _check(isinstance(value, dict) and set(value) <= {"rule", "tasks"})
    rule, numbers = value.get("rule"), value.get("tasks", [1])
    _check(
        isinstance(rule, str)
        and rule in RULES
        and isinstance(numbers, list)
        and 0 < len(numbers) <= len(tasks)
    )
    chosen = tuple(tasks[_integer(number, 1, len(tasks)) - 1] for number in numbers)
    _check(len(chosen) == RULES[rule].tasks)
    return Reduction(rule, chosen)


def _integer(value: Any, low: int, high: int) -> int:
    _check(isinstance(value, int) and not isinstance(value, bool) and low <= value <= high)
    return int(value)


def _check(condition: bool) -> None:
    if not condition:
        raise _Wrong
