"""``collab-llm eval``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from collab_llm_nodes.cli.options import JsonOption, SeedOption
from collab_llm_nodes.cli.output import console, write_json

app = typer.Typer(no_args_is_help=True, help="Measure the shipped models.")


@app.command("nav")
def eval_nav(
    rooms: Annotated[int, typer.Option(help="Fresh rooms to drive.", min=1)] = 200,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Closed-loop success, perception, losslessness and tau of the embedded pair."""
    from collab_llm_nodes.training.evaluate import EvalConfig, eval_nav

    found = eval_nav(EvalConfig(rooms=rooms, seed=seed))
    table = Table("figure", "measured")
    for name, value in (
        ("rooms solved, target", f"{found['target']['success_rate']:.1%}"),
        ("rooms solved, draft alone", f"{found['draft']['success_rate']:.1%}"),
        ("... asked in other trained words, target", f"{found['wording']['trained']:.1%}"),
        ("... in words never trained on, target", f"{found['wording']['held_out']:.1%}"),
        ("direction of things in view", f"{found['in_view_direction']:.3f}"),
        ('"not in view" right', f"{found['not_in_view']:.3f}"),
        ("invalid actions", str(found["invalid_actions"])),
        (
            "steps whose action differs from the target's alone",
            f"{found['action_mismatches']} of {found['steps_compared']}",
        ),
        ("tau", f"{found['tau']:.2f}"),
        ("tau on decision words", f"{found['tau_decision']:.2f}"),
    ):
        table.add_row(name, value)
    console.print(table)
    write_json(json_file, found)
