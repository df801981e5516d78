"""The commands that the laboratory adds to ``collab-llm``.

Heavy imports happen inside the commands.
"""

from __future__ import annotations

import typer

from collab_llm_lab.commands import bench, check, demo, evaluate, pair, train
from collab_llm_nodes.cli import pair as product_pair


def add_to(app: typer.Typer) -> None:
    """Add the commands to ``app``; the entry point in setup.py names this function."""
    app.add_typer(demo.app)
    product_pair.app.command("collect")(pair.collect)
    train.app.command("exits")(pair.train_exits)
    train.app.command("draft")(pair.train_draft)
    train.app.command("heads")(pair.train_heads)
    for name, group in (("train", train), ("eval", evaluate), ("bench", bench), ("check", check)):
        app.add_typer(group.app, name=name)
