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
from collab_llm_lab.bench.collective.methods import S
from collab_llm_lab.bench.collective.watch import PARTS as OVERHEADS
from collab_llm_lab.bench.rendering import show_goals, show_lines, show_rows

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
    cell = "{{{0}[us_per_verification]:.0f}}, {{{0}[share]:.2%}}"
    columns = {f"{part}: us per verification, share": cell.format(part) for part in OVERHEADS}
    show_rows(console, title, ["batch"], results["overhead"], columns)


def _acceptance(results: Mapping[str, Any], console: Console) -> None:
    rows = {
        stream: {
            n: f"{rate:.3f}  {results['throughput'][stream][n]:.0f}" for n, rate in row.items()
        }
        for stream, row in results["acceptance"].items()
    }
    columns = {name: f"{{{name}}}" for name in rows.get(MIXED, ())}
    show_rows(console, f"acceptance and tokens/s, s = {S}", ["stream"], rows, columns)


def _over_default(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the modes of a ladder with their throughput ``over`` Default."""
    base = row["default"]["tokens_per_s"]
    return {mode: {**own, "over": own["tokens_per_s"] / base} for mode, own in row.items()}


def _ladder(
    results: Mapping[str, Any], stream: str, by_batch: Mapping[str, Any], console: Console
) -> None:
    papers = ", ".join(f"{total}x {name}" for name, total in PAPER_TOTALS.items())
    drafts = results["default_draft"][stream]
    title = (
        f"{stream}: times the throughput of Default ({drafts['best']}; worst:"
        f" {drafts['worst']}), and normalised latency in ms; the paper's ladder: {papers}"
    )
    rows = {batch: _over_default(row) for batch, row in by_batch.items()}
    cell = "{{{0}[over]:.2f}}x\n{{{0}[normalised_latency_ms]:.1f}}"
    columns = {mode: cell.format(mode) for mode in (*LADDER, *BESIDE)}
    show_rows(console, title, ["batch"], rows, columns)


def _emulated(results: Mapping[str, Any], console: Console) -> None:
    passes = results["emulated"]["passes"]
    title = (
        f"EMULATED: a pass of the target takes {passes['least_s']:g} s, of a draft"
        f" {passes['draft_s']:g} s; times the throughput of Default"
    )
    rows = {n: _over_default(row) for n, row in results["emulated"].items() if n != "passes"}
    columns = {mode: f"{{{mode}[over]:.2f}}x" for mode in (*LADDER, *EMULATED_BESIDE)}
    show_rows(console, title, ["batch"], rows, columns)


def _adaptive(results: Mapping[str, Any], console: Console) -> None:
    def figures(row: Mapping[str, Any]) -> dict[str, Any]:
        best, learning = str(row["best_fixed_s"]), row.get("learning")
        return {  # a file of an earlier version has neither ``learning`` nor ``twins``
            "share": 1 - row["regret"],
            "printed_share": 1 - row["printed_regret"],
            "learning_share": f"{learning[ADAPTIVE] / learning[best]:.3f}" if learning else "",
            "both": " ".join(f"{x:.0f}" for x in row["twins"][best]) if learning else "",
            "best": best,
            "tokens_per_s": row["best_fixed_tokens_per_s"],
        }

    columns = {
        "best fixed s": "{best}",
        "tokens/s": "{tokens_per_s:.0f}",
        ADAPTIVE: "{share:.3f}",
        PRINTED_RULE: "{printed_share:.3f}",
        f"{ADAPTIVE}, learning": "{learning_share}",
        "the fixed one, both instances": "{both}",
    }
    rows = {batch: figures(row) for batch, row in results["adaptive"].items()}
    title = "speculation length: fixed and adaptive, share of the best fixed one's throughput"
    show_rows(console, title, ["batch"], rows, columns)


def _variants(results: Mapping[str, Any], console: Console) -> None:
    title = f"other votes and pipelines, mixed, batch {results['batch']}, s = {S}"
    columns = {"acceptance": "{acceptance:.3f}", "tokens/s": "{tokens_per_s:.0f}"}
    show_rows(console, title, ["variant"], results["variants"], columns)
