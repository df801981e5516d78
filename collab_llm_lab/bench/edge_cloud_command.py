"""``collab-llm bench edge-cloud``."""

from __future__ import annotations

from typing import Annotated

import typer

from collab_llm_lab.bench.options import measure
from collab_llm_nodes.cli.options import JsonOption, PlotOption, SeedOption


def bench_edge_cloud(
    answers: Annotated[int, typer.Option(help="Answers per point and mode.", min=1)] = 6,
    seed: SeedOption = 5,
    ablations: Annotated[
        bool, typer.Option(help="Also gamma, workers and queues (paper 003, Figure 4, Table 7).")
    ] = True,
    vocabulary: Annotated[
        int, typer.Option(help="Tokens of both models; 0: their own 441.", min=0)
    ] = 151_936,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Every decoding mode at four operating points, emulated; predicted beside measured."""
    from collab_llm_lab.bench.edge_cloud import run_edge_cloud

    measure(
        run_edge_cloud,
        json_file,
        lambda results: results["output_mismatches"] == 0,
        answers=answers,
        seed=seed,
        ablations=ablations,
        vocabulary=vocabulary,
        plot=plot,
    )
