"""``collab-llm dragon-cloud``."""

from __future__ import annotations

from typing import Annotated

import typer

from collab_llm_nodes.assets import version
from collab_llm_nodes.cli.options import AddressOption, ConfigOption, ListeningOption, ModelOption
from collab_llm_nodes.cli.output import port_writer, starting

app = typer.Typer()


@app.command("dragon-cloud")
def dragon_cloud(
    config: ConfigOption = None,
    model: ModelOption = None,
    store: Annotated[
        str | None, typer.Option(help="Folder of its documents (collab-llm knowledge add).")
    ] = None,
    address: AddressOption = None,
    json_file: ListeningOption = None,
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
