"""``collab-llm bench safety``: how soon the robot stops, and whether it ever moves unasked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from collab_llm_lab.bench.rendering import (
    Draw,
    draw_panels,
    judged,
    label_axes,
    show_lines,
    show_rows,
    show_table,
)
from collab_llm_lab.bench.safety.soak import drive_undisturbed, run_soak
from collab_llm_lab.bench.safety.trials import run_trials
from collab_llm_nodes.ros.domain import isolate_ros

UNDISTURBED_S = 90.0


def run_safety(
    *, trials: int, soak_minutes: float, seed: int, plot: Path | None, console: Console
) -> dict[str, Any]:
    """Stop latencies and what the undisturbed graph costs, unless ``trials`` is 0; then a soak,
    unless ``soak_minutes`` is 0.

    Returns:
        What ``run_trials`` and ``drive_undisturbed`` return, ``soak`` as ``run_soak`` does, ``ok``.

    Raises:
        CollabError: a process ended by itself, or the robot did not move, or did not stop.
    """
    isolate_ros(shared_memory=False)
    results: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "seed": seed}
    if trials:
        results |= run_trials(trials, seed, console)
        results |= drive_undisturbed(UNDISTURBED_S, seed, console)
    if soak_minutes:
        results["soak"] = run_soak(soak_minutes, seed, console)
    in_time = all(row["ok"] for row in results.get("faults", {}).values())
    soaked = "soak" not in results or results["soak"]["ok"]
    results["ok"] = in_time and soaked and not results.get("unintended_motions")
    if trials:
        _print_trials(results, console)
        _plot(results, plot)
    if soak_minutes:
        _print_soak(results["soak"], console)
    return results


def _print_trials(results: Mapping[str, Any], console: Console) -> None:
    limit_s = results["limit_s"]
    rows = (
        (
            name,
            row["trials"],
            f"{1e3 * row['median_s']:.0f}",
            judged(row["max_s"], limit_s, f"{1e3 * row['max_s']:.0f}"),
        )
        for name, row in results["faults"].items()
    )
    title = f"from the fault to zero velocity; limit {1e3 * limit_s:.0f} ms"
    show_table(console, title, ("fault", "trials", "median [ms]", "max [ms]"), rows)
    title = "every node in a process of its own, simulator in real time"
    columns = {"CPU [% of a core]": "{cpu_percent:.1f}", "memory [MB]": "{rss_mb:.0f}"}
    show_rows(console, title, ["process"], results["nodes"], columns)
    age = results["camera_to_action_age"]
    console.print(
        f"from picture to action: median {1e3 * age['median']:.0f} ms,"
        f" 95 % {1e3 * age['p95']:.0f} ms; unintended motions: {results['unintended_motions']}"
    )
    show_lines(console, (f"  {words}" for words in results["unintended"]))


def _print_soak(soak: Mapping[str, Any], console: Console) -> None:
    console.print(
        f"soak of {soak['minutes']:g} min: {soak['instructions']} instructions,"
        f" {sum(soak['faults'].values())} faults, {soak['crashes']} crashes,"
        f" {soak['hangs']} hangs, {soak['leaks']} leaks,"
        f" {soak['unintended_motions']} unintended motions"
    )
    show_lines(console, (f"  {words}" for words in (*soak["crashed"], *soak["unintended"])))


def _plot(results: Mapping[str, Any], file: Path | None) -> None:
    def latencies(axis: Any) -> None:
        faults = results["faults"]
        axis.boxplot(
            [[1e3 * s for s in row["latencies_s"]] for row in faults.values()],
            orientation="horizontal",
            whis=(0, 100),
            tick_labels=list(faults),
        )
        axis.axvline(1e3 * results["limit_s"], linestyle="--", color="grey")
        axis.set_xlim(left=0)
        label_axes(axis, "[ms]; whiskers: all trials; dashed: the limit")

    panels: dict[str, Draw] = {"from the fault to zero velocity": latencies}
    draw_panels(panels, file, columns=1, size=(8, 4))
