"""The dynamic programs of paper 004: layers on devices (Eq. 1), sub-sequences (Eq. 2 and 3).

Costs are arrays [L + 1, L + 1] for L decoder layers: ``cost[i, j]`` is the time of layers i to
j - 1, +inf where they do not fit into the device's memory, or are too few for a first stage. A
range that begins with 0 includes the embedding, and one that ends with L the head (final norm, LM
head, drafting heads).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.protocols.jupiter.profile import DeviceProfile, ModelFacts, Seconds


@dataclass(frozen=True)
class Placement:
    """Decoder layers ``first`` to ``last - 1`` on ``device``.

    The first layer brings the embedding, the last one the head. A device is a name in a profile; in
    a chain it is the address of a worker.
    """

    device: str
    first: int
    last: int


@dataclass(frozen=True)
class PassShape:
    """A pass for which a partition is balanced.

    Attributes:
        tokens: new tokens.
        before: cached tokens before them.
        rows: rows of logits; a fraction where only some passes have one.
        lanes: sessions whose keys and values take memory.
        longest: tokens of the longest pass, whose activations take memory.
    """

    tokens: int
    before: int
    rows: float
    lanes: int
    longest: int


def range_costs(model: ModelFacts, device: DeviceProfile, of: PassShape) -> Seconds:
    """Return the cost of each range of layers on ``device``, [L + 1, L + 1]."""
    end = model.layers
    found = np.full((end + 1, end + 1), np.inf)
    layer = float(device.layer(of.tokens, of.before))
    constant = float(device.by_length(device.pass_s, of.tokens))
    embedding = float(device.by_length(device.embedding_s, of.tokens))
    head = float(device.by_length(device.head_s, max(1.0, of.rows))) * min(1.0, of.rows)
    for i in range(end):
        for j in range(i + 1 if i else model.first_layers, end + 1):
            if model.stage_bytes(i, j, of.lanes, of.longest) <= device.memory_bytes:
                ends = (i == 0) * embedding + (j == end) * head
                found[i, j] = constant + (j - i) * layer + ends
    return found


@dataclass(frozen=True)
class Partition:
    """A partition of the layers over devices.

    Attributes:
        value: cost of the slowest stage, or of all stages together.
        devices: indices of the devices that take part, in the order of their layers.
        bounds: first layer of each stage, and the end of the last one.
    """

    value: float
    devices: tuple[int, ...]
    bounds: tuple[int, ...]


Join = Callable[[Seconds, Seconds], Seconds]
"""``np.maximum``: the slowest stage counts (Eq. 1). ``np.add``: the sum of all stages counts."""


def best_partitions(cost: Sequence[Seconds], join: Join = np.maximum) -> list[Partition]:
    """Solve Eq. 1 for each set of devices that has a partition, in its best order.

    The value of a set follows from those of its subsets without the last device: 2^n sets instead
    of n! orders.
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
        found.append(Partition(value, tuple(reversed(order)), tuple(reversed(bounds))))
    return found


def to_placements(devices: Sequence[DeviceProfile], partition: Partition) -> tuple[Placement, ...]:
    """Return the stages of ``partition``."""
    return tuple(
        Placement(devices[d].name, partition.bounds[i], partition.bounds[i + 1])
        for i, d in enumerate(partition.devices)
    )


def check_placements(parts: Sequence[Placement], layers: int) -> None:
    """Refuse stages that do not hold each layer once, in order, on different devices.

    Raises:
        ConfigError: ``field`` is ``plan``.
    """
    bounds = [0, *(part.last for part in parts)]
    follow = all(part.first == bounds[i] < part.last for i, part in enumerate(parts))
    if not parts or not follow or bounds[-1] != layers:
        raise ConfigError(
            f"stages do not cover layers 0 to {layers} in order",
            field="plan",
            remedy="plan again",
        )
    if len({part.device for part in parts}) < len(parts):
        raise ConfigError(
            "a device has two stages", field="plan", remedy="give each device one range"
        )


Slowest = Callable[[NDArray[np.int64], NDArray[np.int64]], Seconds]
"""Returns h(x, y): the time of x tokens after y others in the slowest stage [s]."""

_BLOCK = 1 << 17  # pairs (x, y) per call of Slowest


class SequenceTable:
    """W(1 -> y, k) of Eq. 2 for each y up to ``longest`` and each k up to ``most``.

    A single sub-sequence may have any length, so that prompts shorter than b have a plan as well.
    Takes O(longest^2 most), with a few numpy operations per y.

    Args:
        slowest: see ``Slowest``.
        longest: S_max [tokens].
        most: largest number of sub-sequences, 4 |D| in the paper.
        least: b, the shortest length of one of several sub-sequences.
        step: all lengths are multiples of it, also ``longest``.

    Attributes:
        worst: W, [longest / step + 1, most + 1]; +inf where there is no division.
    """

    def __init__(
        self, slowest: Slowest, longest: int, most: int, least: int, step: int = 1
    ) -> None:
        self.step = step
        self.most = most
        count = longest // step
        self.worst = np.full((count + 1, most + 1), np.inf)
        self._cut = np.zeros((count + 1, most + 1), np.int32)
        places = np.arange(count + 1) * step
        self.worst[1:, 1] = slowest(places[1:], np.zeros(count, np.int64))
        margin = -(-least // step)  # Eq. 3: at least b tokens on either side of a cut
        rows = max(1, _BLOCK // count)
        for begin in range(1, count + 1 if most > 1 else 0, rows):
            end = min(begin + rows, count + 1)
            new = places[begin:end, None] - places[None, :end]
            own = slowest(np.maximum(new, 0), np.broadcast_to(places[:end], new.shape))
            for y in range(max(begin, 2 * margin), end):
                high = y - margin + 1
                joined = np.maximum(
                    self.worst[margin:high, 1:-1], own[y - begin, margin:high, None]
                )
                cut = joined.argmin(0)
                self._cut[y, 2:] = margin + cut
                self.worst[y, 2:] = joined[cut, np.arange(most - 1)]

    def split(self, places: NDArray[np.intp], k: int) -> NDArray[np.int64]:
        """Return the sub-sequences of several prompts in ``k`` parts each, [k, places].

        Args:
            places: lengths of the prompts, in steps; ``worst`` is finite there.
        """
        found = np.zeros((k, len(places)), np.int64)
        end = np.asarray(places)
        for i in reversed(range(k)):
            begin = self._cut[end, i + 1] if i else np.zeros_like(end)
            found[i] = (end - begin) * self.step
            end = begin
        return found


def equal_split(totals: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    """Return each of ``totals`` in ``k`` parts that differ by at most one token, [k, totals]."""
    found: NDArray[np.int64] = totals // k + (np.arange(k)[:, None] < totals % k)
    return found
