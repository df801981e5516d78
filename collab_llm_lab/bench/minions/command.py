"""``collab-llm bench minions``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from collab_llm_lab.bench.minions import PARTS
from collab_llm_lab.bench.options import given, measure_parts, part_option, results_keeper
from collab_llm_nodes.cli.options import JsonOption, PlotOption, SeedOption

SAFETY_GOALS = ("no canary seen", "no attack escapes or hangs")
"""The goals that ``--quick`` is held to."""


def bench_minions(
    models: Annotated[Path, typer.Option(help="Folder of the text family's models.")] = Path(
        "models"
    ),
    questions: Annotated[
        int | None, typer.Option(help="Questions of the main table.", min=7)
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Length of its logs.", min=500)] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few questions about short logs.")
    ] = False,
    part: Annotated[list[str] | None, part_option(PARTS)] = None,
    pretrained: Annotated[
        Path | None,
        typer.Option(help="Folder of a model to be the worker of some questions too."),
    ] = None,
    pretrained_questions: Annotated[
        int | None, typer.Option(help="Questions that it is asked, about two logs.", min=2)
    ] = None,
    encoder: Annotated[
        Path | None,
        typer.Option(help="Folder of an encoder that finds the passages of RAG too."),
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps answers: a run that was ended goes on there."),
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads of each process.", min=1)] = 1,
    processes: Annotated[
        int, typer.Option(help="Processes that answer questions, about one log each.", min=1)
    ] = 1,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Minion, MinionS and baselines on long robot logs (paper 000): accuracy, tokens, cost.

    The JSON is written after each part. With --part, a file that is there keeps its other parts,
    and --plot draws them all.

    Exits with 0 only if no part fails and all goals are reached; with --quick if nothing leaks or
    escapes.
    """
    from collab_llm_lab.bench.minions.plots import plot_all
    from collab_llm_lab.bench.minions.report import QUICK, Sizes, join, run_minions

    def succeeded(results: dict[str, Any]) -> bool:
        goals = results["goals"]
        wanted = SAFETY_GOALS if quick else goals
        return not results["failed"] and all(goals.get(goal, True) for goal in wanted)

    asked = given(questions=questions, tokens=tokens, reality=pretrained_questions)
    measure_parts(
        run_minions,
        results_keeper(json_file, plot, part, join, plot_all),
        succeeded,
        models=models,
        sizes=replace(QUICK if quick else Sizes(), **asked),
        parts=part or (),
        threads=threads,
        processes=processes,
        seed=seed,
        pretrained=pretrained,
        encoder=encoder,
        answers=answers,
    )
