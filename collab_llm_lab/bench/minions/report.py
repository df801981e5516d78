"""``collab-llm bench minions``: parts, goals and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from collab_llm_lab.bench.chat import JobsShape, measure_parallel
from collab_llm_lab.bench.harness import Keep, beside, check_parts, forget, run_parts
from collab_llm_lab.bench.minions import PARTS, measure
from collab_llm_lab.bench.minions.answering import (
    PRICED_AS,
    TARGET,
    WORKER,
    Counter,
    ModelCache,
    ModelSpec,
    answering,
    read,
)
from collab_llm_lab.bench.minions.attacks import run_attacks
from collab_llm_lab.bench.minions.figures import break_even, paired
from collab_llm_lab.bench.minions.material import Case, make_cases
from collab_llm_lab.bench.minions.measure import Bench
from collab_llm_lab.bench.minions.methods import METHODS, Answered
from collab_llm_lab.bench.rendering import show_lines, show_rows
from collab_llm_nodes.assets import config_file
from collab_llm_nodes.chat.ledger import PriceTable
from collab_llm_nodes.config import from_yaml
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.trained import holds_trained
from collab_llm_nodes.protocols.minions.embedded.remote import ROLE, Planner

_RUN = ("machine", "models", "threads", "processes")
"""Facts of a run, stored separately for parts that are measured later."""

Results = Mapping[str, Any]

_WORKERS = (WORKER, TARGET, "ssm-reports")
"""Models of the family that are a worker in turn; the first alone is trained for it."""
_COLUMNS = {
    "accuracy": "{accuracy:.3f}",
    "remote prefill tokens": "{remote_prefill_tokens:,.0f}",
    "remote decode tokens": "{remote_decode_tokens:,.0f}",
    "local tokens": "{local_tokens:,.0f}",
    "cost usd": "{cost_usd:.4f}",
    "rounds": "{rounds:.2f}",
    "wall s": "{wall_s:.2f}",
}


@dataclass(frozen=True)
class Sizes:
    """Numbers of questions, and lengths of logs in tokens.

    Attributes:
        questions: questions of the main table on logs of ``tokens``, ``per_log`` of them per log.
        trained: logs of the main table for the trained remote.
        few: questions of each point of the other parts, on one log.
        shape: jobs of ``parallel``.
        pretrained: questions to that worker, equally on logs of ``pretrained_tokens``.
    """

    questions: int = 406
    tokens: int = 32_768
    per_log: int = 29
    trained: int = 2
    few: int = 14
    sweep_tokens: int = 16_384
    contexts: tuple[int, ...] = (4096, 8192, 16_384, 65_536)
    requests: int = 64
    plans: int = 60
    shape: JobsShape = JobsShape()
    repeats: int = 3
    pretrained: int = 24
    pretrained_tokens: tuple[int, ...] = (4096, 8192)


QUICK = Sizes(
    questions=14,
    tokens=4096,
    per_log=14,
    trained=1,
    few=7,
    sweep_tokens=2048,
    contexts=(2048, 8192),
    requests=4,
    plans=10,
    shape=JobsShape(chunks=2, tasks=2, samples=2, chunk_tokens=300, reply_tokens=16),
    repeats=1,
    pretrained=4,
    pretrained_tokens=(1024, 2048),
)


def run_minions(
    *,
    models: Path,
    sizes: Sizes,
    threads: int,
    processes: int,
    seed: int,
    console: Console,
    parts: Sequence[str] = (),
    pretrained: Path | None = None,
    encoder: Path | None = None,
    answers: Path | None = None,
    keep: Keep = forget,
) -> dict[str, Any]:
    """Measure Minion, MinionS and the baselines with the text family in ``models``.

    Args:
        processes: processes that answer questions about different logs.
        parts: some of ``PARTS``, empty for all; ``pretrained`` needs the model of that name, and
            ``pretrained_encoder`` needs ``encoder``.
        pretrained: folder of a further model as worker.
        encoder: folder of a further encoder for RAG.
        answers: folder that stores the answers about each log, to resume a run.
        keep: called with the results after each part.

    Returns:
        ``protocols.<method>`` with remote ``oracle``, ``trained.protocols.<method>`` and
        ``trained.plans``; ``paired`` gains; ``sweeps.<setting>.<value>``, ``contexts.<tokens>``,
        ``requests`` (figure 3, tables 4 and 5), ``workers.<model>`` (table 2),
        ``remotes.<remote>.<method>`` (table 3), ``pretrained``, ``pretrained_encoder``,
        ``break_even_tokens``; ``parallel``, ``privacy``, ``attacks``; ``seconds.<part>`` and
        ``failed.<part>``; ``goals`` and ``ok``.

    Raises:
        ConfigError: a model is missing, or a part is unknown.
        ModelError: a model cannot be loaded.
    """
    check_parts(parts, PARTS)
    spec = ModelSpec(models, models / WORKER, threads=threads)
    count = Counter(read(models / WORKER)).text
    prices = from_yaml(PriceTable, config_file("prices.yaml"))
    results: dict[str, Any] = {
        "models": str(models),
        "tokenizer": f"that of {WORKER}",
        "priced_as": PRICED_AS,
        "threads": threads,
        "processes": processes,
    }
    cache = ModelCache()

    def report_line(text: str) -> None:
        console.print(text, highlight=False)

    given = {"pretrained": pretrained, "pretrained_encoder": encoder}
    wanted = [part for part in PARTS if part in (parts or PARTS) and given.get(part, True)]
    with answering(cache, processes, answers) as answer:
        bench = Bench(spec, cache, answer, prices, count, seed, report_line)
        run = _Run(bench, sizes, pretrained, encoder)
        run_parts([(part, partial(_PARTS[part], run)) for part in wanted], results, console, keep)
    cache.close()
    results["goals"] = _goals(results, wanted)
    results["ok"] = _ok(results)
    searched = {name: results[name] for name in ("string_search",) if name in results}
    _print("remote: oracle", {**results.get("protocols", {}), **searched}, console)
    _print("remote: trained", results.get("trained", {}).get("protocols", {}), console)
    _print("pretrained worker", results.get("pretrained", {}).get("protocols", {}), console)
    _print("encoder", results.get("pretrained_encoder", {}).get("protocols", {}), console)
    show_lines(
        console,
        (
            f"{'reached' if reached else 'MISSED '}  {goal}"
            for goal, reached in results["goals"].items()
        ),
    )
    return results


def join(earlier: Results, found: Results) -> dict[str, Any]:
    """Return ``earlier`` with the parts of ``found`` in place of its own."""
    return beside(earlier, found, _ok, facts=_RUN, shared=("reality",))


def _ok(results: Results) -> bool:
    return all(results["goals"].values()) and not results["failed"]


@dataclass
class _Run:
    """Common state of the parts of a run.

    Attributes:
        answers: answers of the main table by method; empty before it is measured.
    """

    bench: Bench
    sizes: Sizes
    pretrained: Path | None
    encoder: Path | None
    answers: dict[str, list[Answered]] = field(default_factory=dict)

    def cases(self, name: str, tokens: int, questions: int, per_log: int) -> list[Case]:
        """Return the logs and questions of a part."""
        return make_cases(f"{name} {self.bench.seed}", tokens, questions, per_log, self.bench.count)

    @property
    def main(self) -> list[Case]:
        """Logs and questions of the main table."""
        return self.cases("main", self.sizes.tokens, self.sizes.questions, self.sizes.per_log)


def _protocols(run: _Run) -> dict[str, Any]:
    rows, run.answers = run.bench.rows(METHODS, run.main)
    local, minion, minions = (run.answers[name] for name in ("local_only", "minion", "minions"))
    gains = {
        "minion_over_local_only": paired(local, minion, run.bench.seed),
        "minions_over_minion": paired(minion, minions, run.bench.seed),
    }
    return {"protocols": rows, "paired": gains}


def _string_search(run: _Run) -> dict[str, Any]:
    """Return the row of MinionS with a search for the beginning of a line as its worker."""
    searching = run.bench.with_models(worker=None)
    rows, _ = searching.rows({"string_search": METHODS["minions"]}, run.main)
    return rows


def _trained(run: _Run) -> dict[str, Any]:
    """Return rows and plans of the trained remote, and rows of both on the same questions."""
    folder = run.bench.spec.family / TARGET
    if not holds_trained(folder, ROLE, "role"):
        run.bench.report(f"{folder} has not learnt to plan: no remote is trained")
        return {"trained": {}, "remotes": {}}
    cases = run.main[: run.sizes.trained]
    trained = run.bench.with_models(trained=True)
    rows, _ = trained.rows(METHODS, cases)
    questions = sum(len(case.asked) for case in cases)
    answers = run.answers or run.bench.rows(METHODS, cases)[1]
    oracle = {
        name: run.bench.row(f"oracle, {name}", answers[name][:questions], cases) for name in METHODS
    }
    planner = trained.models.remote
    assert isinstance(planner, Planner)
    plans = measure.planning(trained, planner, run.sizes.plans)
    return {
        "trained": {"protocols": rows, "plans": plans},
        "remotes": {"oracle": oracle, "trained": rows},
    }


def _contexts(run: _Run) -> dict[str, Any]:
    few = run.sizes.few
    rows = measure.contexts(run.bench, run.sizes.contexts, few, few)
    first, last = rows[str(min(run.sizes.contexts))], rows[str(max(run.sizes.contexts))]
    return {"contexts": rows, "break_even_tokens": break_even(first, last)}


def _sweeps(run: _Run) -> dict[str, Any]:
    few = run.sizes.few
    cases = run.cases("sweeps", run.sizes.sweep_tokens, few, few)
    return {"sweeps": measure.sweeps(run.bench, cases)}


def _workers(run: _Run) -> dict[str, Any]:
    few = run.sizes.few
    cases = run.cases("workers", min(run.sizes.contexts), few, few)
    folders = [run.bench.spec.family / name for name in _WORKERS]
    here = [folder for folder in folders if (folder / "config.json").is_file()]
    return {"workers": measure.workers(run.bench, here, cases)}


def _requests(run: _Run) -> dict[str, Any]:
    local = run.bench.models.local
    return {"requests": measure.chunks_and_tasks(run.bench, local, run.sizes.requests)}


def _parallel(run: _Run) -> dict[str, Any]:
    engine = Engine(read(run.bench.spec.family / WORKER))
    engine.eos = frozenset()  # every reply has the same length
    found = measure_parallel(engine, run.sizes.shape, repeats=run.sizes.repeats)
    engine.close()
    return {"parallel": {**found["parallel"], "shape": found["shape"]}}


def _privacy(run: _Run) -> dict[str, Any]:
    return {"privacy": measure.privacy(run.bench, run.sizes.sweep_tokens, run.sizes.few)}


def _attacks(run: _Run) -> dict[str, Any]:
    return {"attacks": run_attacks()}


def _pretrained(run: _Run) -> dict[str, Any]:
    assert run.pretrained is not None
    lengths = run.sizes.pretrained_tokens
    each = max(1, run.sizes.pretrained // len(lengths))
    cases = [case for tokens in lengths for case in run.cases("reality", tokens, each, each)]
    return {"pretrained": measure.pretrained(run.bench, run.pretrained, cases)}


def _pretrained_encoder(run: _Run) -> dict[str, Any]:
    assert run.encoder is not None
    return {"pretrained_encoder": measure.pretrained_retrieval(run.bench, run.encoder, run.main)}


_PARTS: Mapping[str, Callable[[_Run], dict[str, Any]]] = {
    "parallel": _parallel,
    "protocols": _protocols,
    "string_search": _string_search,
    "trained": _trained,
    "privacy": _privacy,
    "attacks": _attacks,
    "contexts": _contexts,
    "sweeps": _sweeps,
    "requests": _requests,
    "workers": _workers,
    "pretrained": _pretrained,
    "pretrained_encoder": _pretrained_encoder,
}

_READ = "remote_prefill_tokens"


def _share(results: Results, method: str, figure: str) -> float:
    """Return a figure of a method as a share of remote only's."""
    rows = results["protocols"]
    return float(rows[method][figure] / rows["remote_only"][figure])


