"""The whole benchmark: its parts in order, and their tables."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from collab_llm_lab.bench.harness import Keep, Log, beside, check_parts, run_parts
from collab_llm_lab.bench.jupiter import PARTS, Sizes
from collab_llm_lab.bench.jupiter.cases import run_planner
from collab_llm_lab.bench.jupiter.decoding import run_decode
from collab_llm_lab.bench.jupiter.emulated import (
    ACCEPTED,
    ANSWER,
    OUTLINE,
    PAPER_TOTALS,
    POINTS,
    PROMPT,
    SPEEDS,
    run_emulated,
)
from collab_llm_lab.bench.jupiter.material import write_wide_model
from collab_llm_lab.bench.jupiter.plots import SYSTEMS
from collab_llm_lab.bench.jupiter.quality import run_quality
from collab_llm_lab.bench.jupiter.questions import run_router
from collab_llm_lab.bench.jupiter.real import run_death, run_prefill
from collab_llm_lab.bench.rendering import show_lines, show_rows, show_table

LARGEST_ERROR = 0.1
"""Largest error of a prediction, as a share of the emulated time."""
SLOWED = 4.0
"""EMULATION: four workers are so many times slower, so that two cores have room for all."""
_SHARED = ("real",)
"""Results that two parts fill: ``prefill``, and ``decode`` with its mismatches."""


def run_jupiter(
    *,
    parts: Sequence[str],
    sizes: Sizes,
    model: str,
    seed: int,
    console: Console,
    keep: Keep,
) -> dict[str, Any]:
    """Run the parts of the benchmark that are named; one that fails does not end the others.

    Args:
        parts: of ``PARTS``.
        model: of the text domain, with Medusa heads, for ``decode``, ``death`` and ``quality``.
        keep: is given the results so far after each part.

    Returns:
        ``planner``: see ``run_planner``. ``router``: see ``run_router``. What ``run_emulated``
        returns, with the paper's tables IV and II as ``paper_totals`` and ``paper_ratios``.
        ``real``: see ``run_real_prefill``, with the ``mismatches`` of decoding; ``memory``; what
        ``run_decode``, ``run_death`` and ``run_quality`` return. ``seconds`` that each part took,
        and ``failed``: the errors of parts, by name. ``ok``: see ``all_right``.

    Raises:
        ConfigError: a part is unknown.
    """
    check_parts(parts, PARTS)

    def log(text: str) -> None:
        console.print(text, highlight=False)

    run: Mapping[str, Callable[[], dict[str, Any]]] = {
        "planner": lambda: {"planner": run_planner(sizes.cases, sizes.large, seed)},
        "router": lambda: {"router": run_router(seed)},
        "emulated": lambda: run_emulated(seed, log, brief=sizes.brief),
        "prefill": lambda: run_real_prefill(sizes, log),
        "decode": lambda: run_decode(model, sizes.questions, log, seed=seed),
        "death": lambda: run_death(model, max(1, sizes.repeats // 2), log),
        "quality": lambda: run_quality(model, sizes.samples, seed, log),
    }
    results: dict[str, Any] = {}

    def judged(found: dict[str, Any]) -> None:
        found["ok"] = all_right(found)
        keep(found)

    wanted = {name: run[name] for name in PARTS if name in parts}
    run_parts(wanted.items(), results, console, judged)
    _show(results, console)
    return results


def run_real_prefill(sizes: Sizes, log: Log) -> dict[str, Any]:
    """Run the prefill over two workers with a core each, then over four slowed-down ones.

    Returns:
        ``real`` as ``run_prefill`` returns it, with the second run as ``real.slowed``, and
        ``memory``: the largest worker's tensors by number of workers.
    """
    tokens = sizes.tokens
    with tempfile.TemporaryDirectory(prefix="collab_llm_") as folder:
        wide = str(write_wide_model(Path(folder), max(tokens) + 8))
        real = run_prefill(wide, tokens, sizes.repeats, log)
        log(f"four workers, EMULATED {SLOWED:g} times slower")
        slowed = run_prefill(wide, tokens[:1], 1, log, stages=4, slowdown=SLOWED)
    memory = real.pop("memory") | slowed.pop("memory")
    return {"real": {**real, "slowed": slowed}, "memory": memory}


def all_right(results: Mapping[str, Any]) -> bool:
    """Return True if every part that was run came to its end and found nothing wrong.

    The planner equals brute force in all cases, no prediction is wrong by more than
    ``LARGEST_ERROR``, and no answer over workers differs.
    """
    planner = results.get("planner", {"cases": 0, "equal_to_brute_force": 0})
    return bool(
        not results["failed"]
        and planner["equal_to_brute_force"] == planner["cases"]
        and results.get("goals", {}).get("largest_error", 0.0) <= LARGEST_ERROR
        and not results.get("real", {}).get("mismatches", 0)
        and all(death["identical"] for death in results.get("worker_death", {}).values())
    )


def join(earlier: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``earlier`` with the parts of ``found`` in place of its own."""
    return beside(earlier, found, all_right, shared=_SHARED)


