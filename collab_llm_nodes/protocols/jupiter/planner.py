"""The plan for a model on a set of devices: stages, and sub-sequences for every prompt length.

Paper 004 takes the partition of Eq. 1 and the number of sub-sequences of Eq. 4, which assume equal
stages and free links. Here a local search begins at these partitions: layers move between
neighbours, devices change places or are left out, while the exact flow shop gets shorter. The time
of the paper's own plan is reported as well (``Predicted.paper_plan_s``).

Prefill is limited by the slowest stage, a single lane of decoding by the sum of all stages. One
partition serves both, since keys and values cannot move: the fastest for the whole request. The
plan reports what that costs each phase.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path

import numpy as np

from collab_llm_nodes.config import check_ranges, from_mapping, setting
from collab_llm_nodes.errors import ConfigError, InvalidInput, ModelError
from collab_llm_nodes.protocols.jupiter.estimate import Estimate, paper_latency
from collab_llm_nodes.protocols.jupiter.messages import STATES
from collab_llm_nodes.protocols.jupiter.partition import (
    Join,
    Partition,
    PassShape,
    Placement,
    SequenceTable,
    best_partitions,
    check_placements,
    equal_split,
    range_costs,
    to_placements,
)
from collab_llm_nodes.protocols.jupiter.profile import (
    ModelFacts,
    Profile,
    Seconds,
    least_length,
    read_json,
    write_json,
)

VERSION = 1
"""Version of the file format."""
COARSE_CUTS = 32
"""Possible cuts of a prompt where an approximate division is enough."""
_STARTS = 3  # partitions of each kind at which the search begins


@dataclass(frozen=True)
class PlannerConfig:
    """The requests that a plan is made for."""

    prompt_tokens: int = setting(256, "Typical length of a prompt [tokens].", low=1, high=1 << 20)
    answer_tokens: int = setting(
        64,
        "Typical length of an answer [tokens]; 0: plan for the prompt only.",
        low=0,
        high=1 << 20,
    )
    lanes: int = setting(
        1, "Lanes that decode at the same time; each reserves memory.", low=1, high=1024
    )
    draft_tokens: int = setting(5, "Tokens drafted for each pass of a lane.", low=0, high=64)
    accepted: float = setting(
        2.0, "Tokens that a pass of a lane adds to the answer, on average.", low=1.0, high=65.0
    )
    states: str = setting("float32", "Form of hidden states on the wire.", choices=STATES)
    coordinator: str = setting(
        "",
        "Device that the server runs on, whose memory holds the vision encoder of a model that sees"
        " as well; empty: none of these.",
    )
    utilisation: float = setting(
        0.5,
        "Least share of its best speed that a device reaches with a sub-sequence.",
        low=0.01,
        high=1.0,
    )
    parts_per_device: int = setting(
        4, "Largest number of sub-sequences of a prompt, per device.", low=1, high=64
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Predicted:
    """Times of the typical request, by the exact flow shop [s].

    Attributes:
        prefill_s: to the first token.
        decode_s: of the whole answer.
        best_prefill_s, best_decode_s: with partitions for one phase only.
        paper_plan_s: prefill with the paper's partition (Eq. 1) and sub-sequences (Eq. 2, 4).
        paper_latency_s: ``prefill_s`` as Eq. 4 estimates it.
    """

    prefill_s: float
    decode_s: float
    best_prefill_s: float
    best_decode_s: float
    paper_plan_s: float
    paper_latency_s: float

    @property
    def prefill_loss(self) -> float:
        """Share by which prefill takes longer than with a partition of its own."""
        return self.prefill_s / self.best_prefill_s - 1.0

    @property
    def decode_loss(self) -> float:
        """Share by which decoding takes longer than with a partition of its own."""
        return self.decode_s / self.best_decode_s - 1.0 if self.best_decode_s else 0.0


@dataclass(frozen=True)
class JupiterPlan:
    """Stages on devices, and the sub-sequences of every prompt length.

    Attributes:
        fingerprint: of the model.
        placements: the stages in order. Devices that would slow down the others have none.
        memory_bytes: of each stage; the coordinator's with the vision encoder.
        least: b, the shortest of several sub-sequences.
        parts: sub-sequences of a prompt of n + 1 tokens, at index n.
        prefill_s: predicted time to the first token, likewise.
    """

    fingerprint: str
    config: PlannerConfig
    placements: tuple[Placement, ...]
    memory_bytes: tuple[int, ...]
    least: int
    predicted: Predicted
    parts: tuple[tuple[int, ...], ...]
    prefill_s: tuple[float, ...]
    version: int = VERSION

    def __post_init__(self) -> None:
        check_placements(self.placements, self.placements[-1].last if self.placements else 0)
        whole = all(min(p, default=0) > 0 and sum(p) == n for n, p in enumerate(self.parts, 1))
        if not whole or not self.parts or len(self.prefill_s) != len(self.parts):
            raise ConfigError(
                "sub-sequences do not add up to their prompts", field="parts", remedy="plan again"
            )
        if len(self.memory_bytes) != len(self.placements):
            raise ConfigError(
                f"{len(self.memory_bytes)} figures for {len(self.placements)} stages",
                field="memory_bytes",
                remedy="plan again",
            )
        times = np.array([*vars(self.predicted).values(), *self.prefill_s])
        if not (np.isfinite(times).all() and (times >= 0).all()):
            raise ConfigError(
                "times are finite and not negative", field="prefill_s", remedy="plan again"
            )

    @property
    def context(self) -> int:
        """Tokens of the longest prompt."""
        return len(self.parts)

    @property
    def typical_prompt(self) -> int:
        """Tokens of the typical prompt, at most the model's context."""
        return min(self.config.prompt_tokens, self.context)

    def lengths(self, prompt_tokens: int) -> tuple[int, ...]:
        """Return the sub-sequences of a prompt.

        Raises:
            InvalidInput: it is empty, or longer than the model's context.
        """
        if not 1 <= prompt_tokens <= self.context:
            raise InvalidInput(
                f"{prompt_tokens} tokens; plans are for 1 to {self.context}",
                field="prompt",
                remedy="shorten the prompt",
            )
        return self.parts[prompt_tokens - 1]

    def save(self, file: Path) -> None:
        """Write the plan as JSON."""
        write_json(file, asdict(self))

    @classmethod
    def load(cls, file: Path) -> JupiterPlan:
        """Read a plan.

        Raises:
            ConfigError: it is unreadable, or of another version.
        """
        return from_mapping(cls, read_json(file, "plan", VERSION))


