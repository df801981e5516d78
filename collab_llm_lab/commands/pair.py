"""What the laboratory adds to ``collab-llm pair``, and ``collab-llm train`` for any pair."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from collab_llm_nodes.cli.options import JsonOption, SeedOption
from collab_llm_nodes.cli.output import console, write_json

TargetOption = Annotated[
    str, typer.Option("--target", help="Target: folder, hub id or name of a shipped model.")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
DtypeOption = Annotated[
    str, typer.Option(help="Of the target's weights; auto: bfloat16 on a GPU, else float32.")
]
QuantizationOption = Annotated[str, typer.Option(help="Of the target: none, int8 or int4.")]


def collect(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE...",
            help="Bags, folders of pictures or texts, .txt, .md or .jsonl files of questions.",
        ),
    ],
    target: TargetOption,
    out: Annotated[Path, typer.Option(help="The data folder; goes on with what it holds.")],
    ask: Annotated[
        list[str] | None,
        typer.Option(help="Ask this about each picture of a folder, instead of the usual; repeat."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Of the answers; 0 = greedy.", min=0.0)] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 128,
    batch: Annotated[int, typer.Option(help="Prompts answered at a time.", min=1)] = 16,
    max_refused: Annotated[
        int, typer.Option(help="Prompts that may be unusable before the run ends.", min=0)
    ] = 20,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = "none",
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Collect the target's own answers, to train exits, a draft or heads on; resumable."""
    from collab_llm_lab.training.loop import show_progress
    from collab_llm_lab.training.pair import collecting
    from collab_llm_lab.training.pair.target import target_config
    from collab_llm_lab.training.stopping import StopRequest

    config = collecting.CollectConfig(
        target_config(target, device, dtype, quantization),
        tuple(sources),
        out,
        tuple(ask or collecting.QUESTIONS),
        temperature,
        max_tokens,
        seed,
        batch,
        max_refused,
    )
    say = partial(console.print, highlight=False, soft_wrap=True)
    with StopRequest() as stop, show_progress(()) as show:
        found = collecting.collect(config, show("pair collect"), stop, say)
    if not found.finished:
        say("stopped; the same command goes on from here")
    say(f"{out} holds {found.answers} answers; {found.refused} prompts were left out")
    write_json(json_file, {"out": str(out), **found._asdict()})
    stop.end()
