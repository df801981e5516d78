"""EMULATED baselines whose devices compute each layer together.

SP, Megatron-LM, DeTransformer and Galaxy, as paper 004 compares with.

Each is a program that runs on a virtual clock, with ring collectives made of single messages.
Beside it stands a prediction: the same steps without noise, as a recursion over the times at which
devices are ready. Table I of paper 004 gives what they send.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collab_llm_lab.bench.jupiter.clock import Line, Process
from collab_llm_lab.bench.jupiter.clusters import LATENCY_S, Cluster, Hardware, Llm
from collab_llm_lab.bench.jupiter.pipelines import World
from collab_llm_nodes.protocols.jupiter.partition import equal_split
from collab_llm_nodes.protocols.jupiter.profile import Seconds


class RingTimes:
    """The times at which devices of a ring are ready, through steps of equal messages.

    Attributes:
        ready: [devices] in seconds.
    """

    def __init__(self, cluster: Cluster) -> None:
        count = len(cluster.hardware)
        self.ready = np.zeros(count)
        self._free = np.zeros(count)  # when each device's link has sent what it was given
        self._rate = count * cluster.bytes_per_s

    def compute(self, seconds: Seconds) -> None:
        """Let each device compute."""
        self.ready = self.ready + seconds

    def step(self, size: int, meanwhile: Seconds | float = 0.0) -> None:
        """Let each device send its part of ``size`` bytes, compute, and wait for the other part."""
        self._free = np.maximum(self._free, self.ready) + size / self._rate
        self.ready = np.maximum(self.ready + meanwhile, np.roll(self._free, 1) + 2 * LATENCY_S)

    def all_reduce(self, size: int) -> None:
        """Sum ``size`` bytes over all devices."""
        for _ in range(2 * (len(self.ready) - 1)):
            self.step(size)

    def all_gather(self, size: int) -> None:
        """Gather ``size`` bytes from all devices."""
        for _ in range(len(self.ready) - 1):
            self.step(size)


class Collective(ABC):
    """A method whose devices compute every layer together.

    Attributes:
        name: in results.
    """

    name: str

    @abstractmethod
    def memory_bytes(self, cluster: Cluster, tokens: int) -> list[float]:
        """Return what each device holds for a request of ``tokens`` tokens in all."""

    @abstractmethod
    def _layer(self, world: World, ring: Ring, d: int, index: int, x: int, y: int) -> Process:
        """Run device ``d`` through layer ``index``: ``x`` tokens after ``y``."""

    @abstractmethod
    def _foresee(self, cluster: Cluster, times: RingTimes, index: int, x: int, y: int) -> None:
        """Take ``times`` through layer ``index``."""

    def _shares(self, cluster: Cluster) -> list[float]:
        """Return the share of each layer that a device computes."""
        return [1 / len(cluster.hardware)] * len(cluster.hardware)

    def fits(self, cluster: Cluster, tokens: int) -> bool:
        """Log whether the memory of each device suffices."""
        held = self.memory_bytes(cluster, tokens)
        return all(h.memory_bytes >= b for h, b in zip(cluster.hardware, held, strict=True))

    def run(self, world: World, x: int, y: int) -> float:
        """Return the emulated time of a pass of ``x`` tokens after ``y``, with logits of one."""
        cluster, begun = world.cluster, world.clock.now
        ring = Ring(world)
        ends: list[float] = []

        def device(d: int) -> Process:
            for index in range(cluster.model.layers):
                yield from self._layer(world, ring, d, index, x, y)
            head = cluster.hardware[d].head(cluster.model, 1)
            yield world.taken(self._shares(cluster)[d] * head)
            ends.append(world.clock.now)

        for d in range(len(cluster.hardware)):
            world.clock.start(device(d))
        world.clock.run()
        return max(ends) - begun

    def predicted_s(self, cluster: Cluster, x: int, y: int) -> float:
        """Return the time of such a pass without noise."""
        times = RingTimes(cluster)
        for index in range(cluster.model.layers):
            self._foresee(cluster, times, index, x, y)
        shares = self._shares(cluster)
        times.compute(self._each(cluster, lambda d, h: shares[d] * h.head(cluster.model, 1)))
        return float(times.ready.max())

    @staticmethod
    def _each(cluster: Cluster, seconds: Callable[[int, Hardware], Any]) -> Seconds:
        """Return the time of each device."""
        return np.array([float(seconds(d, h)) for d, h in enumerate(cluster.hardware)])


class Ring:
    """Devices in a ring, each with a link to the next."""

    def __init__(self, world: World) -> None:
        self.count = len(world.cluster.hardware)
        self.lines: list[Line] = [world.line() for _ in range(self.count)]

    def step(self, d: int, size: int) -> Process:
        """Send a part of ``size`` bytes in all to the next device, and wait for the one before."""
        self.lines[d].put(None, size // self.count)
        yield self.lines[d - 1].arrived

    def all_reduce(self, d: int, size: int) -> Process:
        """Sum ``size`` bytes over all devices: reduce-scatter, then all-gather."""
        for _ in range(2 * (self.count - 1)):
            yield from self.step(d, size)

    def all_gather(self, d: int, size: int) -> Process:
        """Gather ``size`` bytes from all devices."""
        for _ in range(self.count - 1):
            yield from self.step(d, size)


class MegatronTp(Collective):
    """Tensor parallelism [11]: heads and neurons in equal parts, two all-reduces in each layer."""

    name = "tp"

    def _synchronises(self, index: int) -> bool:
        return True

    def memory_bytes(self, cluster: Cluster, tokens: int) -> list[float]:
        return _divided(cluster.model, tokens, self._shares(cluster))

    def _layer(self, world: World, ring: Ring, d: int, index: int, x: int, y: int) -> Process:
        model, hardware = world.cluster.model, world.cluster.hardware[d]
        share = self._shares(world.cluster)[d]
        yield world.taken(hardware.attention(model, x, y, share))
        if self._synchronises(index):
            yield from ring.all_reduce(d, x * model.state_bytes)
        yield world.taken(hardware.mlp(model, x, share))
        if self._synchronises(index):
            yield from ring.all_reduce(d, x * model.state_bytes)

    def _foresee(self, cluster: Cluster, times: RingTimes, index: int, x: int, y: int) -> None:
        model, shares = cluster.model, self._shares(cluster)
        for block in (
            self._each(cluster, lambda d, h: h.attention(model, x, y, shares[d])),
            self._each(cluster, lambda d, h: h.mlp(model, x, shares[d])),
        ):
            times.compute(block)
            if self._synchronises(index):
                times.all_reduce(x * model.state_bytes)


class DeTransformer(MegatronTp):
    """DeTransformer [9]: half of the layers are decoupled and exchange nothing.

    Its answers differ from the model's.
    """

    name = "detransformer"

    def _synchronises(self, index: int) -> bool:
        return index % 2 == 0


class Galaxy(Collective):
    """Galaxy [8]: tensor parallelism by speed; gathers and scatters overlap with products."""

    name = "galaxy"

    def _shares(self, cluster: Cluster) -> list[float]:
        speeds = [1 / float(h.mlp(cluster.model, 128)) for h in cluster.hardware]
        return [speed / sum(speeds) for speed in speeds]

    def memory_bytes(self, cluster: Cluster, tokens: int) -> list[float]:
        return _divided(cluster.model, tokens, self._shares(cluster))

    def _layer(self, world: World, ring: Ring, d: int, index: int, x: int, y: int) -> Process:
        model, hardware = world.cluster.model, world.cluster.hardware[d]
        share = self._shares(world.cluster)[d]
        for block in (hardware.attention(model, x, y, share), hardware.mlp(model, x, share)):
            tile = block / (2 * ring.count)
            for _ in range(2):  # an all-gather at the begin, a reduce-scatter at the end
                for _ in range(ring.count - 1):
                    ring.lines[d].put(None, x * model.state_bytes // ring.count)
                    yield world.taken(tile)  # while the next part is under way
                    yield ring.lines[d - 1].arrived
                yield world.taken(tile)

    def _foresee(self, cluster: Cluster, times: RingTimes, index: int, x: int, y: int) -> None:
        model, shares, count = cluster.model, self._shares(cluster), len(cluster.hardware)
        for block in (
            self._each(cluster, lambda d, h: h.attention(model, x, y, shares[d])),
            self._each(cluster, lambda d, h: h.mlp(model, x, shares[d])),
        ):
            tile = block / (2 * count)
            for _ in range(2):
                for _ in range(count - 1):
                    times.step(x * model.state_bytes, tile)
                times.compute(tile)


class SequenceParallel(Collective):
    """Sequence parallelism [17]: each device has the whole model and a part of the tokens.

    Keys and values of all are gathered in each layer. One token is computed by one device.
    """

    name = "sp"

    def memory_bytes(self, cluster: Cluster, tokens: int) -> list[float]:
        return [_divided(cluster.model, tokens, [1.0])[0]] * len(cluster.hardware)

    def _shares(self, cluster: Cluster) -> list[float]:
        return [1.0] * len(cluster.hardware)

    def run(self, world: World, x: int, y: int) -> float:
        if x > 1:
            return super().run(world, x, y)
        fastest = self._fastest(world.cluster)
        return world.taken(fastest.stage(world.cluster.model, world.cluster.model.layers, 1, y, 1))

    def predicted_s(self, cluster: Cluster, x: int, y: int) -> float:
        if x > 1:
            return super().predicted_s(cluster, x, y)
        return float(self._fastest(cluster).stage(cluster.model, cluster.model.layers, 1, y, 1))

    def _fastest(self, cluster: Cluster) -> Hardware:
        return min(cluster.hardware, key=lambda h: float(h.mlp(cluster.model, 1)))

    def _own(self, cluster: Cluster, d: int, x: int) -> tuple[int, int]:
        """Return a device's number of tokens, and of those before them."""
        parts = [int(n) for n in equal_split(np.array([x]), len(cluster.hardware))[:, 0]]
        return parts[d], sum(parts[:d])

    def _layer(self, world: World, ring: Ring, d: int, index: int, x: int, y: int) -> Process:
        model, hardware = world.cluster.model, world.cluster.hardware[d]
        own, before = self._own(world.cluster, d, x)
        for _ in range(2):  # keys, then values
            yield from ring.all_gather(d, x * model.state_bytes)
        nominal = hardware.attention(model, own, y + before) + hardware.mlp(model, own)
        yield world.taken(nominal)

    def _foresee(self, cluster: Cluster, times: RingTimes, index: int, x: int, y: int) -> None:
        model = cluster.model

        def computed(d: int, hardware: Hardware) -> Seconds:
            own, before = self._own(cluster, d, x)
            return hardware.attention(model, own, y + before) + hardware.mlp(model, own)

        for _ in range(2):
            times.all_gather(x * model.state_bytes)
        times.compute(self._each(cluster, computed))


COLLECTIVES: tuple[Collective, ...] = (
    SequenceParallel(),
    MegatronTp(),
    DeTransformer(),
    Galaxy(),
)


def _divided(model: Llm, tokens: int, shares: Sequence[float]) -> list[float]:
    """Return the bytes of shares of a model with the keys and values of ``tokens`` tokens."""
    facts = model.facts
    whole = facts.weight_bytes(0, model.layers) + model.layers * facts.kv_bytes * tokens
    return [share * whole + facts.scratch_bytes * tokens for share in shares]