def plan(
    profile: Profile,
    config: PlannerConfig | None = None,
    devices: Sequence[str] | None = None,
    check: Callable[[], None] = lambda: None,
) -> JupiterPlan:
    """Return the plan for the model of ``profile``.

    Args:
        config: the requests to plan for.
        devices: names of the devices to use; None: all of the profile.
        check: called from time to time; an exception ends the search.

    Raises:
        ConfigError: a device is not in the profile.
        ModelError: the model does not fit into their memory.
    """
    config = config or PlannerConfig()
    profile = _prepared(profile, config)
    search = _search(profile, config, devices, check)
    chosen = search.best(search.total_s)
    for_prefill, for_decode = search.best(search.prefill_s), search.best(search.decode_s)
    for better in (for_prefill, for_decode):  # each search is local: another may have done better
        chosen = min(chosen, better, key=search.total_s)
    for_prefill = min(for_prefill, for_decode, chosen, key=search.prefill_s)
    for_decode = min(for_prefill, for_decode, chosen, key=search.decode_s)
    estimate = Estimate(profile, chosen)
    parts, prefill_s = _all_lengths(profile.model, estimate, search.least, search.most, check)
    prompt = min(config.prompt_tokens, profile.model.context)
    lengths = np.array(parts[prompt - 1])
    h = estimate.slowest(lengths, lengths.cumsum() - lengths)
    predicted = Predicted(
        prefill_s=prefill_s[prompt - 1],
        decode_s=search.decode_s(chosen),
        best_prefill_s=min(prefill_s[prompt - 1], search.exact_prefill_s(for_prefill)),
        best_decode_s=search.decode_s(for_decode),
        paper_plan_s=search.paper_plan_s(),
        paper_latency_s=float(paper_latency(h, len(chosen))),
    )
    memory = tuple(
        profile.model.stage_bytes(p.first, p.last, config.lanes, profile.model.context)
        + profile.model.vision_bytes * (p.device == config.coordinator)
        for p in chosen
    )
    return JupiterPlan(
        profile.model.fingerprint,
        config,
        chosen,
        memory,
        search.least,
        predicted,
        parts,
        prefill_s,
    )


def stages_for(
    profile: Profile, config: PlannerConfig | None = None, devices: Sequence[str] | None = None
) -> tuple[Placement, ...]:
    """Return the stages of ``plan`` only, which is faster: a lost device is replaced by them."""
    config = config or PlannerConfig()
    search = _search(_prepared(profile, config), config, devices)
    return search.best(search.total_s)


def _prepared(profile: Profile, config: PlannerConfig) -> Profile:
    """Return the profile with the sizes of states sent, and the memory left to stages."""
    return profile.sending(config.states).beside_vision(config.coordinator)


