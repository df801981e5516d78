"""The plots, in the manner of paper 000's figures 3 to 8."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from collab_llm_lab.bench.rendering import Draw, draw_bars, draw_panels, label_axes

Results = Mapping[str, Any]


def plot_all(results: Results, file: Path) -> None:
    """Draw a panel for each part and each sweep that ``results`` holds."""
    panels: dict[str, Draw] = {}
    if results.get("reality"):
        panels["real documents"] = partial(_reality, rows=results["reality"])
    if "protocols" in results:
        panels["cost and accuracy"] = partial(_cost, results=results)
        panels["classes of questions"] = partial(_classes, results=results)
    if "contexts" in results:
        panels["length of the log"] = partial(_lengths, results=results)
    for name, shares in results.get("requests", {}).items():
        panels[f"requests: {name.replace('_', ' ')}"] = partial(_shares, shares=shares)
    if "workers" in results:
        panels["size of the worker"] = partial(_workers, rows=results["workers"])
    for name, rows in results.get("sweeps", {}).items():
        panels[name.replace("_", " ")] = partial(_sweep, rows=rows)
    draw_panels(panels, file, columns=4, size=(4, 3.6))


def _reality(axis: Any, rows: Mapping[str, Any]) -> None:
    by_worker = {name: row["accuracy_by_kind"] for name, row in rows.items()}
    kinds = sorted({kind for shares in by_worker.values() for kind in shares})
    draw_bars(
        axis,
        {
            kind.replace("_", " "): {name: own.get(kind, 0.0) for name, own in by_worker.items()}
            for kind in kinds
        },
    )
    axis.tick_params(axis="x", labelsize=7, rotation=30)
    label_axes(axis, y="right answers")


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
    label_axes(axis, "US dollars per question", "accuracy")


def _lengths(axis: Any, results: Results) -> None:
    lengths = {int(length): rows for length, rows in results["contexts"].items()}
    for name in ("remote_only", "minion", "minions"):
        read = [rows[name]["remote_prefill_tokens"] for rows in lengths.values()]
        axis.plot([*lengths], read, "o-", label=name.replace("_", " "))
    axis.set_xscale("log")
    axis.set_yscale("log")
    label_axes(axis, "tokens", "tokens read by the remote")


def _classes(axis: Any, results: Results) -> None:
    modes = ("local_only", "minion", "minions", "remote_only")
    by_mode = {mode: results["protocols"][mode]["accuracy_by_class"] for mode in modes}
    draw_bars(
        axis,
        {group: {mode: by_mode[mode][group] for mode in modes} for group in by_mode["minions"]},
    )
    axis.tick_params(axis="x", labelsize=7, rotation=30)
    label_axes(axis, y="accuracy")


def _workers(axis: Any, rows: Mapping[str, Mapping[str, Any]]) -> None:
    for name, row in rows.items():
        axis.plot(row["weights_bytes"] / 1e6, row["accuracy"], "o", label=name)
    axis.set_ylim(0, 1.05)
    label_axes(axis, "weights [MB]", "accuracy of MinionS")


def _shares(axis: Any, shares: Mapping[str, float]) -> None:
    axis.plot([*shares], [*shares.values()], "o-")
    axis.set_ylim(0, 1.05)
    label_axes(axis, y="right answers")


def _sweep(axis: Any, rows: Mapping[str, Mapping[str, Any]]) -> None:
    axis.plot([*rows], [row["accuracy"] for row in rows.values()], "o-", color="C0")
    axis.set_ylim(0, 1.05)
    read = axis.twinx()
    read.plot([*rows], [row["remote_prefill_tokens"] for row in rows.values()], "s--", color="C1")
    read.set_ylabel("tokens read by the remote (dashed)", fontsize=7)
    label_axes(axis, y="accuracy")
