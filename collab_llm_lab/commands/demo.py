"""``collab-llm demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from collab_llm_nodes.cli.options import ComputeOption, SeedOption, ending_in, writable
from collab_llm_nodes.cli.output import console, write_json

app = typer.Typer()


@app.command()
def demo(
    rooms: Annotated[int, typer.Option(help="Rooms to drive.", min=1, max=1000)] = 10,
    seed: SeedOption = 0,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the results here.", callback=writable),
    ] = Path("out/demo.json"),
    film: Annotated[
        Path, typer.Option(help="Animated GIF of the first rooms.", callback=ending_in(".gif"))
    ] = Path("out/demo.gif"),
    config: Annotated[
        Path | None,
        typer.Option(
            help="ROS parameters, read after the shipped ones.", exists=True, dir_okay=False
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show/--no-show", help="Begin with a red mug behind a table.")
    ] = True,
    emulated_compute_s: ComputeOption = 0.04,
    record: Annotated[
        Path | None, typer.Option(help="Record it as a bag in this folder.", file_okay=False)
    ] = None,
) -> None:
    """Drive simulated rooms through the whole system: camera, draft, verifier, motion.

    Starts the verifier and the ROS graph as processes of their own and exits with 0 only if at
    least 8 of 10 rooms end as asked for: at the right thing, with a right reply, or with a search
    given up for what is not there.
    """
    from collab_llm_lab.demo.drive import run_demo

    results = run_demo(
        rooms=rooms,
        seed=seed,
        film=film,
        params=config,
        compute_s=emulated_compute_s,
        console=console,
        record=record,
        show_first=show,
    )
    write_json(json_file, results)
    raise typer.Exit(0 if results["right"] >= 0.8 * results["rooms"] else 1)
