"""EMULATED clusters: Jupiter and its baselines on the devices of paper 004, prediction beside run.

A run executes every step on a virtual clock with noisy times; what is predicted comes from a
profile, measured with the same noise at few calibration lengths, or, for the baselines, from the
same steps without noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from collab_llm_lab.bench.harness import Log
from collab_llm_lab.bench.jupiter.clusters import (
    CONTEXT,
    ENV_A,
    ENV_B,
    LLAMA_7B,
    Cluster,
    clusters,
)
from collab_llm_lab.bench.jupiter.collectives import COLLECTIVES, Collective
from collab_llm_lab.bench.jupiter.pipelines import Stages, World
from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.protocols.jupiter.estimate import Estimate
from collab_llm_nodes.protocols.jupiter.gantt import Rows, plan_rows
from collab_llm_nodes.protocols.jupiter.partition import (
    PassShape,
    Placement,
    best_partitions,
    equal_split,
    range_costs,
)
from collab_llm_nodes.protocols.jupiter.partition import to_placements as named
from collab_llm_nodes.protocols.jupiter.planner import JupiterPlan, PlannerConfig, plan, split
from collab_llm_nodes.protocols.jupiter.profile import Profile, least_length

PROMPT, ANSWER = 260, 64
"""Tokens of the paper's requests (its section VI-B)."""
DRAFTED, ACCEPTED = 5, 2.0
"""Tokens drafted for a pass, and tokens that a pass adds: ASSUMED, about the paper's Table V."""
POINTS, OUTLINE, POINT_PROMPT = 4, 16, 12
"""Points of an answer, tokens of their outline, tokens of a request to expand one: ASSUMED."""
SPEEDS = (100, 500, 1000)
"""Networks of the paper [10^6 bit/s]."""
SAMPLES = 8  # tokens of an answer that collectives really run; the others take as long
LENGTHS = (32, 64, 128, PROMPT, 512, 960)
PASSES_SHOWN = 3
"""Passes of each lane in the picture of decoding."""

PAPER_TOTALS: Mapping[str, Mapping[str, tuple[float | None, ...]]] = {
    "env_a": {
        "sp": (53.5, 37.4, 35.4),
        "tp": (431.2, 106.9, 66.4),
        "detransformer": (228.5, 66.4, 46.1),
        "galaxy": (427.6, 103.9, 65.0),
        "edgeshard": (42.2, 39.0, 38.6),
        "jupiter": (16.5, 15.2, 14.9),
    },
    "env_b": {
        "sp": (63.1, 47.0, 44.8),
        "tp": (491.2, 167.0, 126.4),
        "detransformer": (288.6, 126.4, 106.2),
        "galaxy": (458.3, 142.9, 104.9),
        "edgeshard": (59.3, 56.1, 55.7),
        "jupiter": (22.4, 21.4, 20.9),
    },
    "env_a_13b": {
        "sp": (None, None, None),
        "tp": (503.4, 130.1, 83.4),
        "detransformer": (270.1, 83.4, 60.1),
        "galaxy": (496.5, 125.0, 81.3),
        "edgeshard": (66.2, 63.4, 63.1),
        "jupiter": (26.3, 25.2, 24.9),
    },
    "env_b_13b": {
        "sp": (None, None, None),
        "tp": (624.5, 251.2, 204.5),
        "detransformer": (391.2, 204.5, 181.2),
        "galaxy": (566.4, 208.0, 165.7),
        "edgeshard": (102.4, 99.7, 98.3),
        "jupiter": (38.8, 37.3, 36.8),
    },
}
"""Table IV as printed: seconds at 100, 500 and 1000 Mbit/s; None: out of memory.

Its TP rows imply 5.1 GB on the wire (from the difference of two speeds), where Table I gives 0.68.
"""
PAPER_RATIOS = {
    "Llama2-7B": {
        "100": {"sp": 8.16, "tp": 6.96, "detransformer": 3.48, "galaxy": 5.19, "jupiter": 0.08},
        "1000": {"sp": 0.92, "tp": 0.88, "detransformer": 0.45, "galaxy": 0.69, "jupiter": 0.01},
    },
    "Llama2-13B": {
        "100": {"sp": 5.71, "tp": 6.06, "detransformer": 3.03, "galaxy": 4.63, "jupiter": 0.05},
        "1000": {"sp": 0.73, "tp": 0.81, "detransformer": 0.38, "galaxy": 0.56, "jupiter": 0.01},
    },
}
"""Table II as printed: communication over computation. SP over TP is 1.17, by Table I 0.5."""

