"""``collab-llm jupiter-worker``."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from collab_llm_nodes.cli.options import writable
from collab_llm_nodes.cli.output import port_writer, starting

app = typer.Typer()


@app.command("jupiter-worker")
def jupiter_worker(
    config: Annotated[
        Path | None,
        typer.Option(help="YAML with its settings: a file, or the name of a shipped one."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model: directory or hub id.")] = None,
    address: Annotated[str | None, typer.Option(help="host:port to listen on.")] = None,
    cores: Annotated[
        str, typer.Option(help="Run on these processor cores only, such as 0 or 0,1.")
    ] = "",
    emulated_slowdown: Annotated[
        float,
        typer.Option(help="A pass takes so many times as long: an emulated slower device.", min=1),
    ] = 1.0,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write address, port and model here.", callback=writable),
    ] = None,
) -> None:
    """Hold some layers of a model for a coordinator of the protocol jupiter. Ends on SIGTERM."""
    from collab_llm_nodes.transport.logs import set_up_logging

    if cores:
        _stay_on(cores)
    with starting():
        from collab_llm_nodes.protocols.jupiter.worker import serve
        from collab_llm_nodes.protocols.jupiter.worker_settings import load_config

    settings = load_config(config, model=model, address=address)
    set_up_logging(settings.log_format)
    if emulated_slowdown > 1:
        settings = replace(settings, emulated_slowdown=emulated_slowdown)
    if not settings.token and not settings.token_file:
        logging.getLogger(__name__).warning("no token: whoever reaches the port may use it")

    tell = port_writer(json_file, settings.address, settings.model.path)
    serve(settings, tell)


def _stay_on(cores: str) -> None:
    try:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    except (ValueError, OSError) as error:
        raise typer.BadParameter(f"{cores!r}: {error}", param_hint="--cores") from error
