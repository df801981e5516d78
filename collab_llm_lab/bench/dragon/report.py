"""``collab-llm bench dragon``: latency, the scheduler, quality and privacy, and their goals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from collab_llm_lab.bench.dragon.answers import AnswersPlan
from collab_llm_lab.bench.dragon.baselines import SEQUENCE_FULL
from collab_llm_lab.bench.dragon.case import plot_case
from collab_llm_lab.bench.dragon.exchange import ExchangePlan, measure_exchange
from collab_llm_lab.bench.dragon.latency import (
    DRAGON,
    TOKEN_WISE,
    LatencyPlan,
    plot_latency,
    run_latency,
    run_scheduler,
    show_latency,
    windows_of,
)
from collab_llm_lab.bench.dragon.law import law_tv
from collab_llm_lab.bench.dragon.privacy import AttackPlan
from collab_llm_lab.bench.dragon.quality import DRAGON as MIXTURE
from collab_llm_lab.bench.dragon.quality import QualityPlan
from collab_llm_lab.bench.dragon.quality_report import run_quality
from collab_llm_lab.bench.dragon.replayed import run_live
from collab_llm_lab.bench.harness import Keep, forget
from collab_llm_lab.bench.rendering import missed, show_goals
from collab_llm_nodes.decoding.aggregation import Pair
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.knowledge.retrieval import RetrievalConfig
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.protocols.dragon.side_settings import SideConfig

GOALS = {
    "token_wise_ratio": 0.50,
    "sequence_wise_ratio": 0.45,
    "device_ratio": 1.20,
    "ttft_ratio": 1.10,
    "scheduler_virtual_ratio": 1.05,
    "scheduler_random_ratio": 1.0,
    "scheduler_live_ratio": 1.10,
    "mismatches": 0,
    "law_tv": 1e-12,
    "private_ngrams_outside_answer": 0,
    "quality_second_share": 1 / 1.9,
    "quality_second_share_unsaturated": 1 / 1.9,
}
"""Largest value allowed of each figure of :func:`figures_of`."""
PACES: tuple[Pair, ...] = ((0.005, 0.005), (0.05, 0.05), (0.1, 0.085), (0.166, 0.04))
ADDED_S = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)
"""Points of the simulation: passes of device and cloud, and added round trips [s]."""
PINNED = "dragon_device"
"""The policy that the goals of privacy are about."""
PAPER = "166_40_300"
"""The paper's own setting, as far as it can be inferred."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the parts beside latency.

    Attributes:
        answers: simulated at each point.
        live: points that are replayed live, with ``live_answers`` of ``live_tokens`` each.
        exchange, quality, puzzles, attack: see there.
    """

    answers: int = 50
    live: tuple[tuple[Pair, float], ...] = (
        ((0.005, 0.005), 0.3),
        ((0.05, 0.05), 0.1),
        ((0.05, 0.05), 0.3),
        ((0.1, 0.085), 0.3),
        ((0.166, 0.04), 0.3),
    )
    live_answers: int = 2
    live_tokens: int = 40
    exchange: ExchangePlan = field(default_factory=ExchangePlan)
    quality: QualityPlan = field(default_factory=lambda: QualityPlan(houses=24))
    puzzles: AnswersPlan = field(default_factory=AnswersPlan)
    attack: AttackPlan = field(default_factory=lambda: AttackPlan(houses=16))


QUICK = Sizes(
    answers=5,
    live=(((0.005, 0.005), 0.1), ((0.05, 0.05), 0.3)),
    live_answers=1,
    live_tokens=15,
    exchange=ExchangePlan(questions=1),
    quality=QualityPlan(houses=1, windows=(512,), documents=(0, 2, 16)),
    puzzles=AnswersPlan(questions=2),
    attack=AttackPlan(houses=2),
)


def run_dragon(
    *,
    model: str,
    plan: LatencyPlan,
    documents: int,
    sizes: Sizes,
    plot: Path | None,
    console: Console,
    keep: Keep = forget,
) -> dict[str, Any]:
    """Measure all figures of DRAGON with ``model`` on both sides.

    Args:
        keep: is given what was found so far after each part.

    Returns:
        What ``run_latency`` returns but for the fates; ``privacy`` also with the figures of the
        aggregator pinned to the device, and ``attack``; ``exchange``, see ``measure_exchange``;
        ``scheduler.<point>`` as ``run_scheduler``
        and ``run_live`` return it (``live_ms`` None: not replayed live); ``law_tv``, see there;
        what ``run_quality`` returns; ``figures`` and ``goals`` by name, and ``ok``.
    """
    engine = Engine(load(ModelConfig(model)))
    side = SideConfig(retrieval=RetrievalConfig(method="dense", chunks=documents, temperature=0.1))
    found = run_latency(engine, side, plan, console)
    fates = found.pop("fates")
    found["privacy"] |= found["privacy"][PINNED]
    found["settings"] |= {"model": Path(model).name, "side": asdict(side.retrieval)}
    found["law_tv"] = law_tv()
    found["exchange"] = measure_exchange(engine, replace(sizes.exchange, seed=plan.seed))
    show_latency(found, console)
    if plot is not None:
        plot_latency(found, plot)
        plot_case(found["case"], beside(plot, "case"))
    keep(found)
    points = [(pace, added) for pace in PACES for added in ADDED_S]
    with console.status("simulating ..."):
        simulated = run_scheduler(fates, points, answers=sizes.answers)
    found["scheduler"] = {name: {**row, "live_ms": None} for name, row in simulated.items()}
    keep(found)
    with console.status("") as status:
        traces = windows_of(fates, sizes.live_answers, sizes.live_tokens)
        live = run_live(traces, sizes.live, lambda name: status.update(f"replaying {name} ..."))
    for name, row in live.items():
        found["scheduler"].setdefault(name, {}).update(row)
    keep(found)
    quality = run_quality(
        engine,
        plan=replace(sizes.quality, seed=plan.seed),
        answers=replace(sizes.puzzles, seed=plan.seed),
        attack=replace(sizes.attack, seed=plan.seed),
        plot=None if plot is None else beside(plot, "quality"),
        console=console,
        keep=lambda part: keep({**found, **part}),
    )
    found["privacy"]["attack"] = quality.pop("attack")
    found |= quality
    found["figures"] = figures_of(found)
    found["goals"] = GOALS
    found["ok"] = not missed(found["figures"], GOALS)
    over = missed(found["figures"], GOALS)
    show_goals(
        console,
        (
            (name, f"<= {goal:.3g}", found["figures"][name], name not in over)
            for name, goal in GOALS.items()
        ),
    )
    return found


def beside(plot: Path, what: str) -> Path:
    """Return the file of another plot."""
    return plot.with_stem(f"{plot.stem}_{what}")


def figures_of(found: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the figures that have goals.

    The ratios of latency are those at the longest round trip, those of the scheduler the worst of
    all points (but for ``scheduler_random_ratio``, which is of means). Private runs of tokens are
    counted with the aggregator pinned to the device. ``second_share`` of quality is that at the
    largest number of documents, within the paper's budget and where all documents fit.
    """
    rows = found["latency"]
    rtt_ms = max(rows, key=int)
    far = rows[rtt_ms]
    points: dict[str, dict[str, Any]] = found["scheduler"]
    simulated = [row for row in points.values() if "virtual_ms" in row]
    live = [row for row in points.values() if row.get("live_ms") is not None]
    return {
        "token_wise_ratio": far[DRAGON]["ms_per_token"] / far[TOKEN_WISE]["ms_per_token"],
        "sequence_wise_ratio": far[DRAGON]["ms_per_token_of_all"]
        / far[SEQUENCE_FULL]["ms_per_token_of_all"],
        "device_ratio": points[PAPER]["virtual_ms"] / (1e3 * PACES[-1][0]),
        "ttft_ratio": far[DRAGON]["ttft_ms"] / far[DRAGON]["predicted_ttft_ms"],
        "scheduler_virtual_ratio": max(r["virtual_ms"] / r["best_static_ms"] for r in simulated),
        "scheduler_random_ratio": sum(row["virtual_ms"] for row in simulated)
        / sum(row["random_ms"] for row in simulated),
        "scheduler_live_ratio": max(r["live_ms"] / r["live_best_static_ms"] for r in live),
        "mismatches": found["mismatches"],
        "law_tv": found["law_tv"],
        "private_ngrams_outside_answer": found["privacy"]["private_ngrams_outside_answer"],
        "quality_second_share": _most(found["second_share"]),
        "quality_second_share_unsaturated": _most(found["unsaturated"]["second_share"]),
    }


def _most(shares: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> float | None:
    """Return DRAGON's share in the first length of windows, with most documents."""
    by_documents = next(iter(shares.values()))
    return by_documents[max(by_documents, key=int)][MIXTURE]