def _search(
    profile: Profile,
    config: PlannerConfig,
    devices: Sequence[str] | None,
    check: Callable[[], None] = lambda: None,
) -> _Search:
    names = [d.name for d in profile.devices] if devices is None else devices
    return _Search(Profile(profile.model, tuple(profile.device(n) for n in names)), config, check)


def _all_lengths(
    model: ModelFacts, estimate: Estimate, least: int, most: int, check: Callable[[], None]
) -> tuple[tuple[tuple[int, ...], ...], tuple[float, ...]]:
    """Return the sub-sequences of prompts of 1 to ``context`` tokens, and their times.

    Candidates for each length and k are the parts of Eq. 2, and equal parts, which are sometimes
    better where stages differ. The flow shop decides.
    """
    table = SequenceTable(estimate.slowest, model.context, most, least)
    best = np.full(model.context, np.inf)
    parts: list[tuple[int, ...]] = [()] * model.context
    for k in range(1, most + 1):
        check()
        places = np.flatnonzero(np.isfinite(table.worst[:, k]))
        if not len(places):
            break
        for lengths in (table.split(places, k), equal_split(places, k)):
            seconds = estimate.prefill_s(lengths)
            for i in np.flatnonzero(seconds < best[places - 1]):
                best[places[i] - 1] = seconds[i]
                parts[places[i] - 1] = tuple(int(n) for n in lengths[:, i])
    return tuple(parts), tuple(float(s) for s in best)


@dataclass(frozen=True)
class Split:
    """The sub-sequences of one prompt, and the time to its first token.

    Attributes:
        lengths, seconds: the best ones found.
        paper_s: time with the sub-sequences of Eq. 2 and 4.
    """

    lengths: tuple[int, ...]
    seconds: float
    paper_s: float


