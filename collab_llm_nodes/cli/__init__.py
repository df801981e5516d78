"""``collab-llm``: the commands people type, one file for each group.

Heavy imports happen inside the commands.
"""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from collab_llm_nodes.cli import (
    ask,
    bags,
    bench,
    check,
    demo,
    dragon,
    evaluate,
    jupiter,
    jupiter_worker,
    knowledge,
    train,
    verifier,
)
from collab_llm_nodes.cli.output import console, fail, told_without_ros
from collab_llm_nodes.errors import CollabError

app = typer.Typer(
    name="collab-llm",
    help="Edge-cloud collaborative decoding for ROS 2 robots.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for group in (demo, verifier, dragon, jupiter_worker, ask, bags):
    app.add_typer(group.app)
for name, group in (
    *(("train", train), ("eval", evaluate), ("bench", bench), ("check", check)),
    *(("knowledge", knowledge), ("jupiter", jupiter)),
):
    app.add_typer(group.app, name=name)
app.add_typer(bags.bag_app, name="bag")


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
    # By an exception, so that nobody's child processes are left behind. (The verifier drains.)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # in the background of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the end is an exception now
    try:
        with told_without_ros():
            app()
    except CollabError as error:
        fail(error)
