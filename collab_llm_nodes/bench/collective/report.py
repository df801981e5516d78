"""The whole benchmark: what is measured in which order, and the tables of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from collab_llm_nodes.bench.collective import measure
from collab_llm_nodes.bench.collective.material import (
    DRAFTS,
    MIXED,
    STREAMS,
    TARGET,
    RightAnswers,
    load_family,
    partial_prompts,
)
from collab_llm_nodes.bench.collective.measure import ADAPTIVE, PIPELINE, PRINTED_RULE, Bench
from collab_llm_nodes.bench.collective.plots import plot_all
from collab_llm_nodes.bench.collective.ways import IN_FLIGHT, S
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.protocols.collective.length import LengthConfig
from collab_llm_nodes.training.text.samples import SUB_DOMAINS

PAPER_TOTALS = {"OPT-13B": 1.99, "Llama2-70B-chat": 2.63}
"""+Pipeline over Default in paper 002, Figure 10 (finance, batch 16)."""
PAPER_OVERHEAD = 0.0237
LADDER = ("default", "majority", "selector", PIPELINE)
BESIDE = ("default_worst", "autoregressive", "tree", "generate", "assisted")
PAPER_BATCH = 16
"""Batch of the paper's Figures 10 to 12."""
LONGEST = LengthConfig().longest


