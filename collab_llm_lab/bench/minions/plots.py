"""The plots, in the manner of paper 000's figures 3 to 8."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from collab_llm_lab.bench.harness import save_plot, subplots

Results = Mapping[str, Any]
_COLUMNS = 4


def plot_all(results: Results, file: Path) -> None:
    """Draw a panel for each part and each sweep that ``results`` holds."""
    draw: list[Callable[[Any], None]] = []
    if "protocols" in results:
        draw += [partial(_cost, results=results), partial(_classes, results=results)]
    if "contexts" in results:
        draw.append(partial(_lengths, results=results))
    if "requests" in results:
        draw += [
            partial(_shares, name=name, shares=shares)
            for name, shares in results["requests"].items()
        ]
    if "workers" in results:
        draw.append(partial(_workers, rows=results["workers"]))
    draw += [
        partial(_sweep, name=name, rows=rows) for name, rows in results.get("sweeps", {}).items()
    ]
    height = max(1, math.ceil(len(draw) / _COLUMNS))
    figure, grid = subplots(height, _COLUMNS, figsize=(16, 3.6 * height), squeeze=False)
    panels = list(grid.flat)
    for panel, axis in zip(draw, panels, strict=False):
        panel(axis)
    for axis in panels[len(draw) :]:
        axis.set_axis_off()
    save_plot(figure, file)


def _cost(axis: Any, results: Results) -> None:
    for name, row in results["protocols"].items():
        axis.errorbar(
            row["cost_usd"],
            row["accuracy"],
            yerr=[[max(0.0, abs(row["accuracy"] - end))] for end in row["accuracy_interval"]],
            fmt="o",
            label=name.replace("_", " "),
        )
    axis.set_xscale("symlog", linthresh=1e-3)
    axis.legend(fontsize=7)
    _label(axis, "cost and accuracy", "US dollars per question", "accuracy")


def _lengths(axis: Any, results: Results) -> None:
    lengths = {int(length): rows for length, rows in results["contexts"].items()}
    for name in ("remote_only", "minion", "minions"):
        read = [rows[name]["remote_prefill_tokens"] for rows in lengths.values()]
        axis.plot([*lengths], read, "o-", label=name.replace("_", " "))
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.legend(fontsize=7)
    _label(axis, "length of the log", "tokens", "tokens read by the remote")


def _classes(axis: Any, results: Results) -> None:
    methods = ("local_only", "minion", "minions", "remote_only")
    for number, method in enumerate(methods):
        shares = results["protocols"][method]["accuracy_by_class"]
        places = [i + 0.2 * number for i in range(len(shares))]
        axis.bar(places, [*shares.values()], 0.18, label=method.replace("_", " "))
        axis.set_xticks([i + 0.3 for i in range(len(shares))], [*shares], fontsize=7, rotation=30)
    axis.legend(fontsize=7)
    _label(axis, "classes of questions", "", "accuracy")


def _workers(axis: Any, rows: Mapping[str, Mapping[str, Any]]) -> None:
    for name, row in rows.items():
        axis.plot(row["weights_bytes"] / 1e6, row["accuracy"], "o", label=name)
    axis.set_ylim(0, 1.05)
    axis.legend(fontsize=7)
    _label(axis, "size of the worker", "weights [MB]", "accuracy of MinionS")


def _shares(axis: Any, name: str, shares: Mapping[str, float]) -> None:
    axis.plot([*shares], [*shares.values()], "o-")
    axis.set_ylim(0, 1.05)
    _label(axis, f"requests: {name.replace('_', ' ')}", "", "right answers")


def _sweep(axis: Any, name: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    axis.plot([*rows], [row["accuracy"] for row in rows.values()], "o-", color="C0")
    axis.set_ylim(0, 1.05)
    read = axis.twinx()
    read.plot([*rows], [row["remote_prefill_tokens"] for row in rows.values()], "s--", color="C1")
    read.set_ylabel("tokens read by the remote (dashed)", fontsize=7)
    _label(axis, name.replace("_", " "), "", "accuracy")


def _label(axis: Any, title: str, x: str, y: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(x, fontsize=8)
    axis.set_ylabel(y, fontsize=8)
