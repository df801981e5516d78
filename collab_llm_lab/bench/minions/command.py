"""``collab-llm bench minions``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from collab_llm_lab.bench.minions import PARTS
from collab_llm_lab.bench.options import (
    given,
    measure_parts,
    part_option,
    results_keeper,
)
from collab_llm_nodes.cli.options import JsonOption, PlotOption, SeedOption

SAFETY_GOALS = ("no canary seen", "no attack escapes or hangs")
"""The goals that ``--quick`` is held to."""


def bench_minions(
    models: Annotated[Path, typer.Option(help="Folder of the text family's models.")] = Path(
        "models"
    ),
    questions: Annotated[
        Path | None,
        typer.Option(help="Questions about --documents, a file of JSON lines, instead of logs."),
    ] = None,
    documents: Annotated[
        Path, typer.Option(help="Folder of the documents that --questions name.")
    ] = Path("."),
    worker: Annotated[
        str,
        typer.Option(help="Local model: a folder, hub id or shipped name; empty: of --config."),
    ] = "string-search",
    remote: Annotated[
        str, typer.Option(help="Remote model: oracle (rules), embedded, or the URL of a server.")
    ] = "oracle",
    remote_model: Annotated[
        str, typer.Option(help="Name of the model at that server; empty: of --config.")
    ] = "",
    judge: Annotated[str, typer.Option(help="exact, number, or llm, which asks the remote.")] = (
        "exact"
    ),
    protocol: Annotated[
        str, typer.Option(help="Of --questions: minions, minion, rag, local-only or remote-only.")
    ] = "minions",
    config: Annotated[
        str, typer.Option(help="Of --questions: parameter file of minions_server.")
    ] = "",
    options: Annotated[
        list[str] | None, typer.Option("--set", help="Of --questions: NAME=VALUE; repeat.")
    ] = None,
    development: Annotated[
        bool,
        typer.Option("--development", help="Ask the questions kept for development instead."),
    ] = False,
    log_questions: Annotated[
        int | None, typer.Option(help="Questions of the main table.", min=7)
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Length of its logs.", min=500)] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few questions about short logs.")
    ] = False,
    part: Annotated[list[str] | None, part_option(PARTS)] = None,
    pretrained: Annotated[
        Path | None,
        typer.Option(help="Folder of a model to be the worker of some questions too."),
    ] = None,
    pretrained_questions: Annotated[
        int | None, typer.Option(help="Questions that it is asked, about two logs.", min=2)
    ] = None,
    encoder: Annotated[
        Path | None,
        typer.Option(help="Folder of an encoder that finds the passages of RAG too."),
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps answers: a run that was ended goes on there."),
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads of each process.", min=1)] = 1,
    processes: Annotated[
        int, typer.Option(help="Processes that answer questions, about one log each.", min=1)
    ] = 1,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Minion, MinionS and baselines (paper 000): accuracy, tokens, cost.

    With --questions, a worker and a remote of your choice answer them about your documents, and
    string search in place of the worker for comparison. Otherwise the shipped models answer
    questions about long robot logs.

    The JSON is written after each part. With --part, a file that is there keeps its other parts,
    and --plot draws them all.

    Exits with 0 only if no part fails and all goals are reached; with --quick if nothing leaks or
    escapes.
    """
    from collab_llm_lab.bench.minions.plots import plot_all
    from collab_llm_lab.bench.minions.reality import Setup, run_reality
    from collab_llm_lab.bench.minions.report import QUICK, Sizes, join, run_minions

    if questions is not None:
        measure_parts(
            run_reality,
            results_keeper(json_file, plot, ["reality"], join, plot_all),
            lambda results: not results["failed"],
            questions=questions,
            documents=documents,
            setup=Setup(
                remote, remote_model, worker, protocol, config, tuple(options or ()), seed=seed
            ),
            judge=judge,
            development=development,
            answers=answers,
        )

    def succeeded(results: dict[str, Any]) -> bool:
        goals = results["goals"]
        wanted = SAFETY_GOALS if quick else goals
        return not results["failed"] and all(goals.get(goal, True) for goal in wanted)

    asked = given(questions=log_questions, tokens=tokens, pretrained=pretrained_questions)
    measure_parts(
        run_minions,
        results_keeper(json_file, plot, part, join, plot_all),
        succeeded,
        models=models,
        sizes=replace(QUICK if quick else Sizes(), **asked),
        parts=part or (),
        threads=threads,
        processes=processes,
        seed=seed,
        pretrained=pretrained,
        encoder=encoder,
        answers=answers,
    )
