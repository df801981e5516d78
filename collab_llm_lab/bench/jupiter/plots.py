"""The plots: emulated clusters in the order of paper 004's figures, and the real runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from collab_llm_lab.bench.jupiter.emulated import ANSWER, PROMPT, SPEEDS
from collab_llm_lab.bench.rendering import draw_bars, draw_panels, label_axes, panels_of
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
DrawResults = Callable[[Any, Results], None]
SIZE = (6.0, 14 / 3)
"""Width and height of a panel [inches]."""


def plot_all(results: Results, file: Path) -> None:
    """Draw what ``results`` holds.

    Emulated clusters go to ``file``, real runs to one beside it with ``_real`` in its name.
    """
    if "emulated" in results:
        plot_emulated(results, file)
    plot_real(results, file.with_stem(f"{file.stem}_real"))


def plot_emulated(results: Results, file: Path) -> None:
    """Draw Figures 7, 8 and 10 to 12 with emulated numbers, the sweeps and a timeline."""
    panels: dict[str, DrawResults] = {
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
    draw_panels(panels_of(results, panels), file, columns=4, size=SIZE)


def plot_real(results: Results, file: Path) -> None:
    """Draw the parts with real workers that have been run: prefill, Table V, Table VII."""
    panels: dict[str, DrawResults] = {}
    if any(name.startswith("prefill_") for name in results.get("real", {})):
        panels["prefill over two workers, a core each"] = _prefill
    if results.get("decode"):
        panels["Table V: decoding over four slowed-down stages"] = _decode
    if results.get("quality"):
        panels["Table VII: quality by the grammar's judgement"] = _quality
    draw_panels(panels_of(results, panels), file, columns=max(1, len(panels)), size=SIZE)


def _prefill(axis: Any, results: Results) -> None:
    rows = {
        name.removeprefix("prefill_") + " tokens": {
            key.removesuffix("_s"): row["single_s"] / row[key]
            for key in ("single_s", "two_threads_s", "pipeline_s", "jupiter_s", "ceiling_s")
        }
        for name, row in results["real"].items()
        if name.startswith("prefill_")
    }
    draw_bars(axis, rows)
    label_axes(axis, y="times as fast as one core")


def _decode(axis: Any, results: Results) -> None:
    decode = results["decode"]
    draw_bars(axis, {name: {"speed": speed} for name, speed in decode["speedup"].items()})
    label_axes(axis, y="tokens per second over naive")


def _quality(axis: Any, results: Results) -> None:
    rows = {
        category: {mode: row[mode]["score"] for mode in ("naive", "outline")}
        | {"routed": row["router"]["score"]}
        for category, row in results["quality"].items()
    }
    draw_bars(axis, rows)
    label_axes(axis, y="coverage x sound sentences")


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
    draw_bars(axis, speeds)
    label_axes(axis, y="times as fast as one device at a time")


def _timeline(axis: Any, results: Results) -> None:
    draw_rows(axis, results["timeline"])


def _passes(mode: str) -> DrawResults:
    def draw(axis: Any, results: Results) -> None:
        draw_rows(axis, results["passes"][mode])

    return draw


def _sweep(axis: Any, results: Results) -> None:
    for prompt, by in results["sweep"].items():
        for kind, style in (("b", "o-"), ("k", "s--")):
            seconds = {int(n): s for n, s in by[kind].items()}
            best = min(seconds.values())
            label = f"{kind}, {prompt} tokens"
            axis.plot([*seconds], [s / best for s in seconds.values()], style, label=label)
    axis.set_xscale("log", base=2)
    label_axes(axis, y="prefill, over the best")


def _phase(cluster: str, key: str, scale: float) -> DrawResults:
    def draw(axis: Any, results: Results) -> None:
        groups = {
            f"{mbps} Mbit/s": {
                name: rows[name][key] * scale if key in rows[name] else None for name in SYSTEMS
            }
            for mbps, rows in results["emulated"][cluster].items()
        }
        draw_bars(axis, groups)
        label_axes(axis, y="ms per token (x: out of memory)")

    return draw


def _points(axis: Any, results: Results) -> None:
    for key in next(iter(results["points"].values())):
        row = {int(n): by[key] for n, by in results["points"].items()}
        axis.plot([*row], [*row.values()], "o-", label=key.removesuffix("_ms").replace("_", " "))
    axis.set_xscale("log", base=2)
    label_axes(axis, "points", "ms per token")


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
    label_axes(axis, y=f"{PROMPT} tokens in, {ANSWER} out [s]")
