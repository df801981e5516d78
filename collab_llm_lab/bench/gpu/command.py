"""``collab-llm bench gpu``: ``scripts/gpu_check`` where the laboratory is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from collab_llm_nodes.cli.options import writable


def bench_gpu(
    tiny: Annotated[bool, typer.Option(help="Tiny models, on the CPU; about a minute.")] = False,
    steps: Annotated[str, typer.Option(help="Some of the steps, with commas; empty: all.")] = "",
    budget_s: Annotated[float, typer.Option(help="For all steps together [s].")] = 540.0,
    json: Annotated[
        Path, typer.Option(help="Results, written after each finding.", callback=writable)
    ] = Path("out/gpu_check.json"),
) -> None:
    """The engine on a GPU: right or not, and how fast, beside transformers' generate."""
    from collab_llm_lab.bench.gpu.__main__ import main

    arguments = ["--budget-s", str(budget_s), "--json", str(json)]
    if tiny:
        arguments.append("--tiny")
    if steps:
        arguments += ["--steps", steps]
    raise typer.Exit(main(arguments))
