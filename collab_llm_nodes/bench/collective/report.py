"""The whole benchmark: its parts in order, and what they find."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from collab_llm_nodes.bench.collective import Sizes, measure
from collab_llm_nodes.bench.collective.emulation import DRAFT_PACE, TARGET_PACE
from collab_llm_nodes.bench.collective.goals import goals_of
from collab_llm_nodes.bench.collective.material import (
    DRAFTS,
    MIXED,
    STREAMS,
    TARGET,
    RightAnswers,
    load_family,
    partial_prompts,
)
from collab_llm_nodes.bench.collective.measure import PIPELINE, Bench
from collab_llm_nodes.bench.collective.plots import plot_all
from collab_llm_nodes.bench.collective.tables import PAPER_TOTALS, print_tables
from collab_llm_nodes.bench.collective.ways import IN_FLIGHT
from collab_llm_nodes.bench.harness import Keep, run_parts
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.protocols.collective.length import LengthConfig
from collab_llm_nodes.training.text.samples import SUB_DOMAINS

PAPER_BATCH = 16
"""Batch of the paper's Figures 10 to 12."""
LONGEST = LengthConfig().longest

Results = dict[str, Any]
Part = tuple[str, Callable[[], dict[str, Any]]]
"""The name of a part, and what measures it and adds it to the results."""


def run_collective(
    *,
    models: Path,
    sizes: Sizes,
    seed: int,
    plot: Path | None,
    keep: Keep,
    console: Console,
) -> Results:
    """Measure collective speculation with the text family in ``models``.

    A part that fails is named, and the others go on.

    Args:
        keep: is given the results so far after each part.

    Returns:
        ``acceptance.<stream>.<draft or vote>``, ``throughput`` likewise; ``acceptance_by_length``;
        ``ladder.<batch>.<way>.{tokens_per_s, normalised_latency_ms}`` on the mixed stream, and
        ``ladder_by_stream.<sub-domain>.<batch>.<way>``; ``ladder_total.<batch>``;
        ``adaptive.<batch>.{best_fixed_s, best_fixed_tokens_per_s, adaptive_tokens_per_s, ...}``;
        ``overhead.<batch>.<part>`` and ``overhead_share``, the largest of them; ``variants``;
        ``time_lines``; ``pool``; ``mismatches``, ``near_ties``, ``peer_differences``; ``goals``;
        ``failed``: the error of each part that has failed; ``seconds`` that each part has taken.

    Raises:
        ConfigError: a model is missing, tokenizers differ, or a number makes no sense.
        ModelError: a model cannot be loaded.
    """
    _check(sizes.repeats, sizes.lengths)
    set_threads(*(ModelConfig(path=str(models / name)) for name in (TARGET, *DRAFTS.values())))
    family = load_family(models)
    bench = Bench(
        family,
        partial_prompts(family, sizes.count(max(sizes.batches)), seed),
        RightAnswers(family, sizes.max_tokens),
        sizes,
        lambda text: console.print(text, highlight=False),
    )
    middle = min(sizes.batches, key=lambda batch: abs(batch - PAPER_BATCH))
    begun = time.monotonic()
    singles = measure.drafts(bench, middle)  # all others need the best draft
    results: Results = {
        "models": str(models),
        "sizes": asdict(sizes),
        "seed": seed,
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
        "acceptance_by_length": {},
        "ladder": {},
        "ladder_by_stream": {},
        "overhead": {},
        "adaptive": {},
        "variants": {},
        "emulated": {"passes": asdict(TARGET_PACE) | {"draft_s": DRAFT_PACE.least_s}},
        "time_lines": {},
        "pool": {},
        "seconds": {"drafts": time.monotonic() - begun},
    }

    def summarised(found: Results) -> None:
        _summarise(found, bench)
        keep(found)

    summarised(results)
    run_parts(_parts(bench, middle), results, console, summarised)
    print_tables(results, console)
    if plot is not None:
        plot_all(results, plot)
    return results


def _parts(bench: Bench, middle: int) -> Iterator[Part]:
    """Yield the parts: first what most figures are of."""

    def climb(batch: int) -> Results:
        runs = measure.ladder(bench, MIXED, batch, bench.sizes.repeats)
        overhead = measure.overhead(runs[PIPELINE])
        return {"ladder": {str(batch): measure.figures(runs)}, "overhead": {str(batch): overhead}}

    def emulate(batch: int) -> Results:
        return {"emulated": {str(batch): measure.figures(measure.emulated(bench, batch))}}

    def adapt(batch: int) -> Results:
        return {"adaptive": {str(batch): measure.lengths(bench, batch)}}

    def climb_on(stream: str, batch: int) -> Results:
        runs = measure.ladder(bench, stream, batch, max(1, bench.sizes.repeats // 2))
        return {"ladder_by_stream": {stream: {str(batch): measure.figures(runs)}}}

    batches = bench.sizes.batches
    for batch in batches:
        yield f"ladder, batch {batch}", partial(climb, batch)
    for batch in sorted({min(batches), middle}):
        yield f"emulated, batch {batch}", partial(emulate, batch)
    for batch in batches:
        yield f"lengths, batch {batch}", partial(adapt, batch)
    yield "acceptance by length", lambda: {"acceptance_by_length": measure.by_length(bench)}
    yield "variants", lambda: {"variants": measure.variants(bench, middle)}
    yield "time lines", lambda: {"time_lines": measure.time_lines(bench, middle)}
    yield "pool", lambda: {"pool": measure.pool(bench, middle)}
    for stream in SUB_DOMAINS if bench.sizes.sub_domains else ():
        for batch in batches:
            yield f"ladder on {stream}, batch {batch}", partial(climb_on, stream, batch)


def _summarise(results: Results, bench: Bench) -> None:
    """Set the figures that follow from those of the parts."""
    results["ladder_total"] = {
        batch: row[PIPELINE]["tokens_per_s"] / row["default"]["tokens_per_s"]
        for batch, row in results["ladder"].items()
    }
    shares = (sum(p["share"] for p in parts.values()) for parts in results["overhead"].values())
    results["overhead_share"] = max(shares, default=None)
    for name in ("mismatches", "near_ties", "peer_differences"):
        results[name] = getattr(bench, name)
    results["goals"] = goals_of(results)


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
