"""``collab-llm ask``: answer a question in the terminal, with a live table of jobs and ledgers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import InvalidInput, NotFound, quoted
from collab_llm_nodes.knowledge.documents import Document, DocumentLimits
from collab_llm_nodes.knowledge.files import Folders, read_document
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols import registry
from collab_llm_nodes.protocols.base import Answer, Control, Progress, Request, Resources
from collab_llm_nodes.protocols.minions.messages import UNSURE
from collab_llm_nodes.protocols.minions.metrics import MinionsMetrics, by_round, marks_in
from collab_llm_nodes.protocols.minions.served import (
    LOCAL_ONLY,
    PROTOCOL,
    RAG,
    REMOTE_ONLY,
    ServedMinions,
    served_minions,
)
from collab_llm_nodes.protocols.options import named_values, with_options

PROTOCOLS = {
    "minion": ("minion", PROTOCOL),
    "minions": ("minions", PROTOCOL),
    "remote-only": ("minions", REMOTE_ONLY),
    "local-only": ("minions", LOCAL_ONLY),
    "rag": ("minions", RAG),
}
"""Protocol and ``way`` of each value of ``--protocol``."""
_ROWS = 12
"""Jobs in the table."""
_CELL = 60
"""Length of a text in a table [characters]."""
_DROPPED = ("abstained", "truncated", "unreadable", "unsupported", "failed")
_COUNTS = ("jobs", "done", "repaired", "kept", *_DROPPED, "cut")
_TOKENS = ("prefill", "cached", "decode")


@dataclass(frozen=True)
class Question:
    """A question with the options of the command line.

    Attributes:
        files: documents, read with the user's rights.
        protocol: a key of ``PROTOCOLS``.
        config: parameter file of ``minions_server``, or the name of a shipped one.
        options: options of a request, as NAME=VALUE.
        store: folder of a store that is read as well.
        deadline_s: time after which the best answer so far is taken [s].
    """

    text: str
    files: tuple[str, ...]
    protocol: str = "minions"
    config: str = "minions.yaml"
    options: tuple[str, ...] = ()
    store: Path | None = None
    deadline_s: float = 300.0
    seed: int = 0


class OutcomeStatus(IntEnum):
    """What an answer is, and the exit status that says so; 2 is a wrong command line."""

    FOUND = 0
    FAILED = 1
    UNKNOWN = 3
    FORCED = 4


def outcome_of(answer: Answer) -> OutcomeStatus:
    """Return what ``answer`` is; forced means that the remote did not decide on it freely."""
    if isinstance(answer.error, NotFound):
        return OutcomeStatus.UNKNOWN
    if answer.error is not None:
        return OutcomeStatus.FAILED
    forced = marks_in(answer.metrics.figures()) & UNSURE
    return OutcomeStatus.FORCED if forced else OutcomeStatus.FOUND


def run_ask(question: Question, console: Console) -> tuple[Answer, dict[str, Any]]:
    """Answer ``question`` and print the progress.

    Returns:
        The answer, and a report for JSON.

    Raises:
        CollabError: a file, an option or a model cannot be used.
    """
    name, settings, options = _settings(question)
    request = Request(
        "ask",
        settings,
        (Turn("user", question.text),),
        documents=tuple(map(_document, question.files)),
        sampling=SamplingConfig(seed=question.seed),
        options=options,
    )
    entry = registry.find(name)
    entry.check(request)
    with contextlib.closing(entry.start(settings, Resources())) as running:
        control = Control(time.monotonic() + question.deadline_s)
        try:
            with Live(console=console) as live:
                answer = running.run(
                    request, lambda progress: live.update(progress_table(progress)), control
                )
                live.update(progress_table(answer))
        finally:
            control.cancel()  # on Ctrl-C, running requests end
    if not console.is_terminal:
        console.print()  # rich ends a live display's last line on terminals only
    _print_ledgers(answer, settings.cost.priced_as, console)
    report = {
        "answer": answer.text,
        "outcome": outcome_of(answer).name.lower(),
        "verified": answer.verified,
        "error": str(answer.error or ""),
        "rounds": answer.metrics.rounds,
        "total_s": answer.metrics.total_s,
        "figures": dict(answer.metrics.figures()),
    }
    return answer, report


def _settings(question: Question) -> tuple[str, ServedMinions, frozenset[str]]:
    """Return the protocol's name, its configuration, and the names of the options given."""
    name, way = PROTOCOLS[question.protocol]
    settings = replace(served_minions(question.config), way=way)
    if question.store is not None:
        folder = question.store.resolve()
        library = replace(settings.library, stores=str(folder.parent))
        settings = replace(settings, library=library, store=folder.name)
    keys, values = named_values(question.options)
    # The user of the command line is the operator and may allow more to be sent.
    return name, with_options(settings, keys, values, by_operator=True), frozenset(keys)


