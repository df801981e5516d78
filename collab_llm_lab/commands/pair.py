"""Commands that collect a target's answers, and train exits, drafts and heads on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from collab_llm_nodes.cli.options import JsonOption, SeedOption
from collab_llm_nodes.cli.output import console, write_json

if TYPE_CHECKING:
    from collab_llm_lab.training.pair.config import PairConfig

TargetOption = Annotated[
    str, typer.Option("--target", help="Target: folder, hub id or name of a shipped model.")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
DtypeOption = Annotated[
    str, typer.Option(help="Type of the target's weights; auto: bfloat16 on a GPU, else float32.")
]
QuantizationOption = Annotated[
    str, typer.Option(help="Quantisation of the target: none, int8 or int4.")
]

DataOption = Annotated[Path, typer.Option(help="Folder written by pair collect.")]
EpochsOption = Annotated[float, typer.Option(help="Passes over the answers.")]
BatchOption = Annotated[int, typer.Option(help="Answers per step.", min=1)]
RateOption = Annotated[float, typer.Option(help="Peak learning rate.")]
CacheOption = Annotated[
    float, typer.Option(help="Disk for hidden states [GB]; others are computed again.")
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
    out: Annotated[Path, typer.Option(help="Data folder; a later call adds to it.")],
    ask: Annotated[
        list[str] | None,
        typer.Option(help="Question about each picture, in place of the usual ones; repeat."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Temperature of the answers; 0 = greedy.", min=0.0)
    ] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 128,
    guide: Annotated[
        str, typer.Option(help="Limit on the answers, as the robot's answer.guide will be.")
    ] = "none",
    guide_source: Annotated[str, typer.Option(help="As answer.guide_source.")] = "",
    batch: Annotated[int, typer.Option(help="Prompts answered at a time.", min=1)] = 16,
    max_refused: Annotated[
        int, typer.Option(help="Most unusable prompts; one more ends the run.", min=0)
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
    from collab_llm_lab.training.pair.config import target_config
    from collab_llm_lab.training.stopping import StopRequest

    questions = tuple(ask or collecting.QUESTIONS)
    loaded_as = target_config(target, device, dtype, quantization)
    asked = (tuple(sources), out, questions, temperature, max_tokens, seed, batch, max_refused)
    config = collecting.CollectConfig(loaded_as, *asked, guide, guide_source)
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
    out: Annotated[Path, typer.Option(help="Folder of adapters, state and cache; resumes.")],
    layers: Annotated[
        str, typer.Option(help="Candidates, as layers done, with commas; empty: seven of them.")
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
    from collab_llm_lab.training.pair.choosing import Operation
    from collab_llm_lab.training.pair.config import target_config
    from collab_llm_lab.training.pair.exits import ExitsConfig, train_exits

    loaded_as = target_config(target, device, dtype, quantization)
    chosen = numbers(layers or None, "--layers", 1) or ()
    point = Operation(rtt_ms, pass_ms, draft_ms, tau=tau, missed=missed, candidates=candidates)
    common = (loaded_as, data, out, epochs, batch, learning_rate, hours, seed, cache_gb)
    config = ExitsConfig(*common, layers=chosen, operation=point)
    _train(train_exits, config, json_file, _show_exits)


def train_draft(
    target: TargetOption,
    data: DataOption,
    out: Annotated[Path, typer.Option(help="Folder of the draft (model/) and the state; resumes.")],
    draft: Annotated[
        str, typer.Option(help="Begin with this model, which has the target's tokens.")
    ] = "",
    layers: Annotated[
        int, typer.Option(help="Or with this many first layers of the target.", min=0)
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
    from collab_llm_lab.training.pair.config import target_config
    from collab_llm_lab.training.pair.draft import DraftConfig, train_draft

    loaded_as = target_config(target, device, dtype, quantization)
    common = (loaded_as, data, out, epochs, batch, learning_rate, hours, seed)
    config = DraftConfig(*common, draft=draft, layers=layers, lora=lora)
    _train(train_draft, config, json_file, _show_draft)


def train_heads(
    target: TargetOption,
    data: DataOption,
    out: Annotated[Path, typer.Option(help="Folder of heads, state and cache; resumes.")],
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
    from collab_llm_lab.training.pair.config import target_config
    from collab_llm_lab.training.pair.heads import HeadsConfig, train_heads

    loaded_as = target_config(target, device, dtype, quantization)
    common = (loaded_as, data, out, epochs, batch, learning_rate, hours, seed, cache_gb)
    config = HeadsConfig(*common, heads=heads)
    _train(train_heads, config, json_file, _show_heads)


def _train(
    train: Callable[[Any, Callable[[], bool]], dict[str, Any] | None],
    config: PairConfig,
    json_file: Path | None,
    show: Callable[[dict[str, Any], Path], None],
) -> None:
    """Train until the end or a signal, show the report and write its JSON."""
    from collab_llm_lab.training.stopping import StopRequest

    with StopRequest() as stop:
        report = train(config, stop)
    if report is not None:
        show(report, config.out)
    finished = report is not None
    write_json(json_file, {"out": str(config.out), "finished": finished, **(report or {})})
    stop.end()


def _say(text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


def _show_draft(report: dict[str, Any], out: Path) -> None:
    before, after = report["tau_before"], report["tau_after"]
    _say(f"wrote {out / 'model'}: {after:.2f} tokens per pass of the target, {before:.2f} before")


def _show_heads(report: dict[str, Any], out: Path) -> None:
    table = Table("head", "best guess right", "among two", "among three")
    for name, shares in report["heads"].items():
        table.add_row(name, *(f"{share:.3f}" for share in shares))
    console.print(table)
    _say(f"wrote {out}: {report['tokens_per_round']:.2f} tokens per round")


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
