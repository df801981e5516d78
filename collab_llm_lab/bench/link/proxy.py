"""A TCP link in user space: a proxy that delays, throttles, cuts and falls silent on request.

    with LinkProxy("127.0.0.1:50551", LinkProfile(delay_s=0.02)) as link:
        VerifierClient(ClientLinkConfig(address=link.address))
        link.cut()

What a byte stream can show of a bad link is here: delay, jitter, capacity, resets, silence. Lost
and reordered packets are TCP's business below that; ``PacketLink`` has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

from collab_llm_lab.bench.link.lane import Lane, LinkProfile, LoopThread, Wire
from collab_llm_nodes.errors import ConfigError

_SEGMENT = 1448
"""Bytes per packet: with a capacity, a long message arrives in pieces, not at its end."""
_HANDSHAKE = 3
"""One-way delays until a server can read from a client that has begun to connect: SYN, SYN-ACK, and
the ACK that brings the first data."""
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that makes close() send RST."""


class LinkProxy:
    """See the module docstring. All methods are thread-safe and effective when they return.

    Args:
        target: host:port that the link leads to.
        profile: of each direction; ``loss`` and ``reorder`` must be 0.
        tap: Called in the proxy's thread with all bytes that enter the link, and the direction and
            number of their connection, such as "up 1".
        enter: called in the proxy's thread before it connects anywhere, e.g. to enter a network
            namespace; the listening socket is that of the caller.

    Attributes:
        address: host:port to connect to instead of ``target``.
    """

    def __init__(
        self,
        target: str,
        profile: LinkProfile | None = None,
        *,
        tap: Callable[[str, bytes], object] = lambda lane, data: None,
        enter: Callable[[], None] = lambda: None,
    ) -> None:
        self._tap = tap
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._profile = _checked(profile or LinkProfile())
        self._thread = LoopThread("link-proxy", enter)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._connections: set[_Connection] = set()
        self._dialling: set[asyncio.Task[None]] = set()
        self._refusing = False
        self._to_swallow = 0
        self._swallowed: list[socket.socket] = []
        self._flows = asyncio.Event()  # not set: half-open
        self._flows.set()
        self._bytes = {"up": 0, "down": 0}
        self._accepted = 0

    def __enter__(self) -> LinkProxy:
        self._thread.start()
        self._thread.call(self._serve)
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.call(self._close)
        self._thread.stop()
        self._listener.close()

    @property
    def profile(self) -> LinkProfile:
        """The current profile."""
        return self._profile

    @property
    def bytes_up(self) -> int:
        """Delivered to the target."""
        return self._bytes["up"]

    @property
    def bytes_down(self) -> int:
        """Delivered to those who connected."""
        return self._bytes["down"]

    @property
    def accepted(self) -> int:
        """Connections accepted so far, refused ones included."""
        return self._accepted

    @property
    def connections(self) -> int:
        """Connections that stand now."""
        return len(self._connections)

    # Controls.

    def change(self, profile: LinkProfile) -> None:
        """Set another profile for data that enters the link from now on."""
        self._thread.call(self._change, _checked(profile))

    def throttle(self, rate_bps: float) -> None:
        """Set another capacity; 0 means unlimited."""
        self.change(replace(self._profile, rate_bps=rate_bps))

    def cut(self) -> None:
        """Reset every connection, at both ends; new ones are accepted."""
        self._thread.call(self._cut)

    def refuse(self) -> None:
        """Reset new connections from now on; those that stand are left alone."""
        self._thread.call(setattr, self, "_refusing", True)

    def swallow(self, count: int) -> None:
        """Let nothing through on the next ``count`` connections, as if every SYN was lost."""
        self._thread.call(setattr, self, "_to_swallow", count)

    def half_open(self) -> None:
        """Fall silent: connections stay, new ones are accepted, but nothing is forwarded.

        Nothing is lost either: as TCP would, the link delivers what is under way once it healed.
        """
        self._thread.call(self._stall)

    def forget(self) -> None:
        """The connections that stand fall silent, as when a NAT forgets them; new ones work."""
        self._thread.call(self._forget)

    def heal(self) -> None:
        """Accept and forward again."""
        self._thread.call(self._heal)

    # In the loop's thread.

    def _serve(self) -> None:
        self._listener.setblocking(False)
        self._thread.loop.add_reader(self._listener.fileno(), self._accept)

    def _close(self) -> None:
        self._thread.loop.remove_reader(self._listener.fileno())
        self._cut()
        for accepted in self._swallowed:
            accepted.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return
        self._accepted += 1
        if self._refusing:
            _reset(accepted)
            return
        accepted.setblocking(False)
        if self._to_swallow:
            self._to_swallow -= 1
            self._swallowed.append(accepted)
            return
        task = self._thread.loop.create_task(self._dial(accepted))
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)

    async def _dial(self, accepted: socket.socket) -> None:
        """Connect ``accepted`` with the target, as late as a handshake over this link would."""
        loop, connection = self._thread.loop, _Connection(self)
        try:
            await asyncio.sleep(_HANDSHAKE * self._profile.delay_s)
            await self._flows.wait()
            await loop.create_connection(lambda: connection.server, self._host, self._port)
            await loop.connect_accepted_socket(lambda: connection.client, accepted)
            self._connections.add(connection)
        except (OSError, asyncio.CancelledError):  # no server there, or the link was cut
            connection.reset()
            _reset(accepted)

    def _change(self, profile: LinkProfile) -> None:
        self._profile = profile
        for connection in self._connections:
            connection.change(profile)

    def _cut(self) -> None:
        for task in list(self._dialling):
            task.cancel()
        for connection in list(self._connections):
            connection.reset()

    def _stall(self) -> None:
        self._flows.clear()
        self._forget()

    def _forget(self) -> None:
        for connection in self._connections:
            connection.stall(True)

    def _heal(self) -> None:
        self._refusing = False
        self._flows.set()
        for connection in list(self._connections):
            connection.stall(False)


