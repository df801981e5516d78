"""``collab-llm bench ros``."""

from __future__ import annotations

from typing import Annotated

import typer

from collab_llm_lab.bench.options import measure
from collab_llm_nodes.cli.options import JsonOption, PlotOption, SeedOption


def bench_ros(
    answers: Annotated[int, typer.Option(help="Answers per mode and verifier.", min=1)] = 60,
    rounds: Annotated[
        int, typer.Option(help="Rounds to watch for growth; 0: without.", min=0)
    ] = 10000,
    standing: Annotated[
        float, typer.Option(help="Seconds to watch a graph that has nothing to do.", min=1.0)
    ] = 30.0,
    seed: SeedOption = 3,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """The graph in six processes against the same loop without ROS: time added, age, growth; and
    the processor time of a standing graph.

    Exits with 0 only if nothing grows over the rounds watched.
    """
    from collab_llm_lab.bench.ros import run_ros

    measure(
        run_ros,
        json_file,
        lambda results: not rounds or results["growth"]["bounded"],
        answers=answers,
        rounds=rounds,
        standing_s=standing,
        seed=seed,
        plot=plot,
    )