def _document(file: str) -> Document:
    path = Path(file).resolve()
    if not path.parent.is_dir():
        raise InvalidInput(f"cannot read {quoted(file)}: no such file", field="path")
    return read_document(path, Folders([path.parent]), DocumentLimits(), file)


def progress_table(progress: Progress) -> Group:
    """Return the stage, the jobs of each round, and the kept outputs of the last one."""
    rounds = by_round(progress.metrics.figures())
    names = [name for name in _COUNTS if any(each.get(name) for each in rounds.values())]
    counts = Table("round", *names, "bytes sent")
    for number, figures in rounds.items():
        sent = sum(value for name, value in figures.items() if name.startswith("sent_"))
        row = (f"{figures[name]:.0f}" if name in figures else "" for name in names)
        counts.add_row(str(number), *row, f"{sent:.0f}")
    parts: list[RenderableType] = [f"{progress.stage}, {progress.share_done:.0%} done", counts]
    if isinstance(progress.metrics, MinionsMetrics):
        parts += _kept(progress.metrics)
    return Group(*parts)


def _kept(metrics: MinionsMetrics) -> Sequence[Table]:
    kept = [job for job in metrics.jobs if job.kept]
    if not kept:
        return []
    table = Table("job", "task", "answer")
    for job in kept[:_ROWS]:
        texts = (job.manifest.task, job.output.answer or "")
        shown = (" ".join(text.split())[:_CELL] for text in texts)
        table.add_row(job.manifest.job_id, *shown)
    if len(kept) > _ROWS:
        table.add_row("...", f"{len(kept) - _ROWS} more", "")
    return [table]


def _print_ledgers(answer: Answer, priced_as: str, console: Console) -> None:
    """Print the bytes sent to the remote by kind, and the cost, perhaps that of another model."""
    figures = answer.metrics.figures()
    sent = Table("read by the remote", "bytes")
    for name, value in figures.items():
        if name.startswith("sent_") and "." not in name and name != "sent_bytes":
            sent.add_row(name.removeprefix("sent_"), f"{value:.0f}")
    sent.add_row("all", f"{figures.get('sent_bytes', 0):.0f}")
    if figures.get("choice_bits"):
        sent.add_row("choice of jobs", f"{figures['choice_bits']:.0f} bits")
    cost = Table("tokens", *_TOKENS)
    for role in ("remote", "local"):
        cost.add_row(role, *(f"{figures.get(f'{role}_{n}_tokens', 0):.0f}" for n in _TOKENS))
    console.print(sent, cost)
    summary = [f"rounds: {answer.metrics.rounds}", f"{answer.metrics.total_s:.1f} s"]
    if "cost_usd" in figures:
        other = f"as if priced as {priced_as}: " if priced_as else ""
        summary.append(f"{other}{figures['cost_usd']:.6f} US dollars")
    console.print(", ".join(summary), highlight=False)
    for mark in sorted(marks_in(figures)):
        console.print(f"{mark.value}: {mark.message}", highlight=False)
