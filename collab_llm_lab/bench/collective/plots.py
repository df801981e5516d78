"""The plots, in the order of paper 002's figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from collab_llm_lab.bench.collective.measure import (
    ADAPTIVE,
    LADDER,
    PEERS,
    PIPELINE,
    PRINTED_RULE,
)
from collab_llm_lab.bench.rendering import draw_panels, label_axes, panels_of

SYSTEMS = (*PEERS, "autoregressive", "tree", PIPELINE)
Results = Mapping[str, Any]


def plot_all(results: Results, file: Path) -> None:
    """Draw Figures 1 to 3 and 7 to 14 with this machine's numbers, one panel each.

    A panel whose part has failed is left out.
    """
    panels = {title: draw for title, (key, draw) in _PANELS.items() if results[key]}
    draw_panels(panels_of(results, panels), file, columns=3, size=(17 / 3, 4.5))


def _acceptance_by_length(axis: Any, results: Results) -> None:
    styles = ("-", "--", ":")
    for style, (stream, by_draft) in zip(
        styles, results["acceptance_by_length"].items(), strict=True
    ):
        for colour, (draft, row) in enumerate(by_draft.items()):
            places = [int(s) for s in row]
            label = f"{draft.removeprefix('ssm_')} on {stream}"
            axis.plot(places, [*row.values()], style, color=f"C{colour}", label=label)
    axis.set_ylim(0.0, 1.5)  # room for the legend
    axis.legend(fontsize=5, ncols=3, loc="upper center", handlelength=1.5, columnspacing=0.8)
    label_axes(axis, "speculation length", "acceptance")


def _llm_time(axis: Any, results: Results) -> None:
    for batch, row in results["adaptive"].items():
        ms = {int(s): own["llm_ms_per_token"] for s, own in row["by_length"].items()}
        (line,) = axis.plot([*ms], [*ms.values()], "o-", label=f"batch {batch}")
        best = min(ms, key=ms.__getitem__)
        axis.plot(best, ms[best], "*", markersize=14, color=line.get_color())
    label_axes(axis, "speculation length", "target's time per token [ms]")


def _time_lines(axis: Any, results: Results) -> None:
    lanes = []
    for name, lines in results["time_lines"].items():
        for colour, (part, spans) in enumerate(lines.items()):
            lanes.append(f"{name.replace('_', ' ')}:\n{part}")
            bars = [(begin, end - begin) for begin, end in spans]
            axis.broken_barh(bars, (len(lanes) - 1.4, 0.8), color=f"C{colour}", edgecolor="white")
    axis.set_yticks(range(len(lanes)), lanes, fontsize=7)
    axis.invert_yaxis()
    label_axes(axis, "ms", "")


def _pool(axis: Any, results: Results) -> None:
    memory = axis.twinx()
    for colour, (name, row) in enumerate(results["pool"].items()):
        for style, key in (("-", "drafts_waiting"), ("--", "requests_active")):
            label = f"{name}: {key.replace('_', ' ')}"
            axis.step(*zip(*row[key], strict=True), style, color=f"C{colour}", label=label)
        for style, key in ((":", "kv_bytes"), ("-.", "drafts_kv_bytes")):
            times, sizes = zip(*row[key], strict=True)
            memory.plot(times, [n / 1e6 for n in sizes], style, color=f"C{colour}")
    for own in (axis, memory):
        own.set_ylim(0, 1.6 * own.get_ylim()[1])  # room for the legend
    memory.set_ylabel("KV caches [MB]: target's (dotted), drafts' (dash-dotted)", fontsize=8)
    label_axes(axis, "s", "number")


def _systems(key: str, title: str) -> Callable[[Any, Results], None]:
    def draw(axis: Any, results: Results) -> None:
        for name in SYSTEMS:
            row = {int(batch): own[name][key] for batch, own in results["ladder"].items()}
            axis.plot([*row], [*row.values()], "o-", label=name)
        axis.set_yscale("log")
        axis.set_xscale("log", base=2)
        label_axes(axis, "batch", title)

    return draw


def _breakdown(axis: Any, results: Results) -> None:
    batch = _middle(results, "ladder")
    streams = {"mixed": results["ladder"][batch]}
    by_stream = results["ladder_by_stream"].items()
    streams |= {name: own[batch] for name, own in by_stream if batch in own}
    for number, (stream, row) in enumerate(streams.items()):
        base = row["default"]["tokens_per_s"]
        heights = [row[name]["tokens_per_s"] / base for name in LADDER]
        width = 0.8 / len(streams)
        axis.bar([i + number * width for i in range(len(LADDER))], heights, width, label=stream)
    axis.set_xticks(range(len(LADDER)), LADDER, fontsize=8)
    label_axes(axis, f"batch {batch}", "throughput over Default")


def _single_drafts(axis: Any, results: Results) -> None:
    rates = axis.twinx()
    names = [*results["throughput"]["mixed"]]
    for number, name in enumerate(names):
        places = [i + 0.2 * number for i in range(len(results["throughput"]))]
        heights = [row[name] for row in results["throughput"].values()]
        axis.bar(places, heights, 0.18, label=name)
        rates.plot(places, [row[name] for row in results["acceptance"].values()], "ko")
    axis.set_xticks(range(len(results["throughput"])), [*results["throughput"]], fontsize=8)
    rates.set_ylim(0, 1)
    rates.set_ylabel("acceptance (dots)", fontsize=8)
    label_axes(axis, f"batch {results['batch']}", "tokens/s")


def _fixed_and_adaptive(axis: Any, results: Results) -> None:
    batch = _middle(results, "adaptive")
    row = results["adaptive"][batch]
    fixed = {s: own["tokens_per_s"] for s, own in row["by_length"].items()}
    adaptive = {name: row[f"{name}_tokens_per_s"] for name in (ADAPTIVE, PRINTED_RULE)}
    for speeds in (fixed, adaptive):
        axis.bar([*speeds], [*speeds.values()])
    label = f"s = {row['best_fixed_s']} in the turns of the adaptive lengths (orange)"
    axis.axhline(row["best_fixed_tokens_per_s"], color="red", label=label)
    axis.tick_params(axis="x", labelsize=7, rotation=60)
    label_axes(axis, f"speculation length, batch {batch}", "tokens/s")


def _trees(axis: Any, results: Results) -> None:
    batch = [*results["ladder"]][-1]
    row = results["ladder"][batch]
    gains = {
        "throughput": row[PIPELINE]["tokens_per_s"] / row["tree"]["tokens_per_s"],
        "latency": row["tree"]["normalised_latency_ms"] / row[PIPELINE]["normalised_latency_ms"],
    }
    axis.bar([*gains], [*gains.values()])
    axis.axhline(1.0, color="grey", linewidth=0.8)
    label_axes(axis, f"batch {batch}", "times better than the tree")


def _overhead(axis: Any, results: Results) -> None:
    batches = [*results["overhead"]]
    below = [0.0] * len(batches)
    for part in results["overhead"][batches[0]]:
        shares = [100 * results["overhead"][batch][part]["share"] for batch in batches]
        axis.bar(batches, shares, bottom=below, label=part)
        below = [a + b for a, b in zip(below, shares, strict=True)]
    label_axes(axis, "batch", "share of the time [%]")


def _middle(results: Results, key: str) -> str:
    """Return the batch of figures with only one, or the one measured that is nearest to it."""
    return min(results[key], key=lambda batch: abs(int(batch) - results["batch"]))


_PANELS: Mapping[str, tuple[str, Callable[[Any, Results], None]]] = {
    "Figure 1: acceptance of the drafts": ("acceptance_by_length", _acceptance_by_length),
    "Figure 2: time of the target (star: least)": ("adaptive", _llm_time),
    "Figure 3: drafting and verification": ("time_lines", _time_lines),
    "Figure 7: drafts that wait, requests, memory": ("pool", _pool),
    "Figure 8: normalised latency": ("ladder", _systems("normalised_latency_ms", "ms per token")),
    "Figure 9: throughput": ("ladder", _systems("tokens_per_s", "tokens/s")),
    "Figure 10: the ladder": ("ladder", _breakdown),
    "Figure 11: single drafts and the vote": ("throughput", _single_drafts),
    "Figure 12: fixed and adaptive length": ("adaptive", _fixed_and_adaptive),
    "Figure 13: against the tree (SpecInfer)": ("ladder", _trees),
    "Figure 14: overhead": ("overhead", _overhead),
}
"""Title of each panel, the key of its results, and the function that draws it."""
