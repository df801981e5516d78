"""``collab-llm train``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from collab_llm_nodes.cli.options import JsonOption, SeedOption
from collab_llm_nodes.cli.output import write_json
from collab_llm_nodes.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True, help="Train the shipped models, or exits, a draft and heads for any pair."
)


@app.command("nav")
def train_nav(
    out: Annotated[Path, typer.Option(help="Where runs are kept; resumes from there.")] = Path(
        "runs/nav"
    ),
    data: Annotated[
        Path | None, typer.Option(help="Where rendered pictures are kept; OUT/data if not given.")
    ] = None,
    hours: Annotated[
        float, typer.Option(help="Stop after this long; 0 = the whole plan.", min=0.0)
    ] = 0.0,
    seed: SeedOption = 0,
    device: Annotated[
        str, typer.Option(help="auto, cpu or cuda; each has a plan of its own.")
    ] = "auto",
    stage: Annotated[
        str, typer.Option(help="Only this stage (see docs/models.md); empty: all.")
    ] = "",
    export: Annotated[
        Path | None,
        typer.Option(help="Train nothing; write the present model of --stage here, in float16."),
    ] = None,
    pack: Annotated[
        Path | None,
        typer.Option(help="Train nothing; write all weights here. A copy of it is an --out."),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Train the embedded pair (target, draft, early-exit adapters) from seeds; resumable."""
    from collab_llm_lab.training.learner import pick_device
    from collab_llm_lab.training.nav import trainer
    from collab_llm_lab.training.nav.packing import pack as pack_weights
    from collab_llm_lab.training.nav.plans import PLANS
    from collab_llm_lab.training.run import check_stages
    from collab_llm_lab.training.stopping import StopRequest

    chosen = pick_device(device)
    plan = PLANS[chosen.type]
    if stage:
        stages = [*plan.stages] if export else [*plan.stages, trainer.EXITS]
        check_stages([stage], stages, "--stage")
    training = trainer.Trainer(plan, out, data or out / "data", chosen, seed)
    if export or pack:
        if export:
            training.export(stage or "target", export)
        if pack:
            pack_weights(out, pack, plan.stages)
        return
    with StopRequest() as stop:
        finished = trainer.train_nav(training, hours, stage, stop)
    curves = trainer.write_nav_curves(training)
    write_json(json_file, {"out": str(out), "finished": finished, "curves": curves})
    stop.end()


@app.command("text")
def train_text(
    out: Annotated[Path, typer.Option(help="Where runs are kept; resumes from there.")] = Path(
        "runs/text"
    ),
    hours: Annotated[
        float, typer.Option(help="Stop after this long; 0 = the whole plan.", min=0.0)
    ] = 0.0,
    seed: SeedOption = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    stages: Annotated[
        str, typer.Option(help="Only these stages, with spaces between; empty: all.")
    ] = "",
    plan: Annotated[
        str, typer.Option(help="auto (by device), gpu, cpu, or tiny to check a machine.")
    ] = "auto",
    minutes: Annotated[
        str, typer.Option(help="Other times than the plan's, as in 'target=10 draft=0.5'.")
    ] = "",
    json_file: JsonOption = None,
) -> None:
    """Train the embedded text family from seeds; resumable in every stage."""
    from collab_llm_lab.training.learner import pick_device
    from collab_llm_lab.training.stopping import StopRequest
    from collab_llm_lab.training.text import trainer

    chosen = trainer.pick_plan(plan, pick_device(device))
    config = trainer.TrainText(
        out,
        chosen.with_minutes(_minutes(minutes)),
        seed=seed,
        hours=hours,
        device=device,
        stages=tuple(stages.split()) or trainer.STAGES,
    )
    with StopRequest() as stop:
        finished = trainer.train_text(config, stop)
    curves = trainer.write_text_curves(out, out / "curves")
    write_json(json_file, {"out": str(out), "finished": finished, "curves": curves})
    stop.end()


@app.command("minions")
def train_minions(
    out: Annotated[Path, typer.Option(help="Where runs are kept; resumes from there.")] = Path(
        "runs/minions"
    ),
    models: Annotated[Path, typer.Option(help="Folder of the text family that is adapted.")] = Path(
        "models"
    ),
    plan: Annotated[str, typer.Option(help="cpu, or tiny to check a machine.")] = "cpu",
    stages: Annotated[str, typer.Option(help="worker, planner, or both.")] = "worker planner",
    hours: Annotated[
        float, typer.Option(help="Stop after this long; 0 = the whole plan.", min=0.0)
    ] = 0.0,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Adapt the text worker to its tasks and the text target to planning; resumable."""
    from collab_llm_lab.training.minions import trainer
    from collab_llm_lab.training.stopping import StopRequest

    config = trainer.TrainMinions(
        out, models, plan=plan, seed=seed, hours=hours, stages=tuple(stages.split())
    )
    with StopRequest() as stop:
        finished = trainer.train_minions(config, stop)
    curves = {f.parent.name: json.loads(f.read_text("utf-8")) for f in out.glob("*/curve.json")}
    write_json(json_file, {"out": str(out), "finished": finished, "curves": curves})
    stop.end()


@app.command("evidence")
def train_evidence(
    documents: Annotated[
        list[Path],
        typer.Argument(help="Folders of text files, beside the shipped ones.", file_okay=False),
    ],
    questions: Annotated[
        Path | None, typer.Option(help="Questions with answers; default: the shipped ones.")
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option(help="Folder of documents that are kept apart from training.")
    ] = None,
    held_out_questions: Annotated[
        Path | None, typer.Option(help="Questions about them; default: those on the handbook.")
    ] = None,
    encoder: Annotated[
        str, typer.Option(help="Folder of an encoder model; empty: words alone.")
    ] = "",
    candidates: Annotated[
        int, typer.Option(help="Pieces searched for a question, as in the configuration.", min=1)
    ] = 16,
    least: Annotated[float, typer.Option(help="Probability that a quote needs.")] = 0.5,
    out: Annotated[Path, typer.Option(help="File of the weights (YAML).")] = Path("evidence.yaml"),
    json_file: JsonOption = None,
) -> None:
    """Calibrate the evidence that a quote needs (docs/dragon.md)."""
    from dataclasses import asdict

    import yaml

    from collab_llm_lab.training.evidence.run import Material, calibrate

    material = Material(tuple(documents), questions, held_out, held_out_questions)
    found, figures = calibrate(material, encoder, candidates, least)
    out.write_text(yaml.safe_dump(asdict(found), sort_keys=False), encoding="utf-8")
    write_json(json_file, {"weights": asdict(found), **figures})


def _minutes(text: str) -> dict[str, float]:
    """Read ``STAGE=MINUTES`` pairs.

    Raises:
        ConfigError: a part of another form.
    """
    found = {}
    for part in text.split():
        name, _, value = part.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError(
                f"cannot read {part!r}", field="--minutes", remedy="STAGE=MINUTES"
            ) from None
    return found
