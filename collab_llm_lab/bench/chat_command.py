"""``collab-llm bench chat``."""

from __future__ import annotations

from typing import Annotated

import typer

from collab_llm_lab.bench.options import measure
from collab_llm_nodes.cli.options import JsonOption, PlotOption, SeedOption


def bench_chat(
    chunks: Annotated[int, typer.Option(help="Chunks of the document.", min=1)] = 8,
    tasks: Annotated[int, typer.Option(help="Tasks on each chunk.", min=1)] = 4,
    samples: Annotated[int, typer.Option(help="Samples of each task.", min=1)] = 2,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of a chunk.", min=1)] = 600,
    reply_tokens: Annotated[int, typer.Option(help="Tokens of a reply.", min=2)] = 48,
    model: Annotated[
        str, typer.Option(help="Folder of a model; none: random weights of the text worker.")
    ] = "",
    max_batch: Annotated[int, typer.Option(help="Jobs per pass at most.", min=1)] = 32,
    prefill_tokens: Annotated[int, typer.Option(help="Prompt tokens per pass.", min=1)] = 512,
    repeats: Annotated[int, typer.Option(help="Runs of each mode.", min=1)] = 3,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """The jobs of MinionS on one engine: one by one, batched, with forked chunks, both.

    Exits with 0 only if all modes give the same replies.
    """
    from collab_llm_lab.bench.chat import JobsShape, run_chat

    measure(
        run_chat,
        json_file,
        lambda results: results["mismatches"] == 0,
        shape=JobsShape(
            chunks, tasks, samples, chunk_tokens=chunk_tokens, reply_tokens=reply_tokens
        ),
        model=model,
        max_batch=max_batch,
        prefill_tokens=prefill_tokens,
        repeats=repeats,
        threads=threads,
        seed=seed,
        plot=plot,
    )
