"""``collab-llm verifier``."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from collab_llm_nodes.cli.options import ComputeOption, writable
from collab_llm_nodes.cli.output import port_writer, starting

app = typer.Typer()


@app.command()
def verifier(
    config: Annotated[
        Path | None,
        typer.Option(help="YAML with its settings: a file, or the name of a shipped one."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Target model: directory or hub id.")] = None,
    address: Annotated[str | None, typer.Option(help="host:port to listen on.")] = None,
    emulated_compute_s: ComputeOption = 0.0,
    ray: Annotated[
        bool, typer.Option("--ray", help="Several replicas, by Ray Serve (docs/cloud.md).")
    ] = False,
    replicas: Annotated[
        int | None, typer.Option(help="Replicas, with --ray.", min=1, max=1024)
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write address, port and model here.", callback=writable),
    ] = None,
) -> None:
    """Serve the target model (cloud side). Ends cleanly on SIGTERM.

    With neither --config nor --model: the small model of the demo, which ships with the package.
    """
    from collab_llm_nodes.transport.logs import set_up_logging

    with starting():
        from collab_llm_nodes.protocols.edge_cloud.settings import load_config

        if ray:
            from collab_llm_nodes.protocols.edge_cloud.ray_serve import serve
        else:
            from collab_llm_nodes.protocols.edge_cloud.service import serve

    unnamed = config is None and model is None
    settings = load_config(
        "verifier_embedded.yaml" if unnamed else config, model=model, address=address
    )
    set_up_logging(settings.log_format)
    if unnamed:
        logging.getLogger(__name__).warning(
            "no --model and no --config: serving %s, the small model of the demo, which knows"
            " nothing but its simulated rooms",
            settings.model.path,
        )
    if emulated_compute_s:
        settings = replace(settings, emulated_compute_s=emulated_compute_s)
    if replicas is not None:
        if not ray:
            raise typer.BadParameter("only with --ray", param_hint="--replicas")
        settings = replace(settings, ray=replace(settings.ray, replicas=replicas))

    tell = port_writer(json_file, settings.address, settings.model.path)
    serve(settings, tell)