def _surely_better(results: Results, gain: str) -> bool:
    return bool(results["paired"][gain]["interval"][0] > 0)


_GOALS: Mapping[str, tuple[str, Callable[[Results], bool]]] = {
    "remote only >= 0.8": (
        "protocols",
        lambda found: found["protocols"]["remote_only"]["accuracy"] >= 0.8,
    ),
    "MinionS >= 95 % of remote only": (
        "protocols",
        lambda found: _share(found, "minions", "accuracy") >= 0.95,
    ),
    "MinionS reads <= 20 % remotely": (
        "protocols",
        lambda found: _share(found, "minions", _READ) <= 0.2,
    ),
    "MinionS costs <= 25 %": (
        "protocols",
        lambda found: _share(found, "minions", "cost_usd") <= 0.25,
    ),
    "Minion reads <= 5 % remotely": (
        "protocols",
        lambda found: _share(found, "minion", _READ) <= 0.05,
    ),
    "local only < Minion": (
        "protocols",
        lambda found: _surely_better(found, "minion_over_local_only"),
    ),
    "Minion < MinionS": ("protocols", lambda found: _surely_better(found, "minions_over_minion")),
    "nothing truncated": (
        "protocols",
        lambda found: not any(row["truncated_share"] for row in found["protocols"].values()),
    ),
    "both <= a third of one by one": (
        "parallel",
        lambda found: found["parallel"]["both_s"] <= found["parallel"]["one_by_one_s"] / 3,
    ),
    "no canary seen": ("privacy", lambda found: found["privacy"]["canaries_seen"] == 0),
    "no attack escapes or hangs": (
        "attacks",
        lambda found: found["attacks"]["escaped"] == found["attacks"]["hung"] == 0,
    ),
}
"""Part and criterion of each goal."""


def _goals(results: Results, parts: Sequence[str]) -> dict[str, bool]:
    """Return for each goal of the parts that were run if it is reached."""
    return {
        name: part not in results["failed"] and holds(results)
        for name, (part, holds) in _GOALS.items()
        if part in parts
    }


def _print(title: str, by_mode: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    rows = {mode.replace("_", " "): row for mode, row in by_mode.items()}
    show_rows(console, title, ["mode"], rows, _COLUMNS)
