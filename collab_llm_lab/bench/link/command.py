"""``collab-llm bench link``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from collab_llm_lab.bench.options import measure
from collab_llm_nodes.cli.options import JsonOption, PlotOption, SeedOption

FAULTS = ("wrong_tokens", "failed", "hangs")


def bench_link(
    answers: Annotated[int, typer.Option(help="Answers per run.", min=1)] = 20,
    cuts: Annotated[int, typer.Option(help="Cuts in each run that has them.", min=1)] = 20,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Answers over an emulated bad link: cuts, loss, jitter, reordering, throttle, silence.

    Exits with 0 only if no token differs from the undisturbed answers, none fails, nothing hangs.
    """
    from collab_llm_lab.bench.link.report import run_link

    def faultless(results: dict[str, Any]) -> bool:
        return not any(run[fault] for run in results["runs"].values() for fault in FAULTS)

    measure(run_link, json_file, faultless, answers=answers, cuts=cuts, seed=seed, plot=plot)
