"""The planner against brute force on small random clusters, and its time on a large one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collab_llm_nodes.protocols.jupiter.estimate import Estimate
from collab_llm_nodes.protocols.jupiter.partition import (
    PassShape,
    Placement,
    SequenceTable,
    best_partitions,
    range_costs,
)
from collab_llm_nodes.protocols.jupiter.partition import to_placements as named
from collab_llm_nodes.protocols.jupiter.planner import PlannerConfig, plan, split
from collab_llm_nodes.protocols.jupiter.profile import DeviceProfile, ModelFacts, Profile

PROMPT, LEAST = 20, 3


def random_cluster(rng: np.random.Generator, devices: int, layers: int, context: int) -> Profile:
    """Return a cluster whose devices differ up to fourfold, on links that matter."""
    weights = 50_000_000
    facts = ModelFacts(
        fingerprint="random",
        layers=layers,
        context=context,
        layer_bytes=weights,
        embedding_bytes=2 * weights,
        head_bytes=2 * weights,
        shared_bytes=2 * weights,
        kv_bytes=8192,
        state_bytes=8192,
        scratch_bytes=100_000,
        logits_bytes=128_000,
    )
    lengths = (1, *(2**i for i in range(1, context.bit_length())))
    befores = (0, *lengths[2:])
    x, y = np.array(lengths)[:, None], np.array(befores)[None, :]
    found = []
    for d in range(devices):
        token_s = 1e-3 * rng.uniform(1, 4)
        layer = token_s * (rng.uniform(0, 4) + x + x * (y + x / 2) * rng.uniform(0, 2) / context)
        found.append(
            DeviceProfile(
                name=f"d{d}",
                memory_bytes=int(weights * (layers + 4) * rng.uniform(0.4, 1.5) + 5e8),
                mbps=float(rng.uniform(20, 1000)),
                latency_s=float(rng.uniform(0, 1e-3)),
                lengths=lengths,
                befores=befores,
                layer_s=tuple(tuple(float(s) for s in row) for row in layer),
                pass_s=(float(token_s * rng.uniform(0, 1)),) * len(lengths),
                embedding_s=(0.0,) * len(lengths),
                head_s=tuple(float(token_s * (2 + n)) for n in lengths),
            )
        )
    return Profile(facts, tuple(found))


def compositions(total: int, least: int, most: int) -> NDArray[np.int64]:
    """Return all ways to divide ``total`` into parts of at least ``least``, [most, ways].

    Missing parts are 0, at the end. One part may be shorter.
    """
    found: list[tuple[int, ...]] = [(total,)]
    for k in range(2, most + 1):
        free = total - k * least  # to be shared out over k parts
        for bars in combinations(range(free + k - 1), k - 1) if free >= 0 else ():
            ends = (-1, *bars, free + k - 1)
            found.append(tuple(least + ends[i + 1] - ends[i] - 1 for i in range(k)))
    padded = np.zeros((most, len(found)), np.int64)
    for column, parts in enumerate(found):
        padded[: len(parts), column] = parts
    return padded


def partitions(profile: Profile) -> Iterator[tuple[Placement, ...]]:
    """Yield each partition over each order of each set of devices."""
    names, layers = [d.name for d in profile.devices], profile.model.layers
    for count in range(1, len(names) + 1):
        for order in permutations(names, count):
            for inner in combinations(range(1, layers), count - 1):
                ends = (0, *inner, layers)
                yield tuple(Placement(n, ends[i], ends[i + 1]) for i, n in enumerate(order))


@dataclass(frozen=True)
class Compared:
    """One small case.

    Attributes:
        equal: Eq. 1 and 2 give the optimum, and Eq. 4's k is the best of theirs.
        paper_gap, plan_gap: makespan of the paper's plan and of ours over the least, less 1.
        latency_error: Eq. 4's latency of the paper's plan over its makespan, less 1.
    """

    equal: bool
    paper_gap: float
    plan_gap: float
    latency_error: float


def compare(profile: Profile) -> Compared:
    """Compare the planner with brute force over all partitions and all sub-sequences."""
    config = PlannerConfig(prompt_tokens=PROMPT, answer_tokens=0, utilisation=0.01)
    of = PassShape(PROMPT // (2 * len(profile.devices)), PROMPT // 2, 0.1, 1, profile.model.context)
    cost = {d.name: range_costs(profile.model, d, of) for d in profile.devices}
    most = config.parts_per_device * len(profile.devices)
    ways = compositions(PROMPT, LEAST, min(most, PROMPT // LEAST))

    def slowest_stage(parts: tuple[Placement, ...]) -> float:
        return max(float(cost[p.device][p.first, p.last]) for p in parts)

    all_parts = [parts for parts in partitions(profile) if np.isfinite(slowest_stage(parts))]
    balanced = min(best_partitions([*cost.values()]), key=lambda found: found.value)
    chosen = named(profile.devices, balanced)
    equal = balanced.value == slowest_stage(chosen) == min(map(slowest_stage, all_parts))

    estimate = Estimate(profile, chosen)
    end = ways.cumsum(0)
    h = estimate.slowest(ways, end - ways) * (ways > 0)
    table = SequenceTable(estimate.slowest, PROMPT, most, LEAST)
    latencies = {}
    for k in range(1, len(ways) + 1):
        own = h[:, (ways > 0).sum(0) == k].max(0)
        equal &= bool(np.isclose(table.worst[PROMPT, k], own.min()))
        lengths = table.split(np.array([PROMPT]), k)[:, 0]
        each = [float(s) for s in estimate.slowest(lengths, lengths.cumsum() - lengths)]
        equal &= bool(np.isclose(max(each), own.min()))
        latencies[k] = sum(each) + (len(chosen) - 1) * max(each), lengths
    latency, lengths = min(latencies.values(), key=lambda found: found[0])
    made = split(estimate, PROMPT, most, LEAST)
    paper_s = float(estimate.prefill_s(lengths))
    equal &= bool(np.isclose(made.paper_s, paper_s))

    best = min(float(Estimate(profile, parts).prefill_s(ways).min()) for parts in all_parts)
    ours = plan(profile, config).placements
    ours_s = split(Estimate(profile, ours), PROMPT, most, LEAST).seconds
    return Compared(equal, paper_s / best - 1, ours_s / best - 1, latency / paper_s - 1)


def run_planner(cases: int, large: tuple[int, int, int], seed: int) -> dict[str, Any]:
    """Compare ``cases`` small clusters, then plan a large one.

    Args:
        large: its layers and devices, and the tokens of the longest prompt.

    Returns:
        ``cases``; ``equal_to_brute_force``, of them; ``makespan_gap``, the largest of the paper's
        plans, with its mean; ``plan_gap`` likewise, of ours; ``latency_error``, the least and the
        largest of Eq. 4; ``seconds_<layers>x<devices>x<tokens>``, of the processor.
    """
    rng = np.random.default_rng(seed)
    found = []
    for i in range(cases):
        layers = int(rng.integers(4, 7))
        found.append(compare(random_cluster(rng, 2 + i % 2, layers, 32)))
    paper, ours = ([getattr(c, name) for c in found] for name in ("paper_gap", "plan_gap"))
    layers, devices, tokens = large
    cluster = random_cluster(rng, devices, layers, tokens)
    begun = time.process_time()  # of the processor: others may use it as well
    plan(cluster, PlannerConfig(prompt_tokens=tokens // 4))
    seconds = time.process_time() - begun
    return {
        "cases": cases,
        "equal_to_brute_force": sum(c.equal for c in found),
        "makespan_gap": max(paper),
        "makespan_gap_mean": float(np.mean(paper)),
        "plan_gap": max(ours),
        "plan_gap_mean": float(np.mean(ours)),
        "latency_error": [
            min(c.latency_error for c in found),
            max(c.latency_error for c in found),
        ],
        f"seconds_{layers}x{devices}x{tokens}": seconds,
    }