class _Connection:
    """A client's connection and the one to the target that stands for it."""

    def __init__(self, proxy: LinkProxy) -> None:
        self._proxy = proxy
        self.client = _End(proxy, self, "up")
        self.server = _End(proxy, self, "down")
        self.client.peer, self.server.peer = self.server, self.client

    def ended(self) -> None:
        if self.client.gone and self.server.gone:
            self._proxy._connections.discard(self)

    def change(self, profile: LinkProfile) -> None:
        for end in (self.client, self.server):
            end.lane.profile = profile

    def reset(self) -> None:
        for end in (self.client, self.server):
            end.reset()

    def stall(self, silent: bool) -> None:
        for end in (self.client, self.server):
            end.stall(silent)


class _End(asyncio.Protocol):
    """One socket; what it receives goes through its lane to the other end's socket."""

    peer: _End

    def __init__(self, proxy: LinkProxy, connection: _Connection, direction: str) -> None:
        self._proxy, self._connection, self._direction = proxy, connection, direction
        self._name = f"{direction} {proxy._accepted}"
        self.lane = Lane(proxy._profile, self._name)
        self._wire: Wire[Callable[[], None]] = Wire(self._on_due)
        self._transport: asyncio.Transport | None = None
        self._held: list[Callable[[], None]] = []  # due, but the other end is not there yet
        self._silent = False
        self._obstacles: set[str] = set()  # reasons not to read more
        self.gone = False

    # Callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.get_extra_info("socket").setsockopt(
            socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
        )
        self.peer.release()

    def data_received(self, data: bytes) -> None:
        self._proxy._tap(self._name, data)
        now, rate = self._wire.now(), self.lane.profile.rate_bps
        step = _SEGMENT if rate else len(data)
        for begin in range(0, len(data), step):
            piece = data[begin : begin + step]
            self._send(partial(self.peer.write, piece), len(piece), now)
        if rate and (wait := self.lane.backlog(now) - self.lane.profile.queue_s) > 0:
            self._read(False, "queue")
            self._proxy._thread.loop.call_later(wait, self._read, True, "queue")

    def eof_received(self) -> bool:
        self._send(self.peer.write_eof, 0, self._wire.now())
        return True  # the other direction may go on

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        self._connection.ended()
        if not self.peer.gone:
            self._send(self.peer.reset if exc else self.peer.close, 0, self._wire.now())

    def pause_writing(self) -> None:
        self.peer._read(False, "receiver")

    def resume_writing(self) -> None:
        self.peer._read(True, "receiver")

    # What the other end asks for.

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self.gone:
            self._transport.write(data)
            self._proxy._bytes[self.peer._direction] += len(data)

    def write_eof(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            with contextlib.suppress(OSError):  # reset just now: connection_lost is to come
                self._transport.write_eof()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # What the link's owner asks for.

    def reset(self) -> None:
        """Send RST now, and drop the data under way."""
        self._wire.clear()
        self._held.clear()
        if self._transport is not None and not self.gone:
            self._transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, _RESET
            )
            self._transport.abort()

    def stall(self, silent: bool) -> None:
        """Hold everything, or let it go."""
        self._silent = silent
        self._read(not silent, "silence")
        self.release()

    def release(self) -> None:
        """Do what is due, if the other end can take it."""
        while self._held and self._can_leave():
            self._held.pop(0)()

    def _can_leave(self) -> bool:
        return not self._silent and self.peer._transport is not None

    def _send(self, action: Callable[[], None], size: int, now: float) -> None:
        due = self.lane.leaves(now, size)
        assert due is not None, "a stream loses nothing"
        self._wire.push(action, due)

    def _on_due(self, action: Callable[[], None]) -> None:
        self._held.append(action)
        self.release()

    def _read(self, on: bool, reason: str) -> None:
        (self._obstacles.discard if on else self._obstacles.add)(reason)
        if self._transport is None or self.gone or self._transport.is_closing():
            return
        if self._obstacles:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    connection.close()


def _checked(profile: LinkProfile) -> LinkProfile:
    for name in ("loss", "reorder"):
        if getattr(profile, name):
            raise ConfigError(
                "a TCP proxy sees no packets", field=name, remedy="emulate it with a PacketLink"
            )
    return profile
