"""The quality part of ``bench dragon``: windows, questions and the attack, with one model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from collab_llm_lab.bench.dragon.answers import AnswersPlan, measure_answers
from collab_llm_lab.bench.dragon.corpus import corpus_of_files
from collab_llm_lab.bench.dragon.privacy import AttackPlan, measure_attack
from collab_llm_lab.bench.dragon.quality import (
    METHODS,
    QualityPlan,
    measure_quality,
    plot_quality,
    print_quality,
)
from collab_llm_lab.bench.harness import Keep, forget
from collab_llm_lab.bench.rendering import show_rows
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.knowledge.encoders import Encoder

UNSATURATED = {"windows": (512,), "document_tokens": 24, "budget": 1024, "own": 192}
"""All documents of 16 per side fit into one context of context aggregation."""
FILES = QualityPlan(windows=(512,), documents=(0, 2, 16), retrieval="dense")
"""For files of prose, which take a large model: few points."""
FILES_UNSATURATED = replace(FILES, documents=(0, 16), budget=4096, own=512)


def run_files(
    engine: Engine,
    folder: Path,
    encoder: Encoder,
    *,
    texts: int,
    seed: int = 0,
    plans: tuple[QualityPlan, QualityPlan | None] = (FILES, FILES_UNSATURATED),
    plot: Path | None = None,
    console: Console,
    keep: Keep = forget,
) -> dict[str, Any]:
    """Measure and print what the files in ``folder`` are worth for ``texts`` of them, held out.

    Args:
        plans: within the paper's budget, and with room for all documents; None leaves that out.

    Returns:
        What ``run_quality`` returns, but for ``answers`` and ``attack``: these need invented facts.
    """
    plan, unsaturated = replace(plans[0], seed=seed), plans[1]
    if unsaturated is not None:
        unsaturated = replace(unsaturated, seed=seed)
    corpus = corpus_of_files(
        folder, engine.loaded.tokenizer, texts=texts, tokens=max(plan.windows), seed=seed
    )
    return _windows(engine, plan, unsaturated, plot, console, keep, corpus=corpus, encoder=encoder)


def run_quality(
    engine: Engine,
    *,
    plan: QualityPlan,
    unsaturated: QualityPlan | None = None,
    answers: AnswersPlan | None = None,
    attack: AttackPlan | None = None,
    plot: Path | None = None,
    console: Console,
    keep: Keep = forget,
) -> dict[str, Any]:
    """Measure and print what documents on two sides are worth, and what they give away.

    Args:
        unsaturated: default: ``plan`` with short documents and a budget that admits all of them,
            and with no other numbers of documents than the largest.
        keep: is given what was found so far after each part.

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
    found = _windows(engine, plan, unsaturated, plot, console, keep)
    found["answers"] = measure_answers(engine, answers or AnswersPlan())
    keep(found)
    found["attack"] = measure_attack(engine, attack or AttackPlan())
    _print_shares(found["answers"], found["attack"], console)
    return found


def _windows(
    engine: Engine,
    plan: QualityPlan,
    unsaturated: QualityPlan | None,
    plot: Path | None,
    console: Console,
    keep: Keep,
    **material: Any,
) -> dict[str, Any]:
    """Predict the windows within both plans' budgets."""
    figures = measure_quality(engine, plan, **material)
    print_quality(figures, console)
    if plot is not None:
        plot_quality(figures, plot)
    first, *others = map(str, plan.windows)
    found = {
        "quality": figures[first],
        **{f"quality_{size}": figures[size] for size in others},
        **{name: figures[name] for name in ("gain", "gain_over_sides", "second_share", "plan")},
    }
    keep(found)
    if unsaturated is None:
        return found
    found["unsaturated"] = measure_quality(engine, unsaturated, **material)
    console.print(
        f"documents of {unsaturated.document_tokens} tokens, budget {unsaturated.budget}:"
    )
    print_quality(found["unsaturated"], console)
    keep(found)
    return found


def _print_shares(
    asked: dict[str, dict[str, float]], guessed: dict[str, float], console: Console
) -> None:
    columns = {method: f"{{{method}:.2f}}" for method in METHODS}
    show_rows(console, "questions answered right", ["kind"], asked, columns)
    console.print(
        "which document was retrieved? guessed right by "
        + ", ".join(f"{name} {share:.2f}" for name, share in guessed.items())
    )
