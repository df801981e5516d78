"""The tables of the benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from collab_llm_lab.bench.collective.material import MIXED
from collab_llm_lab.bench.collective.measure import (
    ADAPTIVE,
    GENERALIST,
    LADDER,
    PEERS,
    PRINTED_RULE,
)
from collab_llm_lab.bench.collective.watch import PARTS as OVERHEADS
from collab_llm_lab.bench.collective.ways import S
from collab_llm_lab.bench.rendering import show_goals, show_lines, show_table

PAPER_TOTALS = {"OPT-13B": 1.99, "Llama2-70B-chat": 2.63}
"""+Pipeline over Default in paper 002, Figure 10 (finance, batch 16)."""
PAPER_OVERHEAD = 0.0237
EMULATED_BESIDE = ("autoregressive", "tree")
BESIDE = ("default_worst", GENERALIST, "autoregressive", "tree", *PEERS)


def print_tables(results: Mapping[str, Any], console: Console) -> None:
    """Print what was found; parts without results are left out."""
    _acceptance(results, console)
    for stream, by_batch in {MIXED: results["ladder"], **results["ladder_by_stream"]}.items():
        _ladder(results, stream, by_batch, console)
    if any(batch.isdigit() for batch in results["emulated"]):
        _emulated(results, console)
    _adaptive(results, console)
    _variants(results, console)
    if results["overhead_share"] is not None:
        _overhead(results, console)
    if pools := results["pool"]:
        show_lines(
            console,
            (
                "most drafts that waited, and most requests under way, with and without control:"
                f" {_peaks(pools, 'peak_drafts_waiting')};"
                f" {_peaks(pools, 'peak_requests_active')}",
                "most memory of KV caches, with and without control [MB]:"
                f" {_peaks(pools, 'peak_kv_bytes', 1e6)} of the target,"
                f" {_peaks(pools, 'peak_drafts_kv_bytes', 1e6)} of the drafts",
            ),
        )
    show_lines(
        console,
        [
            f"answers of ours that differ from the target's: {results['mismatches']},"
            f" and {results['near_ties']} near ties;"
            f" of transformers' batched and assisted: {results['peer_differences']}"
        ],
    )
    show_goals(
        console,
        (
            (name, row["wanted"], row["measured"], row["reached"])
            for name, row in results["goals"].items()
        ),
    )


def _peaks(pools: Mapping[str, Mapping[str, Any]], key: str, unit: float = 1) -> str:
    return ", ".join(f"{pools[name][key] / unit:.4g}" for name in ("controlled", "uncontrolled"))


def _overhead(results: Mapping[str, Any], console: Console) -> None:
    title = (
        f"overhead: {results['overhead_share']:.2%} of the time at most"
        f" (paper {PAPER_OVERHEAD:.2%})"
    )
    headings = ("batch", *(f"{part}: us per verification, share" for part in OVERHEADS))
    rows = (
        (
            batch,
            *(
                f"{row[part]['us_per_verification']:.0f}, {row[part]['share']:.2%}"
                for part in OVERHEADS
            ),
        )
        for batch, row in results["overhead"].items()
    )
    show_table(console, title, headings, rows, texts=0)


def _acceptance(results: Mapping[str, Any], console: Console) -> None:
    rows = (
        (
            stream,
            *(
                f"{rate:.3f}  {results['throughput'][stream][name]:.0f}"
                for name, rate in row.items()
            ),
        )
        for stream, row in results["acceptance"].items()
    )
    headings = ("stream", *results["acceptance"].get(MIXED, ()))
    show_table(console, f"acceptance and tokens/s, s = {S}", headings, rows)


def _ladder(
    results: Mapping[str, Any], stream: str, by_batch: Mapping[str, Any], console: Console
) -> None:
    papers = ", ".join(f"{total}x {name}" for name, total in PAPER_TOTALS.items())
    drafts = results["default_draft"][stream]
    title = (
        f"{stream}: times the throughput of Default ({drafts['best']}; worst:"
        f" {drafts['worst']}), and normalised latency in ms; the paper's ladder: {papers}"
    )
    modes = (*LADDER, *BESIDE)
    rows = (
        (
            batch,
            *(
                f"{row[mode]['tokens_per_s'] / row['default']['tokens_per_s']:.2f}x\n"
                f"{row[mode]['normalised_latency_ms']:.1f}"
                for mode in modes
            ),
        )
        for batch, row in by_batch.items()
    )
    show_table(console, title, ("batch", *modes), rows, texts=0)


def _emulated(results: Mapping[str, Any], console: Console) -> None:
    passes = results["emulated"]["passes"]
    title = (
        f"EMULATED: a pass of the target takes {passes['least_s']:g} s, of a draft"
        f" {passes['draft_s']:g} s; times the throughput of Default"
    )
    modes = (*LADDER, *EMULATED_BESIDE)
    rows = (
        (
            batch,
            *(
                f"{row[mode]['tokens_per_s'] / row['default']['tokens_per_s']:.2f}x"
                for mode in modes
            ),
        )
        for batch, row in results["emulated"].items()
        if batch != "passes"
    )
    show_table(console, title, ("batch", *modes), rows, texts=0)


def _adaptive(results: Mapping[str, Any], console: Console) -> None:
    headings = (
        "batch",
        "best fixed s",
        "tokens/s",
        ADAPTIVE,
        PRINTED_RULE,
        f"{ADAPTIVE}, learning",
        "the fixed one, both instances",
    )

    def line(batch: str, row: Mapping[str, Any]) -> tuple[str, ...]:
        best = str(row["best_fixed_s"])
        learning = row.get("learning")  # a file of an earlier version has neither it nor twins
        return (
            batch,
            best,
            f"{row['best_fixed_tokens_per_s']:.0f}",
            f"{1 - row['regret']:.3f}",
            f"{1 - row['printed_regret']:.3f}",
            f"{learning[ADAPTIVE] / learning[best]:.3f}" if learning else "",
            " ".join(f"{speed:.0f}" for speed in row["twins"][best]) if learning else "",
        )

    show_table(
        console,
        "speculation length: fixed and adaptive, share of the best fixed one's throughput",
        headings,
        (line(batch, row) for batch, row in results["adaptive"].items()),
        texts=0,
    )


def _variants(results: Mapping[str, Any], console: Console) -> None:
    rows = (
        (name, f"{row['acceptance']:.3f}", f"{row['tokens_per_s']:.0f}")
        for name, row in results["variants"].items()
    )
    title = f"other votes and pipelines, mixed, batch {results['batch']}, s = {S}"
    show_table(console, title, ("variant", "acceptance", "tokens/s"), rows)
