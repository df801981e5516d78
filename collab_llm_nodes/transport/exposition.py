"""The port at which Prometheus asks for a server's metrics: small and hard to hold up.

One thread serves all who ask. prometheus_client's own server gives each connection a thread, for as
long as its request takes to arrive.
"""

from __future__ import annotations

import asyncio
import socket
import threading

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from collab_llm_nodes.transport.background import within

_REQUEST_S = 2.0  # from a connection to its whole request, and for the answer to be taken
_REQUEST_BYTES = 8192
_CONNECTIONS = 64  # at a time; one more ends the oldest, so that there is always one for Prometheus
_END_S = 5.0


class Exposition:
    """Answers ``GET /metrics`` at ``host`` and ``port``, in a thread of its own, until ``stop``.

    Raises:
        OSError: cannot listen there.

    Attributes:
        port: where it listens.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self.port: int = self._socket.getsockname()[1]
        self._registry = registry
        self._asking: dict[asyncio.StreamWriter, asyncio.Future[None]] = {}  # in order of arrival
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop answering."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._socket, limit=_REQUEST_BYTES)
        async with server:
            await self._end.wait()
            asking = dict(self._asking)
            for writer in asking:
                writer.transport.abort()
            await asyncio.gather(*asking.values())

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._asking) >= _CONNECTIONS:
            oldest = next(iter(self._asking))
            del self._asking[oldest]
            oldest.transport.abort()  # which ends its reading or writing
        self._asking[writer] = ended = asyncio.get_running_loop().create_future()
        try:
            await within(self._answer(reader, writer), _REQUEST_S)
        except (OSError, EOFError, asyncio.TimeoutError, asyncio.LimitOverrunError):
            pass  # half a request, too long a one, or nobody who takes the answer
        finally:
            writer.transport.abort()
            self._asking.pop(writer, None)
            ended.set_result(None)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        status, body = "200 OK", b""
        if path not in (b"/metrics", b"/"):
            status = "404 Not Found"
        elif method != b"GET":
            status = "405 Method Not Allowed"
        else:
            body = generate_latest(self._registry)
        lines = (
            f"HTTP/1.1 {status}",
            f"Content-Type: {CONTENT_TYPE_LATEST}",
            f"Content-Length: {len(body)}",
            "Connection: close",
        )
        writer.write("".join(f"{line}\r\n" for line in (*lines, "")).encode() + body)
        writer.close()
        await writer.wait_closed()
