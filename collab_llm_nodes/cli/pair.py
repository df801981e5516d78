"""``collab-llm pair``: two models of a user's own, as draft and target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collab_llm_nodes.cli.options import JsonOption
from collab_llm_nodes.cli.output import console, write_json
from collab_llm_nodes.errors import CollabError, ConfigError, translate_errors

if TYPE_CHECKING:
    from collab_llm_nodes.engine.inspection import Inspection, Memory
    from collab_llm_nodes.protocols.edge_cloud.pair import PairReport
    from collab_llm_nodes.protocols.edge_cloud.pair_timing import Link, Measurement, Prediction

app = typer.Typer(no_args_is_help=True, help="Bring two models of your own together.")


@app.command("check")
def check(
    target: Annotated[str, typer.Argument(help="Target: folder, hub id or name of a model.")],
    draft: Annotated[str, typer.Argument(help="Draft: likewise.")],
    exits: Annotated[
        str | None,
        typer.Option(help="Folder of the target's early exits; else those beside it."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Load both, time them and predict the modes.")
    ] = False,
    device: Annotated[str, typer.Option(help="Of the target: cpu, cuda or cuda:N.")] = "cpu",
    draft_device: Annotated[str, typer.Option(help="Of the draft.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of the target's weights.")] = "float32",
    draft_dtype: Annotated[str, typer.Option(help="Of the draft's weights.")] = "float32",
    quantization: Annotated[str, typer.Option(help="Of the target: none, int8, int4.")] = "none",
    draft_quantization: Annotated[str, typer.Option(help="Of the draft.")] = "none",
    gamma: Annotated[
        int, typer.Option(help="Draft tokens of the measured rounds.", min=1, max=16)
    ] = 4,
    rtt_ms: Annotated[
        float, typer.Option(help="Round trip of the link [ms].", min=0.0, max=60_000.0)
    ] = 60.0,
    up_mbit: Annotated[
        float, typer.Option(help="Its speed from the robot [10^6 bit/s].", min=1e-3)
    ] = 20.0,
    down_mbit: Annotated[
        float, typer.Option(help="Its speed to the robot [10^6 bit/s].", min=1e-3)
    ] = 50.0,
    acceptance: Annotated[
        float | None,
        typer.Option(help="Chance of a draft token, instead of the measured.", min=0.0, max=1.0),
    ] = None,
    draft_ms: Annotated[
        float | None,
        typer.Option(help="Time of a draft token on the robot [ms], if not this one.", min=1e-3),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Questions to measure with, one a line.", exists=True, dir_okay=False),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Check two models by their files: do they fit, what memory do they need, how do they run?

    Exits with 0 if they fit, 1 if not. With --measure, loads both and predicts which mode of
    decoding pays over a link.
    """
    from collab_llm_nodes.models.loading import ModelConfig, TargetConfig
    from collab_llm_nodes.models.threads import set_threads
    from collab_llm_nodes.protocols.edge_cloud.pair import check_pair
    from collab_llm_nodes.protocols.edge_cloud.pair_timing import (
        QUESTIONS,
        Link,
        MeasureConfig,
        assume,
        load_pair,
        time_pair,
    )

    models = (
        TargetConfig(target, dtype, device, quantization, exits=exits),
        ModelConfig(draft, draft_dtype, draft_device, draft_quantization),
    )
    link = Link(rtt_ms, up_mbit, down_mbit)
    config = MeasureConfig(gamma, _questions(prompts, QUESTIONS))
    report = check_pair(*models)
    _print_sides(report)
    results: dict[str, Any] = {}
    if measure and report.fits:
        set_threads(*models)
        try:
            measured = time_pair(*load_pair(report), config)
            results = _print_times(assume(measured, acceptance=acceptance, draft_ms=draft_ms), link)
        except CollabError as error:
            report = report.refused(error)
    _print_verdict(report)
    write_json(json_file, {**report.as_json(), **results})
    raise typer.Exit(0 if report.fits else 1)


