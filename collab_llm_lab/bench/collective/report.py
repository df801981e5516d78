"""The whole benchmark: its parts in order, and what they find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from collab_llm_lab.bench.collective import PARTS, Sizes, measure
from collab_llm_lab.bench.collective.emulation import DRAFT_PACE, TARGET_PACE
from collab_llm_lab.bench.collective.goals import goals_of
from collab_llm_lab.bench.collective.material import (
    DRAFTS,
    GENERALIST,
    MIXED,
    STREAMS,
    TARGET,
    TargetAnswers,
    load_family,
    partial_prompts,
)
from collab_llm_lab.bench.collective.measure import PIPELINE, Bench
from collab_llm_lab.bench.collective.methods import IN_FLIGHT
from collab_llm_lab.bench.collective.tables import PAPER_TOTALS, print_tables
from collab_llm_lab.bench.harness import Keep, beside, check_parts, run_parts
from collab_llm_lab.training.text.samples import SUB_DOMAINS
from collab_llm_nodes.config import merged
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.protocols.collective.length import LengthConfig

PAPER_BATCH = 16
"""Batch of the paper's Figures 10 to 12."""
LONGEST = LengthConfig().longest

Results = dict[str, Any]
Part = tuple[str, Callable[[], dict[str, Any]]]
"""The name of a part, and what measures it and returns what it adds to the results."""

_RUN = ("machine", "models", "sizes", "seed", "batch", "default_draft")
"""Facts of a run, which parts that are measured later have of their own."""
_FILLED = (
    "acceptance",
    "throughput",
    "acceptance_by_length",
    "ladder",
    "ladder_by_stream",
    "overhead",
    "adaptive",
    "variants",
    "emulated",
    "time_lines",
    "pool",
    "differences",
)
"""Results that the parts fill; they are empty until one has."""
_DIFFERENCES = ("mismatches", "near_ties", "peer_differences")


def run_collective(
    *,
    models: Path,
    sizes: Sizes,
    seed: int,
    keep: Keep,
    console: Console,
    parts: Sequence[str] = PARTS,
) -> Results:
    """Measure collective speculation with the text family in ``models``.

    A part that fails is named, and the others go on.

    Args:
        keep: is given the results so far after each part.
        parts: some of ``PARTS``.

    Returns:
        ``acceptance.<stream>.<draft or vote>``, ``throughput`` likewise; ``acceptance_by_length``;
        ``ladder.<batch>.<method>.{tokens_per_s, normalised_latency_ms}`` on the mixed stream, and
        ``ladder_by_stream.<sub-domain>.<batch>.<method>``; ``ladder_total.<batch>``;
        ``adaptive.<batch>.{best_fixed_s, best_fixed_tokens_per_s, adaptive_tokens_per_s, ...}``;
        ``answer_tokens.<stream>``: mean length of an answer;
        ``overhead.<batch>.<part>`` and ``overhead_share``, the largest of them; ``variants``;
        ``time_lines``; ``pool``; ``mismatches``, ``near_ties``, ``peer_differences``, and
        ``differences``: those of each part; ``goals``; ``failed``: the error of each part that has
        failed; ``seconds`` that each part has taken; ``ok``.

    Raises:
        ConfigError: a model is missing, tokenizers differ, a part is unknown, or a number makes no
            sense.
        ModelError: a model cannot be loaded.
    """
    check_parts(parts, PARTS)
    _check(sizes.repeats, sizes.lengths)
    used = (TARGET, *DRAFTS.values(), GENERALIST)
    set_threads(*(ModelConfig(path=str(models / name)) for name in used))
    family = load_family(models)
    bench = Bench(
        family,
        partial_prompts(family, sizes.count(max(sizes.batches)), seed),
        TargetAnswers(family, sizes.max_tokens),
        sizes,
        lambda text: console.print(text, highlight=False),
    )
    measure.choose_drafts(bench)  # asks for the answers that ``answer_tokens`` is of
    middle = min(sizes.batches, key=lambda batch: abs(batch - PAPER_BATCH))
    results: Results = {
        "models": str(models),
        "sizes": asdict(sizes),
        "seed": seed,
        "in_flight_per_place": IN_FLIGHT,
        "answer_tokens": measure.answer_tokens(bench),
        "paper_ladder_totals": PAPER_TOTALS,
        "batch": middle,
        "default_draft": {
            stream: {
                "best": [*DRAFTS][bench.best_draft[stream]],
                "worst": [*DRAFTS][bench.worst_draft[stream]],
            }
            for stream in STREAMS
        },
        **{name: {} for name in _FILLED},
    }

    def summarised(found: Results) -> None:
        _summarise(found)
        keep(found)

    run_parts(_counted(_parts(bench, middle, parts), bench), results, console, summarised)
    print_tables(results, console)
    return results


