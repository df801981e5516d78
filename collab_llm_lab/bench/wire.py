"""gRPC streams for load generators and attackers: HTTP/2 by hand.

``grpc.aio`` cannot take its place: it binds no source address, on which a server's limits depend,
and it obeys the server's limit of streams and leaves it windows to send in, as attackers do not.
This implements as much of HTTP/2 (RFC 9113) as streams of messages need: flow control, settings,
pings. It reads no headers, so of a call that fails it only knows that it has ended. A round takes
about 0.06 ms of a core, which the robots of ``bench verifier`` share with their verifier.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque

from collab_llm_lab.bench import http2
from collab_llm_nodes.errors import CollabError, DeadlineExceeded, Unavailable

_INITIAL_WINDOW = 4  # a setting
_FRAME_BYTES = 1 << 14
_WINDOW_BYTES = (1 << 16) - 1  # of both sides at first
_LARGEST_WINDOW = (1 << 31) - 1  # ours: no benchmark receives more


class Connection(asyncio.Protocol):
    """One client's connection; made by :func:`connect`.

    Attributes:
        open: calls can begin.
    """

    def __init__(self, authority: str, scheme: str, token: str) -> None:
        self.open = True
        self._authority, self._scheme, self._token = authority, scheme, token
        self._buffer = bytearray()
        self._calls: dict[int, Call] = {}
        self._begun = 0
        self._window = _WINDOW_BYTES  # what may be sent
        self._first_window = _WINDOW_BYTES  # of a call

    def call(self, path: str, timeout_s: float) -> Call:
        """Begin a call, which may last ``timeout_s``."""
        number = 2 * self._begun + 1
        self._begun += 1
        self._calls[number] = call = Call(self, number, self._first_window, timeout_s)
        fields = http2.grpc_fields(path, self._authority, scheme=self._scheme, token=self._token)
        self.send(http2.headers(number, http2.header_block(fields)))
        return call

    def send(self, frames: bytes) -> None:
        """Write ``frames`` as they are."""
        self._transport.write(frames)

    @property
    def unsent(self) -> int:
        """Bytes that the server has not taken yet."""
        return self._transport.get_write_buffer_size()

    def close(self) -> None:
        """End the connection and all its calls."""
        self.open = False
        self._end_calls("closed")
        self._transport.close()

    # Callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        window = _INITIAL_WINDOW.to_bytes(2, "big") + _LARGEST_WINDOW.to_bytes(4, "big")
        more = (_LARGEST_WINDOW - _WINDOW_BYTES).to_bytes(4, "big")
        self.send(
            http2.PREFACE
            + http2.frame(http2.SETTINGS, payload=window)
            + http2.frame(http2.WINDOW_UPDATE, payload=more)
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._end_calls("the connection is lost")

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        buffer, start = self._buffer, 0
        while len(buffer) >= start + 9:
            end = start + 9 + int.from_bytes(buffer[start : start + 3], "big")
            if len(buffer) < end:
                break
            number = int.from_bytes(buffer[start + 5 : start + 9], "big")
            self._handle(buffer[start + 3], buffer[start + 4], number, buffer[start + 9 : end])
            start = end
        del buffer[:start]

    def _handle(self, kind: int, flags: int, number: int, payload: bytearray) -> None:
        call = self._calls.get(number)
        if kind == http2.DATA and call is not None:
            call._take(payload)
        elif kind == http2.WINDOW_UPDATE:
            more = int.from_bytes(payload, "big")
            if number == 0:
                self._widen(more, 0)
            elif call is not None:
                call._widen(more)
        elif kind == http2.PING and not flags & http2.ACK:
            self.send(http2.frame(http2.PING, http2.ACK, 0, bytes(payload)))
        elif kind == http2.SETTINGS and not flags & http2.ACK:
            for start in range(0, len(payload), 6):
                if int.from_bytes(payload[start : start + 2], "big") == _INITIAL_WINDOW:
                    window = int.from_bytes(payload[start + 2 : start + 6], "big")
                    self._widen(0, window - self._first_window)
                    self._first_window = window
            self.send(http2.frame(http2.SETTINGS, http2.ACK))
        elif kind == http2.GOAWAY:  # calls that the server has begun with go on
            self.open = False
            self._end_calls("the server goes away", int.from_bytes(payload[:4], "big"))
        ended = kind in (http2.DATA, http2.HEADERS) and flags & http2.END_STREAM
        if call is not None and (ended or kind == http2.RST_STREAM):
            del self._calls[number]
            call._end(Unavailable("the call has ended", remedy="see the verifier's log"))

    def _widen(self, more: int, each: int) -> None:
        """Let ``more`` bytes be sent in all, and ``each`` by each call."""
        self._window += more
        for call in self._calls.values():
            call._widen(each)

    def _end_calls(self, why: str, last: int = 0) -> None:
        """End all calls but those with numbers up to ``last``."""
        for number in [number for number in self._calls if number > last]:
            self._calls.pop(number)._end(Unavailable(why, remedy="see the verifier's log"))


class Call:
    """A bidirectional stream of messages, for one task; made by :meth:`Connection.call`."""

    def __init__(self, connection: Connection, number: int, window: int, timeout_s: float) -> None:
        self._connection = connection
        self._number = number
        self._window = window
        self._part = bytearray()  # of a message to come
        self._messages: deque[bytes] = deque()
        self._error: CollabError | None = None
        self._waiting: asyncio.Future[None] | None = None
        late = DeadlineExceeded(f"the call has not ended after {timeout_s:g} s")
        self._deadline = asyncio.get_running_loop().call_later(timeout_s, self._end, late)

    async def write(self, message: bytes) -> None:
        """Send ``message``, waiting for a slow server.

        Raises:
            Unavailable: the call or the connection has ended.
            DeadlineExceeded: the call takes too long.
        """
        connection = self._connection
        body = b"\0" + len(message).to_bytes(4, "big") + message
        for start in range(0, len(body), _FRAME_BYTES):
            part = body[start : start + _FRAME_BYTES]
            while min(self._window, connection._window) < len(part):
                await self._wait()
            self._window -= len(part)
            connection._window -= len(part)
            connection.send(http2.frame(http2.DATA, 0, self._number, part))

    @property
    def ended(self) -> bool:
        """Whether the call has ended."""
        return self._error is not None

    async def read(self) -> bytes:
        """Return the next message; raises as :meth:`write`."""
        while not self._messages:
            await self._wait()
        return self._messages.popleft()

    def done_writing(self) -> None:
        """Half-close the call."""
        if self._error is None:
            self._connection.send(http2.frame(http2.DATA, http2.END_STREAM, self._number))

    def reset(self) -> None:
        """End the call at once, on both sides."""
        if self._error is None:
            self._connection.send(http2.reset(self._number))
            self._connection._calls.pop(self._number, None)
            self._end(Unavailable("the call was given up"))

    async def _wait(self) -> None:
        """Wait until the call has news."""
        if self._error is not None:
            raise self._error
        self._waiting = asyncio.get_running_loop().create_future()
        await self._waiting

    # Called by the connection.

    def _take(self, payload: bytearray) -> None:
        part = self._part
        part += payload
        while len(part) >= 5:
            end = 5 + int.from_bytes(part[1:5], "big")
            if len(part) < end:
                break
            self._messages.append(bytes(part[5:end]))
            del part[:end]
        self._wake()

    def _widen(self, more: int) -> None:
        self._window += more
        self._wake()

    def _end(self, error: CollabError) -> None:
        self._deadline.cancel()
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


async def connect(
    address: str, *, tls: ssl.SSLContext | None = None, token: str = "", source: str = ""
) -> Connection:
    """Connect to the server at ``address`` (host:port).

    Args:
        tls: encrypt by it; its protocols include "h2".
        token: of every call.
        source: the own address; empty: any.
    """
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    scheme = "http" if tls is None else "https"
    _, connection = await loop.create_connection(
        lambda: Connection(address, scheme, token),
        host,
        int(port),
        ssl=tls,
        local_addr=(source, 0) if source else None,
    )
    return connection