def _questions(file: Path | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Return the lines of ``file``.

    Raises:
        ConfigError: it cannot be read, or holds none.
    """
    if file is None:
        return default
    with translate_errors(
        ConfigError, f"cannot read {file}", field="--prompts", remedy="give a text file in UTF-8"
    ):
        lines = file.read_text(encoding="utf-8").splitlines()
    questions = tuple(line.strip() for line in lines if line.strip())
    if not questions:
        raise ConfigError(f"{file} holds no question", field="--prompts", remedy="one a line")
    return questions


def _print_sides(report: PairReport) -> None:
    """Print what is known of each model, and the memory that it needs."""
    from rich.table import Table

    sides = {"target": report.target, "draft": report.draft}
    table = Table("", *sides)
    for name, cell in _ROWS.items():
        table.add_row(name, *(str(cell(side) or "-") for side in sides.values()))
    if any(side.model_type for side in sides.values()):
        console.print(table)
    if not any(side.memory for side in sides.values()):
        return
    memory = Table("memory", *(f"{name}: {column}" for name in sides for column in _MEMORY))
    for kind in _TYPES:
        needs = (side.memory.get(kind) for side in sides.values())
        memory.add_row(kind, *(cell for need in needs for cell in _memory(need)))
    console.print(memory)


def _print_verdict(report: PairReport) -> None:
    if (token := report.first_difference) is not None:
        console.print(f"token {token.id}: {token.target!r} (target), {token.draft!r} (draft)")
    for side, found in (("target", report.target), ("draft", report.draft)):
        for note in found.notes:
            console.print(f"{side}: {note}", style="yellow", highlight=False)
    for note in report.notes:
        console.print(note, style="yellow", highlight=False)
    for reason in report.all_reasons:
        where = f"{reason.field}: " if reason.field else ""
        line = f"{reason.code}: {where}{reason.message} ({reason.remedy})"
        console.print(line, style="red", highlight=False)
    console.print("they fit" if report.fits else "they do not fit", style="bold")


def _print_times(measured: Measurement, link: Link) -> dict[str, Any]:
    """Print what was measured and what follows for ``link``; return both for the JSON."""
    from rich.table import Table

    from collab_llm_nodes.protocols.edge_cloud.pair_timing import fastest, predict

    figures, opening_s = measured.figures(), measured.opening_s(link)
    predictions = predict(measured, link)
    best = fastest(predictions)
    times = Table("measured", "")
    for name, text in _FIGURES.items():
        times.add_row(text.format(**figures), f"{figures[name]:.3g}")
    times.add_row("until it is read, sent over the link [ms]", f"{1e3 * opening_s:.3g}")
    modes = Table("over the link", "tokens per pass", "ms per token", "times the cloud alone")
    for each in predictions:
        modes.add_row(each.name, f"{each.tau:.2f}", f"{each.token_ms:.1f}", f"{each.speedup:.2f}")
    console.print(times, modes, _advice(best, predictions))
    return {
        "measured": figures,
        "link": asdict(link),
        "opening_ms": 1e3 * opening_s,
        "modes": [asdict(each) for each in predictions],
        "fastest": best.name,
    }


def _advice(best: Prediction, predictions: Sequence[Prediction]) -> str:
    alone, *others = predictions
    if best is not alone:
        return f"{best.name} pays: {best.speedup:.2f} times as fast as the cloud alone"
    most = max(each.speedup for each in others)
    return f"the cloud alone pays (ar): with drafts it is {most:.2f} times as fast"


_FIGURES = {
    "t_p_ms": "draft: one token, T_p [ms]",
    "step_ms": "draft: a step for several outcomes [ms]",
    "t_q1_ms": "target: one token, T_q(1) [ms]",
    "t_q_ms": "target: a draft of {gamma}, T_q [ms]",
    "tau": "tokens per pass with drafts of {gamma}",
    "unexpected": "share of verdicts that nothing suggested",
    "by_exit": "share that only an early exit suggested",
    "target_prefill_ms": "target: reading {target_prompt_tokens} tokens of a question [ms]",
    "draft_prefill_ms": "draft: reading {draft_prompt_tokens} of them [ms]",
}


def _vocabulary(side: Inspection) -> str | None:
    found = side.vocabulary
    if found is None:
        return None
    return f"{found.tokens} tokens in {found.rows} rows, {found.hash[:12]}"


def _pictures(side: Inspection) -> str | None:
    if side.sees is None:
        return None
    if not side.sees:
        return "reads text only"
    return f"{side.picture_tokens or '?'} tokens for 640 x 480"


def _backend(side: Inspection) -> str | None:
    found = side.backend
    if found is None:
        return None
    can = {
        "many sessions in a pass": found.batches,
        "trees": found.trees,
        "stages": found.stages,
    }
    lacks = [name for name, able in can.items() if not able]
    return f"{found.name}; without {', '.join(lacks)}" if lacks else found.name


def _exits(side: Inspection) -> str:
    return (
        "none" if side.exits is None else f"after layers {', '.join(map(str, side.exits.layers))}"
    )


def _stored(side: Inspection) -> str:
    from collab_llm_nodes.models.footprint import format_bytes

    size = format_bytes(side.stored) if side.stored else "not here"
    return f"{size}, quantised by {side.quantised}" if side.quantised else size


_ROWS: dict[str, Callable[[Inspection], object]] = {
    "model": lambda side: side.config.path,
    "type": lambda side: side.model_type,
    "parameters": lambda side: side.parameters and f"{side.parameters / 1e6:,.1f} million",
    "layers": lambda side: side.layers,
    "context": lambda side: side.context and f"{side.context} tokens",
    "vocabulary": _vocabulary,
    "chat template": lambda side: side.chat and "renders a question",
    "pictures": _pictures,
    "backend": _backend,
    "early exits": _exits,
    "weight files": _stored,
}
_MEMORY = ("weights", "1,000 tokens", "largest pass")
_TYPES = ("float32", "bfloat16", "float16", "int8", "int4")


def _memory(need: Memory | None) -> list[str]:
    """Return the cells of one side in one type."""
    from collab_llm_nodes.models.footprint import format_bytes

    if need is None:
        return ["-"] * len(_MEMORY)
    weights = "as stored" if need.weights is None else format_bytes(need.weights)
    return [weights, format_bytes(need.kv_per_1000), format_bytes(need.largest_pass)]
