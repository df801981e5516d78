"""``collab-llm bench engine-host``: cost of a round on the host beside its forward passes.

A round is four drafted tokens with their distributions, the prediction of the verdict, and the
verdict itself, for the vocabulary of Qwen2 and one thread. The models are tables of logits:
normal noise with a few peaks, so that top-p keeps some tens of tokens, or noise alone, so that it
keeps thousands.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from collab_llm_lab.bench.harness import save_plot, subplots
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.interface import OnExit
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.protocols.edge_cloud.client import DraftJob
from collab_llm_nodes.protocols.edge_cloud.drafter import Drafter
from collab_llm_nodes.protocols.edge_cloud.messages import Open
from collab_llm_nodes.protocols.edge_cloud.server import ExitConfig
from collab_llm_nodes.protocols.edge_cloud.target import TargetJudge, TargetSession

VOCABULARY = 151_936
GAMMA = 4
PREDICTIONS = 16
LAWS = {
    "greedy": SamplingConfig(),
    "temperature 0.7, top-p 0.9": SamplingConfig(0.7, top_p=0.9),
    "temperature 0.7, top-p 0.9, coupled": SamplingConfig(0.7, top_p=0.9, law="coupled"),
    "temperature 0.7": SamplingConfig(0.7),
}
_ROWS = 16  # of a table: 10 MB, more than the caches of a core hold
_PROMPT = EncodedPrompt((1, 2, 3))


def run_engine_host(*, repeats: int, plot: Path | None, console: Console) -> dict[str, Any]:
    """Measure ``repeats`` rounds of each law.

    Returns:
        ``ms`` per round by logits (``peaked``, ``flat``) and law: ``median`` and ``worst`` of all
        rounds.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ms = {
            name: {law: rounds(logits, sampling, repeats) for law, sampling in LAWS.items()}
            for name, logits in (("peaked", table_of(peaks=64)), ("flat", table_of(peaks=0)))
        }
    finally:
        torch.set_num_threads(threads)
    results = {"vocabulary": VOCABULARY, "gamma": GAMMA, "rounds": repeats, "ms": ms}
    table = Table(title=f"host time of a round, {VOCABULARY:,} tokens, one thread [ms]")
    for column in ("logits", "law", "median", "worst"):
        table.add_column(column, justify="left" if column in ("logits", "law") else "right")
    for name, laws in ms.items():
        for law, row in laws.items():
            table.add_row(name, law, f"{row['median']:.2f}", f"{row['worst']:.2f}")
    console.print(table)
    if plot is not None:
        _plot(ms, plot)
    return results


def _plot(ms: Mapping[str, Mapping[str, Mapping[str, float]]], file: Path) -> None:
    figure, axis = subplots(figsize=(8, 2.6))
    for number, (name, laws) in enumerate(ms.items()):
        places = [i + 0.4 * number for i in range(len(laws))]
        axis.barh(places, [row["median"] for row in laws.values()], 0.38, label=f"{name} logits")
    axis.set_yticks([i + 0.2 for i in range(len(LAWS))], list(LAWS), fontsize=8)
    axis.set_xscale("log")
    axis.set_xlabel(f"ms per round on the host, {VOCABULARY:,} tokens", fontsize=8)
    axis.legend(fontsize=7)
    save_plot(figure, file)


def table_of(peaks: int) -> Tensor:
    """Return [rows, V]: noise of standard deviation 2, and up to ``peaks`` likely tokens a row."""
    generator = torch.Generator().manual_seed(1)
    logits = 2.0 * torch.randn(_ROWS, VOCABULARY, generator=generator)
    for row, count in zip(logits, torch.linspace(0, peaks, _ROWS).int().tolist(), strict=True):
        likely = torch.randperm(VOCABULARY, generator=generator)[: count + bool(peaks)]
        row[likely] = 18.0 + torch.randn(len(likely), generator=generator)
    return logits


def rounds(logits: Tensor, sampling: SamplingConfig, repeats: int) -> dict[str, float]:
    """Measure rounds of a target that differs a little from its draft model."""
    generator = torch.Generator().manual_seed(2)
    drafting = _TableEngine(logits)
    target = _TableEngine(logits + 0.3 * torch.randn(logits.shape, generator=generator))
    judge = TargetJudge(ExitConfig())
    taken = []
    for number in range(repeats + 2):
        law = replace(sampling, seed=number)  # no random number is known from the round before
        drafter = Drafter(drafting, _PROMPT, law)
        opened = Open("", (), law, 64, "", replay=(number + 10,))
        session = TargetSession(target, _PROMPT, opened)
        session.prefill()
        drafter.next_token(())
        job = DraftJob(0, (number + 10,), GAMMA)
        begun, forward_s = time.thread_time(), _TableEngine.forward_s
        draft = drafter.draft(job)
        assert draft is not None
        drafter.predict(job, draft, PREDICTIONS)
        session.offer(draft)
        feed = session.begin()
        assert feed is not None
        rows = feed.session.feed(feed.ids)
        (finding,) = judge.find([(session, rows)])
        session.conclude(rows, 0.0, 0.0, finding)
        forward_s = _TableEngine.forward_s - forward_s
        taken.append(1e3 * (time.thread_time() - begun - forward_s))
    return {"median": statistics.median(taken[2:]), "worst": max(taken[2:])}


class _TableEngine:
    """Looks the logits after a token up in a table: a forward pass, whose time is not counted.

    Attributes:
        forward_s: of all passes.
    """

    forward_s = 0.0
    vocab_size = VOCABULARY
    vocabulary = ""
    context = 1024
    grows_trees = True
    eos = frozenset({0})
    device = torch.device("cpu")

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self.loaded: Any = SimpleNamespace(sees=False, processor=None, begun_thought="")

    def open(self, prompt: EncodedPrompt, expected: int = 0) -> _TableSession:
        """Return a session."""
        return _TableSession(self._logits)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return no text."""
        return ""


class _TableSession:
    """A ``DecodingSession`` that keeps no tree: of a table, every path looks alike."""

    own_bytes = 0

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self.length = self.columns = 0

    def feed(
        self, ids: Sequence[int], on_exit: OnExit | None = None, last: int | None = None
    ) -> Tensor:
        """Return the logits after ``ids``, or after the ``last`` of them."""
        self.length = self.columns = self.length + len(ids)
        return self._rows(ids if last is None else ids[len(ids) - last :])

    def grow(self, ids: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Return the logits after each of ``ids``."""
        self.columns += len(ids)
        return self._rows(ids)

    def retain(self, column: int) -> dict[int, int]:
        """Keep all columns in their places."""
        return {column: column for column in range(self.columns)}

    def encode_images(self) -> None:
        """Do nothing: prompts have no images."""

    def close(self) -> None:
        """Do nothing: there is no cache."""

    def _rows(self, ids: Sequence[int]) -> Tensor:
        begun = time.thread_time()
        rows = self._logits[[token % _ROWS for token in ids]]
        _TableEngine.forward_s += time.thread_time() - begun
        return rows
