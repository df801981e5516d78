"""``collab-llm bench engine`` and ``bench engine-host``."""

from __future__ import annotations

from typing import Annotated

import typer

from collab_llm_lab.bench.options import measure
from collab_llm_nodes.cli.options import JsonOption, PlotOption, SeedOption


def bench_engine(
    answers: Annotated[int, typer.Option(help="Answers per comparison.", min=1)] = 20,
    repeats: Annotated[int, typer.Option(help="Timings per variant of a pass.", min=1)] = 100,
    threads: Annotated[
        list[int] | None, typer.Option(help="Numbers of threads; repeat.", min=1)
    ] = None,
    paper_layers: Annotated[
        int, typer.Option(help="Layers of the model with 152k tokens (3 GB); 0: without.", min=0)
    ] = 6,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """The engine against transformers: decoding, speculation, early exits, pre-drafts, batches.

    Exits with 0 only if both give the same answers.
    """
    from collab_llm_lab.bench.engine import run_engine

    measure(
        run_engine,
        json_file,
        lambda results: results["mismatches"] == 0,
        answers=answers,
        repeats=repeats,
        threads=threads or (1, 2),
        seed=seed,
        paper_layers=paper_layers,
        plot=plot,
    )


def bench_engine_host(
    repeats: Annotated[int, typer.Option(help="Rounds per law.", min=1)] = 50,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """A round's time on the host beside its forward passes, with 151,936 tokens."""
    from collab_llm_lab.bench.engine_host import run_engine_host

    measure(run_engine_host, json_file, lambda results: True, repeats=repeats, plot=plot)
