"""Places for connections: few and short for strangers, so that the emergency stop always gets one.

A connection begins as a stranger's and becomes known with the first request that the gate lets
pass (``front.py``). Strangers have ``STRANGERS`` places. A newcomer always gets one: when all are
taken, the oldest stranger is cut off, of the network that holds most of them if one holds many. So
connections that are opened and left, by whomever and however many, never keep out a client that
sends its request at once, and never cost a known client its connection.
"""

from __future__ import annotations

import asyncio
import re
import resource
import socket
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from collab_llm_nodes.network import network_of

STRANGERS = 256
STRANGER_S = 10.0
"""Seconds after which a stranger is cut off; request, log-in and answer must be over by then."""
STRANGER_BYTES = 16384
"""Most bytes that a stranger may send: the head of a request and a log-in."""
KNOWN = 32
"""Places for known clients ..."""
KNOWN_PER_VIEWER = 4
"""... and for each page's web socket, pictures and state."""
_SHARE = 16
"""A network with more strangers than this loses its own first."""
_TURNS = 16
"""A newcomer has so many turns of the event loop before those after it may cost it its place."""
_QUEUE = 2048
_TICK_S = 0.5
_PAUSE_S = 0.05


class Holder(Protocol):
    """A connection as :class:`Places` sees it."""

    @property
    def network(self) -> str:
        """See ``network_of``."""

    @property
    def closed(self) -> bool:
        """It takes no place any more."""


H = TypeVar("H", bound=Holder)


class Places(Generic[H]):
    """The connections. Those that a method returns have lost their place and are to be cut off."""

    def __init__(self, strangers: int, known: int) -> None:
        self._limits = (strangers, known)
        self._strangers: dict[H, float] = {}  # when each came; the oldest first
        self._held: Counter[str] = Counter()  # strangers by network
        self._known: dict[H, None] = {}  # the one whose last request is longest ago first

    def __len__(self) -> int:
        return len(self._strangers) + len(self._known)

    def enter(self, who: H, now: float) -> list[H]:
        """Give a place to a stranger at ``now`` [s]."""
        self._strangers[who] = now
        self._held[who.network] += 1
        return self.displace() if len(self._strangers) > self._limits[0] else []

    def displace(self) -> list[H]:
        """Take the place of one stranger, if there is any."""
        if not self._strangers:
            return []
        crowd = max(self._held, key=self._held.__getitem__)
        crowded = self._held[crowd] > _SHARE
        oldest = next(w for w in self._strangers if not crowded or w.network == crowd)
        self._forget(oldest)
        return [oldest]

    def welcome(self, who: H) -> list[H]:
        """Count ``who`` as known, with a request just now."""
        if who in self._strangers:
            self._forget(who)
        elif who not in self._known:
            return []  # it was cut off in the meantime
        self._known.pop(who, None)
        self._known[who] = None
        if len(self._known) > self._limits[1]:
            self._known = {w: None for w in self._known if not w.closed}
        if len(self._known) <= self._limits[1]:
            return []
        oldest = next(iter(self._known))
        del self._known[oldest]
        return [oldest]

    def overdue(self, now: float) -> list[H]:
        """Take the places of strangers who have left or have been here for ``STRANGER_S``."""
        late = [w for w, at in self._strangers.items() if w.closed or now - at >= STRANGER_S]
        for who in late:
            self._forget(who)
        return late

    def _forget(self, stranger: H) -> None:
        del self._strangers[stranger]
        self._held[stranger.network] -= 1
        if not self._held[stranger.network]:
            del self._held[stranger.network]


@dataclass(eq=False)
class _Client:
    socket: socket.socket
    network: str
    protocol: _StrangersFirst | None = None
    known: bool = False
    ended: bool = False

    @property
    def closed(self) -> bool:
        return self.socket.fileno() < 0

    def cut(self) -> None:
        self.ended = True
        if self.protocol is not None and self.protocol.transport is not None:
            self.protocol.transport.abort()


class _StrangersFirst(H11Protocol):
    """HTTP, and little of it from strangers.

    Their request is parsed once its head is complete. A body in chunks, each of which costs much
    more than it weighs, is not parsed before they are known.
    """

    def __init__(self, client: _Client, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._client = client
        self._received = 0
        self._held = b""
        self._has_head = False
        self._in_chunks = False
        client.protocol = self

    def data_received(self, data: bytes) -> None:
        if self._client.known:
            super().data_received(data)
            return
        self._received += len(data)
        if self._received > STRANGER_BYTES:
            self.transport.abort()
            return
        self._held += data
        end = None if self._has_head else re.search(rb"\n\r?\n", self._held)
        if end is not None:
            head, self._held = self._held[: end.end()], self._held[end.end() :]
            self._has_head, self._in_chunks = True, b"transfer-encoding" in head.lower()
            super().data_received(head)
        if self._has_head and not self._in_chunks:
            self.release()

    def release(self) -> None:
        """Parse what was held back, unless it came before the answer to a web socket's request."""
        held, self._held = self._held, b""
        if held and self.transport.get_protocol() is self:
            super().data_received(held)


class Server(uvicorn.Server):
    """uvicorn behind a door of our own: it accepts whatever comes and cuts it off itself.

    An application finds ``welcome`` in a request's ``scope["state"]`` and calls it to make the
    connection a known one.
    """

    def __init__(self, config: uvicorn.Config, listener: socket.socket, max_viewers: int) -> None:
        super().__init__(config)
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        strangers = max(16, min(STRANGERS, files // 4))
        known = max(16, min(KNOWN + KNOWN_PER_VIEWER * max_viewers, files // 4))
        self._batch = strangers // _TURNS
        self._places: Places[_Client] = Places(strangers, known)
        self._listener = listener
        listener.setblocking(False)
        listener.listen(_QUEUE)
        self._beginning: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start without a socket of uvicorn's own, then open the door."""
        await super().startup(sockets=[])
        self._sweeper = asyncio.create_task(self._sweep())
        self._open()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the door first."""
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        await super().shutdown(sockets=[])

    def _open(self) -> None:
        if not self.should_exit:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Let in those who wait; a few, since those who came before must get their turn."""
        for _ in range(self._batch):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # it has left again
            except OSError:  # no file descriptor: take one from a stranger, or wait for one
                if not _cut(self._places.displace()):
                    asyncio.get_running_loop().remove_reader(self._listener)
                    asyncio.get_running_loop().call_later(_PAUSE_S, self._open)
                return
            accepted.setblocking(False)
            client = _Client(accepted, network_of(address[0]))
            _cut(self._places.enter(client, time.monotonic()))
            task = asyncio.create_task(self._begin(client))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    async def _begin(self, client: _Client) -> None:
        """Have uvicorn speak with a client."""
        loop = asyncio.get_running_loop()
        protocol = partial(
            _StrangersFirst,
            client,
            config=self.config,
            server_state=self.server_state,
            app_state={"welcome": partial(self._welcome, client)},
        )
        try:
            await loop.connect_accepted_socket(protocol, client.socket)
        except OSError:  # it has left again
            client.socket.close()
        if client.ended:
            client.cut()

    def _welcome(self, client: _Client) -> None:
        _cut(self._places.welcome(client))
        client.known = True
        if client.protocol is not None:
            client.protocol.release()

    async def _sweep(self) -> None:
        while True:
            _cut(self._places.overdue(time.monotonic()))
            await asyncio.sleep(_TICK_S)


def _cut(clients: list[_Client]) -> bool:
    """Cut all off; whether there was any."""
    for client in clients:
        client.cut()
    return bool(clients)
