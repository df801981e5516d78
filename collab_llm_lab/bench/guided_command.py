"""``collab-llm bench guided``."""

from __future__ import annotations

from typing import Annotated

import typer

from collab_llm_lab.bench.options import measure
from collab_llm_nodes.cli.options import JsonOption, SeedOption


def bench_guided(
    target: Annotated[str, typer.Option(help="The large model.")] = "nav-target",
    draft: Annotated[str, typer.Option(help="The small model, of the same tokenizer.")] = (
        "nav-draft"
    ),
    answers: Annotated[int, typer.Option(help="Answers of each row.", min=1)] = 20,
    gamma: Annotated[int, typer.Option(help="Draft tokens per round.", min=1, max=64)] = 4,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """A pair of models with and without a guide: tokens per pass, time, answers that can be read.

    Exits with 0 only if no answer differs from the target's alone.
    """
    from collab_llm_lab.bench.guided import run_guided

    measure(
        run_guided,
        json_file,
        target=target,
        draft=draft,
        answers=answers,
        gamma=gamma,
        seed=seed,
    )
