"""What the laboratory adds to ``collab-llm pair``, and ``collab-llm train`` for any pair."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from collab_llm_nodes.cli.options import JsonOption, SeedOption
from collab_llm_nodes.cli.output import console, write_json

TargetOption = Annotated[
    str, typer.Option("--target", help="Target: folder, hub id or name of a shipped model.")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
DtypeOption = Annotated[
    str, typer.Option(help="Of the target's weights; auto: bfloat16 on a GPU, else float32.")
]
QuantizationOption = Annotated[str, typer.Option(help="Of the target: none, int8 or int4.")]

DataOption = Annotated[Path, typer.Option(help="Folder that pair collect has written.")]
EpochsOption = Annotated[float, typer.Option(help="Times that each answer is learnt from.")]
BatchOption = Annotated[int, typer.Option(help="Answers of a step.", min=1)]
RateOption = Annotated[float, typer.Option(help="At its peak.")]
CacheOption = Annotated[
    float, typer.Option(help="Hidden states kept on disk [GB]; others are computed again.")
]
HoursOption = Annotated[float, typer.Option(help="Stop after this long; 0 = at the end.")]


def collect(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE...",
            help="Bags, pictures, texts (.txt, .md), folders of them; .jsonl files of questions.",
        ),
    ],
    target: TargetOption,
    out: Annotated[Path, typer.Option(help="The data folder; goes on with what it holds.")],
    ask: Annotated[
        list[str] | None,
        typer.Option(help="Ask this about each picture of a folder, instead of the usual; repeat."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Of the answers; 0 = greedy.", min=0.0)] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 128,
    batch: Annotated[int, typer.Option(help="Prompts answered at a time.", min=1)] = 16,
    max_refused: Annotated[
        int, typer.Option(help="Prompts that may be unusable before the run ends.", min=0)
    ] = 20,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = "none",
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Collect the target's own answers, to train exits, a draft or heads on; resumable."""
    from collab_llm_lab.training.loop import show_progress
    from collab_llm_lab.training.pair import collecting
    from collab_llm_lab.training.pair.target import target_config
    from collab_llm_lab.training.stopping import StopRequest

    config = collecting.CollectConfig(
        target_config(target, device, dtype, quantization),
        tuple(sources),
        out,
        tuple(ask or collecting.QUESTIONS),
        temperature,
        max_tokens,
        seed,
        batch,
        max_refused,
    )
    with StopRequest() as stop, show_progress(()) as show:
        found = collecting.collect(config, show("pair collect"), stop, _say)
    if not found.finished:
        _say("stopped; the same command goes on from here")
    _say(f"{out} holds {found.answers} answers; {found.refused} prompts were left out")
    write_json(json_file, {"out": str(out), **found._asdict()})
    stop.end()


