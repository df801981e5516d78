"""The plan: a decomposition as plain JSON, for remotes that cannot program, or may not.

    {
      "tasks": [{"task": "Extract the total revenue of 2015.", "advice": "Look for a table."}],
      "over": "documents",
      "chunker": "chunk_by_section", "size": 3000,
      "samples": 1,
      "reduce": {"rule": "ratio", "tasks": [1, 2]}
    }

Each task is done over each chunk, as in the paper's own examples of programs. ``over`` may be
"answered": then only the chunks on which a job of the last round has found something are cut again.
``reduce`` is an extension of ours, see ``reduction.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collab_llm_nodes.protocols.minions.chunkers import CHUNKERS
from collab_llm_nodes.protocols.minions.jobs import Fault, Job, JobList, WantedJob
from collab_llm_nodes.protocols.minions.reading import find_object
from collab_llm_nodes.protocols.minions.reduction import RULES, Reduction
from collab_llm_nodes.protocols.minions.sandbox.limits import SandboxLimits

_MAX_TASKS = 64
_MAX_SAMPLES = 64


@dataclass(frozen=True)
class Plan:
    """See the module's text.

    Attributes:
        tasks: pairs of a task and its advice.
        answered: work on the chunks that gave an answer in the last round.
    """

    tasks: tuple[tuple[str, str], ...]
    chunker: str
    size: int = 0
    samples: int = 1
    answered: bool = False
    reduction: Reduction | None = None


def read_plan(
    text: str, chunkers: Collection[str], limits: SandboxLimits, *, reduce: bool
) -> Plan | Fault:
    """Return the plan in the remote's reply.

    Args:
        chunkers: names of those that it may use; the first is the default.
        reduce: it may ask for a reduction.
    """
    fields = find_object(text)
    if fields is None:
        return Fault.NOT_A_PLAN
    try:
        return _plan(fields, chunkers, limits, reduce)
    except _Wrong:
        return Fault.NOT_A_PLAN


def jobs_of(
    plan: Plan,
    documents: Sequence[str],
    last_jobs: Sequence[Job],
    *,
    chunk_size: int,
    limits: SandboxLimits,
) -> JobList | Fault:
    """Return the jobs of ``plan``.

    Args:
        last_jobs: those of the last round, with their outputs.
        chunk_size: takes the place of the plan's own, unless 0.
        limits: jobs beyond ``limits.jobs`` are left out.
    """
    texts: Sequence[str] = documents
    if plan.answered:
        texts = list(dict.fromkeys(job.manifest.chunk for job in last_jobs if job.output.answer))
    chunker = CHUNKERS[plan.chunker]
    jobs: list[WantedJob] = []
    cut = 0
    for text in texts:
        for chunk in chunker(text, chunk_size or plan.size):
            for task, advice in plan.tasks:
                if len(jobs) < limits.jobs and len(chunk) <= limits.chunk_characters:
                    jobs.append(WantedJob(chunk, task, advice, plan.samples))
                else:
                    cut += 1
    return JobList(tuple(jobs), cut) if jobs else Fault.NO_JOBS


class _Wrong(Exception):
    """The plan is not of the required form."""


def _plan(
    fields: Mapping[str, Any], chunkers: Collection[str], limits: SandboxLimits, reduce: bool
) -> Plan:
    known = {"tasks", "over", "chunker", "size", "samples"} | ({"reduce"} if reduce else set())
    _check(set(fields) <= known)
    tasks = fields.get("tasks")
    _check(isinstance(tasks, list) and 0 < len(tasks) <= _MAX_TASKS)
    chunker = fields.get("chunker", next(iter(chunkers)))
    _check(isinstance(chunker, str) and chunker in chunkers)
    over = fields.get("over", "documents")
    _check(over in ("documents", "answered"))
    size = _integer(fields.get("size", 0), 0, 1_000_000)
    samples = _integer(fields.get("samples", 1), 1, _MAX_SAMPLES)
    parsed = tuple(_task(task, limits.task_characters) for task in tasks or ())
    reduction = None
    if fields.get("reduce") is not None:
        reduction = _reduction(fields["reduce"], [task for task, _ in parsed])
    return Plan(parsed, chunker, size, samples, over == "answered", reduction)


def _task(value: Any, max_characters: int) -> tuple[str, str]:
    value = {"task": value} if isinstance(value, str) else value
    _check(isinstance(value, dict) and set(value) <= {"task", "advice"})
    task, advice = value.get("task"), value.get("advice") or ""
    _check(isinstance(task, str) and isinstance(advice, str) and bool(task.strip()))
    _check(max(len(task), len(advice)) <= max_characters)
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
