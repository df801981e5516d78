"""``collab-llm ask``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collab_llm_nodes.cli.options import JsonOption, SeedOption
from collab_llm_nodes.cli.output import console, fail, write_json
from collab_llm_nodes.errors import InvalidInput, did_you_mean, quoted

if TYPE_CHECKING:
    from collab_llm_nodes.protocols.base import Answer

app = typer.Typer()
_DRAGON = "dragon"


@app.command()
def ask(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[FILE...] QUESTION", help="PDF, Markdown or text; the question."),
    ],
    protocol: Annotated[
        str, typer.Option(help="minion, minions, remote-only, local-only, rag, or dragon.")
    ] = "minions",
    config: Annotated[
        str,
        typer.Option(
            help="Parameters of minions_server, or of dragon_server: a file, or the name of a"
            " shipped one."
        ),
    ] = "",
    options: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE of a request's option; repeat.")
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            help="Store to read as well (collab-llm knowledge); with dragon, the private one:"
            " a folder, or a name in ~/.collab_llm.",
            file_okay=False,
        ),
    ] = None,
    deadline: Annotated[
        float,
        typer.Option(
            help="Time after which the best answer so far is taken [s].", min=0.1, max=86_400.0
        ),
    ] = 300.0,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Ask about documents: files read by a small model, or stores on robot and in the cloud.

    Exits with 0 for an answer, 1 after an error or if it was cut short, 3 if the documents do not
    give it, and 4 if the remote did not decide on it freely.
    """
    from collab_llm_nodes.protocols.minions.command import (
        PROTOCOLS,
        Question,
        outcome_of,
        run_ask,
    )

    *files, text = words
    known = (*PROTOCOLS, _DRAGON)
    if protocol not in known:
        raise InvalidInput(
            f"unknown protocol {quoted(protocol)}",
            field="--protocol",
            remedy=did_you_mean(protocol, known, f"one of {', '.join(known)}"),
        )
    if protocol == _DRAGON:
        answer, report = _ask_dragon(text, files, config, options or [], store, deadline, seed)
    else:
        question = Question(
            text,
            tuple(files),
            protocol,
            config or "minions.yaml",
            tuple(options or ()),
            store,
            deadline,
            seed,
        )
        answer, report = run_ask(question, console)
    if answer.text:
        console.print(answer.text, style="bold", highlight=False)
    write_json(json_file, report)
    status = outcome_of(answer)
    if answer.error is not None:
        fail(answer.error, status)
    raise typer.Exit(status)


def _ask_dragon(
    text: str,
    files: list[str],
    config: str,
    options: list[str],
    store: Path | None,
    deadline: float,
    seed: int,
) -> tuple[Answer, dict[str, Any]]:
    if files:
        raise InvalidInput(
            f"{len(files)} files for DRAGON",
            field="FILE",
            remedy="add them to a store first: collab-llm knowledge add STORE FILES --by sentence"
            " --characters 240",
        )
    from collab_llm_nodes.protocols.dragon.command import Question, run_ask

    question = Question(text, config or "dragon.yaml", tuple(options), store, deadline, seed)
    return run_ask(question, console)
