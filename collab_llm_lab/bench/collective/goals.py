"""The goals of the benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from collab_llm_lab.bench.collective.material import MIXED
from collab_llm_lab.bench.collective.measure import (
    GENERALIST,
    GENERATE,
    ON_ALL_CORES,
    PIPELINE,
    VOTED,
)

Results = Mapping[str, Any]
Goal = tuple[str, float, float, bool]
"""Name, the value wanted, the value measured, and whether it is reached."""


def goals_of(results: Results) -> dict[str, dict[str, Any]]:
    """Return the goals that the results so far can be held to.

    Ratios are of tokens per second. A goal that names several batches asks for the best of them;
    one that names none holds at each batch.
    """
    found = [*_acceptances(results), *_ladders(results), *_lengths(results), *_others(results)]
    keys = ("wanted", "measured", "reached")
    return {name: dict(zip(keys, rest, strict=True)) for name, *rest in found}


def _acceptances(results: Results) -> Iterator[Goal]:
    for stream, row in results["acceptance"].items():
        single = {name: rate for name, rate in row.items() if name != VOTED}
        if stream == MIXED:
            best = max(single.values())
            yield "vote above every draft, mixed", best, row[VOTED], row[VOTED] > best
        else:  # it can be no better than the drafts that it chooses from
            least = max(rate for name, rate in single.items() if name != GENERALIST) - 0.01
            yield (
                f"vote as good as the best draft, {stream}",
                least,
                row[VOTED],
                row[VOTED] >= least,
            )


def _ladders(results: Results) -> Iterator[Goal]:
    ladder = results["ladder"]

    def ratios(other: str, *batches: str) -> list[float]:
        rows = [ladder[batch] for batch in batches if batch in ladder]
        return [row[PIPELINE]["tokens_per_s"] / row[other]["tokens_per_s"] for row in rows]

    if over := ratios("selector", "8", "16"):
        yield _at_least("pipeline over selector, batch 8 or 16", 1.2, max(over))
    if over := ratios("autoregressive", *ladder):
        yield _at_least("pipeline over autoregressive", 0.97, min(over))
    if over := ratios("autoregressive", "1"):
        yield _at_least("pipeline over autoregressive, batch 1", 1.3, over[0])
    if over := ratios(GENERATE, "16"):
        yield _at_least("pipeline over generate, batch 16", 2.0, over[0])
    if over := ratios(ON_ALL_CORES, "16"):
        yield _at_least("pipeline over generate on all cores, batch 16", 2.0, over[0])


def _lengths(results: Results) -> Iterator[Goal]:
    for batch, row in results["adaptive"].items():
        share = row["adaptive_tokens_per_s"] / row["best_fixed_tokens_per_s"]
        yield _at_least(f"adaptive over the best fixed length, batch {batch}", 0.97, share)


def _others(results: Results) -> Iterator[Goal]:
    if (share := results["overhead_share"]) is not None:
        yield "overhead share", 0.024, share, share <= 0.024
    wrong = results["mismatches"]
    yield "mismatches", 0, wrong, wrong == 0


def _at_least(name: str, wanted: float, measured: float) -> Goal:
    return name, wanted, measured, measured >= wanted