def train_exits(
    target: TargetOption,
    data: DataOption,
    out: Annotated[Path, typer.Option(help="Of the adapters, the state and the cache; resumes.")],
    layers: Annotated[
        str, typer.Option(help="Candidates in layers done, with commas; empty: seven.")
    ] = "",
    epochs: EpochsOption = 3.0,
    batch: BatchOption = 8,
    learning_rate: RateOption = 1e-3,
    cache_gb: CacheOption = 8.0,
    hours: HoursOption = 0.0,
    rtt_ms: Annotated[float, typer.Option(help="Round trip of the robot's link [ms].")] = 60.0,
    pass_ms: Annotated[
        float, typer.Option(help="A verification in the cloud [ms]; 0 = as measured here.")
    ] = 0.0,
    draft_ms: Annotated[
        float, typer.Option(help="A token of the draft model [ms]; 0 = an eighth of a pass.")
    ] = 0.0,
    tau: Annotated[float, typer.Option(help="Tokens per round with the draft model.")] = 3.0,
    missed: Annotated[
        float, typer.Option(help="Share of verdicts that the draft model does not foresee.")
    ] = 0.55,
    candidates: Annotated[int, typer.Option(help="exit_candidates of the verifier.", min=0)] = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = "none",
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Train early exits of any target on its own answers, and keep those that pay; resumable.

    Which exits pay depends on the link and the draft model: give what `pair check --measure` says.
    The same command with other figures chooses again, without training.
    """
    from collab_llm_lab.bench.options import numbers
    from collab_llm_lab.training.pair import exits
    from collab_llm_lab.training.pair.choosing import Operation
    from collab_llm_lab.training.pair.target import target_config
    from collab_llm_lab.training.stopping import StopRequest

    config = exits.ExitsConfig(
        target_config(target, device, dtype, quantization),
        data,
        out,
        numbers(layers or None, "--layers", 1) or (),
        epochs,
        batch,
        learning_rate,
        cache_gb,
        hours,
        seed,
        Operation(rtt_ms, pass_ms, draft_ms, tau=tau, missed=missed, candidates=candidates),
    )
    with StopRequest() as stop:
        report = exits.train_exits(config, stop)
    if report is not None:
        _show_exits(report, out)
    write_json(json_file, {"out": str(out), "finished": report is not None, **(report or {})})
    stop.end()


def train_draft(
    target: TargetOption,
    data: DataOption,
    out: Annotated[Path, typer.Option(help="Of the draft (model/) and the state; resumes.")],
    draft: Annotated[
        str, typer.Option(help="Begin with this model, which has the target's tokens.")
    ] = "",
    layers: Annotated[
        int, typer.Option(help="Or with so many first layers of the target.", min=0)
    ] = 0,
    lora: Annotated[
        int, typer.Option(help="Rank of the trained changes (peft); 0 = all weights.", min=0)
    ] = 0,
    epochs: EpochsOption = 3.0,
    batch: BatchOption = 8,
    learning_rate: RateOption = 3e-4,
    hours: HoursOption = 0.0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = "none",
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Distil a target's own answers into a draft for it; resumable."""
    from collab_llm_lab.training.pair.draft import DraftConfig, train_draft
    from collab_llm_lab.training.pair.target import target_config
    from collab_llm_lab.training.stopping import StopRequest

    loaded_as = target_config(target, device, dtype, quantization)
    config = DraftConfig(
        loaded_as, data, out, draft, layers, lora, epochs, batch, learning_rate, hours, seed
    )
    with StopRequest() as stop:
        report = train_draft(config, stop)
    if report is not None:
        before, after = report["tau_before"], report["tau_after"]
        _say(
            f"wrote {out / 'model'}: {after:.2f} tokens per pass of the target, {before:.2f} before"
        )
    write_json(json_file, report or {"out": str(out), "finished": False})
    stop.end()


def train_heads(
    target: TargetOption,
    data: DataOption,
    out: Annotated[Path, typer.Option(help="Of the heads, the state and the cache; resumes.")],
    heads: Annotated[int, typer.Option(help="Tokens guessed beyond the next one.", min=1)] = 5,
    epochs: EpochsOption = 3.0,
    batch: BatchOption = 8,
    learning_rate: RateOption = 1e-3,
    cache_gb: CacheOption = 8.0,
    hours: HoursOption = 0.0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = "none",
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Train Medusa heads of any target on its own answers, for Jupiter's workers; resumable."""
    from collab_llm_lab.training.pair.heads import HeadsConfig, train_heads
    from collab_llm_lab.training.pair.target import target_config
    from collab_llm_lab.training.stopping import StopRequest

    loaded_as = target_config(target, device, dtype, quantization)
    config = HeadsConfig(
        loaded_as, data, out, heads, epochs, batch, learning_rate, cache_gb, hours, seed
    )
    with StopRequest() as stop:
        report = train_heads(config, stop)
    if report is not None:
        table = Table("head", "best guess right", "among two", "among three")
        for name, shares in report["heads"].items():
            table.add_row(name, *(f"{share:.3f}" for share in shares))
        console.print(table)
        _say(f"wrote {out}: {report['tokens_per_round']:.2f} tokens per round")
    write_json(json_file, report or {"out": str(out), "finished": False})
    stop.end()


def _say(text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


def _show_exits(report: dict[str, Any], out: Path) -> None:
    columns = (
        *("agreement_before", "agreement_fitted", "agreement"),
        *("calibration_error", "rounds_foreseen"),
    )
    table = Table("after layer", *(name.replace("_", " ") for name in columns), "pays")
    for layer, figures in report["exits"].items():
        pays = "yes" if int(layer) in report["chosen"] else ""
        table.add_row(layer, *(f"{figures[name]:.3f}" for name in columns), pays)
    console.print(table)
    by_layer = report["exits"].items()
    worse = [layer for layer, f in by_layer if f["agreement"] < f["agreement_fitted"]]
    if worse:
        _say(
            f"after layers {', '.join(worse)} the least squares alone agreed more: try another"
            " --out with a tenth of --learning-rate"
        )
    with_ms, without_ms = report["round_ms"], report["round_ms_without_exits"]
    if report["chosen"]:
        _say(f"wrote {out}: a round takes {with_ms:.1f} ms, {without_ms:.1f} ms without exits")
    else:
        _say(f"no exit pays here: a round takes {without_ms:.1f} ms without; no adapters written")
