"""The plots: emulated clusters in the order of paper 004's figures, and the real runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from collab_llm_lab.bench.harness import save_plot, subplots
from collab_llm_lab.bench.jupiter.emulated import ANSWER, PROMPT, SPEEDS
from collab_llm_nodes.protocols.jupiter.gantt import draw_rows

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


def plot_all(results: Results, file: Path) -> None:
    """Draw what ``results`` holds.

    Emulated clusters go to ``file``, real runs to one beside it with ``_real`` in its name.
    """
    if "emulated" in results:
        plot_emulated(results, file)
    plot_real(results, file.with_stem(f"{file.stem}_real"))


def plot_emulated(results: Results, file: Path) -> None:
    """Draw Figures 7, 8 and 10 to 12 with emulated numbers, the sweeps and a timeline."""
    panels: dict[str, Callable[[Any, Results], None]] = {
        "Figure 7: what planning gives, emulated": _ablation,
        "a plan's timeline (env_b, 100 Mbit/s)": _timeline,
        "b and k swept (env_a, 100 Mbit/s), emulated": _sweep,
        "Figure 8: passes with drafts, one lane (env_a, 100 Mbit/s), emulated": _passes("sd"),
        "the same, the points of an outline in lanes, emulated": _passes("both"),
        "Figure 10: env_a, prefill, emulated": _phase("env_a", "prefill_s", 1e3 / PROMPT),
        "Figure 10: env_a, decoding, emulated": _phase("env_a", "decode_ms", 1.0),
        "points and passes (env_a, 100 Mbit/s), emulated": _points,
        "Figure 11: env_b, prefill, emulated": _phase("env_b", "prefill_s", 1e3 / PROMPT),
        "Figure 11: env_b, decoding, emulated": _phase("env_b", "decode_ms", 1.0),
        "Figure 12: devices of env_a, 100 Mbit/s, emulated": _devices,
    }
    _draw(panels, results, 3, 4, file)


def plot_real(results: Results, file: Path) -> None:
    """Draw the parts with real workers that have been run: prefill, Table V, Table VII."""
    real = results.get("real", {})
    prefill = {name: row for name, row in real.items() if name.startswith("prefill_")}
    results = {**results, "prefill": prefill}
    every: dict[str, tuple[str, Callable[[Any, Results], None]]] = {
        "prefill": ("prefill over two workers, a core each", _prefill),
        "decode": ("Table V: decoding over four slowed-down stages", _decode),
        "quality": ("Table VII: quality by the grammar's judgement", _quality),
    }
    panels = dict(panel for name, panel in every.items() if results.get(name))
    if panels:
        _draw(panels, results, 1, len(panels), file)


def _draw(
    panels: Mapping[str, Callable[[Any, Results], None]],
    results: Results,
    rows: int,
    columns: int,
    file: Path,
) -> None:
    figure, grid = subplots(rows, columns, figsize=(6 * columns, 14 / 3 * rows), squeeze=False)
    for axis, (title, draw) in zip(grid.flat, panels.items(), strict=False):
        axis.set_title(title, fontsize=10)
        draw(axis, results)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize=7)
    for axis in grid.flat[len(panels) :]:
        axis.set_axis_off()
    save_plot(figure, file)


def _bars(axis: Any, rows: Mapping[str, Mapping[str, float]]) -> None:
    """Draw a group of bars for each row, a colour for each name in it."""
    names = list(next(iter(rows.values())))
    for i, name in enumerate(names):
        places = [j + i / (len(names) + 1) for j in range(len(rows))]
        heights = [row[name] for row in rows.values()]
        axis.bar(places, heights, 1 / (len(names) + 1), label=name.replace("_", " "))
    middle = (len(names) - 1) / (len(names) + 1) / 2
    axis.set_xticks([j + middle for j in range(len(rows))], list(rows), fontsize=8)


def _prefill(axis: Any, results: Results) -> None:
    rows = {
        name.removeprefix("prefill_") + " tokens": {
            key.removesuffix("_s"): row["single_s"] / row[key]
            for key in ("single_s", "two_threads_s", "pipeline_s", "jupiter_s", "ceiling_s")
        }
        for name, row in results["prefill"].items()
    }
    _bars(axis, rows)
    axis.set_ylabel("times as fast as one core", fontsize=8)


def _decode(axis: Any, results: Results) -> None:
    decode = results["decode"]
    _bars(axis, {name: {"speed": speed} for name, speed in decode["speedup"].items()})
    axis.set_ylabel("tokens per second over naive", fontsize=8)


def _quality(axis: Any, results: Results) -> None:
    rows = {
        category: {way: row[way]["score"] for way in ("naive", "outline")}
        | {"routed": row["router"]["score"]}
        for category, row in results["quality"].items()
    }
    _bars(axis, rows)
    axis.set_ylabel("coverage x sound sentences", fontsize=8)


def _ablation(axis: Any, results: Results) -> None:
    rows = {
        f"{cluster}, {prompt}": row
        for cluster, by_prompt in results["ablation"].items()
        for prompt, row in by_prompt.items()
    }
    speeds = {
        title: {name: row["one_device_at_a_time"] / seconds for name, seconds in row.items()}
        for title, row in rows.items()
    }
    _bars(axis, speeds)
    axis.set_ylabel("times as fast as one device at a time", fontsize=8)


def _timeline(axis: Any, results: Results) -> None:
    draw_rows(axis, results["timeline"])


def _passes(way: str) -> Callable[[Any, Results], None]:
    def draw(axis: Any, results: Results) -> None:
        draw_rows(axis, results["passes"][way])

    return draw


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
        by_speed = results["emulated"][cluster]
        for i, name in enumerate(SYSTEMS):
            rows = [by_system[name] for by_system in by_speed.values()]
            places = [j + i / (len(SYSTEMS) + 1) for j in range(len(rows))]
            axis.bar(
                places,
                [row.get(key, 0.0) * scale for row in rows],
                1 / (len(SYSTEMS) + 1),
                label=name,
            )
            for place, row in zip(places, rows, strict=True):
                if key not in row:
                    axis.text(place, 0.0, "x", color=f"C{i}", ha="center")
        axis.set_xticks([j + 0.4 for j in range(len(by_speed))], [f"{m} Mbit/s" for m in by_speed])
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
            clusters = [results["emulated"].get(cluster, {}) for cluster in names]
            rows = [by_speed.get(speed, {}).get(name, {}) for by_speed in clusters]
            found = {n: row["total_s"] for n, row in enumerate(rows, 1) if "total_s" in row}
            if not found:
                continue
            axis.plot([*found], [*found.values()], style, color=f"C{i}", label=f"{name}{suffix}")
    axis.set_yscale("log")
    axis.set_xticks([1, 2, 3, 4])
    axis.set_ylabel(f"{PROMPT} tokens in, {ANSWER} out [s]", fontsize=8)
