"""The quality part of ``bench dragon``: windows, questions and the attack, with one model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from collab_llm_nodes.bench.dragon.answers import AnswersPlan, measure_answers
from collab_llm_nodes.bench.dragon.privacy import AttackPlan, measure_attack
from collab_llm_nodes.bench.dragon.quality import (
    METHODS,
    QualityPlan,
    measure_quality,
    plot_quality,
    print_quality,
)
from collab_llm_nodes.engine.engine import Engine

UNSATURATED = {"windows": (512,), "document_tokens": 24, "budget": 1024, "own": 192}
"""All documents of 16 per side fit into one context of context aggregation."""


def run_quality(
    engine: Engine,
    *,
    plan: QualityPlan,
    unsaturated: QualityPlan | None = None,
    answers: AnswersPlan | None = None,
    attack: AttackPlan | None = None,
    plot: Path | None = None,
    console: Console,
) -> dict[str, Any]:
    """Measure and print what documents on two sides are worth, and what they give away.

    Args:
        unsaturated: default: ``plan`` with short documents and a budget that admits all of them,
            and with no other numbers of documents than the largest.

    Returns:
        ``quality.<documents>.<method>``: figures of the first length of windows;
        ``quality_<window>``: likewise, of the others; ``gain`` and ``gain_over_sides``, see
        ``measure_quality``; ``unsaturated``: results of ``measure_quality``;
        ``answers.<kind>.<method>``: share of questions answered right; ``attack``: see
        ``measure_attack``.
    """
    unsaturated = unsaturated or replace(
        plan,
        documents=(0, max(plan.documents)),
        **UNSATURATED,  # type: ignore[arg-type]
    )
    found = measure_quality(engine, plan)
    print_quality(found, console)
    if plot is not None:
        plot_quality(found, plot)
    wide = measure_quality(engine, unsaturated)
    console.print(
        f"documents of {unsaturated.document_tokens} tokens, budget {unsaturated.budget}: "
    )
    print_quality(wide, console)
    asked = measure_answers(engine, answers or AnswersPlan())
    guessed = measure_attack(engine, attack or AttackPlan())
    _print_shares(asked, guessed, console)
    first, *others = map(str, plan.windows)
    return {
        "quality": found[first],
        **{f"quality_{size}": found[size] for size in others},
        **{name: found[name] for name in ("gain", "gain_over_sides", "plan")},
        "unsaturated": wide,
        "answers": asked,
        "attack": guessed,
    }


def _print_shares(
    asked: dict[str, dict[str, float]], guessed: dict[str, float], console: Console
) -> None:
    table = Table(title="questions answered right")
    table.add_column("")
    for method in METHODS:
        table.add_column(method, justify="right")
    for kind, shares in asked.items():
        table.add_row(kind, *(f"{shares[method]:.2f}" for method in METHODS))
    console.print(table)
    console.print(
        "which document was retrieved? guessed right by "
        + ", ".join(f"{name} {share:.2f}" for name, share in guessed.items())
    )
