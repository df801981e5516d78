"""``collab-llm verifier``."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Annotated

import typer

from collab_llm_nodes.cli.options import (
    AddressOption,
    ComputeOption,
    ConfigOption,
    ListeningOption,
    ModelOption,
)
from collab_llm_nodes.cli.output import port_writer, starting

app = typer.Typer()


@app.command()
def verifier(
    config: ConfigOption = None,
    model: ModelOption = None,
    address: AddressOption = None,
    emulated_compute_s: ComputeOption = 0.0,
    ray: Annotated[
        bool, typer.Option("--ray", help="Several replicas, by Ray Serve (docs/cloud.md).")
    ] = False,
    replicas: Annotated[
        int | None, typer.Option(help="Replicas, with --ray.", min=1, max=1024)
    ] = None,
    json_file: ListeningOption = None,
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

    serve(settings, port_writer(json_file, settings.address, settings.model.path))
