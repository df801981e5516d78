"""Fates of drafts replayed live: machines, threads, gRPC and link, but no model (figure 8).

A side's pass takes its time and gives a distribution that makes its draft meet the recorded fate:

    token           0 (the target)   1     2          both sides weigh alike, temperature 0
    accepted        1.0                               mixture of two rejected sides: .4 .3 .3
    device, rejected 0.4             0.6              so the target is token 0 in any case
    cloud, rejected  0.4                   0.6
"""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from collab_llm_lab.bench.dragon.served import Served, served
from collab_llm_lab.bench.dragon.simulation import Trace
from collab_llm_lab.bench.link.lane import LinkProfile
from collab_llm_nodes.decoding.aggregation import AggregationConfig, Pair, Party
from collab_llm_nodes.errors import Cancelled
from collab_llm_nodes.knowledge.retrieval import Retrieved
from collab_llm_nodes.protocols.base import Control
from collab_llm_nodes.protocols.dragon.device import AnswerSoFar, DeviceAnswer, Question, Rules
from collab_llm_nodes.protocols.dragon.link import PatienceConfig
from collab_llm_nodes.protocols.dragon.profiler import UNKNOWN
from collab_llm_nodes.protocols.dragon.scheduler import ScheduleConfig
from collab_llm_nodes.protocols.dragon.side import SideInfo

_INFO = SideInfo("trace", "trace", "trace", 3, frozenset())
_ACCEPTED = np.array([1.0, 0.0, 0.0], np.float32)
_REJECTED = (np.array([0.4, 0.6, 0.0], np.float32), np.array([0.4, 0.0, 0.6], np.float32))
_BASE_S, _SWING, _PERIOD_S = 0.008, 0.2, 20 * math.pi
_STEP_S = 0.1
"""Time between two changes of the link's delay [s]."""
_ANSWER_S = 600.0


class TraceDecoder:
    """A ``SideDecoder`` that gives what a trace wants, and takes ``pass_s`` for it."""

    def __init__(self, side: TraceSide) -> None:
        self._side = side
        self._length = 0
        self._ended = threading.Event()

    def open(self, prompt_ids: Sequence[int], documents: Retrieved) -> None:
        """Do nothing: there is no prompt."""

    def next(self) -> tuple[NDArray[np.float32], float]:
        """Return the distribution at the present position."""
        self._ended.clear()
        if self._ended.wait(self._side.pass_s):
            raise Cancelled("the draft is not wanted any more")
        side = self._side
        accepted = side.trace[self._length % len(side.trace)][side.party]
        return (_ACCEPTED if accepted else _REJECTED[side.party]), 0.0

    def read_on(self, tokens: int) -> bool:
        """Return False: there is nothing to read."""
        return False

    def push(self, token: int) -> None:
        """Go on by one position."""
        self._length += 1

    def rollback(self, length: int) -> None:
        """Go back to position ``length``."""
        self._length = length

    def cancel(self) -> None:
        """End the pass under way."""
        self._ended.set()

    def close(self) -> None:
        """Do nothing: nothing is held."""


class TraceSide:
    """A ``Side`` whose drafts meet the fates in ``trace``.

    Attributes:
        trace, pass_s: may be changed between two answers.
    """

    def __init__(self, party: Party) -> None:
        self.party = party
        self.trace: Trace = [(True, True)]
        self.pass_s = 0.0

    @property
    def info(self) -> SideInfo:
        """Facts of the side."""
        return _INFO

    @property
    def pieces(self) -> int:
        """One, so that the side has a say."""
        return 1

    def decoder(self, query: str, max_tokens: int) -> TraceDecoder:
        """Return a decoder at the beginning of the trace."""
        return TraceDecoder(self)


