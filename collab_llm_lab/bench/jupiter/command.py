"""``collab-llm bench jupiter``."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from collab_llm_lab.bench.jupiter import PARTS, QUICK, Sizes
from collab_llm_lab.bench.options import given, measure_parts, part_option, results_keeper
from collab_llm_nodes.cli.options import JsonOption, PlotOption, SeedOption


def bench_jupiter(
    part: Annotated[list[str] | None, part_option(PARTS)] = None,
    model: Annotated[
        str, typer.Option(help="Text model with Medusa heads: directory or shipped name.")
    ] = "text-target",
    cases: Annotated[
        int | None,
        typer.Option(help="Small clusters to compare the planner with brute force on.", min=1),
    ] = None,
    questions: Annotated[
        int | None, typer.Option(help="Questions, decoded once in each mode.", min=1)
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Questions of each category that are judged.", min=1)
    ] = None,
    repeats: Annotated[int | None, typer.Option(help="Turns of each prefill.", min=1)] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Every part, but small: to see that it runs.")
    ] = False,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """A model over several devices (paper 004): planner, emulated clusters, workers, quality.

    The JSON is written after each part. With --part, a file that is there keeps its other parts,
    and --plot draws them all. A part that fails is named in it, and the others go on.

    Exits with 0 only if no part fails, the planner equals brute force in all small cases, no
    prediction of an emulated run is wrong by more than 10 %, and workers give the answers of one
    device, also when some of them die.
    """
    from collab_llm_lab.bench.jupiter.plots import plot_all
    from collab_llm_lab.bench.jupiter.report import join, run_jupiter

    asked = given(cases=cases, questions=questions, samples=samples, repeats=repeats)
    measure_parts(
        run_jupiter,
        results_keeper(json_file, plot, part, join, plot_all),
        parts=part or PARTS,
        sizes=replace(QUICK if quick else Sizes(), **asked),
        model=model,
        seed=seed,
    )