def _show(results: Mapping[str, Any], console: Console) -> None:
    """Print everything that was found."""
    if "planner" in results:
        show_lines(console, _planner(results["planner"]))
    if "router" in results:
        show_lines(console, [_router(results["router"])])
    if "emulated" in results:
        _show_emulated(results, console)
    _show_real(results, console)


def _planner(found: Mapping[str, Any]) -> list[str]:
    low, high = found["latency_error"]
    return [
        f"planner: {found['equal_to_brute_force']} of {found['cases']} small cases equal to brute"
        " force (Eq. 1, 2, 4)",
        f"makespan over the least of all: paper's plan at most {found['makespan_gap']:+.1%}, mean"
        f" {found['makespan_gap_mean']:+.1%}; ours {found['plan_gap']:+.1%},"
        f" {found['plan_gap_mean']:+.1%}",
        f"Eq. 4 over the makespan: {low:+.1%} to {high:+.1%}",
        *(f"{name}: {value:.1f}" for name, value in found.items() if name.startswith("seconds_")),
    ]


def _router(found: Mapping[str, Any]) -> str:
    rows = (
        f"{name} {row['declined']} of {row['questions']}"
        for name, row in found.items()
        if name != "error"
    )
    return f"router, outlines declined: {', '.join(rows)}; wrong {found['error']:.1%}"


def _show_emulated(found: Mapping[str, Any], console: Console) -> None:
    for cluster, by_speed in found["emulated"].items():
        rows = (
            (name, *(_cell(cluster, mbps, name, own[name]) for mbps, own in by_speed.items()))
            for name in SYSTEMS
        )
        title = (
            f"{cluster}, EMULATED: prefill in s, decoding in ms per token;"
            " total in s (predicted); the paper's total"
        )
        show_table(console, title, ("system", *(f"{mbps} Mbit/s" for mbps in by_speed)), rows)
    goals = found["goals"]
    show_lines(
        console,
        (
            f"EMULATED. {PROMPT} tokens in, {ANSWER} out; ASSUMED: {ACCEPTED:g} tokens a pass with"
            f" drafts, {POINTS} points of an outline of {OUTLINE} tokens.",
            "prefill over the plain pipeline, env_a, 100 Mbit/s: "
            + ", ".join(f"{n} tokens {x:.2f}x" for n, x in goals["prefill_over_pipeline"].items()),
            f"end to end over the plain pipeline {goals['end_to_end_over_pipeline']:.2f}x, over"
            f" EdgeShard {goals['end_to_end_over_edgeshard']:.2f}x (paper 2.6x)",
            "planned over equal split, env_b: "
            + ", ".join(
                f"{n} {x:.2f}x" for n, x in goals["heterogeneous_over_equal_split"].items()
            ),
            f"largest error of a prediction: {goals['largest_error']:.1%}"
            f" ({goals['largest_error_of']}), of Jupiter's {goals['largest_error_of_jupiter']:.1%}",
            "decoding, env_a, 100 Mbit/s, ms per token: "
            + ", ".join(f"{name} {ms:.1f}" for name, ms in found["decoding"].items()),
        ),
    )