Parts = tuple[Placement, ...]
Row = dict[str, Any]
OUT_OF_MEMORY: Row = {"out_of_memory": True}


@dataclass(frozen=True)
class Bed:
    """A cluster with the profile of its devices."""

    cluster: Cluster
    profile: Profile
    seed: int

    @property
    def least(self) -> int:
        """b, as planned by default."""
        return least_length(self.profile.devices, PlannerConfig().utilisation)

    @property
    def most(self) -> int:
        """Sub-sequences of a prompt at most."""
        return PlannerConfig().parts_per_device * len(self.cluster.hardware)

    def world(self) -> World:
        """Return the cluster in virtual time."""
        return World(self.cluster, self.seed)

    def stages(self, parts: Parts) -> Stages:
        """Return a pipeline in virtual time."""
        return Stages(self.world(), parts)

    def fits(self, parts: Parts, lanes: int) -> bool:
        """Log whether each stage fits into its device's memory."""
        return all(
            self.profile.model.stage_bytes(p.first, p.last, lanes, CONTEXT)
            <= self.profile.device(p.device).memory_bytes
            for p in parts
        )

    def equal_layers(self) -> Parts:
        """Return equal numbers of layers on all devices."""
        names = self.cluster.names
        counts = equal_split(np.array([self.profile.model.layers]), len(names))[:, 0]
        ends = [int(n) for n in counts.cumsum()]
        starts = [0, *ends]
        return tuple(Placement(n, starts[i], ends[i]) for i, n in enumerate(names))

    def equal_parts(self, parts: Parts, prompt: int) -> tuple[int, ...]:
        """Return the best equal sub-sequences of at least b tokens."""
        estimate = Estimate(self.profile, parts)
        counts = range(1, max(1, min(self.most, prompt // self.least)) + 1)
        choices = [equal_split(np.array([prompt]), k)[:, 0] for k in counts]
        best = min(choices, key=lambda lengths: float(estimate.prefill_s(lengths)))
        return tuple(int(n) for n in best)

    def planned_parts(self, parts: Parts, prompt: int) -> tuple[int, ...]:
        """Return the sub-sequences that the planner chooses for given stages."""
        return split(Estimate(self.profile, parts), prompt, self.most, self.least).lengths

    def planned_layers(self, prompt: int) -> Parts:
        """Return the partition that the planner makes for a prompt alone."""
        return _prefill_plan(self.profile, prompt).placements


@cache
def _prefill_plan(profile: Profile, prompt: int) -> JupiterPlan:
    return plan(profile, PlannerConfig(prompt_tokens=prompt, answer_tokens=0))


def bed(cluster: Cluster, seed: int) -> Bed:
    """Return ``cluster`` with a profile of its own."""
    return Bed(cluster, cluster.profile(seed), seed + 1)


@dataclass(frozen=True)
class Decoding:
    """A mode in which an answer is decoded over stages.

    Attributes:
        drafts: tokens drafted for each pass; 0: none.
        points: lanes that write the points of an outline; 1: no outline.
    """

    drafts: int = 0
    points: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of a pass."""
        return self.drafts + 1

    @property
    def per_pass(self) -> float:
        """Tokens that a pass adds to its lane."""
        return ACCEPTED if self.drafts else 1.0

    def passes(self, tokens: float) -> int:
        """Return the passes that ``tokens`` tokens of one lane need."""
        return int(np.ceil(tokens / self.per_pass))

    def run_s(self, stages: Stages, prompt: int) -> float:
        """Return the emulated time of an answer."""
        if self.points == 1:
            return stages.decode(self.passes(ANSWER), self.tokens, self.per_pass, prompt)
        outline = stages.decode(self.passes(OUTLINE), self.tokens, self.per_pass, prompt)
        before = prompt + OUTLINE
        asked = stages.decode(1, POINT_PROMPT, 0, before, self.points)
        passes = self.passes(ANSWER / self.points)
        before += POINT_PROMPT
        said = stages.decode(passes, self.tokens, self.per_pass, before, self.points)
        return outline + asked + said

    def predicted_s(self, estimate: Estimate, prompt: int) -> float:
        """Return the time of an answer as the planner foresees it."""

        def rounds(count: int, tokens: int, before: int, lanes: int) -> float:
            middle = before + int(count * self.per_pass / 2)
            return estimate.decode_s(tokens, middle, lanes, count)

        if self.points == 1:
            return rounds(self.passes(ANSWER), self.tokens, prompt, 1)
        before = prompt + OUTLINE
        return (
            rounds(self.passes(OUTLINE), self.tokens, prompt, 1)
            + rounds(1, POINT_PROMPT, before, self.points)
            + rounds(
                self.passes(ANSWER / self.points), self.tokens, before + POINT_PROMPT, self.points
            )
        )


NAIVE, SD = Decoding(), Decoding(DRAFTED)
OP, BOTH = Decoding(points=POINTS), Decoding(DRAFTED, POINTS)


def row(prefill_s: float, decode_s: float, predicted: tuple[float, float]) -> Row:
    """Return the figures of one system."""
    return {
        "prefill_s": prefill_s,
        "decode_ms": 1e3 * decode_s / ANSWER,
        "total_s": prefill_s + decode_s,
        "predicted_prefill_s": predicted[0],
        "predicted_decode_ms": 1e3 * predicted[1] / ANSWER,
        "predicted_s": sum(predicted),
    }


def pipelined(here: Bed, parts: Parts, lengths: Sequence[int], decoding: Decoding) -> Row:
    """Return the figures of a pipeline of stages."""
    if not here.fits(parts, decoding.points):
        return OUT_OF_MEMORY
    estimate = Estimate(here.profile, parts)
    prompt = sum(lengths)
    return row(
        here.stages(parts).prefill(lengths),
        decoding.run_s(here.stages(parts), prompt),
        (float(estimate.prefill_s(np.array(lengths))), decoding.predicted_s(estimate, prompt)),
    )


def together(here: Bed, method: Collective) -> Row:
    """Return the figures of a method whose devices compute each layer together."""
    cluster, world = here.cluster, here.world()
    if not method.fits(cluster, PROMPT + ANSWER):
        return OUT_OF_MEMORY
    places = [int(y) for y in np.linspace(PROMPT, PROMPT + ANSWER - 1, SAMPLES)]
    decode_s = np.mean([method.run(world, 1, y) for y in places]) * ANSWER
    predicted = np.mean([method.predicted_s(cluster, 1, y) for y in places]) * ANSWER
    return row(
        method.run(world, PROMPT, 0),
        float(decode_s),
        (method.predicted_s(cluster, PROMPT, 0), float(predicted)),
    )


def edgeshard_layers(here: Bed) -> Parts:
    """Return EdgeShard's partition [10]: the least time of one sequence, transfers included."""
    devices = here.profile.devices
    of = PassShape(PROMPT, 0, 1, lanes=1, longest=CONTEXT)
    found = best_partitions([range_costs(here.profile.model, d, of) for d in devices], np.add)
    choices = [named(devices, one) for one in found]
    if not choices:
        return here.equal_layers()
    alone = np.array([PROMPT])
    return min(choices, key=lambda p: float(Estimate(here.profile, p).prefill_s(alone)))


def jupiter(here: Bed, decoding: Decoding = BOTH) -> tuple[Parts, Row]:
    """Return Jupiter's stages and figures, with as many points as memory allows."""
    points = decoding.points
    while True:
        config = PlannerConfig(PROMPT, ANSWER, points, decoding.drafts, decoding.per_pass)
        try:
            made = plan(here.profile, config)
        except ModelError:
            if points == 1:
                return (), OUT_OF_MEMORY
            points //= 2
            continue
        found = pipelined(
            here, made.placements, made.lengths(PROMPT), replace(decoding, points=points)
        )
        return made.placements, found | {"devices": len(made.placements), "points": points}


def systems(here: Bed) -> dict[str, Row]:
    """Return the figures of Jupiter and of all baselines on one cluster."""
    found = {method.name: together(here, method) for method in COLLECTIVES}
    equal = here.equal_layers()
    found["edgeshard"] = pipelined(here, edgeshard_layers(here), (PROMPT,), NAIVE)
    found["pipeline"] = pipelined(here, equal, (PROMPT,), NAIVE)
    found["equal_split"] = pipelined(here, equal, here.equal_parts(equal, PROMPT), BOTH)
    found["jupiter"] = jupiter(here)[1]
    return found


def ablation(here: Bed, prompt: int) -> dict[str, float]:
    """Return Figure 7's ablation: emulated prefill with equal or planned layers and parts [s]."""
    equal, planned = here.equal_layers(), here.planned_layers(prompt)

    def seconds(parts: Parts, lengths: Sequence[int]) -> float:
        return here.stages(parts).prefill(lengths)

    return {
        "one_device_at_a_time": seconds(equal, (prompt,)),
        "equal_layers_equal_parts": seconds(equal, here.equal_parts(equal, prompt)),
        "equal_layers_planned_parts": seconds(equal, here.planned_parts(equal, prompt)),
        "planned_layers_equal_parts": seconds(planned, here.equal_parts(planned, prompt)),
        "planned_layers_planned_parts": seconds(planned, here.planned_parts(planned, prompt)),
    }


def swept(here: Bed, prompt: int) -> dict[str, dict[str, float]]:
    """Return emulated prefill by b (with the planner's k), and by k (with b = 1) [s]."""
    parts = here.planned_layers(prompt)
    estimate = Estimate(here.profile, parts)

    def run(most: int, least: int) -> float:
        return here.stages(parts).prefill(split(estimate, prompt, most, least).lengths)

    by_k = {}
    for k in range(1, here.most + 1):
        lengths = equal_split(np.array([prompt]), k)[:, 0]
        by_k[str(k)] = here.stages(parts).prefill([int(n) for n in lengths])
    by_b = {str(b): run(here.most, b) for b in (1, 2, 4, 8, 16, 32, 64, 128) if b <= prompt}
    return {"b": by_b, "k": by_k}


def points(here: Bed) -> dict[str, dict[str, float]]:
    """Return milliseconds per token by number of points, SD in each: in turn or in shared passes.

    ``one_device_ms`` is the control: all points share the passes of a single device.
    """
    parts = here.planned_layers(PROMPT)
    alone = (Placement(here.cluster.names[0], 0, here.profile.model.layers),)
    passes = SD.passes(ANSWER / POINTS)
    found = {}
    for count in (1, 2, 4, 8, 16):

        def ms(stages: Parts, shared: int, count: int = count) -> float:
            seconds = here.stages(stages).decode(
                passes, SD.tokens, SD.per_pass, PROMPT, count, shared
            )
            return 1e3 * seconds / (passes * SD.per_pass * count)

        found[str(count)] = {
            "in_turn_ms": ms(parts, 1),
            "shared_ms": ms(parts, max(1, count // len(parts))),
            "one_device_ms": ms(alone, count),
        }
    return found


def timeline(here: Bed) -> Rows:
    """Return the planned spans of a prefill: names of machines, and their spans [s]."""
    return plan_rows(_prefill_plan(here.profile, PROMPT), here.profile, PROMPT)


def passes(here: Bed, mode: Decoding) -> Rows:
    """Return the emulated spans of the first passes of decoding over equal stages (figure 8)."""
    parts = here.equal_layers()
    stages = here.stages(parts)
    stages.decode(PASSES_SHOWN, mode.tokens, mode.per_pass, PROMPT, mode.points)
    return [
        (f"{part.device} {part.first}-{part.last - 1}", spans)
        for part, spans in zip(parts, stages.spans, strict=True)
    ]


def all_clusters(brief: bool) -> list[Cluster]:
    """Return the paper's clusters at its speeds, and the smaller ones of its figure 12.

    Args:
        brief: those with the smaller model at the slowest speed only.
    """
    if brief:
        return [cluster for cluster in clusters(SPEEDS[0]) if cluster.model is LLAMA_7B]
    found = [cluster for mbps in SPEEDS for cluster in clusters(mbps)]
    for mbps in (SPEEDS[0], SPEEDS[-1]):
        whole = [cluster for cluster in clusters(mbps) if cluster.hardware is ENV_A]
        found += [cluster.first(count) for cluster in whole for count in (1, 2, 3)]
    return found


def run_emulated(seed: int, log: Log, *, brief: bool = False) -> dict[str, Any]:
    """Run everything that is emulated.

    Args:
        log: Receives a line about each cluster before it is run.
        brief: fewer clusters, and one length of prompts in sweeps.

    Returns:
        ``emulated.<cluster>.<mbps>.<system>``; ``ablation``; ``decoding``; ``sweep``; ``points``;
        ``timeline``; ``passes``; ``prefill_by_length``; ``goals``; the paper's
        tables IV and II as ``paper_totals`` and ``paper_ratios``.
    """
    found: dict[str, dict[str, dict[str, Row]]] = {}
    lengths = (PROMPT,) if brief else LENGTHS
    ends = sorted({PROMPT, lengths[-1]})
    for cluster in all_clusters(brief):
        here = bed(cluster, seed)
        log(f"emulated: {cluster.name} at {cluster.mbps:g} Mbit/s")
        found.setdefault(cluster.name, {})[f"{cluster.mbps:g}"] = systems(here)
    slow_a = bed(Cluster("env_a", LLAMA_7B, ENV_A, SPEEDS[0]), seed)
    slow_b = bed(Cluster("env_b", LLAMA_7B, ENV_B, SPEEDS[0]), seed)
    log("emulated: ablations and sweeps")
    parts = plan(
        slow_a.profile, PlannerConfig(PROMPT, ANSWER, POINTS, DRAFTED, ACCEPTED)
    ).placements
    modes = {"naive": NAIVE, "sd": SD, "op": OP, "both": BOTH}
    results: dict[str, Any] = {
        "emulated": found,
        "ablation": {
            here.cluster.name: {str(n): ablation(here, n) for n in ends}
            for here in (slow_a, slow_b)
        },
        "decoding": {
            name: 1e3 * mode.run_s(slow_a.stages(parts), PROMPT) / ANSWER
            for name, mode in modes.items()
        },
        "sweep": {str(n): swept(slow_a, n) for n in ends},
        "points": points(slow_a),
        "timeline": timeline(slow_b),
        "passes": {name: passes(slow_a, mode) for name, mode in modes.items()},
        "prefill_by_length": {str(n): _by_length(slow_a, n) for n in lengths},
        "paper_totals": PAPER_TOTALS,
        "paper_ratios": PAPER_RATIOS,
    }
    results["goals"] = goals(results)
    return results


def _by_length(here: Bed, prompt: int) -> dict[str, float]:
    equal, planned = here.equal_layers(), here.planned_layers(prompt)
    plain = here.stages(equal).prefill((prompt,))
    ours = here.stages(planned).prefill(here.planned_parts(planned, prompt))
    return {"pipeline_s": plain, "jupiter_s": ours, "speedup": plain / ours}


def errors(emulated: Mapping[str, Mapping[str, Mapping[str, Row]]]) -> dict[str, float]:
    """Return the relative errors of predictions by cluster, speed, system and figure."""
    found = {}
    for cluster, by_speed in emulated.items():
        for mbps, by_system in by_speed.items():
            for system, figures in by_system.items():
                for own in ("prefill_s", "decode_ms"):
                    if own in figures:
                        error = figures[f"predicted_{own}"] / figures[own] - 1.0
                        found[f"{cluster}.{mbps}.{system}.{own}"] = error
    return found


def goals(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that the project set goals for."""
    emulated = results["emulated"]
    slow = str(SPEEDS[0])
    wrong = {name: abs(error) for name, error in errors(emulated).items()}
    worst = max(wrong, key=wrong.__getitem__)
    own = [value for name, value in wrong.items() if ".jupiter." in name]
    ablated = results["ablation"]["env_b"][str(PROMPT)]
    return {
        "prefill_over_pipeline": {
            n: by["speedup"] for n, by in results["prefill_by_length"].items()
        },
        "end_to_end_over_pipeline": emulated["env_a"][slow]["pipeline"]["total_s"]
        / emulated["env_a"][slow]["jupiter"]["total_s"],
        "end_to_end_over_edgeshard": emulated["env_a"][slow]["edgeshard"]["total_s"]
        / emulated["env_a"][slow]["jupiter"]["total_s"],
        "heterogeneous_over_equal_split": {
            "prefill": ablated["equal_layers_equal_parts"]
            / ablated["planned_layers_planned_parts"],
            **{
                f"{name}.{mbps}": by["equal_split"]["total_s"] / by["jupiter"]["total_s"]
                for name in ("env_b", "env_b_13b")
                for mbps, by in emulated.get(name, {}).items()
                if "total_s" in by["equal_split"] and "total_s" in by["jupiter"]
            },
        },
        "largest_error": wrong[worst],
        "largest_error_of": worst,
        "largest_error_of_jupiter": max(own),
    }
