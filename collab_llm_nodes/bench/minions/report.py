"""``collab-llm bench minions``: what is measured in which order, and the tables of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from collab_llm_nodes.assets import config_file
from collab_llm_nodes.bench.chat import JobsShape, measure_parallel
from collab_llm_nodes.bench.minions import measure
from collab_llm_nodes.bench.minions.attacks import run_attacks
from collab_llm_nodes.bench.minions.figures import break_even, paired
from collab_llm_nodes.bench.minions.material import make_cases
from collab_llm_nodes.bench.minions.measure import Bench
from collab_llm_nodes.bench.minions.oracle import Oracle
from collab_llm_nodes.bench.minions.plots import plot_all
from collab_llm_nodes.bench.minions.reality import RealitySizes, reality
from collab_llm_nodes.bench.minions.ways import Models
from collab_llm_nodes.chat.batch import BatchConfig
from collab_llm_nodes.chat.in_process import InProcessChat, InProcessConfig
from collab_llm_nodes.chat.ledger import PriceTable
from collab_llm_nodes.config import from_yaml
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.models.loading import LoadedModel, ModelConfig, load
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.minions.embedded.remote import ROLE, open_planner
from collab_llm_nodes.protocols.minions.embedded.windows import WindowedChat, token_count
from collab_llm_nodes.training.text.rendering import prompt_text

WORKER, TARGET = "text-worker", "text-target"
PRICED_AS = "gpt-4o"
"""Prices of the paper's remote; the models here cost nothing."""
_ROWS = (
    ("accuracy", "{:.3f}"),
    ("remote_prefill_tokens", "{:,.0f}"),
    ("remote_decode_tokens", "{:,.0f}"),
    ("local_tokens", "{:,.0f}"),
    ("cost_usd", "{:.4f}"),
    ("rounds", "{:.2f}"),
    ("wall_s", "{:.2f}"),
)


@dataclass(frozen=True)
class Sizes:
    """Numbers of questions, and lengths of logs in tokens.

    Attributes:
        questions: of the main table, on logs of ``tokens``; ``per_log`` share a log.
        trained, sweep, context: questions of these parts.
        shape: jobs of ``parallel``.
    """

    questions: int = 406
    tokens: int = 32_768
    per_log: int = 14
    trained: int = 42
    sweep: int = 14
    sweep_tokens: int = 16_384
    context: int = 14
    contexts: tuple[int, ...] = (4096, 8192, 16_384, 65_536)
    requests: int = 64
    plans: int = 60
    shape: JobsShape = JobsShape()
    repeats: int = 1
    reality: RealitySizes = RealitySizes()


QUICK = Sizes(
    questions=14,
    tokens=4096,
    per_log=14,
    trained=7,
    sweep=7,
    sweep_tokens=2048,
    context=7,
    contexts=(2048, 8192),
    requests=4,
    plans=10,
    shape=JobsShape(chunks=2, tasks=2, samples=2, chunk_tokens=300, reply_tokens=16),
    reality=RealitySizes(questions=4, tokens=1024, per_log=4),
)


def run_minions(
    *,
    models: Path,
    sizes: Sizes,
    attacks: bool,
    threads: int,
    seed: int,
    plot: Path | None,
    console: Console,
    pretrained: Path | None = None,
) -> dict[str, Any]:
    """Measure Minion, MinionS and the baselines with the text family in ``models``.

    Args:
        pretrained: folder of a model to be the worker of some questions too.

    Returns:
        ``protocols.<way>`` with remote ``oracle``, ``trained.protocols.<way>`` and
        ``trained.plans``; ``paired`` gains; ``sweeps.<setting>.<value>``, ``contexts.<tokens>``,
        ``requests`` (tables 4 and 5), ``workers.<model>``, ``reality``, ``break_even_tokens``;
        ``parallel``, ``privacy``, ``attacks``; ``goals`` and ``ok``.

    Raises:
        ConfigError: a model is missing.
        ModelError: a model cannot be loaded.
    """
    torch.set_num_threads(threads)
    worker = _read(models, WORKER)
    counted = _Counter(worker)
    prices = from_yaml(PriceTable, config_file("prices.yaml"))
    local = _windowed(worker, counted)
    oracle = Oracle(PRICED_AS, counted.chat)
    both = Models(oracle, local, prices.of(PRICED_AS))

    def tell(text: str) -> None:
        console.print(text, highlight=False)

    bench = Bench(both, prices, counted.text, seed, tell)
    cases = make_cases(f"main {seed}", sizes.tokens, sizes.questions, sizes.per_log, counted.text)
    protocols, answers = bench.protocols(cases)
    _print("remote: oracle", protocols, console)
    few = make_cases(f"sweeps {seed}", sizes.sweep_tokens, sizes.sweep, sizes.per_log, counted.text)
    lengths = measure.contexts(bench, sizes.contexts, sizes.context, sizes.per_log)
    first, last = lengths[str(min(sizes.contexts))], lengths[str(max(sizes.contexts))]
    results: dict[str, Any] = {
        "models": str(models),
        "tokenizer": f"that of {WORKER}",
        "priced_as": PRICED_AS,
        "threads": threads,
        "protocols": protocols,
        "paired": {
            "minion_over_local_only": paired(answers["local_only"], answers["minion"], seed),
            "minions_over_minion": paired(answers["minion"], answers["minions"], seed),
        },
        "contexts": lengths,
        "break_even_tokens": break_even(first, last),
        "sweeps": measure.sweeps(bench, few),
        "requests": measure.chunks_and_tasks(bench, local, sizes.requests),
        "workers": _workers(bench, models, counted, few),
        "trained": _trained(bench, models, counted, sizes),
        "reality": reality(bench, pretrained, sizes.reality) if pretrained else {},
        "privacy": measure.privacy(bench, sizes.sweep_tokens, sizes.per_log),
        "attacks": run_attacks() if attacks else {},
    }
    local.close()
    results |= _parallel(worker, sizes)
    results["goals"] = _goals(results)
    results["ok"] = all(results["goals"].values())
    _print("pretrained worker", results["reality"].get("protocols", {}), console)
    _print("remote: trained", results["trained"].get("protocols", {}), console)
    for goal, reached in results["goals"].items():
        console.print(f"{'reached' if reached else 'MISSED '}  {goal}", highlight=False)
    if plot is not None:
        plot_all(results, plot)
    return results


