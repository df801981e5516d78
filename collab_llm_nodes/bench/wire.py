"""gRPC streams for a load generator: HTTP/2 by hand, without TLS, at little cost.

The robots of ``bench verifier`` run on the cores of the verifier they measure, and must leave them
to it: a round takes about 0.06 ms of a core here (16 robots); what ``grpc.aio`` would take was not
measured. This speaks as much of HTTP/2 (RFC 9113) as streams of messages need: flow control,
settings, pings. It reads no headers, so of a call that fails it only knows that it has ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

from collab_llm_nodes.errors import CollabError, DeadlineExceeded, Unavailable

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW = 4  # a setting
_FRAME_BYTES = 1 << 14
_WINDOW_BYTES = (1 << 16) - 1  # of both sides, until they say otherwise
_LARGEST_WINDOW = (1 << 31) - 1  # ours: what a benchmark hears is less, so we never say more


class Connection(asyncio.Protocol):
    """One client's connection; made by :func:`connect`."""

    def __init__(self, authority: str) -> None:
        self._authority = authority
        self._buffer = bytearray()
        self._calls: dict[int, Call] = {}
        self._begun = 0
        self._window = _WINDOW_BYTES  # what may be sent
        self._first_window = _WINDOW_BYTES  # of a call

    def call(self, path: str, timeout_s: float) -> Call:
        """Begin a call, which may last ``timeout_s``."""
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": self._authority,
            "content-type": "application/grpc",
            "te": "trailers",
        }
        number = 2 * self._begun + 1
        self._begun += 1
        self._calls[number] = call = Call(self, number, self._first_window, timeout_s)
        self._send(_HEADERS, _END_HEADERS, number, b"".join(_header(headers)))
        return call

    def close(self) -> None:
        """End the connection and all its calls."""
        self._end_calls("closed")
        self._transport.close()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        window = _INITIAL_WINDOW.to_bytes(2, "big") + _LARGEST_WINDOW.to_bytes(4, "big")
        self._send(_SETTINGS, 0, 0, window)
        self._send(_WINDOW, 0, 0, (_LARGEST_WINDOW - _WINDOW_BYTES).to_bytes(4, "big"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_calls("the connection is lost")

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        buffer, start = self._buffer, 0
        while len(buffer) >= start + 9:
            end = start + 9 + int.from_bytes(buffer[start : start + 3], "big")
            if len(buffer) < end:
                break
            number = int.from_bytes(buffer[start + 5 : start + 9], "big")
            self._hear(buffer[start + 3], buffer[start + 4], number, buffer[start + 9 : end])
            start = end
        del buffer[:start]

    def _hear(self, kind: int, flags: int, number: int, payload: bytearray) -> None:
        call = self._calls.get(number)
        if kind == _DATA and call is not None:
            call._take(payload)
        elif kind == _WINDOW:
            more = int.from_bytes(payload, "big")
            if number == 0:
                self._widen(more, 0)
            elif call is not None:
                call._widen(more)
        elif kind == _PING and not flags & _ACK:
            self._send(_PING, _ACK, 0, bytes(payload))
        elif kind == _SETTINGS and not flags & _ACK:
            for start in range(0, len(payload), 6):
                if int.from_bytes(payload[start : start + 2], "big") == _INITIAL_WINDOW:
                    window = int.from_bytes(payload[start + 2 : start + 6], "big")
                    self._widen(0, window - self._first_window)
                    self._first_window = window
            self._send(_SETTINGS, _ACK, 0, b"")
        elif kind == _GOAWAY:
            self._end_calls("the server goes away")
        if call is not None and (
            kind == _RESET or (kind in (_DATA, _HEADERS) and flags & _END_STREAM)
        ):
            del self._calls[number]
            call._end(Unavailable("the call has ended", remedy="see the verifier's log"))

    def _widen(self, more: int, each: int) -> None:
        """``more`` may be sent in all, and ``each`` by each call."""
        self._window += more
        for call in self._calls.values():
            call._widen(each)

    def _send(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + number.to_bytes(4, "big")
        self._transport.write(head + payload)

    def _end_calls(self, why: str) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call._end(Unavailable(why, remedy="see the verifier's log"))


class Call:
    """A stream of messages each way, for one task; made by :meth:`Connection.call`."""

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
            connection._send(_DATA, 0, self._number, part)

    async def read(self) -> bytes:
        """The next message; raises as :meth:`write`."""
        while not self._messages:
            await self._wait()
        return self._messages.popleft()

    def done_writing(self) -> None:
        """Tell the server that nothing more comes."""
        if self._error is None:
            self._connection._send(_DATA, _END_STREAM, self._number, b"")

    async def _wait(self) -> None:
        """Until something was heard of the call."""
        if self._error is not None:
            raise self._error
        self._waiting = asyncio.get_running_loop().create_future()
        await self._waiting

    # What the connection hears.

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


async def connect(address: str) -> Connection:
    """A connection to the server at ``address`` (host:port)."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(address), host, int(port))
    return connection


def _header(fields: dict[str, str]) -> Iterator[bytes]:
    """HPACK (RFC 7541, 6.2.2): literals without indexing; each shorter than 127 bytes."""
    for name, value in fields.items():
        yield bytes((0, len(name))) + name.encode() + bytes((len(value),)) + value.encode()
