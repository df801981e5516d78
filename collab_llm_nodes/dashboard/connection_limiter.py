"""Accept connections within limits, and answer the requests that must never wait.

This thread belongs to the emergency stop and does a bounded amount of work for each client: it
reads one head and the body of a log-in, 16 KiB in all, and writes one answer. Connections for pages
and web sockets are handed on to another thread (``server.py``), so the emergency stop waits neither
for slow senders nor for slow readers.

A connection counts as unknown until it has made a request that ``http_api.py`` allows. Unknown
connections have ``STRANGERS`` places, and a new one always gets a place: when all are taken, the
oldest is closed, from the network that holds most of them if one holds many. So connections that
are opened and abandoned, however many and from wherever, never keep out a client that sends its
request at once, and never cost a known client its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, TypeVar
from urllib.parse import unquote

import h11
from starlette.responses import PlainTextResponse, Response

from collab_llm_nodes.dashboard.http_api import HttpApi, Request, encode
from collab_llm_nodes.network import network_of

STRANGERS = 256
STRANGER_S = 10.0
"""Seconds after which an unknown connection is closed; its request must have been answered."""
STRANGER_BYTES = 16384
"""Largest head of a request, with the body of a log-in."""
KNOWN = 32
"""Places for known clients, and below for each page: its web socket, pictures and state."""
KNOWN_PER_VIEWER = 4
_SHARE = 16
"""A network with more unknown connections than this loses its own first."""
_TURNS = 16
"""Turns of the event loop that a new connection gets before later ones can displace it."""
_QUEUE = 2048
_TICK_S = 0.5
_PAUSE_S = 0.05
_END_S = 1.0
"""Seconds that answers under way get at :meth:`ConnectionLimiter.close`."""


class Holder(Protocol):
    """A connection, as far as :class:`Places` needs to know it."""

    @property
    def network(self) -> str: ...

    @property
    def closed(self) -> bool: ...


H = TypeVar("H", bound=Holder)


class Places(Generic[H]):
    """Places of connections. A method returns those that lost theirs; the caller closes them."""

    def __init__(self, strangers: int, known: int) -> None:
        self._limits = (strangers, known)
        self._strangers: dict[H, float] = {}  # when each came; the oldest first
        self._held: Counter[str] = Counter()  # strangers by network
        self._known: dict[H, None] = {}  # the one whose last request is longest ago first

    def __len__(self) -> int:
        return len(self._strangers) + len(self._known)

    def enter(self, who: H, now: float) -> list[H]:
        """Give a place to a new, unknown connection at ``now`` [s]."""
        self._strangers[who] = now
        self._held[who.network] += 1
        return self.displace() if len(self._strangers) > self._limits[0] else []

    def displace(self) -> list[H]:
        """Take the place of one unknown connection, if there is any."""
        if not self._strangers:
            return []
        crowd = max(self._held, key=self._held.__getitem__)
        crowded = self._held[crowd] > _SHARE
        oldest = next(w for w in self._strangers if not crowded or w.network == crowd)
        self._forget(oldest)
        return [oldest]

    def welcome(self, who: H) -> list[H]:
        """Count ``who`` as known, and as the one that made a request last."""
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

    def leave(self, who: H) -> None:
        """Give up the place of ``who``: its request is one that must not be interrupted."""
        self._known.pop(who, None)
        if who in self._strangers:
            self._forget(who)

    def overdue(self, now: float) -> list[H]:
        """Take the places of unknown connections that ended or are ``STRANGER_S`` old."""
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
    address: str
    cut: Callable[[], object]
    """Close the connection, in the thread that serves it."""
    handed_on: bool = False

    @property
    def network(self) -> str:
        return network_of(self.address)

    @property
    def closed(self) -> bool:
        return self.socket.fileno() < 0


class ConnectionLimiter:
    """Serves ``listener`` in a thread of its own, from construction until :meth:`close`.

    Args:
        hand_on: takes a connection and the bytes read from it; returns a function that closes it.
    """

    def __init__(
        self,
        listener: socket.socket,
        api: HttpApi,
        hand_on: Callable[[socket.socket, bytes], Callable[[], object]],
        max_viewers: int,
    ) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        strangers = max(16, min(STRANGERS, files // 4))
        known = max(16, min(KNOWN + KNOWN_PER_VIEWER * max_viewers, files // 4))
        self._batch = strangers // _TURNS
        self._places: Places[_Client] = Places(strangers, known)
        self._listener, self._api, self._hand_on = listener, api, hand_on
        listener.setblocking(False)
        listener.listen(_QUEUE)
        self._closing = threading.Event()
        self._serving: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._live()), name="dashboard-stop", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening; answers under way get a second to end."""
        self._closing.set()
        self._thread.join()

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._open()
        while not self._closing.is_set():
            _cut(self._places.overdue(time.monotonic()))
            await asyncio.sleep(_TICK_S)
        self._loop.remove_reader(self._listener)
        self._listener.close()
        if self._serving:
            await asyncio.wait(self._serving, timeout=_END_S)

    def _open(self) -> None:
        if not self._closing.is_set():
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Accept a few waiting connections; the earlier ones must get their turn."""
        for _ in range(self._batch):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # the client has left again
            except OSError:  # no file descriptor: take one from a stranger, or wait for one
                if not _cut(self._places.displace()):
                    self._loop.remove_reader(self._listener)
                    self._loop.call_later(_PAUSE_S, self._open)
                return
            accepted.setblocking(False)
            client = _Client(accepted, address[0], accepted.close)
            task = self._loop.create_task(self._serve(client))
            client.cut = task.cancel
            _cut(self._places.enter(client, time.monotonic()))
            self._serving.add(task)
            task.add_done_callback(partial(self._on_served, client))

    def _on_served(self, client: _Client, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        if not client.handed_on:
            client.socket.close()

    async def _serve(self, client: _Client) -> None:
        try:
            request, received = await self._read(client)
            if request.refusal is None and request.stops:
                self._places.leave(client)
            elif request.refusal is None:
                _cut(self._places.welcome(client))
            reply = await self._api.reply(request)
            if reply is None:
                client.cut, client.handed_on = self._hand_on(client.socket, received), True
            else:
                await self._loop.sock_sendall(client.socket, encode(reply, request.method))
                client.socket.recv(STRANGER_BYTES)  # a body left unread could cost the answer
        except h11.RemoteProtocolError:
            _send(client, PlainTextResponse("no request", 400))
        except OSError:
            """The client has left, or there was nothing left to read."""
        except Exception:
            logging.getLogger(__name__).exception("a request failed")
            _send(client, PlainTextResponse("the dashboard failed", 500))

    async def _read(self, client: _Client) -> tuple[Request, bytes]:
        """Return the request of a connection, and all bytes read for it."""
        http, received = h11.Connection(h11.SERVER, STRANGER_BYTES), b""
        request: Request | None = None
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA and len(received) < STRANGER_BYTES:
                data = await self._loop.sock_recv(client.socket, STRANGER_BYTES - len(received))
                received += data
                http.receive_data(data)
            elif isinstance(event, h11.Request):
                request = self._api.judge(_request(event, client.address))
                if not request.logs_in:
                    return request, received
            elif isinstance(event, h11.Data) and request is not None:
                request = replace(request, body=request.body + event.data)
            elif isinstance(event, h11.EndOfMessage) and request is not None:
                return request, received
            else:
                raise ConnectionError("the client left, or sends without end")


def _request(event: h11.Request, address: str) -> Request:
    """Return ``event`` as a request; a header given twice has both values, so neither is valid."""
    headers: dict[str, str] = {}
    for raw_name, raw_value in event.headers:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    proxied = address == "127.0.0.1"  # a reverse proxy names its client
    if proxied and "x-forwarded-for" in headers:
        address = headers["x-forwarded-for"].rpartition(",")[2].strip()
    path, _, query = event.target.decode("ascii").partition("?")
    return Request(
        method=event.method.decode("ascii"),
        path=unquote(path),
        query=query,
        headers=headers,
        network=network_of(address),
        https=proxied and headers.get("x-forwarded-proto") == "https",
    )


def _send(client: _Client, reply: Response) -> None:
    with contextlib.suppress(OSError):
        client.socket.send(encode(reply))


def _cut(clients: list[_Client]) -> bool:
    """Close all; return True if there was any."""
    for client in clients:
        client.cut()
    return bool(clients)
