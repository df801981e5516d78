"""``collab-llm jupiter-worker``."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Annotated

import typer

from collab_llm_nodes.cli.options import AddressOption, ConfigOption, ListeningOption, ModelOption
from collab_llm_nodes.cli.output import port_writer, starting

app = typer.Typer()


@app.command("jupiter-worker")
def jupiter_worker(
    config: ConfigOption = None,
    model: ModelOption = None,
    address: AddressOption = None,
    cores: Annotated[
        str, typer.Option(help="Run on these processor cores only, such as 0 or 0,1.")
    ] = "",
    emulated_slowdown: Annotated[
        float,
        typer.Option(help="Emulate a slower device: factor on the time of a pass.", min=1),
    ] = 1.0,
    json_file: ListeningOption = None,
) -> None:
    """Hold some layers of a model for a coordinator of the protocol jupiter. Ends on SIGTERM."""
    from collab_llm_nodes.transport.logs import set_up_logging

    if cores:
        _stay_on(cores)
    with starting():
        from collab_llm_nodes.protocols.jupiter.worker import serve
        from collab_llm_nodes.protocols.jupiter.worker_settings import WorkerConfig
        from collab_llm_nodes.transport.settings import read_server_config

    settings = read_server_config(WorkerConfig, config, model=model, address=address)
    set_up_logging(settings.log_format)
    if emulated_slowdown > 1:
        settings = replace(settings, emulated_slowdown=emulated_slowdown)
    if not settings.token and not settings.token_file:
        logging.getLogger(__name__).warning("no token: anyone who reaches the port may use it")

    serve(settings, port_writer(json_file, settings.address, settings.model.path))


def _stay_on(cores: str) -> None:
    try:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    except (ValueError, OSError) as error:
        raise typer.BadParameter(f"{cores!r}: {error}", param_hint="--cores") from error
