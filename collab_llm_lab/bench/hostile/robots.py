"""Honest clients: a few robots that replay recorded answers."""

from __future__ import annotations

import asyncio
import ssl
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from collab_llm_lab.bench.verifier import Tally
from collab_llm_lab.bench.wire import Connection, connect
from collab_llm_nodes.errors import CollabError, DeadlineExceeded
from collab_llm_nodes.protocols.edge_cloud.link import LinkConfig
from collab_llm_nodes.transport.background import within

ROBOTS = 4
DRAFTING_S = 0.02
"""Time that a robot's draft takes, whatever it took when it was recorded."""
DEADLINE_S = LinkConfig().verdict_deadline_s
"""A robot that waits longer for a connection or a reply has failed."""


class Conversation(Protocol):
    """One answer of a robot, replayed on a connection; raises CollabError where it fails."""

    async def open(self, tally: Tally) -> None:
        """Send the request, and wait for the first reply."""

    @property
    def left(self) -> int:
        """Replies to come."""

    async def decode(self, tally: Tally, rounds: int) -> int:
        """Wait for ``rounds`` more replies; count times and wrong ones in ``tally``."""

    def close(self) -> None:
        """End the answer."""


Converse = Callable[[Connection, Any], Conversation]
"""Begin a recorded answer on a connection."""


@dataclass(frozen=True)
class Endpoint:
    """Address and credentials of the server.

    Attributes:
        address: host:port.
        tls: how to check the certificate; None: there is none.
        token: to be given.
    """

    address: str
    tls: ssl.SSLContext | None = None
    token: str = ""


@dataclass
class Observed:
    """The robots' waits and failures in one phase.

    Attributes:
        rounds_s: from a message's sending to its reply.
        openings_s: from the wish for an answer to its first reply: connection, prompt, documents.
        wrong: replies with other tokens than those of a session alone.
        failures: why answers ended early.
    """

    rounds_s: list[float] = field(default_factory=list)
    openings_s: list[float] = field(default_factory=list)
    wrong: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def pace(self) -> Pace:
        """The time a robot takes for a round and for an answer, if nothing holds it up."""
        rounds_s, opening_s = DRAFTING_S + _mean(self.rounds_s), _mean(self.openings_s)
        per_answer = len(self.rounds_s) / max(len(self.openings_s), 1)
        return Pace(rounds_s, opening_s + per_answer * rounds_s)


@dataclass(frozen=True)
class Pace:
    """Time from one draft, or one answer, of an undisturbed robot to its next [s]."""

    round_s: float
    answer_s: float


def percentiles(waits_s: Sequence[float], pace_s: float) -> tuple[float, float]:
    """Return the median and the 99th percentile of waits in milliseconds.

    A robot that waits asks nothing meanwhile. So a long wait also counts as those that would have
    begun during it, one each ``pace_s``: four robots that all stand still for five seconds would
    otherwise be four waits among hundreds.
    """
    all_s = [wait - k * pace_s for wait in waits_s for k in range(max(1, int(wait / pace_s)))]
    if len(all_s) < 2:  # at most one robot waited for any
        all_s = 2 * (all_s or [DEADLINE_S])
    cuts = statistics.quantiles(all_s, n=100, method="inclusive")
    return 1e3 * cuts[49], 1e3 * cuts[98]


def _mean(times_s: Sequence[float]) -> float:
    return statistics.fmean(times_s) if times_s else DEADLINE_S


class Robots:
    """Some robots, each at an address of its own.

    Every other one reconnects for each answer; one alone keeps its connection.
    """

    def __init__(
        self, endpoint: Endpoint, recordings: Sequence[Any], converse: Converse, count: int = ROBOTS
    ) -> None:
        self._recordings = recordings
        self._robots = [
            _Robot(endpoint, f"127.0.0.{10 + i}", converse, keeps=count == 1 or bool(i % 2))
            for i in range(count)
        ]
        self._asked = 0

    async def work(self, seconds: float) -> Observed:
        """Ask for answer after answer for ``seconds``, at least one each; finish those begun."""
        seen, due = Observed(), time.perf_counter() + seconds

        async def work(robot: _Robot) -> None:
            while True:
                self._asked += 1
                await robot.ask(self._recordings[self._asked % len(self._recordings)], seen)
                if time.perf_counter() > due:
                    break

        await asyncio.gather(*(work(robot) for robot in self._robots))
        return seen

    def close(self) -> None:
        """Close all connections."""
        for robot in self._robots:
            robot.disconnect()


class _Robot:
    def __init__(self, endpoint: Endpoint, source: str, converse: Converse, *, keeps: bool) -> None:
        self._door = endpoint
        self._converse = converse
        self._source = source
        self._keeps = keeps
        self._connection: Connection | None = None

    async def ask(self, recording: Any, seen: Observed) -> None:
        """Ask for one answer."""
        tally = Tally()
        waits_s = seen.openings_s
        begun = time.perf_counter()
        try:
            answer = await within(self._open(recording, tally), DEADLINE_S)
            waits_s.append(time.perf_counter() - begun)
            waits_s = seen.rounds_s
            while answer.left:
                await asyncio.sleep(DRAFTING_S)
                await within(answer.decode(tally, 1), DEADLINE_S)
            answer.close()
        except (CollabError, OSError, asyncio.TimeoutError) as error:
            seen.failures.append(str(error) or DeadlineExceeded.code)
            waits_s.append(DEADLINE_S)  # also one that failed at once has no reply
            self.disconnect()
            await asyncio.sleep(DRAFTING_S)
        seen.rounds_s.extend(tally.rounds_s)
        seen.wrong += tally.mismatches
        if not self._keeps:
            self.disconnect()

    async def _open(self, recording: Any, tally: Tally) -> Conversation:
        if self._connection is None or not self._connection.open:
            endpoint = self._door
            self._connection = await connect(
                endpoint.address, tls=endpoint.tls, token=endpoint.token, source=self._source
            )
        answer = self._converse(self._connection, recording)
        await answer.open(tally)
        return answer

    def disconnect(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
