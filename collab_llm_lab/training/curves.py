"""Learning curves as files: one JSON, one picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collab_llm_lab.training.loop import CURVE

Curve = Sequence[Mapping[str, float]]


def read_curve(run: Path) -> list[dict[str, float]]:
    """Return the curve of a run folder; empty if there is none."""
    file = run / CURVE
    found: list[dict[str, float]] = json.loads(file.read_text("utf-8")) if file.exists() else []
    return found


@dataclass(frozen=True)
class Axes:
    """Content of a picture of curves.

    Attributes:
        panels: title of the panel for each figure of the points.
        x: figure of the horizontal axis, divided by ``x_unit``.
    """

    panels: Mapping[str, str]
    x: str
    x_unit: float
    x_label: str
    y_label: str
    y_limits: tuple[float, float] | None = None


def write_curves(
    file: Path, results: Mapping[str, Any], curves: Mapping[str, Curve], axes: Axes
) -> None:
    """Write ``results`` to ``file``, and ``curves`` to a picture beside it.

    Args:
        file: its suffix is .json; the picture's is .png. Without matplotlib there is no picture.
        curves: points by label.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(axes.panels), figsize=(12, 3.4), sharey=True)
    for panel, (key, title) in zip(panels, axes.panels.items(), strict=True):
        for label, curve in curves.items():
            points = [(p[axes.x] / axes.x_unit, p[key]) for p in curve if key in p]
            panel.plot([x for x, _ in points], [y for _, y in points], ".-", label=label)
        panel.set_title(title, fontsize="medium")
        panel.set_xlabel(axes.x_label)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(axes.y_label)
    if axes.y_limits:
        panels[0].set_ylim(*axes.y_limits)
    figure.tight_layout()
    lines = panels[0].get_lines()
    if lines:
        figure.legend(handles=lines, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=4)
    figure.savefig(file.with_suffix(".png"), dpi=110, bbox_inches="tight")
    pyplot.close(figure)
