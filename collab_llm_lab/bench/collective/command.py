"""``collab-llm bench collective``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from collab_llm_lab.bench.collective import PARTS, QUICK, QUICK_PARTS, Sizes
from collab_llm_lab.bench.options import (
    given,
    measure_parts,
    numbers,
    part_option,
    results_keeper,
)
from collab_llm_nodes.cli.options import JsonOption, PlotOption, SeedOption


def bench_collective(
    part: Annotated[list[str] | None, part_option(PARTS)] = None,
    models: Annotated[Path, typer.Option(help="Folder of the text family's models.")] = Path(
        "models"
    ),
    batches: Annotated[
        str | None, typer.Option(help="Sizes of a batch, separated by commas.")
    ] = None,
    prompts: Annotated[int | None, typer.Option(help="Fewest prompts of a run.", min=1)] = None,
    per_place: Annotated[
        int | None,
        typer.Option(
            help="Fewest prompts of a run for each place of a batch: of the ladder and the lengths"
            " on the mixed stream; all else takes half of them.",
            min=1,
        ),
    ] = None,
    repeats: Annotated[int | None, typer.Option(help="Measured turns.", min=2)] = None,
    tokens: Annotated[int | None, typer.Option(help="Longest answer.", min=2, max=512)] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Fixed speculation lengths to compare, separated by commas.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="All parts but the sub-domains, small.")
    ] = False,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Collective speculation step by step, beside trees and transformers (paper 002).

    All modes answer the same prompts, in turn. The JSON is written after each part. With --part, a
    file that is there keeps its other parts, and --plot draws them all. Exits with 0 only if every
    answer is the target's and no part has failed. With all defaults it takes hours.
    """
    from collab_llm_lab.bench.collective.plots import plot_all
    from collab_llm_lab.bench.collective.report import join, run_collective

    asked = given(
        batches=numbers(batches, "--batches", 1),
        prompts=prompts,
        per_place=per_place,
        repeats=repeats,
        max_tokens=tokens,
        lengths=numbers(lengths, "--lengths", 0),
    )
    measure_parts(
        run_collective,
        results_keeper(json_file, plot, part, join, plot_all),
        models=models,
        sizes=replace(QUICK if quick else Sizes(), **asked),
        seed=seed,
        parts=part or (QUICK_PARTS if quick else PARTS),
    )
