"""Turns at the robot: how often, and how many at a time, clients may use it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from collab_llm_nodes.errors import Busy


class Turns:
    """Turns at something that serves ``at_once`` calls: first come, first served, one per client.

    So a client that calls again and again waits after each turn until all others had theirs.
    """

    def __init__(self, at_once: int, wait_s: float) -> None:
        self._places = anyio.Semaphore(at_once)
        self._wait_s = wait_s
        self._clients: set[str] = set()

    @asynccontextmanager
    async def take(self, client: str) -> AsyncIterator[None]:
        """Hold a turn.

        Raises:
            Busy: the client has or awaits one already, or none came within ``wait_s``.
        """
        if client in self._clients:
            raise Busy("your last call is still in progress", remedy="await it, or cancel it")
        self._clients.add(client)
        try:
            await self._place()
            try:
                yield
            finally:
                self._places.release()
        finally:
            self._clients.discard(client)

    async def _place(self) -> None:
        try:
            with anyio.fail_after(self._wait_s):
                await self._places.acquire()
        except TimeoutError:
            raise Busy(
                f"others used the robot for {self._wait_s:g} s", remedy="call again later"
            ) from None


class Rate:
    """A limit on calls: ``burst`` at once, then ``per_s`` a second, for each client."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._gap_s, self._burst = 1 / per_s, burst
        self._free_at: dict[str, float] = {}
        """Time at which each client may use its whole burst again."""

    def take(self, client: str, now: float) -> None:
        """Count a call at ``now`` [s].

        Raises:
            Busy: it is one too many.
        """
        free_at = max(now, self._free_at.get(client, now)) + self._gap_s
        if free_at - now > self._burst * self._gap_s:
            raise Busy(f"more than {1 / self._gap_s:g} calls a second", remedy="call less often")
        self._free_at[client] = free_at
