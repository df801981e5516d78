"""``collab-llm ask --protocol dragon``: a terminal as the device's side."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import InvalidInput, NotFound, quoted
from collab_llm_nodes.knowledge.retrieval import Retrieved
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.base import Answer, Control, Request, Resources, Source
from collab_llm_nodes.protocols.dragon.metrics import DragonMetrics
from collab_llm_nodes.protocols.dragon.running import check, start
from collab_llm_nodes.protocols.dragon.settings import DragonConfig
from collab_llm_nodes.protocols.options import named_values, with_options
from collab_llm_nodes.protocols.parameter_files import server_parameters

_HOME = Path("~/.collab_llm")
_EXCERPT = 200  # characters
_WRITERS = {
    Source.ACCEPTED: "both sides",
    Source.DEVICE: "this side's documents",
    Source.CLOUD: "the cloud's documents",
    Source.RECOVERED: "neither side alone",
    Source.UNVERIFIED: "this side, without the cloud",
}


@dataclass(frozen=True)
class Question:
    """A question with the options of the command line.

    Attributes:
        config: parameter file of ``dragon_server``, or the name of a shipped one.
        options: options of a request, as NAME=VALUE.
        store: folder of the private documents, or its name in ``~/.collab_llm``; None: that of
            ``config``.
        deadline_s: time after which the question is given up [s].
    """

    text: str
    config: str = "dragon.yaml"
    options: tuple[str, ...] = ()
    store: Path | None = None
    deadline_s: float = 300.0
    seed: int = 0


def run_ask(question: Question, console: Console) -> tuple[Answer, dict[str, Any]]:
    """Answer ``question`` and print what was found, who wrote it, and what crossed the wire.

    Returns:
        The answer, with its error if there is none, and a report for JSON.

    Raises:
        CollabError: a file, an option, a store or a model cannot be used, or the answer failed.
    """
    settings, keys = _settings(question)
    request = Request(
        "ask",
        settings,
        (Turn("user", question.text),),
        sampling=SamplingConfig(temperature=0.0, seed=question.seed),
        options=frozenset(keys),
    )
    check(request)
    found: list[Retrieved] = []
    with contextlib.closing(start(settings, Resources())) as running:
        running.on_found = lambda _, retrieved: found.append(retrieved)
        control = Control(time.monotonic() + question.deadline_s)
        try:
            answer = running.run(request, lambda progress: None, control)
        finally:
            control.cancel()
    report = _report(answer, found[-1] if found else None)
    _print(report, console)
    return answer, report


def _settings(question: Question) -> tuple[DragonConfig, list[str]]:
    """Return the configuration, and the names of the options given."""
    given = server_parameters(question.config, "dragon_server", ("memory",))
    settings = from_mapping(DragonConfig, given)
    if question.store is not None:
        side = replace(settings.side, store=str(_store(question.store)))
        settings = replace(settings, side=side)
    keys, values = named_values(question.options)
    return with_options(settings, keys, values, by_operator=True), keys


def _store(name: Path) -> Path:
    for folder in (name.expanduser(), _HOME.expanduser() / name):
        if (folder / "store.db").is_file():
            return folder
    raise InvalidInput(
        f"no store is called {quoted(str(name))}",
        field="--store",
        remedy="make it: collab-llm knowledge add FOLDER FILES --by sentence --characters 240",
    )


def _report(answer: Answer, found: Retrieved | None) -> dict[str, Any]:
    """Return the figures of an answer.

    Returns:
        ``found``: ``name, page, score, text`` of each piece of this side; ``written_by``: tokens by
        writer; ``wire``: ``bytes_up, bytes_down``, and the target tokens, which the cloud learns.
    """
    metrics = answer.metrics
    assert isinstance(metrics, DragonMetrics)
    writers = Counter(_WRITERS.get(Source(source), "other") for source in answer.sources)
    return {
        "answer": answer.text,
        "verified": answer.verified,
        "not_found": isinstance(answer.error, NotFound),
        "error": str(answer.error or ""),
        "found": [
            {
                "name": hit.name,
                "page": hit.chunk.page,
                "score": round(hit.score, 4),
                "text": hit.chunk.text,
            }
            for hit in (found.hits if found is not None else ())
        ],
        "written_by": dict(writers),
        "wire": {
            "bytes_up": metrics.bytes_up,
            "bytes_down": metrics.bytes_down,
            "target_tokens": len(answer.tokens) if metrics.bytes_down else 0,
        },
        "cloud_pieces": metrics.cloud_documents,
        "total_s": metrics.total_s,
        "figures": dict(metrics.figures()),
    }


def _print(report: dict[str, Any], console: Console) -> None:
    pieces = Table("found on this side", "score", "text")
    for piece in report["found"]:
        page = f", page {piece['page']}" if piece["page"] else ""
        text = " ".join(piece["text"].split())[:_EXCERPT]
        pieces.add_row(piece["name"] + page, f"{piece['score']:.2f}", text)
    if not report["found"]:
        pieces.add_row("nothing", "", "")
    wire = Table("crossed the wire", "bytes", "what")
    sent = report["wire"]
    wire.add_row(
        "to the cloud",
        str(sent["bytes_up"]),
        f"the question, {sent['target_tokens']} tokens of the answer; no document",
    )
    wire.add_row("from the cloud", str(sent["bytes_down"]), "its drafts and their probabilities")
    console.print(pieces, wire)
    by = ", ".join(f"{count} by {name}" for name, count in report["written_by"].items())
    searched = f"{report['cloud_pieces']} pieces in the cloud's store"
    console.print(
        f"tokens: {by or 'none'}; {searched}; {report['total_s']:.1f} s"
        + ("" if report["verified"] else "; the cloud took no part, or only at the beginning"),
        highlight=False,
    )
