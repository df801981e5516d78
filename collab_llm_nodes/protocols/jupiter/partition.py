"""The partition of a model's layers over devices (paper 004, Eq. 1).

Costs are arrays [L + 1, L + 1] for L decoder layers: ``cost[i, j]`` is the time of layers i to
j - 1, +inf where they do not fit into the device's memory. The embedding and the head (final norm,
LM head, drafting heads) are layers as well, but no stage has only one of these: a range that begins
with 0 has the embedding, and one that ends with L the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.protocols.jupiter.profile import DeviceProfile, ModelFacts, Seconds


@dataclass(frozen=True)
class Placement:
    """Decoder layers ``first`` to ``last - 1`` on ``device``.

    The embedding is with layer 0, the head with the last layer.
    """

    device: str
    first: int
    last: int


@dataclass(frozen=True)
class Pass:
    """A pass that a partition is balanced for.

    Attributes:
        tokens: new ones.
        before: tokens before them.
        rows: tokens behind which the head gives logits; a fraction where only some passes have one.
        lanes: sessions held at a time; their keys and values count as memory.
        longest: most tokens of any pass; their activations count as memory.
    """

    tokens: int
    before: int
    rows: float
    lanes: int
    longest: int


def costs(model: ModelFacts, device: DeviceProfile, of: Pass) -> Seconds:
    """Return the cost of each range of layers on ``device``, [L + 1, L + 1]."""
    end = model.layers
    found = np.full((end + 1, end + 1), np.inf)
    layer = float(device.layer(of.tokens, of.before))
    constant = float(device.by_length(device.pass_s, of.tokens))
    embedding = float(device.by_length(device.embedding_s, of.tokens))
    head = float(device.by_length(device.head_s, max(1.0, of.rows))) * min(1.0, of.rows)
    for i in range(end):
        for j in range(i + 1, end + 1):
            if model.stage_bytes(i, j, of.lanes, of.longest) <= device.memory_bytes:
                ends = (i == 0) * embedding + (j == end) * head
                found[i, j] = constant + (j - i) * layer + ends
    return found


@dataclass(frozen=True)
class Balanced:
    """A partition of the layers over devices.

    Attributes:
        value: of the slowest stage, or of all stages together; +inf if there is no partition.
        devices: numbers of those that take part, in the order of their layers.
        bounds: first layer of each stage, and the end of the last.
    """

    value: float
    devices: tuple[int, ...]
    bounds: tuple[int, ...]


Join = Callable[[Seconds, Seconds], Seconds]
"""``np.maximum``: the slowest stage counts (Eq. 1). ``np.add``: all stages in turn count."""


def in_order(cost: Sequence[Seconds], join: Join = np.maximum) -> Balanced:
    """Solve Eq. 1 for devices in the given order; each takes part.

    Args:
        cost: of each device.
        join: how the time of a stage joins that of those before it.
    """
    layers = len(cost[0])
    best = np.full(layers, np.inf)
    best[0] = 0.0 if join is np.add else -np.inf
    choices = []
    for own in cost:
        joined = join(best[:, None], own)
        choices.append(joined.argmin(0))
        best = joined.min(0)
    bounds = [layers - 1]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return Balanced(float(best[-1]), tuple(range(len(cost))), tuple(reversed(bounds)))


def in_any_order(cost: Sequence[Seconds], join: Join = np.maximum) -> list[Balanced]:
    """Solve Eq. 1 for each set of devices that has a partition, in its best order.

    The value of a set is found from those of its subsets without one device, the last in line:
    2^n sets instead of n! orders.
    """
    layers, count = len(cost[0]), len(cost)
    start = np.full(layers, np.inf)
    start[0] = 0.0 if join is np.add else -np.inf
    best = {0: start}
    last: dict[int, tuple[Seconds, Seconds]] = {}  # of a set: last device and its first layer
    for group in range(1, 1 << count):
        values, devices, begins = np.full(layers, np.inf), np.zeros(layers), np.zeros(layers)
        for d in range(count):
            if group >> d & 1:
                joined = join(best[group ^ (1 << d)][:, None], cost[d])
                here = joined.min(0)
                better = here < values
                values[better] = here[better]
                devices[better], begins[better] = d, joined.argmin(0)[better]
        best[group] = values
        last[group] = devices, begins
    found = []
    for group in range(1, 1 << count):
        value, rest, bounds, order = float(best[group][-1]), group, [layers - 1], list[int]()
        if not np.isfinite(value):
            continue
        while rest:
            devices, begins = last[rest]
            order.append(int(devices[bounds[-1]]))
            bounds.append(int(begins[bounds[-1]]))
            rest ^= 1 << order[-1]
        found.append(Balanced(value, tuple(reversed(order)), tuple(reversed(bounds))))
    return found


def placements(devices: Sequence[DeviceProfile], balanced: Balanced) -> tuple[Placement, ...]:
    """Return the stages of a partition with the names of their devices."""
    return tuple(
        Placement(devices[d].name, balanced.bounds[i], balanced.bounds[i + 1])
        for i, d in enumerate(balanced.devices)
    )


def check_placements(parts: Sequence[Placement], layers: int) -> None:
    """Refuse stages that do not follow each other from layer 0 to ``layers``.

    Raises:
        ConfigError: they leave a gap, overlap, are empty, or use a device twice.
    """
    bounds = [0, *(part.last for part in parts)]
    follow = all(part.first == bounds[i] < part.last for i, part in enumerate(parts))
    if not parts or not follow or bounds[-1] != layers:
        raise ConfigError(
            f"stages do not cover layers 0 to {layers} in order",
            field="placements",
            remedy="plan again",
        )
    if len({part.device for part in parts}) < len(parts):
        raise ConfigError(
            "a device has two stages", field="placements", remedy="give each device one range"
        )
