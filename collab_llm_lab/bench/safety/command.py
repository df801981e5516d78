"""``collab-llm bench safety``."""

from __future__ import annotations

from typing import Annotated

import typer

from collab_llm_lab.bench.options import measure
from collab_llm_nodes.cli.options import JsonOption, PlotOption, SeedOption


def bench_safety(
    trials: Annotated[int, typer.Option(help="Of each fault; 0: only --soak.", min=0)] = 200,
    soak: Annotated[
        float, typer.Option(help="Minutes of driving under random faults; 0: without.", min=0.0)
    ] = 0.0,
    seed: SeedOption = 1,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Time from a fault to zero velocity, with real nodes and a simulator in real time.

    Exits with 0 only if every trial is within 0.5 s and one control period, and nothing ever moved
    unasked. 200 trials take about 40 minutes.
    """
    if not trials and not soak:
        raise typer.BadParameter("0 without --soak measures nothing", param_hint="--trials")
    from collab_llm_lab.bench.safety.report import run_safety

    measure(run_safety, json_file, trials=trials, soak_minutes=soak, seed=seed, plot=plot)
