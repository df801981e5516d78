"""Two sides in virtual time: the real machines with given delays (paper 001, section 7.4).

trace = [(True, False), ...]                  # accepted drafts of device, of cloud
run = simulate_trace(trace, Delays.constant((0.166, 0.040), rtt_s=0.3), ScheduleConfig())
run.total_s
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from collab_llm_nodes.decoding.aggregation import Drafts, Judgement, Pair, Party, SideDraft
from collab_llm_nodes.decoding.sampling import SparseDistribution
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.protocols.dragon.machine import AheadConfig, Law, Pass, SideMachine
from collab_llm_nodes.protocols.dragon.messages import Message
from collab_llm_nodes.protocols.dragon.profiler import UNKNOWN, Profiler
from collab_llm_nodes.protocols.dragon.scheduler import ScheduleConfig, Scheduler

Distributions = Callable[[Party, tuple[int, ...]], tuple[np.ndarray, float]]
Trace = Sequence[tuple[bool, bool]]


@dataclass(frozen=True)
class Delays:
    """Delays as functions of the virtual time [s].

    Attributes:
        decode: of a pass that a side begins.
        link: of a message that a side sends. Messages of one side arrive in order.
    """

    decode: Callable[[Party, float], float]
    link: Callable[[Party, float], float]

    @classmethod
    def constant(cls, decode_s: Pair, rtt_s: float) -> Delays:
        """Return delays that never change; each way takes half the round trip."""
        return cls(lambda party, now: decode_s[party], lambda party, now: rtt_s / 2)

    @classmethod
    def sinusoidal(cls, decode_s: Pair, rtt_s: float, base_s: float = 0.008) -> Delays:
        """Return the network of figure 8: an extra round trip, its jitter a fifth of it.

        Args:
            rtt_s: the extra latency; its period is 20 pi s.
            base_s: round trip without it.
        """

        def link(party: Party, now: float) -> float:
            return (base_s + rtt_s * (1.0 + 0.2 * math.sin(now / 10.0))) / 2

        return cls(lambda party, now: decode_s[party], link)


@dataclass
class Run:
    """One simulated answer.

    Attributes:
        tokens: the answer.
        known_s: times at which the device knew each token.
        discarded: drafts that were forgotten, of device and cloud.
        handovers: changes of the aggregator.
        messages: sent by device, by cloud.
        acceptance: of device and cloud, as the device knows it in the end.
    """

    tokens: tuple[int, ...] = ()
    known_s: list[float] = field(default_factory=list)
    discarded: tuple[int, int] = (0, 0)
    handovers: int = 0
    messages: list[int] = field(default_factory=lambda: [0, 0])
    acceptance: Pair = UNKNOWN

    @property
    def total_s(self) -> float:
        """Time until the device knew the whole answer."""
        return self.known_s[-1]


class Simulation:
    """Runs two machines; deterministic."""

    def __init__(
        self, machines: tuple[SideMachine, SideMachine], model: Distributions, delays: Delays
    ) -> None:
        self.machines = machines
        self.now = 0.0
        self.run = Run()
        self._model = model
        self._delays = delays
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._running: list[Pass | None] = [None, None]
        self._arrival = [0.0, 0.0]  # of the last message of each side: those behind it wait

    def finish(self) -> Run:
        """Run until the device has the whole answer.

        Raises:
            CollabError: the sides wait for each other.
        """
        device = self.machines[Party.DEVICE]
        for party in Party:
            self._serve(party)
        while not device.finished:
            if not self._events:
                raise CollabError("the two sides wait for each other", remedy="report this")
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.run.tokens = tuple(device.answer)
        figures = [machine.figures for machine in self.machines]
        self.run.discarded = (figures[0].discarded, figures[1].discarded)
        self.run.handovers = figures[0].handovers
        self.run.acceptance = device.profiler.acceptance
        return self.run

    def _at(self, time: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, event))

    def _serve(self, party: Party) -> None:
        """Carry out what the machine of ``party`` wants after an event."""
        machine = self.machines[party]
        for message in machine.poll():
            self._send(party, message)
        if party is Party.DEVICE:
            new = len(machine.answer) - len(self.run.known_s)
            self.run.known_s += [self.now] * new
        running = self._running[party]
        if running is not None and machine.is_void(running):
            self._running[party] = running = None  # ended between two layers
        if running is None and (wanted := machine.wanted) is not None:
            self._running[party] = wanted
            took = self._delays.decode(party, self.now)
            self._at(self.now + took, lambda: self._decoded(party, wanted, took))

    def _decoded(self, party: Party, done: Pass, took: float) -> None:
        if self._running[party] is not done:
            return
        self._running[party] = None
        p, weight = self._model(party, done.prefix)
        self.machines[party].on_pass(done, p, weight, took, self.now)
        self._serve(party)

    def _send(self, party: Party, message: Message) -> None:
        self.run.messages[party] += 1
        arrival = max(self._arrival[party], self.now + self._delays.link(party, self.now))
        self._arrival[party] = arrival
        self._at(arrival, lambda: self._receive(party.other, message))

    def _receive(self, party: Party, message: Message) -> None:
        self.machines[party].on_message(message, self.now)
        self._serve(party)


class TraceLaw:
    """Replays recorded acceptances: the target token is always 0, a draft that is rejected 1."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._kept = SparseDistribution(np.array([0, 1]), np.array([0.5, 0.5], np.float32))

    def propose(self, p: np.ndarray, log_weight: float, position: int, party: Party) -> SideDraft:
        accepted = self._trace[position % len(self._trace)][party]
        return SideDraft(0 if accepted else 1, self._kept, log_weight)

    def check(self, draft: SideDraft) -> None:
        """Accept any draft: it was recorded."""

    def judge(self, drafts: Drafts, position: int) -> Judgement:
        accepted = (drafts[0].token == 0, drafts[1].token == 0)
        return Judgement(0, accepted, (float(accepted[0]), float(accepted[1])))


def two_machines(
    law: Law,
    schedule: ScheduleConfig,
    *,
    vocab_size: int,
    max_tokens: int,
    eos: frozenset[int] = frozenset(),
    ahead: AheadConfig | None = None,
    acceptance: Pair = UNKNOWN,
) -> tuple[SideMachine, SideMachine]:
    """Return the machines of device and cloud for one answer.

    Args:
        acceptance: of earlier answers, which the device remembers.
    """

    def side(party: Party) -> SideMachine:
        return SideMachine(
            party,
            law,
            Scheduler(schedule),
            Profiler(acceptance=acceptance if party is Party.DEVICE else UNKNOWN),
            vocab_size=vocab_size,
            eos=eos,
            max_tokens=max_tokens,
            ahead=ahead,
        )

    return side(Party.DEVICE), side(Party.CLOUD)


def simulate_trace(
    trace: Trace,
    delays: Delays,
    schedule: ScheduleConfig,
    *,
    tokens: int = 0,
    ahead: AheadConfig | None = None,
    acceptance: Pair = UNKNOWN,
) -> Run:
    """Replay ``trace``, repeated to ``tokens`` tokens (0: once), and return the run.

    Args:
        acceptance: see :func:`two_machines`.
    """
    machines = two_machines(
        TraceLaw(trace),
        schedule,
        vocab_size=2,
        max_tokens=tokens or len(trace),
        ahead=ahead,
        acceptance=acceptance,
    )
    nothing = np.ones(2)
    return Simulation(machines, lambda party, prefix: (nothing, 0.0), delays).finish()