def run_collective(
    *,
    models: Path,
    batches: Sequence[int],
    prompts: int,
    repeats: int,
    max_tokens: int,
    lengths: Sequence[int],
    sub_domains: bool,
    seed: int,
    plot: Path | None,
    console: Console,
) -> dict[str, Any]:
    """Measure collective speculation with the text family in ``models``.

    Args:
        batches: sizes of a batch; the one nearest to the paper's is that of figures with only one.
        prompts: of a run; at least four for each place of a batch.
        repeats: measured turns, at least 2.
        lengths: fixed speculation lengths that adaptive ones are compared with.
        sub_domains: also climb the ladder on each sub-domain, with half the turns.

    Returns:
        ``acceptance.<stream>.<draft or vote>``, ``throughput`` likewise; ``acceptance_by_length``;
        ``ladder.<batch>.<way>.{tokens_per_s, normalised_latency_ms}`` on the mixed stream, and
        ``ladder_by_stream.<sub-domain>.<batch>.<way>``; ``ladder_total.<batch>``;
        ``adaptive.<batch>.{best_fixed_s, best_fixed_tokens_per_s, adaptive_tokens_per_s, ...}``;
        ``overhead.<batch>.<part>`` and ``overhead_share``, the largest of them; ``time_lines``;
        ``pool``; ``mismatches``, ``near_ties``, ``peer_differences``.

    Raises:
        ConfigError: a model is missing, tokenizers differ, or a number makes no sense.
        ModelError: a model cannot be loaded.
    """
    _check(repeats, lengths)
    set_threads(*(ModelConfig(path=str(models / name)) for name in (TARGET, *DRAFTS.values())))
    family = load_family(models)
    most = measure.prompts_of_run(prompts, max(batches))
    bench = Bench(
        family,
        partial_prompts(family, most, seed),
        RightAnswers(family, max_tokens),
        max_tokens,
        repeats,
        prompts,
        lambda text: console.print(text, highlight=False),
    )
    middle = min(batches, key=lambda batch: abs(batch - PAPER_BATCH))
    singles = measure.drafts(bench, middle)
    results: dict[str, Any] = {
        "models": str(models),
        "max_tokens": max_tokens,
        "in_flight_per_place": IN_FLIGHT,
        "paper_ladder_totals": PAPER_TOTALS,
        "batch": middle,
        "acceptance": _column(singles, "acceptance"),
        "throughput": _column(singles, "tokens_per_s"),
        "default_draft": {
            stream: {
                "best": [*DRAFTS][bench.best_draft[stream]],
                "worst": [*DRAFTS][bench.worst_draft[stream]],
            }
            for stream in STREAMS
        },
        "acceptance_by_length": measure.by_length(bench, lengths),
        "ladder": {},
        "overhead": {},
        "adaptive": {},
    }
    for batch in batches:
        runs = measure.ladder(bench, MIXED, batch, repeats)
        results["ladder"][str(batch)] = measure.figures(runs)
        results["overhead"][str(batch)] = measure.overhead(runs[PIPELINE])
        results["adaptive"][str(batch)] = measure.lengths(bench, batch, lengths)
    results["ladder_by_stream"] = {
        stream: {
            str(batch): measure.figures(measure.ladder(bench, stream, batch, max(1, repeats // 2)))
            for batch in batches
        }
        for stream in (SUB_DOMAINS if sub_domains else ())
    }
    results["ladder_total"] = {
        batch: row[PIPELINE]["tokens_per_s"] / row["default"]["tokens_per_s"]
        for batch, row in results["ladder"].items()
    }
    results["overhead_share"] = max(
        sum(part["share"] for part in parts.values()) for parts in results["overhead"].values()
    )
    results["time_lines"] = measure.time_lines(bench, middle)
    results["pool"] = measure.pool(bench, middle)
    for name in ("mismatches", "near_ties", "peer_differences"):
        results[name] = getattr(bench, name)
    _print(results, console)
    if plot is not None:
        plot_all(results, plot)
    return results


def _check(repeats: int, lengths: Sequence[int]) -> None:
    if repeats < 2:
        raise ConfigError(
            "the best fixed length is chosen on one half of the turns and scored on the other",
            field="--repeats",
            remedy="take 2 or more",
        )
    if max(lengths) > LONGEST:
        raise ConfigError(
            f"{max(lengths)} is more than adaptive drafts may have, {LONGEST}",
            field="--lengths",
            remedy="take shorter ones",
        )


def _column(found: Mapping[str, Mapping[str, Mapping[str, float]]], key: str) -> dict[str, Any]:
    return {stream: {name: row[key] for name, row in own.items()} for stream, own in found.items()}


# ---------------------------------------------------------------- tables


def _print(results: Mapping[str, Any], console: Console) -> None:
    console.print(_acceptance(results))
    console.print(_ladder(results, MIXED, results["ladder"]))
    for stream, by_batch in results["ladder_by_stream"].items():
        console.print(_ladder(results, stream, by_batch))
    console.print(_adaptive(results))
    share, paper = results["overhead_share"], PAPER_OVERHEAD
    pools = results["pool"]
    console.print(
        f"overhead of vote, monitor and weights: {share:.2%} at most (paper {paper:.2%})\n"
        "most drafts that waited, with and without control:"
        f" {pools['controlled']['peak_drafts_waiting']},"
        f" {pools['uncontrolled']['peak_drafts_waiting']}\n"
        "most memory of KV caches, with and without control [MB]:"
        f" {_megabytes(pools, 'peak_kv_bytes')} of the target,"
        f" {_megabytes(pools, 'peak_drafts_kv_bytes')} of the drafts\n"
        f"answers of ours that differ from the target's: {results['mismatches']},"
        f" and {results['near_ties']} near ties;"
        f" of transformers' batched and assisted: {results['peer_differences']}",
        highlight=False,
    )


def _megabytes(pools: Mapping[str, Mapping[str, Any]], key: str) -> str:
    return ", ".join(f"{pools[name][key] / 1e6:.1f}" for name in ("controlled", "uncontrolled"))


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


def _adaptive(results: Mapping[str, Any]) -> Table:
    table = Table(
        "batch",
        "best fixed s",
        "tokens/s",
        ADAPTIVE,
        PRINTED_RULE,
        title="speculation length: fixed and adaptive, share of the best fixed one's throughput",
    )
    for batch, row in results["adaptive"].items():
        table.add_row(
            batch,
            str(row["best_fixed_s"]),
            f"{row['best_fixed_tokens_per_s']:.0f}",
            f"{1 - row['regret']:.3f}",
            f"{1 - row['printed_regret']:.3f}",
        )
    return table
