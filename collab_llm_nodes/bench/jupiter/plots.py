"""The plots of the planner and of emulated clusters, in the order of paper 004's figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from collab_llm_nodes.bench.harness import save_plot, subplots
from collab_llm_nodes.bench.jupiter.emulated import ANSWER, PROMPT, SPEEDS
from collab_llm_nodes.protocols.jupiter.gantt import draw_lanes

SYSTEMS = (
    "sp",
    "tp",
    "detransformer",
    "galaxy",
    "edgeshard",
    "pipeline",
    "equal_split",
    "jupiter",
)
Results = Mapping[str, Any]


def plot_emulated(results: Results, file: Path) -> None:
    """Draw Figures 7 and 10 to 12 with emulated numbers, the sweeps and a timeline."""
    panels: dict[str, Callable[[Any, Results], None]] = {
        "Figure 7: what planning gives, emulated": _ablation,
        "a plan's timeline (env_b, 100 Mbit/s)": _timeline,
        "b and k swept (env_a, 100 Mbit/s), emulated": _sweep,
        "Figure 10: env_a, prefill, emulated": _phase("env_a", "prefill_s", 1e3 / PROMPT),
        "Figure 10: env_a, decoding, emulated": _phase("env_a", "decode_ms", 1.0),
        "points and passes (env_a, 100 Mbit/s), emulated": _points,
        "Figure 11: env_b, prefill, emulated": _phase("env_b", "prefill_s", 1e3 / PROMPT),
        "Figure 11: env_b, decoding, emulated": _phase("env_b", "decode_ms", 1.0),
        "Figure 12: devices of env_a, 100 Mbit/s, emulated": _devices,
    }
    figure, grid = subplots(3, 3, figsize=(18, 14))
    for axis, (title, draw) in zip(grid.flat, panels.items(), strict=True):
        axis.set_title(title, fontsize=10)
        draw(axis, results)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize=7)
    save_plot(figure, file)


def _ablation(axis: Any, results: Results) -> None:
    rows = {
        f"{cluster}, {prompt}": row
        for cluster, by_prompt in results["ablation"].items()
        for prompt, row in by_prompt.items()
    }
    names = list(next(iter(rows.values())))
    for i, name in enumerate(names):
        heights = [row["one_device_at_a_time"] / row[name] for row in rows.values()]
        places = [j + i / (len(names) + 1) for j in range(len(rows))]
        axis.bar(places, heights, 1 / (len(names) + 1), label=name.replace("_", " "))
    axis.set_xticks([j + 0.35 for j in range(len(rows))], list(rows), fontsize=8)
    axis.set_ylabel("times as fast as one device at a time", fontsize=8)


def _timeline(axis: Any, results: Results) -> None:
    draw_lanes(axis, results["timeline"])


def _sweep(axis: Any, results: Results) -> None:
    for prompt, by in results["sweep"].items():
        for kind, style in (("b", "o-"), ("k", "s--")):
            seconds = {int(n): s for n, s in by[kind].items()}
            best = min(seconds.values())
            label = f"{kind}, {prompt} tokens"
            axis.plot([*seconds], [s / best for s in seconds.values()], style, label=label)
    axis.set_xscale("log", base=2)
    axis.set_ylabel("prefill, over the best", fontsize=8)


def _phase(cluster: str, key: str, scale: float) -> Callable[[Any, Results], None]:
    def draw(axis: Any, results: Results) -> None:
        for i, name in enumerate(SYSTEMS):
            rows = [results["emulated"][cluster][str(mbps)][name] for mbps in SPEEDS]
            places = [j + i / (len(SYSTEMS) + 1) for j in range(len(SPEEDS))]
            axis.bar(
                places,
                [row.get(key, 0.0) * scale for row in rows],
                1 / (len(SYSTEMS) + 1),
                label=name,
            )
            for place, row in zip(places, rows, strict=True):
                if key not in row:
                    axis.text(place, 0.0, "x", color=f"C{i}", ha="center")
        axis.set_xticks([j + 0.4 for j in range(len(SPEEDS))], [f"{m} Mbit/s" for m in SPEEDS])
        axis.set_ylabel("ms per token (x: out of memory)", fontsize=8)

    return draw


def _points(axis: Any, results: Results) -> None:
    for key in next(iter(results["points"].values())):
        row = {int(n): by[key] for n, by in results["points"].items()}
        axis.plot([*row], [*row.values()], "o-", label=key.removesuffix("_ms").replace("_", " "))
    axis.set_xscale("log", base=2)
    axis.set_xlabel("points", fontsize=8)
    axis.set_ylabel("ms per token", fontsize=8)


def _devices(axis: Any, results: Results) -> None:
    speed = str(SPEEDS[0])
    for suffix, style in (("", "o-"), ("_13b", "s--")):
        for i, name in enumerate(SYSTEMS):
            if suffix and name in ("pipeline", "equal_split"):
                continue
            names = [f"env_a{suffix}_{n}" for n in (1, 2, 3)] + [f"env_a{suffix}"]
            rows = [results["emulated"][cluster][speed][name] for cluster in names]
            found = {n: row["total_s"] for n, row in enumerate(rows, 1) if "total_s" in row}
            axis.plot([*found], [*found.values()], style, color=f"C{i}", label=f"{name}{suffix}")
    axis.set_yscale("log")
    axis.set_xticks([1, 2, 3, 4])
    axis.set_ylabel(f"{PROMPT} tokens in, {ANSWER} out [s]", fontsize=8)
