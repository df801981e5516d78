"""Fair turns at a scarce resource: the reader thread, or the workers that decode pictures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from collab_llm_nodes.transport.admission import Peer

K = TypeVar("K")  # hashable
T = TypeVar("T")


@dataclass
class _Request:
    peer: Peer
    cost: float
    urgent: bool


class FairQueue(Generic[K]):
    """A fair queue: a state machine without I/O or clock. Keys identify the requests.

    The next turn goes to the address that has used the least, and among its connections to the one
    that has used the least, each with the cost of its own next turn added. So neither many
    requests, nor many connections, nor costly requests of one client delay another by more than the
    turns that have begun. Within a connection urgent turns come first, then cheap ones; an urgent
    turn gains nothing over other connections. A newcomer starts with the least use of all.

    Where there are several places, one address gets all but one of them at a time, and one
    connection all but two, so that one is free for the next client. An empty name has no such
    limit.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._waiting: dict[K, _Request] = {}  # in order of arrival
        self._running: dict[K, _Request] = {}
        self._addresses: dict[str, float] = {}  # their use, by name
        self._connections: dict[str, float] = {}

    def join(self, key: K, peer: Peer, cost: float, *, urgent: bool = False) -> None:
        """Queue ``key`` of ``peer``."""
        for used, name in self._accounts(peer):
            used.setdefault(name, min(used.values(), default=0.0))
        self._waiting[key] = _Request(peer, cost, urgent)

    def leave(self, key: K) -> None:
        """Drop ``key``, which no longer waits or has had its turn."""
        request = self._waiting.pop(key, None) or self._running.pop(key)
        others = [r.peer for line in (self._waiting, self._running) for r in line.values()]
        if all(peer.connection != request.peer.connection for peer in others):
            del self._connections[request.peer.connection]
        if all(peer.address != request.peer.address for peer in others):
            del self._addresses[request.peer.address]

    def next(self) -> K | None:
        """Return the key whose turn begins now; None if none may begin."""
        waiting = [r for r in self._waiting.items() if self._may_begin(r[1].peer)]
        if not waiting:
            return None
        of_connections = _first_of_each(
            waiting, lambda r: r.peer.connection, lambda r: (not r.urgent, r.cost)
        )
        of_addresses = _first_of_each(
            of_connections,
            lambda r: r.peer.address,
            lambda r: (self._connections[r.peer.connection] + r.cost,),
        )
        chosen, request = min(
            of_addresses, key=lambda r: self._addresses[r[1].peer.address] + r[1].cost
        )
        self._running[chosen] = self._waiting.pop(chosen)
        for used, name in self._accounts(request.peer):
            used[name] += request.cost
        return chosen

    def _may_begin(self, peer: Peer) -> bool:
        running = [r.peer for r in self._running.values()]
        of_address = sum(p.address == peer.address != "" for p in running)
        of_connection = sum(p.connection == peer.connection != "" for p in running)
        return (
            len(running) < self._places
            and of_address < max(1, self._places - 1)
            and of_connection < max(1, self._places - 2)
        )

    def _accounts(self, peer: Peer) -> tuple[tuple[dict[str, float], str], ...]:
        return (self._addresses, peer.address), (self._connections, peer.connection)


def _first_of_each(
    requests: Iterable[tuple[K, _Request]],
    name: Callable[[_Request], str],
    rank: Callable[[_Request], tuple[float, ...]],
) -> list[tuple[K, _Request]]:
    """Return the request of the lowest rank for each name; of equals the first."""
    first: dict[str, tuple[K, _Request]] = {}
    for key, request in requests:
        best = first.setdefault(name(request), (key, request))
        if rank(request) < rank(best[1]):
            first[name(request)] = key, request
    return list(first.values())


class Turns:
    """Runs jobs of many clients, so many at a time, in the order of a :class:`FairQueue`.

    Belongs to one asyncio loop.
    """

    def __init__(self, places: int) -> None:
        self._line: FairQueue[asyncio.Future[None]] = FairQueue(places)
        self._jobs: set[asyncio.Future[Any]] = set()

    async def run(
        self,
        peer: Peer,
        cost: float,
        job: Callable[[], Awaitable[T]],
        grace_s: float | None = None,
        *,
        urgent: bool = False,
    ) -> T:
        """Run ``job`` in its turn, and return its result.

        A caller that is cancelled leaves the queue. If its turn has begun, that lasts until the job
        has ended by itself, or is cancelled after ``grace_s``.
        """
        called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.join(called, peer, cost, urgent=urgent)
        self._call()
        try:
            await called
        except asyncio.CancelledError:
            self._over(called)
            raise
        running = asyncio.ensure_future(job())
        self._jobs.add(running)
        running.add_done_callback(self._jobs.discard)
        running.add_done_callback(_retrieve)
        running.add_done_callback(lambda _: self._over(called))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if grace_s is not None:
                called.get_loop().call_later(grace_s, running.cancel)
            raise
        finally:
            del running  # else its error, which refers to this frame, would keep the job's data

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no job runs; return False if one still does after ``timeout_s``."""
        if not self._jobs:
            return True
        _, pending = await asyncio.wait(self._jobs, timeout=timeout_s)
        return not pending

    def _over(self, called: asyncio.Future[None]) -> None:
        self._line.leave(called)
        self._call()

    def _call(self) -> None:
        while (called := self._line.next()) is not None:
            if not called.done():
                called.set_result(None)


def _retrieve(job: asyncio.Future[Any]) -> None:
    """Retrieve the error of ``job``, or asyncio would log it if the caller has left."""
    if not job.cancelled():
        job.exception()
