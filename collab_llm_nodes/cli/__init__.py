"""The command line ``collab-llm``, one file for each group of commands.

Heavy imports happen inside the commands.
"""

from __future__ import annotations

import signal
import sys
from importlib.metadata import entry_points
from typing import Annotated

import typer

from collab_llm_nodes.cli import (
    ask,
    bags,
    dragon,
    jupiter,
    jupiter_worker,
    knowledge,
    mcp,
    pair,
    verifier,
)
from collab_llm_nodes.cli.output import console, fail, requiring_ros
from collab_llm_nodes.errors import CollabError, ConfigError

app = typer.Typer(
    name="collab-llm",
    help="Edge-cloud collaborative decoding for ROS 2 robots.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for group in (verifier, dragon, jupiter_worker, ask, bags, mcp):
    app.add_typer(group.app)
for name, group in (("knowledge", knowledge), ("jupiter", jupiter), ("pair", pair)):
    app.add_typer(group.app, name=name)
app.add_typer(bags.bag_app, name="bag")

LABORATORY = ("bench", "check", "demo", "eval", "train")
"""Commands of the distribution ``collab_llm_lab``, which robots do without."""


def _add_laboratory(group: typer.Typer) -> None:
    """Add the commands of other distributions; without the laboratory, its commands say so."""
    reason = "is not installed"
    try:
        for other in (others := entry_points(group="collab_llm.commands")):
            other.load()(group)
        if others:
            return
    except Exception as error:  # noqa: BLE001 - a broken laboratory must not stop a verifier
        reason = f"cannot be loaded ({error})"

    def missing(context: typer.Context) -> None:
        raise ConfigError(
            f"{context.info_name} is a command of the laboratory, which {reason}",
            field="command",
            remedy="in the source tree: make lab, or pip install --no-deps ./collab_llm_lab",
        )

    places = [(group, name) for name in LABORATORY] + [(pair.app, "collect")]
    for place, name in places:
        place.command(
            name,
            hidden=True,
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
            add_help_option=False,
        )(missing)


_add_laboratory(app)


def _version(wanted: bool) -> None:
    if wanted:
        from collab_llm_nodes.assets import version

        console.print(f"collab-llm {version()}", highlight=False)
        raise typer.Exit


@app.callback()
def _common(
    _: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_version
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; a typed error becomes one clear line instead of a traceback."""
    # As an exception, so that child processes are ended. (The verifier drains.)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # in the background of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with requiring_ros():
            app()
    except CollabError as error:
        fail(error)
