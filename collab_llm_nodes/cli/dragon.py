"""``collab-llm dragon-cloud``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from collab_llm_nodes.assets import version
from collab_llm_nodes.cli.options import writable
from collab_llm_nodes.cli.output import port_writer, starting

app = typer.Typer()


@app.command("dragon-cloud")
def dragon_cloud(
    config: Annotated[
        Path | None,
        typer.Option(help="YAML with its settings: a file, or the name of a shipped one."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model: directory or hub id.")] = None,
    store: Annotated[
        str | None, typer.Option(help="Folder of its documents (collab-llm knowledge add).")
    ] = None,
    address: Annotated[str | None, typer.Option(help="host:port to listen on.")] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write address, port and model here.", callback=writable),
    ] = None,
) -> None:
    """Serve DRAGON's cloud side: a model with public documents. Ends cleanly on SIGTERM."""
    from collab_llm_nodes.transport.logs import set_up_logging

    with starting():
        from collab_llm_nodes.protocols.dragon.process import serve
        from collab_llm_nodes.protocols.dragon.settings import load_cloud_config

    settings = load_cloud_config(config, model=model, store=store, address=address)
    set_up_logging(settings.log_format)

    tell = port_writer(json_file, settings.address, settings.model.path)
    serve(settings, version(), tell)