def split(estimate: Estimate, prompt: int, most: int, least: int, step: int = 1) -> Split:
    """Return the best sub-sequences of one prompt for given stages.

    Args:
        most: largest number of sub-sequences.
        least: b, the shortest length of one of several sub-sequences.
        step: all lengths are multiples of it, also ``prompt``.
    """
    table = SequenceTable(estimate.slowest, prompt, most, least, step)
    counts = np.flatnonzero(np.isfinite(table.worst[-1]))
    lengths = np.zeros((counts[-1], 2 * len(counts)), np.int64)
    for column, k in enumerate(counts):
        lengths[:k, column] = table.split(np.array([prompt // step]), int(k))[:, 0]
        lengths[:k, len(counts) + column] = equal_split(np.array([prompt]), int(k))[:, 0]
    seconds = estimate.prefill_s(lengths)
    planned = lengths[:, : len(counts)]
    h = estimate.slowest(planned, planned.cumsum(0) - planned) * (planned > 0)
    best = int(seconds.argmin())
    return Split(
        tuple(int(n) for n in lengths[:, best] if n),
        float(seconds[best]),
        float(seconds[paper_latency(h, len(estimate.placements)).argmin()]),
    )


Placements = tuple[Placement, ...]
Objective = Callable[[Placements], float]


@dataclass
class _Search:
    """The search for a partition of one model over one set of devices."""

    profile: Profile
    config: PlannerConfig
    check: Callable[[], None] = lambda: None
    _times: dict[Placements, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        devices = self.profile.devices
        if not devices:
            raise InvalidInput("no devices", field="devices", remedy="name one or more")
        self.least = least_length(devices, self.config.utilisation)
        self.most = self.config.parts_per_device * len(devices)
        model = self.profile.model
        self.prompt = min(self.config.prompt_tokens, model.context)
        self._bytes = {d.name: d.memory_bytes for d in devices}
        prefill = PassShape(
            tokens=max(1, self.prompt // (2 * len(devices))),
            before=self.prompt // 2,
            rows=1 / (2 * len(devices)),
            lanes=self.config.lanes,
            longest=model.context,
        )
        drafted = self.config.draft_tokens + 1
        decode = PassShape(drafted, self.prompt, 2 * drafted - 1, self.config.lanes, model.context)
        self._prefill_costs = [range_costs(model, d, prefill) for d in devices]
        self._decode_costs = [range_costs(model, d, decode) for d in devices]
        if not self._partitions(self._prefill_costs):
            kept = model.kv_bytes * model.layers * model.context * self.config.lanes
            raise ModelError(
                f"{model.weight_bytes(0, model.layers) / 1e6:.0f} MB of weights, {kept / 1e6:.0f}"
                f" MB of keys and values for {self.config.lanes} lanes of {model.context} tokens,"
                " and activations do not fit into the devices'"
                f" {sum(self._bytes.values()) / 1e6:.0f} MB",
                field="devices",
                remedy="add devices, or plan for fewer lanes or a shorter context",
            )

    def _partitions(self, cost: Sequence[Seconds], join: Join = np.maximum) -> list[Partition]:
        return sorted(best_partitions(cost, join), key=lambda found: found.value)

    @cached_property
    def _starts(self) -> list[Placements]:
        """Partitions of Eq. 1 for both phases, the best few for each number of devices."""
        kinds = (
            (self._prefill_costs, np.maximum),
            (self._decode_costs, np.maximum),
            (self._decode_costs, np.add),
        )
        found: list[Placements] = []
        for cost, join in kinds:
            taken = [0] * (len(self.profile.devices) + 1)
            for balanced in self._partitions(cost, join):
                taken[len(balanced.devices)] += 1
                if taken[len(balanced.devices)] <= _STARTS:
                    found.append(to_placements(self.profile.devices, balanced))
        return list(dict.fromkeys(found))

    def best(self, objective: Objective) -> Placements:
        """Return the best partition that improving moves reach from the best starts."""
        ends = []
        for start in sorted(self._starts, key=objective)[:_STARTS]:
            here: Placements | None = start
            while here is not None:
                self.check()
                ends.append(here)
                value = objective(here)
                here = next((p for p in self._neighbours(here) if objective(p) < value), None)
        return min(ends, key=objective)

    def _neighbours(self, parts: Placements) -> Iterator[Placements]:
        """Yield the partitions one move away that fit into memory."""
        bounds, names = [0, *(p.last for p in parts)], [p.device for p in parts]
        stages = range(len(names))
        moved: list[tuple[list[int], list[str]]] = []
        for i in stages[1:]:
            for step in (-4, -1, 1, 4):
                shifted = [*bounds[:i], bounds[i] + step, *bounds[i + 1 :]]
                moved.append((shifted, names))
        for i, j in combinations(
            stages, 2
        ):  # two devices swap places, with their numbers of layers
            layers, swapped = np.diff(bounds), list(names)
            layers[[i, j]] = layers[[j, i]]
            swapped[i], swapped[j] = names[j], names[i]
            moved.append(([0, *(int(n) for n in layers.cumsum())], swapped))
        if len(names) > 1:
            for i in stages:  # a device is left out, and a neighbour takes its layers
                rest = names[:i] + names[i + 1 :]
                for gone in {max(i, 1), min(i + 1, len(names) - 1)}:
                    moved.append((bounds[:gone] + bounds[gone + 1 :], rest))
        for new_bounds, new_names in moved:
            if any(a >= b for a, b in zip(new_bounds, new_bounds[1:], strict=False)):
                continue
            there = tuple(
                Placement(name, new_bounds[i], new_bounds[i + 1])
                for i, name in enumerate(new_names)
            )
            if self._fits(there):
                yield there

    def _fits(self, parts: Placements) -> bool:
        model = self.profile.model
        return parts[0].last >= model.first_layers and all(
            model.stage_bytes(p.first, p.last, self.config.lanes, model.context)
            <= self._bytes[p.device]
            for p in parts
        )

    def prefill_s(self, parts: Placements) -> float:
        """Return the time to the first token, with cuts on a coarse grid."""
        if parts not in self._times:
            step = max(1, self.prompt // COARSE_CUTS)
            self._times[parts] = self._split(parts, self.prompt // step * step, step).seconds
        return self._times[parts]

    def exact_prefill_s(self, parts: Placements) -> float:
        """Return the time to the first token, with cuts anywhere."""
        return self._split(parts, self.prompt, 1).seconds

    def paper_plan_s(self) -> float:
        """Return the time to the first token of Eq. 1's best partition with Eq. 4's parts."""
        chosen = self._partitions(self._prefill_costs)[0]
        return self._split(to_placements(self.profile.devices, chosen), self.prompt, 1).paper_s

    def _split(self, parts: Placements, prompt: int, step: int) -> Split:
        return split(Estimate(self.profile, parts), prompt, self.most, self.least, step)

    def decode_s(self, parts: Placements) -> float:
        """Return the time of the whole answer, divided evenly over the lanes."""
        model, config = self.profile.model, self.config
        if not config.answer_tokens:
            return 0.0
        rounds = max(1.0, config.answer_tokens / (config.lanes * config.accepted))
        drafted = config.draft_tokens + 1
        before = self.prompt + config.answer_tokens // (2 * config.lanes)  # halfway through it
        before = max(0, min(before, model.context - drafted))
        return Estimate(self.profile, parts).decode_s(drafted, before, config.lanes, rounds)

    def total_s(self, parts: Placements) -> float:
        """Return the time of the whole request."""
        return self.prefill_s(parts) + self.decode_s(parts)