def join(earlier: Results, found: Results) -> Results:
    """Return ``earlier`` with the parts of ``found`` in place of its own."""
    streams = "ladder_by_stream"  # of each sub-domain, a part has one batch
    found = {**found, streams: merged(earlier.get(streams, {}), found[streams])}
    both = beside(earlier, found, _all_right, facts=_RUN, shared=_FILLED)
    _summarise(both)
    return both


def _parts(bench: Bench, middle: int, wanted: Sequence[str]) -> list[Part]:
    """Return the parts, of which some have one for each batch, in the order of ``PARTS``."""

    def single() -> Results:
        found = measure.drafts(bench, middle)
        return {
            "acceptance": _column(found, "acceptance"),
            "throughput": _column(found, "tokens_per_s"),
        }

    def climb(batch: int) -> Results:
        runs = measure.ladder(bench, MIXED, batch, bench.sizes.repeats)
        overhead = measure.overhead(runs[PIPELINE])
        return {"ladder": {str(batch): measure.figures(runs)}, "overhead": {str(batch): overhead}}

    def emulate(batch: int) -> Results:
        passes = asdict(TARGET_PACE) | {"draft_s": DRAFT_PACE.least_s}
        found = measure.figures(measure.emulated(bench, batch))
        return {"emulated": {"passes": passes, str(batch): found}}

    def adapt(batch: int) -> Results:
        return {"adaptive": {str(batch): measure.lengths(bench, batch)}}

    def climb_on(stream: str, batch: int) -> Results:
        runs = measure.ladder(bench, stream, batch, max(1, bench.sizes.repeats // 2))
        return {"ladder_by_stream": {stream: {str(batch): measure.figures(runs)}}}

    batches = bench.sizes.batches
    by_length = "acceptance_by_length"
    parts: dict[str, list[Part]] = {
        "drafts": [("drafts", single)],
        "ladder": [(f"ladder, batch {n}", partial(climb, n)) for n in batches],
        "emulated": [
            (f"emulated, batch {n}", partial(emulate, n)) for n in sorted({min(batches), middle})
        ],
        "lengths": [(f"lengths, batch {n}", partial(adapt, n)) for n in batches],
        by_length: [(by_length, lambda: {by_length: measure.by_length(bench)})],
        "variants": [("variants", lambda: {"variants": measure.variants(bench, middle)})],
        "time_lines": [("time_lines", lambda: {"time_lines": measure.time_lines(bench, middle)})],
        "pool": [("pool", lambda: {"pool": measure.pool(bench, middle)})],
        "sub_domains": [
            (f"ladder on {stream}, batch {n}", partial(climb_on, stream, n))
            for stream in SUB_DOMAINS
            for n in batches
        ],
    }
    return [part for name in PARTS if name in wanted for part in parts[name]]


def _counted(parts: Sequence[Part], bench: Bench) -> Iterator[Part]:
    """Have each part return its answers that differ as well."""

    def run(name: str, measured: Callable[[], Results]) -> Results:
        before = {key: getattr(bench, key) for key in _DIFFERENCES}
        found = measured()
        differ = {key: getattr(bench, key) - count for key, count in before.items()}
        return {**found, "differences": {name: differ}}

    for name, measured in parts:
        yield name, partial(run, name, measured)


def _summarise(results: Results) -> None:
    """Set the figures that follow from those of the parts."""
    results["ladder_total"] = {
        batch: row[PIPELINE]["tokens_per_s"] / row["default"]["tokens_per_s"]
        for batch, row in results["ladder"].items()
    }
    shares = (sum(p["share"] for p in parts.values()) for parts in results["overhead"].values())
    results["overhead_share"] = max(shares, default=None)
    for key in _DIFFERENCES:
        results[key] = sum(part[key] for part in results["differences"].values())
    results["goals"] = goals_of(results)
    results["ok"] = _all_right(results)


def _all_right(results: Mapping[str, Any]) -> bool:
    wrong = any(part["mismatches"] for part in results["differences"].values())
    return not wrong and not results["failed"]


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
