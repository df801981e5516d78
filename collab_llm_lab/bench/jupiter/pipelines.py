"""EMULATED runs of a pipeline of stages on a cluster, step by step on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from collab_llm_lab.bench.jupiter.clock import Clock, Line, Mailbox, Process
from collab_llm_lab.bench.jupiter.clusters import LATENCY_S, NOISE, Cluster, Hardware
from collab_llm_nodes.protocols.jupiter.estimate import TOKEN_BYTES, Span
from collab_llm_nodes.protocols.jupiter.partition import Placement
from collab_llm_nodes.protocols.jupiter.profile import Seconds


@dataclass
class World:
    """A cluster in virtual time; each step takes its nominal time, more or less."""

    cluster: Cluster
    seed: int
    clock: Clock = field(default_factory=Clock)
    lines: list[Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def taken(self, nominal: Seconds | float) -> float:
        """Return the time of one step."""
        return float(nominal) * float(np.exp(NOISE * self._random.standard_normal()))

    def line(self) -> Line:
        """Return a new link between two devices."""
        self.lines.append(Line(self.clock, self.cluster.bytes_per_s, 2 * LATENCY_S))
        return self.lines[-1]

    @property
    def bytes(self) -> int:
        """Bytes sent so far."""
        return sum(line.bytes for line in self.lines)


class Stages:
    """A pipeline in a world: one process for each stage."""

    def __init__(self, world: World, parts: Sequence[Placement]) -> None:
        self._world = world
        self._model = world.cluster.model
        by_name = dict(zip(world.cluster.names, world.cluster.hardware, strict=True))
        self._devices: list[Hardware] = [by_name[part.device] for part in parts]
        self._layers = [part.last - part.first for part in parts]
        self._entry = Mailbox()
        self._lines = [world.line() for _ in parts[1:]]
        self._back = world.line() if len(parts) > 1 else None
        self._returned = self._back.arrived if self._back else Mailbox()
        self.spans: list[list[Span]] = [[] for _ in parts]
        for m in range(len(parts)):
            world.clock.start(self._stage(m))

    def _stage(self, m: int) -> Process:
        world, last = self._world, m == len(self._devices) - 1
        inbox = self._lines[m - 1].arrived if m else self._entry
        while True:
            number, x, y, lanes, rows = yield inbox
            nominal = self._devices[m].stage(
                self._model, self._layers[m], x, y, rows if last else 0
            )
            if lanes > 1:  # weights are read once for all lanes; each computes and reads its own
                once = self._devices[m].stage(self._model, self._layers[m], 0, 0, 1 if last else 0)
                nominal = once + lanes * (nominal - once)
            begun = world.clock.now
            yield world.taken(nominal)
            self.spans[m].append((number, begun, world.clock.now))
            message = (number, x, y, lanes, rows)
            if not last:
                self._lines[m].put(message, x * lanes * self._model.state_bytes)
            elif self._back is not None:
                self._back.put(message, TOKEN_BYTES * lanes if rows else 0)
            else:
                self._returned.put(message)

    def prefill(self, lengths: Sequence[int]) -> float:
        """Return the time until the first token is back at the first device."""
        done: list[float] = []

        def wait() -> Process:
            for _ in lengths:
                yield self._returned
            done.append(self._world.clock.now)

        begun, before = self._world.clock.now, 0
        for i, x in enumerate(lengths):
            self._entry.put((i, x, before, 1, int(i == len(lengths) - 1)))
            before += x
        self._world.clock.start(wait())
        self._world.clock.run()
        return done[0] - begun

    def decode(
        self,
        passes: int,
        tokens: int,
        per_pass: float,
        before: int,
        lanes: int = 1,
        together: int = 1,
    ) -> float:
        """Return the time of ``passes`` passes of each of ``lanes`` lanes.

        Args:
            tokens: of a pass: the last one and those drafted. There are logits after each, and
                the drafting heads guess as many again.
            per_pass: tokens that a pass adds to its lane.
            before: tokens of a lane at first.
            together: lanes that share their passes; the others follow each other.
        """
        groups = [min(together, lanes - i) for i in range(0, lanes, together)]
        left = [passes] * len(groups)
        done = [self._world.clock.now]

        def enter(group: int) -> None:
            y = before + int((passes - left[group]) * per_pass)
            self._entry.put((group, tokens, y, groups[group], 2 * tokens - 1))

        def coordinate() -> Process:
            while any(left):
                message = yield self._returned
                left[message[0]] -= 1
                if left[message[0]]:
                    enter(message[0])
            done.append(self._world.clock.now)

        for group in range(len(groups)):
            enter(group)
        self._world.clock.start(coordinate())
        self._world.clock.run()
        return done[-1] - done[0]
