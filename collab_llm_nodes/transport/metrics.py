"""Metrics of a running server, and the port at which Prometheus reads them.

prometheus_client's own server gives each connection a thread for as long as its request takes to
arrive. Here one thread serves all connections, and a connection has no task or stream of its own:
a client that opens hundreds a second takes little of the interpreter from the server's work.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import cast

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    generate_latest,
)

from collab_llm_nodes.errors import ConfigError

_REQUEST_S = 2.0  # from a connection to its whole request, and for sending the answer
_REQUEST_BYTES = 8192
_CONNECTIONS = 64  # at a time; a new one ends the oldest, so that Prometheus always gets one
_END_S = 5.0


class ServerMetrics:
    """Metrics of every server; the counters are thread-safe.

    Args:
        name: of the service; the names of its metrics begin with ``collab_llm_NAME_``.
    """

    def __init__(self, name: str) -> None:
        self.registry = r = CollectorRegistry()
        prefix = f"collab_llm_{name}"
        self.streams = Gauge(f"{prefix}_streams", "Session streams open.", registry=r)
        self.failures = Counter(f"{prefix}_failures", "Streams refused.", ["code"], registry=r)
        self._endpoint: MetricsEndpoint | None = None

    def serve(self, address: str) -> int:
        """Serve the metrics at ``address`` (host:port); return the port.

        Raises:
            ConfigError: cannot listen there.
        """
        host, _, port = address.rpartition(":")
        try:
            self._endpoint = MetricsEndpoint(host.strip("[]"), int(port), self.registry)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot listen on {address}: {error}",
                field="metrics_address",
                remedy="give host:port of a free port",
            ) from error
        return self._endpoint.port

    def stop(self) -> None:
        """Stop serving."""
        if self._endpoint is not None:
            self._endpoint.stop()
            self._endpoint = None


class MetricsEndpoint:
    """Serves ``GET /metrics`` in a thread of its own until ``stop``.

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
        self._asking: dict[_Connection, None] = {}  # in order of arrival
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop serving."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await self._loop.create_server(
            lambda: _Connection(self._registry, self._asking), sock=self._socket
        )
        async with server:
            await self._end.wait()
            for connection in list(self._asking):
                connection.end()


class _Connection(asyncio.Protocol):
    """One request, and its answer.

    Args:
        asking: all connections that are open.
    """

    def __init__(self, registry: CollectorRegistry, asking: dict[_Connection, None]) -> None:
        self._registry = registry
        self._asking = asking
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transports, which Ray uses, are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        if len(self._asking) >= _CONNECTIONS:
            next(iter(self._asking)).end()
        self._asking[self] = None
        self._due = asyncio.get_running_loop().call_later(_REQUEST_S, self.end)

    def end(self) -> None:
        """Close the connection at once."""
        self._due.cancel()
        self._asking.pop(self, None)
        self._transport.abort()

    def connection_lost(self, _error: Exception | None) -> None:
        self._due.cancel()
        self._asking.pop(self, None)

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        searched = max(0, len(self._head) - 3)
        self._head += data
        if self._head.find(b"\r\n\r\n", searched) >= 0:
            self._transport.write(self._answer())
            self._transport.close()  # after the answer has been sent
        elif len(self._head) > _REQUEST_BYTES:
            self.end()

    def _answer(self) -> bytes:
        method, _, rest = self._head.partition(b" ")
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
        return "".join(f"{line}\r\n" for line in (*lines, "")).encode() + body
