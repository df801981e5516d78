"""The plot of ``bench pair``: drafts, exits and heads before and after their training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from collab_llm_lab.bench.rendering import Draw, draw_bars, draw_panels, label_axes

Figures = Mapping[str, Any]
_TAU = ("tau_before", "tau_after", "guided_tau_alone", "guided_tau")
_AGREEMENT = {"agreement_before": ":", "agreement_fitted": "--", "agreement": "-"}


def plot_pairs(pairs: Mapping[str, Figures], file: Path | None) -> None:
    """Draw a panel for the drafts of all pairs, and one for the exits of each pair."""
    drafts = {name: {key: f[key] for key in _TAU} for name, f in pairs.items() if _TAU[0] in f}
    exits = {name: f["exits"]["candidates"] for name, f in pairs.items() if "exits" in f}
    panels: dict[str, Draw] = {}
    if drafts:
        panels["drafts: tokens per pass of the target"] = partial(_taus, drafts)
    panels |= {f"{name}: early exits": _exits(candidates) for name, candidates in exits.items()}
    draw_panels(panels, file, columns=max(1, len(panels)), size=(4.2, 3.2))


def _taus(drafts: Mapping[str, Mapping[str, float]], axis: Any) -> None:
    draw_bars(axis, drafts)
    axis.set_ylim(top=1.5 * max(max(taus.values()) for taus in drafts.values()))  # for the legend


def _exits(candidates: Mapping[str, Mapping[str, float]]) -> Draw:
    """Return how to draw the candidates' agreement with their target by layer."""

    def draw(axis: Any) -> None:
        layers = [int(layer) for layer in candidates]
        for name, style in _AGREEMENT.items():
            shares = [figures[name] for figures in candidates.values()]
            axis.plot(layers, shares, f"o{style}", label=name.replace("_", " "), markersize=4)
        axis.set_ylim(0, 1)
        label_axes(axis, "after layer", "share of tokens as the target says")

    return draw
