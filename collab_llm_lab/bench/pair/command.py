"""``collab-llm bench pair``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from collab_llm_lab.bench.options import measure
from collab_llm_nodes.cli.options import JsonOption, PlotOption

if TYPE_CHECKING:
    from collab_llm_nodes.models.loading import ModelConfig


def bench_pair(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER...",
            help="Of a pair: its data, and what was trained on it.",
            exists=True,
        ),
    ],
    target: Annotated[
        str, typer.Option(help="Where the target is now, if it has moved since; of one pair.")
    ] = "",
    answers: Annotated[int, typer.Option(help="Held-out answers, at most.", min=1)] = 64,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of the weights; auto: by the device.")] = "auto",
    quantization: Annotated[str, typer.Option(help="none, int8 or int4.")] = "none",
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Measure what was trained for pairs that are not ours, on answers that were held out."""
    from collab_llm_lab.bench.pair.measure import run_pairs
    from collab_llm_lab.training.pair.config import target_config

    def load_as(known: str) -> ModelConfig:
        return target_config(target or known, device, dtype, quantization)

    measure(
        run_pairs,
        json_file,
        folders=folders,
        answers=answers,
        plot=plot,
        load_as=load_as,
    )
