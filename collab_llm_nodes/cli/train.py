"""``collab-llm train``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from collab_llm_nodes.cli.options import JsonOption, SeedOption
from collab_llm_nodes.cli.output import write_json

app = typer.Typer(no_args_is_help=True, help="Train the models that ship with the package.")


@app.command("nav")
def train_nav(
    out: Annotated[Path, typer.Option(help="Where runs are kept; resumes from there.")] = Path(
        "runs/nav"
    ),
    hours: Annotated[
        float, typer.Option(help="Stop after this long; 0 = the whole plan.", min=0.0)
    ] = 0.0,
    seed: SeedOption = 0,
    pair: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a trained pair (`models`): only the wording stage and the exits."
        ),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Train the embedded pair (target, draft, early-exit adapters) from seeds; resumable."""
    from collab_llm_nodes.training.trainer import train_all

    train_all(out, hours=hours, seed=seed, pair=pair)
    curves = {f.parent.name: json.loads(f.read_text("utf-8")) for f in out.glob("*/curve.json")}
    write_json(json_file, {"out": str(out), "curves": curves})
