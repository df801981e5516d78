"""Detection of silent and of stuck workers. No I/O, no clock.

Time is counted in ticks of the observer: a pause of this process, whatever its cause, does not
count against a peer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from collab_llm_nodes.errors import ProtocolError
from collab_llm_nodes.protocols.jupiter.messages import Pong, Span


class SilenceMonitor:
    """Detector of a silent peer.

    Args:
        misses: ticks without a message after which the peer is lost.
    """

    def __init__(self, misses: int) -> None:
        self._misses = misses
        self._missed = 0

    def reset(self) -> None:
        """Record a message of the peer."""
        self._missed = 0

    def tick(self, more: float = 0.0) -> bool:
        """Count a tick; return True if the peer is lost.

        Args:
            more: additional ticks, while messages to the peer are in transit.
        """
        self._missed += 1
        return self._missed > self._misses + more


SLOW = 6.0
"""A pass may take this many times as long as others of its size."""
_NEWEST = 0.25
"""Weight of the newest pass in the moving average of its size."""
_BEGIN_S = 5.0  # for an idle worker to begin a job
_LOAD_S, _LOADED_PER_S = 30.0, 50e6  # imports, and bytes per second of the slowest disk
_READ_PER_S, _FED_PER_S = 200e6, 10e9
"""Slowest worker: bytes of weights read, and bytes times rows computed, per second."""


@dataclass
class _Worker:
    """State of one worker.

    Attributes:
        connected: it has sent a message; until then only its link's deadlines apply.
        waited: value of each count that should grow, and the ticks since it last did.
        took_s: time for which each pass in flight was observed being computed.
        seconds: average time of a pass, by the bit length of its rows.
        excused_s: time that a job of a former chain may still take before the first job here.
    """

    connected: bool = False
    counts: Pong = field(default_factory=Pong)
    waited: dict[str, tuple[int, int]] = field(default_factory=dict)
    took_s: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    excused_s: float = 0.0


class _Wait(NamedTuple):
    """A count that should grow, the worker at fault if it does not, and the time allowed."""

    name: str
    value: int
    culprit: int
    omits: str
    allowed_s: float


class ProgressMonitor:
    """Detector of the worker in a chain that makes no progress.

    Pings are answered by a thread that only reads and writes. Whether a worker still computes shows
    in its counts (``Pong``) of jobs received, begun, and computed and sent on. Its Load is the
    first job, each pass another.

    Args:
        weights: rough size of each worker's layers [byte].
        tick_s: time between two ticks.
        grace_s: shortest time without progress after which a worker is reported.
        row_s: time of one row's hidden states on the slowest link.
    """

    def __init__(
        self, weights: Sequence[float], *, tick_s: float, grace_s: float, row_s: float
    ) -> None:
        self._weights = list(weights)
        self._tick_s, self._grace_s, self._row_s = tick_s, grace_s, row_s
        self._workers = [_Worker() for _ in weights]
        self._rows = {0: 0}  # of each job that has not ended
        self._sent = 1
        self._results = 0

    def on_sent(self, rows: int) -> None:
        """Record that a pass of ``rows`` rows has been sent to the first worker."""
        self._rows[self._sent] = rows
        self._sent += 1

    def on_message(self, worker: int) -> None:
        """Record a message of a worker, which is thus connected."""
        self._workers[worker].connected = True

    def on_pong(self, worker: int, counts: Pong) -> None:
        """Record the counts of a worker.

        Raises:
            ProtocolError: they are impossible.
        """
        self.on_message(worker)
        own = self._workers[worker]
        old = own.counts
        if (
            not old.computed <= counts.computed <= counts.begun <= counts.received <= self._sent
            or counts.begun < old.begun
            or counts.received < old.received
            or not counts.busy_s >= 0
        ):
            raise ProtocolError("its counts of jobs are impossible", field="pong")
        own.counts = counts
        if counts.busy_s:  # by a pass or a load: a load may take longer, and sets the limit
            own.excused_s = max(own.excused_s, self._job_s(worker, 0) - counts.busy_s)

    def on_result(self, spans: Sequence[Span], took_s: float) -> None:
        """Record the end of the oldest pass in flight.

        Args:
            spans: of each worker, as the last one reports; they cannot shorten observed times.
            took_s: time since the pass was sent, as measured here.
        """
        self._results += 1
        rows = self._rows.pop(self._results)
        size = rows.bit_length()
        for own, span in zip(self._workers, spans, strict=True):
            # It began and ended between two ticks.
            seen_s = own.took_s.pop(self._results, 0.0) + self._tick_s
            new = min(max(seen_s, span.end - span.begin), took_s)
            old = own.seconds.get(size, new)
            own.seconds[size] = old + _NEWEST * (new - old)

    def tick(self) -> tuple[int, str] | None:
        """Count a tick; return the worker that makes no progress, if any, and a description."""
        for number, own in enumerate(self._workers):
            before, own.waited = own.waited, {}
            for wait in self._waits(number, own.counts):
                value, ticks = before.get(wait.name, (wait.value, 0))
                ticks = 1 if value != wait.value else ticks + 1
                own.waited[wait.name] = wait.value, ticks
                if wait.name == "computed" and wait.value in self._rows:
                    own.took_s[wait.value] = ticks * self._tick_s
                if ticks * self._tick_s > wait.allowed_s:
                    return wait.culprit, f"it {wait.omits} within {wait.allowed_s:.3g} s"
        return None

    def _waits(self, number: int, counts: Pong) -> Iterator[_Wait]:
        """Yield the counts of one worker that should grow."""
        before = self._workers[number - 1].counts.computed if number else self._sent
        ready = max(1, before)  # each Load is sent from here
        if self._workers[number].connected and counts.received < ready:
            rows = sum(self._rows.get(job, 0) for job in range(counts.received, ready))
            allowed_s = self._grace_s + rows * self._row_s
            if number and counts.received:
                omits = "computed a pass and did not send it on"
                yield _Wait("received", counts.received, number - 1, omits, allowed_s)
            else:
                yield _Wait("received", counts.received, number, "took no job", allowed_s)
        if counts.computed == counts.begun < counts.received:
            allowed_s = self._grace_s
            if not counts.begun:
                allowed_s = max(allowed_s, _BEGIN_S) + self._workers[number].excused_s
            yield _Wait("begun", counts.begun, number, "began no job", allowed_s)
        if counts.computed < counts.begun:
            job = counts.computed
            omits = "ended no pass" if job else "did not load its layers"
            yield _Wait("computed", job, number, omits, self._job_s(number, job))
        if number == len(self._workers) - 1 and self._results < counts.computed - 1:
            yield _Wait("results", self._results, number, "sent no result", self._grace_s)

    def _job_s(self, number: int, job: int) -> float:
        """Return the time allowed for a job [s]."""
        if not job:
            return max(self._grace_s, _LOAD_S + self._weights[number] / _LOADED_PER_S)
        return max(self._grace_s, self._slow_s(number, self._rows.get(job, 0)))

    def _slow_s(self, number: int, rows: int) -> float:
        """Return the time allowed for a pass of ``rows`` rows [s]."""
        seconds, size = self._workers[number].seconds, rows.bit_length()
        if (known := min((s for s in seconds if s >= size), default=None)) is not None:
            return SLOW * seconds[known]
        if known := max(seconds, default=0):
            return SLOW * seconds[known] * 2.0 ** (size - known)
        weights = self._weights[number]
        return self._grace_s + weights / _READ_PER_S + rows * weights / _FED_PER_S
