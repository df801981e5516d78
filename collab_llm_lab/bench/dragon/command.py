"""``collab-llm bench dragon`` and ``bench dragon-quality``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from collab_llm_lab.bench.options import measure, numbers
from collab_llm_nodes.cli.options import JsonOption, PlotOption, SeedOption
from collab_llm_nodes.cli.output import write_json

ModelOption = Annotated[str, typer.Option(help="Model of both sides: directory or hub id.")]


def bench_dragon(
    model: ModelOption,
    rtts: Annotated[
        str, typer.Option(help="Added round trips [ms], separated by commas.")
    ] = "0,50,100,200,300",
    decode_ms: Annotated[
        tuple[float, float],
        typer.Option(help="EMULATION: a pass on device, on cloud, takes at least this time [ms]."),
    ] = (50.0, 50.0),
    mbit_s: Annotated[
        float, typer.Option(help="EMULATION: of the link, in each direction.", min=0.1)
    ] = 5.0,
    questions: Annotated[int, typer.Option(help="Questions for each method.", min=1)] = 4,
    tokens: Annotated[int, typer.Option(help="Longest answer.", min=2, max=512)] = 20,
    documents: Annotated[int, typer.Option(help="Documents of each side.", min=1)] = 2,
    quick: Annotated[
        bool, typer.Option("--quick", help="One question, two round trips, small samples.")
    ] = False,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """DRAGON beside its baselines: latency, scheduler, quality and privacy (paper 001).

    Exits with 0 only if all goals are met.
    """
    from collab_llm_lab.bench.dragon.latency import LatencyPlan
    from collab_llm_lab.bench.dragon.report import QUICK, Sizes, run_dragon

    rtts_ms = numbers(rtts, "--rtts", 0)
    assert rtts_ms is not None
    measure(
        run_dragon,
        json_file,
        model=model,
        plan=LatencyPlan(
            rtts_ms=(rtts_ms[0], rtts_ms[-1]) if quick else rtts_ms,
            decode_ms=decode_ms,
            questions=1 if quick else questions,
            tokens=tokens,
            mbit_s=mbit_s,
            seed=seed,
        ),
        documents=documents,
        sizes=QUICK if quick else Sizes(),
        plot=plot,
        keep=partial(write_json, json_file, report=False),
    )


def bench_dragon_quality(
    model: ModelOption,
    houses: Annotated[int, typer.Option(help="Talks, each about documents of its own.", min=1)] = 3,
    questions: Annotated[int, typer.Option(help="Questions of each kind.", min=1)] = 24,
    attacks: Annotated[int, typer.Option(help="Answers that are attacked.", min=1)] = 16,
    files: Annotated[
        Path | None,
        typer.Option(help="Folder of prose (.html, .md, .txt) instead of invented houses."),
    ] = None,
    encoder: Annotated[
        str, typer.Option(help="Folder of an encoder model that scores documents.")
    ] = "",
    documents: Annotated[
        Path | None,
        typer.Option(help="Folder of text files (bench documents): plain questions about them."),
    ] = None,
    asked: Annotated[
        Path | None, typer.Option(help="File of these questions; default: those on the handbook.")
    ] = None,
    config: Annotated[
        str, typer.Option(help="Parameters of dragon_server for --documents.")
    ] = "dragon_instruct.yaml",
    answers: Annotated[
        str, typer.Option(help="free or quote, in place of the configuration's.")
    ] = "",
    most: Annotated[
        int, typer.Option(help="Of the questions with, and without an answer; 0: all.", min=0)
    ] = 0,
    texts: Annotated[
        int, typer.Option(help="Files that are held out and predicted; with --files.", min=1)
    ] = 4,
    room: Annotated[
        bool,
        typer.Option(
            help="Measure also in contexts with room for all documents; with --files, where it "
            "takes longer than the rest."
        ),
    ] = True,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Measure what documents on two sides are worth, and what an answer gives away (paper 001)."""
    if documents is None and (files is None) != (not encoder):
        raise typer.BadParameter("--files and --encoder go together", param_hint="--files")
    import torch

    from collab_llm_lab.bench.dragon.answers import AnswersPlan
    from collab_llm_lab.bench.dragon.privacy import AttackPlan
    from collab_llm_lab.bench.dragon.quality import QualityPlan
    from collab_llm_lab.bench.dragon.quality_report import (
        FILES,
        FILES_UNSATURATED,
        run_files,
        run_quality,
    )
    from collab_llm_lab.bench.dragon.reality import Reality, run_reality
    from collab_llm_lab.training.evidence.questions import HANDBOOK
    from collab_llm_nodes.engine.engine import Engine
    from collab_llm_nodes.knowledge.text_encoder import TextEncoder, TextEncoderConfig
    from collab_llm_nodes.models.loading import ModelConfig, load

    torch.set_num_threads(threads)
    run = partial(
        measure,
        json_file=json_file,
        succeeded=lambda results: True,
        engine=Engine(load(ModelConfig(model))),
    )
    if documents is not None:
        material = Reality(asked or HANDBOOK, documents, config, answers, most, encoder)
        run(run_reality, material=material)
    run = partial(run, plot=plot, keep=partial(write_json, json_file, report=False))
    if files is None:
        run(
            run_quality,
            plan=QualityPlan(houses=houses, seed=seed),
            answers=AnswersPlan(questions=questions, seed=seed),
            attack=AttackPlan(houses=attacks, seed=seed),
        )
    run(
        run_files,
        folder=files,
        encoder=TextEncoder(TextEncoderConfig(encoder)),
        texts=texts,
        seed=seed,
        plans=(FILES, FILES_UNSATURATED if room else None),
    )
