"""``collab-llm bench dragon``: latency live and predicted, and the scheduler in virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from collab_llm_nodes.bench.dragon.latency import (
    DRAGON,
    STATIC,
    TOKEN_WISE,
    LatencyPlan,
    plot_latency,
    run_latency,
    run_scheduler,
    show_latency,
)
from collab_llm_nodes.bench.dragon.law import law_tv
from collab_llm_nodes.decoding.aggregation import Pair
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.knowledge.retrieval import RetrievalConfig
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.protocols.dragon.side_settings import SideConfig

GOALS = {
    "token_wise_ratio": 0.50,
    "ttft_ratio": 1.10,
    "scheduler_virtual_ratio": 1.05,
    "scheduler_live_ratio": 1.10,
    "mismatches": 0,
    "law_tv": 1e-12,
    "private_ngrams_outside_answer": 0,
}
"""Largest value allowed of each figure; the first two at the longest round trip, and
the last with the aggregator pinned to the device."""
PACES: tuple[Pair, ...] = ((0.005, 0.005), (0.05, 0.05), (0.1, 0.085), (0.166, 0.04))
ADDED_S = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)
"""Points of the simulation: passes of device and cloud, and added round trips [s]."""


def run_dragon(
    *,
    model: str,
    rtts_ms: Sequence[int],
    decode_ms: Pair,
    questions: int,
    tokens: int,
    documents: int,
    seed: int,
    answers: int,
    plot: Path | None,
    console: Console,
) -> dict[str, Any]:
    """Measure latency with ``model`` on both sides, and replay its acceptances.

    Returns:
        What ``run_latency`` returns but for the fates; ``scheduler.<point>`` as ``run_scheduler``
        returns it; ``law_tv``, see there; ``figures`` and ``goals`` by name, and ``ok``.
    """
    plan = LatencyPlan(tuple(rtts_ms), decode_ms, questions=questions, tokens=tokens, seed=seed)
    side = SideConfig(retrieval=RetrievalConfig(method="dense", chunks=documents, temperature=0.1))
    found = run_latency(Engine(load(ModelConfig(model))), side, plan, console)
    fates = found.pop("fates")
    points = [(pace, added) for pace in PACES for added in ADDED_S]
    with console.status("simulating ..."):
        found["scheduler"] = run_scheduler(fates, points, answers=answers)
    found["law_tv"] = law_tv()
    found["figures"] = figures_of(found)
    found["goals"] = GOALS
    found["ok"] = all(found["figures"][name] <= goal for name, goal in GOALS.items())
    found["settings"] |= {"model": Path(model).name, "side": asdict(side.retrieval)}
    show_latency(found, console)
    for name, goal in GOALS.items():
        console.print(f"{name}: {found['figures'][name]:.3g} (goal: at most {goal:g})")
    if plot is not None:
        plot_latency(found, plot)
    return found


def figures_of(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures that have goals."""
    rows = found["latency"]
    rtt_ms = max(rows, key=int)
    far = rows[rtt_ms]
    simulated = found["scheduler"].values()
    return {
        "token_wise_ratio": far[DRAGON]["ms_per_token"] / far[TOKEN_WISE]["ms_per_token"],
        "ttft_ratio": far[DRAGON]["ttft_ms"] / far[DRAGON]["predicted_ttft_ms"],
        "scheduler_virtual_ratio": max(r["virtual_ms"] / r["best_static_ms"] for r in simulated),
        "scheduler_live_ratio": max(
            row[DRAGON]["ms_per_token"] / min(row[name]["ms_per_token"] for name in STATIC)
            for row in rows.values()
        ),
        "mismatches": found["mismatches"],
        "law_tv": found["law_tv"],
        "private_ngrams_outside_answer": found["privacy"][STATIC[0]][
            "private_ngrams_outside_answer"
        ],
    }
