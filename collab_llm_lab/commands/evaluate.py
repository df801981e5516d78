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
    rooms: Annotated[int, typer.Option(help="Fresh rooms for each figure.", min=1)] = 200,
    seed: SeedOption = 0,
    target: Annotated[str, typer.Option(help="Folder or shipped name.")] = "nav-target",
    draft: Annotated[str, typer.Option(help="Folder or shipped name.")] = "nav-draft",
    json_file: JsonOption = None,
) -> None:
    """Success in many kinds of room and words, perception, losslessness, tau of the pair."""
    from collab_llm_lab.training.loop import show_progress
    from collab_llm_lab.training.nav import gates

    with show_progress(()) as show:
        found = gates.eval_nav(rooms, seed, show("evaluation"), target=target, draft=draft)
    table = Table("figure", "measured", "goal", "reached")
    for name, value in gates.measured(found).items():
        shown = f"{value:.3f}" if isinstance(value, float) else str(value)
        goal = gates.GOALS.get(name)
        wanted = "" if goal is None else f"{goal[0]} {goal[1]}"
        reached = "" if goal is None else "yes" if gates.reached(goal, value) else "NO"
        table.add_row(name, shown, wanted, reached)
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