def _cell(cluster: str, mbps: str, name: str, row: Mapping[str, Any]) -> str:
    printed = PAPER_TOTALS.get(cluster, {}).get(name)
    paper = printed[SPEEDS.index(int(mbps))] if printed else None
    beside = f"; {paper:g}" if paper else "; out of memory" if printed else ""
    if "total_s" not in row:
        return f"out of memory{beside}"
    return (
        f"{row['prefill_s']:.2f}, {row['decode_ms']:.0f};"
        f" {row['total_s']:.1f} ({row['predicted_s']:.1f}){beside}"
    )


def _show_real(found: Mapping[str, Any], console: Console) -> None:
    """Print what was measured with workers on this machine."""
    real = found.get("real", {})
    slowed = real.get("slowed", {})
    show_lines(
        console,
        (
            *_prefills(real),
            *(
                f"{slowed['stages']} workers, EMULATED {slowed['slowdown']:g} times slower, {line}"
                for line in _prefills(slowed)
            ),
            *(
                f"worker death, {kind}: found after {row['detected_s']:.2f} s, whole again after"
                f" {row['restored_s']:.2f} s,"
                f" {'identical' if row['identical'] else 'ANOTHER ANSWER'}"
                for kind, row in found.get("worker_death", {}).items()
            ),
            *(
                f"largest worker's tensors, {count} workers:"
                f" {row['largest_worker_tensor_mb']:.1f} MB"
                for count, row in found.get("memory", {}).items()
            ),
        ),
    )
    if "decode" in found:
        _show_decoding(found, console)
    if "quality" in found:
        _show_quality(found, console)


def _prefills(real: Mapping[str, Any]) -> list[str]:
    return [
        f"prefill of {name.removeprefix('prefill_')} tokens: {row['speedup']:.2f} times one core,"
        f" {row['of_ceiling']:.2f} of the ceiling, {row['crowded_s'] / row['jupiter_s']:.2f} of it"
        " with the times of stages that compute side by side"
        for name, row in real.items()
        if name.startswith("prefill_")
    ]


def _show_decoding(found: Mapping[str, Any], console: Console) -> None:
    decode = found["decode"]
    rows = {
        mode: {
            "speedup": speedup,
            "accepted": "" if (a := decode[mode]["acceptance"]) is None else f"{a:.3f}",
            **decode[mode],
        }
        for mode, speedup in decode["speedup"].items()
    }
    columns = {
        "tokens/s": "{tokens_per_s:.1f}",
        "over naive": "{speedup:.2f}",
        "acceptance": "{accepted}",
        "tokens of an answer": "{answer_tokens:.0f}",
    }
    title = (
        f"decoding over {found['stages']} stages, EMULATED {found['slowdown']:g}"
        " times slower; supposed: with drafts that are right that often"
    )
    show_rows(console, title, ["mode"], rows, columns)


def _show_quality(found: Mapping[str, Any], console: Console) -> None:
    title = (
        "quality: right / sound sentences / coverage; the router's errors"
        f" {found['quality_router_error']:.1%}"
    )
    columns = {
        "naive": "{naive[right]:.2f} / {naive[grammar]:.2f} / {naive[coverage]:.2f}",
        "outline": "{outline[right]:.2f} / {outline[grammar]:.2f} / {outline[coverage]:.2f}",
        "declined": "{router[declined]} of {questions}",
        "errors": "{router[errors]}",
    }
    show_rows(console, title, ["category"], found["quality"], columns)