class Replay:
    """Both sides over a link whose delay swings as figure 8 says; made by :func:`replay`."""

    def __init__(self, sides: tuple[TraceSide, TraceSide], cloud: Served) -> None:
        self._sides, self._client, self._link = sides, cloud.client, cloud.link
        self._compute = ThreadPoolExecutor(1, "bench-replay")
        self._acceptance: dict[str, Pair] = {}  # what a device with this policy remembers

    def run(self, trace: Trace, decode_s: Pair, rtt_s: float, policy: str) -> AnswerSoFar:
        """Return the answer in which the drafts meet the fates of ``trace``."""
        for side, pass_s in zip(self._sides, decode_s, strict=True):
            side.trace, side.pass_s = trace, pass_s
        rules = Rules(
            AggregationConfig(top_p=1.0),
            ScheduleConfig(aggregate_on=policy),
            patience=PatienceConfig(patience_s=120.0, silence_s=60.0),
        )
        with self._swinging(rtt_s):
            self._client.rtt_s = 0.0
            question = Question("trace", len(trace), 0.0)
            answer = DeviceAnswer(
                self._sides[0],
                self._compute,
                self._client,
                rules,
                question,
                acceptance=self._acceptance.get(policy, UNKNOWN),
            )
            begun = time.monotonic()
            told = answer.run(lambda told: None, Control(begun + _ANSWER_S), begun)
            self._acceptance[policy] = answer.machine.profiler.acceptance
            return told

    def close(self) -> None:
        """End the compute thread."""
        self._compute.shutdown()

    @contextlib.contextmanager
    def _swinging(self, rtt_s: float) -> Iterator[None]:
        """Have the link's delay follow ``Delays.sinusoidal``, from its beginning."""
        begun, over = time.monotonic(), threading.Event()

        def set_delay() -> None:
            swing = 1.0 + _SWING * math.sin(2 * math.pi * (time.monotonic() - begun) / _PERIOD_S)
            self._link.change(LinkProfile(delay_s=(_BASE_S + rtt_s * swing) / 2))

        def swing() -> None:
            while not over.wait(_STEP_S):
                set_delay()

        set_delay()
        thread = threading.Thread(target=swing, name="bench-swing", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@contextlib.contextmanager
def replay() -> Iterator[Replay]:
    """Serve a cloud without a model, and yield both sides."""
    device, cloud = TraceSide(Party.DEVICE), TraceSide(Party.CLOUD)
    with served(cloud, "trace") as way, contextlib.closing(Replay((device, cloud), way)) as made:
        yield made


POLICIES = ("auto", "device", "cloud")
"""Policies that are replayed live: ours, and the static sides."""


def run_live(
    traces: Sequence[Trace],
    points: Sequence[tuple[Pair, float]],
    status: Callable[[str], None] = lambda words: None,
) -> dict[str, dict[str, float]]:
    """Replay ``traces`` live at each point; the policies take turns.

    Returns:
        ``<point>`` with ``live_ms`` per token (policy auto), ``live_device_ms``,
        ``live_cloud_ms`` and ``live_best_static_ms``.
    """
    found = {}
    with replay() as both:
        for decode_s, rtt_s in points:
            name = point_name(decode_s, rtt_s)
            status(name)
            times: dict[str, list[float]] = {policy: [] for policy in POLICIES}
            for trace in traces:
                for policy, taken in times.items():
                    told = both.run(trace, decode_s, rtt_s, policy)
                    taken.append(1e3 * told.metrics.total_s / len(told.tokens))
            means = {policy: statistics.fmean(taken) for policy, taken in times.items()}
            found[name] = {
                "live_ms": means["auto"],
                "live_device_ms": means["device"],
                "live_cloud_ms": means["cloud"],
                "live_best_static_ms": min(means["device"], means["cloud"]),
            }
    return found


def point_name(decode_s: Pair, rtt_s: float) -> str:
    """Return a point's name: passes of device and cloud, and the added round trip [ms]."""
    return "_".join(f"{1e3 * seconds:g}" for seconds in (*decode_s, rtt_s))
