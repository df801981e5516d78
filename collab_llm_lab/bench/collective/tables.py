"""The tables of the benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

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

PAPER_TOTALS = {"OPT-13B": 1.99, "Llama2-70B-chat": 2.63}
"""+Pipeline over Default in paper 002, Figure 10 (finance, batch 16)."""
PAPER_OVERHEAD = 0.0237
EMULATED_BESIDE = ("autoregressive", "tree")
BESIDE = ("default_worst", GENERALIST, "autoregressive", "tree", *PEERS)


def print_tables(results: Mapping[str, Any], console: Console) -> None:
    """Print what was found; parts without results are left out."""
    if results["acceptance"]:
        console.print(_acceptance(results))
    for stream, by_batch in {MIXED: results["ladder"], **results["ladder_by_stream"]}.items():
        console.print(_ladder(results, stream, by_batch))
    if any(batch.isdigit() for batch in results["emulated"]):
        console.print(_emulated(results))
    console.print(_adaptive(results))
    console.print(_variants(results))
    if results["overhead_share"] is not None:
        console.print(_overhead(results))
    if pools := results["pool"]:
        console.print(
            "most drafts that waited, and most requests under way, with and without control:"
            f" {_peaks(pools, 'peak_drafts_waiting')}; {_peaks(pools, 'peak_requests_active')}\n"
            "most memory of KV caches, with and without control [MB]:"
            f" {_peaks(pools, 'peak_kv_bytes', 1e6)} of the target,"
            f" {_peaks(pools, 'peak_drafts_kv_bytes', 1e6)} of the drafts",
            highlight=False,
        )
    console.print(
        f"answers of ours that differ from the target's: {results['mismatches']},"
        f" and {results['near_ties']} near ties;"
        f" of transformers' batched and assisted: {results['peer_differences']}",
        highlight=False,
    )
    console.print(_goals(results))


def _peaks(pools: Mapping[str, Mapping[str, Any]], key: str, unit: float = 1) -> str:
    return ", ".join(f"{pools[name][key] / unit:.4g}" for name in ("controlled", "uncontrolled"))


def _overhead(results: Mapping[str, Any]) -> Table:
    table = Table(
        "batch",
        *(f"{part}: us per verification, share" for part in OVERHEADS),
        title=f"overhead: {results['overhead_share']:.2%} of the time at most"
        f" (paper {PAPER_OVERHEAD:.2%})",
    )
    for batch, row in results["overhead"].items():
        parts = (row[part] for part in OVERHEADS)
        cells = (f"{own['us_per_verification']:.0f}, {own['share']:.2%}" for own in parts)
        table.add_row(batch, *cells)
    return table


def _acceptance(results: Mapping[str, Any]) -> Table:
    table = Table(
        "stream", *results["acceptance"][MIXED], title=f"acceptance and tokens/s, s = {S}"
    )
    for stream, row in results["acceptance"].items():
        speeds = results["throughput"][stream]
        table.add_row(stream, *(f"{rate:.3f}  {speeds[name]:.0f}" for name, rate in row.items()))
    return table


def _ladder(results: Mapping[str, Any], stream: str, by_batch: Mapping[str, Any]) -> Table:
    papers = ", ".join(f"{total}x {name}" for name, total in PAPER_TOTALS.items())
    drafts = results["default_draft"][stream]
    table = Table(
        title=f"{stream}: times the throughput of Default ({drafts['best']}; worst:"
        f" {drafts['worst']}), and normalised latency in ms; the paper's ladder: {papers}"
    )
    table.add_column("batch", justify="right")
    for name in (*LADDER, *BESIDE):
        table.add_column(name, justify="right")
    for batch, row in by_batch.items():
        base = row["default"]["tokens_per_s"]
        table.add_row(
            batch,
            *(
                f"{row[name]['tokens_per_s'] / base:.2f}x\n{row[name]['normalised_latency_ms']:.1f}"
                for name in (*LADDER, *BESIDE)
            ),
        )
    return table


def _emulated(results: Mapping[str, Any]) -> Table:
    passes = results["emulated"]["passes"]
    table = Table(
        "batch",
        *(*LADDER, *EMULATED_BESIDE),
        title=f"EMULATED: a pass of the target takes {passes['least_s']:g} s, of a draft"
        f" {passes['draft_s']:g} s; times the throughput of Default",
    )
    for batch, row in results["emulated"].items():
        if batch != "passes":
            base = row["default"]["tokens_per_s"]
            shares = (row[name]["tokens_per_s"] / base for name in (*LADDER, *EMULATED_BESIDE))
            table.add_row(batch, *(f"{share:.2f}x" for share in shares))
    return table


def _adaptive(results: Mapping[str, Any]) -> Table:
    table = Table(
        "batch",
        "best fixed s",
        "tokens/s",
        ADAPTIVE,
        PRINTED_RULE,
        f"{ADAPTIVE}, learning",
        "the fixed one, both instances",
        title="speculation length: fixed and adaptive, share of the best fixed one's throughput",
    )
    for batch, row in results["adaptive"].items():
        best = str(row["best_fixed_s"])
        learning = row.get("learning")  # none in a file of an earlier version, nor twins
        table.add_row(
            batch,
            best,
            f"{row['best_fixed_tokens_per_s']:.0f}",
            f"{1 - row['regret']:.3f}",
            f"{1 - row['printed_regret']:.3f}",
            f"{learning[ADAPTIVE] / learning[best]:.3f}" if learning else "",
            " ".join(f"{speed:.0f}" for speed in row["twins"][best]) if learning else "",
        )
    return table


def _variants(results: Mapping[str, Any]) -> Table:
    table = Table(
        "variant",
        "acceptance",
        "tokens/s",
        title=f"other votes and pipelines, mixed, batch {results['batch']}, s = {S}",
    )
    for name, row in results["variants"].items():
        table.add_row(name, f"{row['acceptance']:.3f}", f"{row['tokens_per_s']:.0f}")
    return table


def _goals(results: Mapping[str, Any]) -> Table:
    table = Table("goal", "wanted", "measured", "reached")
    for name, row in results["goals"].items():
        wanted = f"{row['wanted']:.3g}"
        table.add_row(name, wanted, f"{row['measured']:.3g}", "yes" if row["reached"] else "NO")
    return table
