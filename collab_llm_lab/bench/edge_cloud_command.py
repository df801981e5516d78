"""``collab-llm bench edge-cloud``."""

from __future__ import annotations

from typing import Annotated

import typer

from collab_llm_lab.bench.options import (
    OF_SERVERS,
    DraftOption,
    KeyOption,
    KindOption,
    SecondsOption,
    ServedAsOption,
    ServerOption,
    TargetOption,
    UnencryptedOption,
    measure,
    numbers,
    refuse_without_effect,
    stock_target,
)
from collab_llm_nodes.cli.options import JsonOption, PlotOption, SeedOption


def bench_edge_cloud(
    context: typer.Context,
    answers: Annotated[int, typer.Option(help="Answers per point and mode.", min=1)] = 6,
    seed: SeedOption = 5,
    ablations: Annotated[
        bool, typer.Option(help="Also gamma, workers and queues (paper 003, Figure 4, Table 7).")
    ] = True,
    embedded: Annotated[
        bool, typer.Option(help="Also the embedded pair with its own acceptance.")
    ] = True,
    server: ServerOption = None,
    kind: KindOption = "vllm",
    target: TargetOption = "nav-target",
    served_as: ServedAsOption = None,
    draft: DraftOption = "nav-draft",
    api_key_file: KeyOption = "",
    unencrypted: UnencryptedOption = False,
    robots: Annotated[
        str, typer.Option(help="With --server: numbers of robots, separated by commas.")
    ] = "1,8,16",
    seconds: SecondsOption = 10.0,
    vocabulary: Annotated[
        int, typer.Option(help="Tokens of both models; 0: their own.", min=0)
    ] = 151_936,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Every decoding mode at four operating points, emulated; predicted beside measured.

    With --server: a stock server beside our verifier instead, nothing emulated.
    """
    if server is not None:
        refuse_without_effect(
            context, "with --server", "ablations", "embedded", "vocabulary", "plot"
        )
        from collab_llm_lab.bench.edge_cloud_server import run_server

        measure(
            run_server,
            json_file,
            lambda results: results["output_mismatches"] == 0,
            config=stock_target(
                server, kind, target, served_as, api_key_file, unencrypted=unencrypted
            ),
            draft=draft,
            answers=answers,
            robots=numbers(robots, "--robots", 1),
            seconds=seconds,
            seed=seed,
        )
    refuse_without_effect(context, "without --server", *OF_SERVERS, "robots", "seconds")
    from collab_llm_lab.bench.edge_cloud import run_edge_cloud

    measure(
        run_edge_cloud,
        json_file,
        lambda results: results["output_mismatches"] == 0,
        answers=answers,
        seed=seed,
        ablations=ablations,
        embedded=embedded,
        vocabulary=vocabulary,
        plot=plot,
    )
