"""``collab-llm eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from collab_llm_nodes.cli.options import JsonOption, SeedOption
from collab_llm_nodes.cli.output import console, write_json

app = typer.Typer(no_args_is_help=True, help="Measure the embedded models.")


@app.command("nav")
def eval_nav(
    rooms: Annotated[int, typer.Option(help="Fresh rooms to drive.", min=1)] = 200,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Closed-loop success, perception, losslessness and tau of the embedded pair."""
    from collab_llm_lab.training.loop import show_progress
    from collab_llm_lab.training.nav import evaluate

    with show_progress(()) as show:
        found = evaluate.eval_nav(rooms, seed, show("evaluation"))
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


@app.command("text")
def eval_text(
    models: Annotated[Path, typer.Option(help="Folder of the family's models.")] = Path(
        "runs/text/models"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer samples: two minutes.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Perplexity, extraction, copying and acceptance of the embedded text family."""
    from collab_llm_lab.training.loop import show_progress
    from collab_llm_lab.training.text import evaluate

    changed = evaluate.QUICK if quick else {}
    config = evaluate.EvalText(models=models, seed=seed, device=device, **changed)
    with show_progress(()) as show:
        found = evaluate.eval_text(config, show("evaluation"))
    table = Table("figure", *evaluate.SUB_DOMAINS)
    for name in ("text-target", "text-worker", "ngram"):
        row = (f"{found['perplexity'][s][name]:.2f}" for s in evaluate.SUB_DOMAINS)
        table.add_row(f"perplexity, {name}", *row)
    for name in ("text-target", "text-worker"):
        right = found["extraction"][name]["by_sub_domain"]
        table.add_row(f"extraction, {name}", *(f"{right[s]:.1%}" for s in evaluate.SUB_DOMAINS))
    for name in evaluate.MODELS[2:]:
        row = (f"{found['acceptance'][s][name]:.3f}" for s in evaluate.SUB_DOMAINS)
        table.add_row(f"acceptance at s = {evaluate.S}, {name}", *row)
    console.print(table)
    console.print({key: found[key] for key in ("copy", "guesses", "distinct")})
    write_json(json_file, found)