class _Counter:
    """Counts tokens with the tokenizer of one model, which names all counts of a run."""

    def __init__(self, model: LoadedModel) -> None:
        self.text = token_count(model.tokenizer)

    def chat(self, turns: Sequence[Turn]) -> int:
        """Return the number of tokens of a prompt, or of one reply."""
        if len(turns) == 1 and turns[0].role == "assistant":
            return self.text(turns[0].content) + 1  # its end
        return self.text(prompt_text(turns))


def _read(models: Path, name: str) -> LoadedModel:
    if not (models / name / "config.json").is_file():
        raise ConfigError(
            f"{models} lacks {name}",
            field="--models",
            remedy=f"name the folder that holds {WORKER} and {TARGET}",
        )
    return load(ModelConfig(path=str(models / name), local_files_only=True))


def _windowed(model: LoadedModel, counted: _Counter) -> WindowedChat:
    limits = BatchConfig(max_batch=64, prefill_tokens=1024, kept_tokens=1 << 16)
    chat = InProcessChat(Engine(model), InProcessConfig(limits, max_jobs=1 << 16))
    return WindowedChat(chat, counted.text)


def _workers(
    bench: Bench, models: Path, counted: _Counter, cases: Sequence[Any]
) -> dict[str, dict[str, Any]]:
    """Return MinionS' row with other models of the family as its worker, untrained for it."""
    found = {}
    for name in (TARGET, "ssm-reports"):
        if not (models / name / "config.json").is_file():
            continue
        worker = _windowed(_read(models, name), counted)
        other = replace(bench, models=replace(bench.models, local=worker))
        found[name] = other.row(f"worker {name}", measure.WAYS["minions"], cases)
        worker.close()
    return found


def _trained(bench: Bench, models: Path, counted: _Counter, sizes: Sizes) -> dict[str, Any]:
    """Return rows and plans of the trained remote; empty without one."""
    folder = models / TARGET
    if not (folder / f"{ROLE}.json").is_file():
        return {}
    planner = open_planner(ModelConfig(path=str(folder), local_files_only=True), PRICED_AS)
    own = replace(bench, models=replace(bench.models, remote=planner))
    cases = make_cases(
        f"trained {bench.seed}", sizes.tokens, sizes.trained, sizes.per_log, counted.text
    )
    protocols, _ = own.protocols(cases, ("remote_only", "rag_bm25", "minion", "minions"))
    plans = measure.planning(own, planner, sizes.plans)
    planner.close()
    return {"protocols": protocols, "plans": plans}


def _parallel(worker: LoadedModel, sizes: Sizes) -> dict[str, Any]:
    engine = Engine(worker)
    engine.eos = frozenset()  # every reply has the same length
    found = measure_parallel(engine, sizes.shape, repeats=sizes.repeats)
    engine.close()
    return {"parallel": {**found["parallel"], "shape": found["shape"]}}


def _goals(results: Mapping[str, Any]) -> dict[str, bool]:
    """Return which of the goals at the main length are reached."""
    rows, gains = results["protocols"], results["paired"]
    remote, minions = rows["remote_only"], rows["minions"]
    read = remote["remote_prefill_tokens"]
    parallel = results["parallel"]
    goals = {
        "remote only >= 0.8": remote["accuracy"] >= 0.8,
        "MinionS >= 95 % of remote only": minions["accuracy"] >= 0.95 * remote["accuracy"],
        "MinionS reads <= 20 % remotely": minions["remote_prefill_tokens"] <= 0.2 * read,
        "MinionS costs <= 25 %": minions["cost_usd"] <= 0.25 * remote["cost_usd"],
        "Minion reads <= 5 % remotely": rows["minion"]["remote_prefill_tokens"] <= 0.05 * read,
        "local only < Minion": gains["minion_over_local_only"]["interval"][0] > 0,
        "Minion < MinionS": gains["minions_over_minion"]["interval"][0] > 0,
        "nothing truncated": not any(row["truncated_share"] for row in rows.values()),
        "both <= a third of one by one": parallel["both_s"] <= parallel["one_by_one_s"] / 3,
        "no canary seen": results["privacy"]["canaries_seen"] == 0,
    }
    if results["attacks"]:
        attacks = results["attacks"]
        goals["no attack escapes or hangs"] = attacks["escaped"] == attacks["hung"] == 0
    return goals


def _print(title: str, rows: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    if not rows:
        return
    table = Table(title=title)
    table.add_column("way")
    for name, _ in _ROWS:
        table.add_column(name.replace("_", " "), justify="right")
    for way, row in rows.items():
        table.add_row(way.replace("_", " "), *(form.format(row[name]) for name, form in _ROWS))
    console.print(table)
