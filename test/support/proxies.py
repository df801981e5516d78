"""A proxy that a test puts into the environment, and keeps what it is sent."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "grpc_proxy", "no_grpc_proxy")
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Proxy:
    """Refuses every request, as company proxies do for names of their own machines.

    Attributes:
        seen: the first part of each request.
    """

    def __init__(self, listening: socket.socket) -> None:
        self.seen: list[bytes] = []
        self._listening = listening
        self.host_and_port = f"127.0.0.1:{listening.getsockname()[1]}"

    def serve(self) -> None:
        """Answer until the listening socket is closed."""
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                with connection, suppress(OSError):
                    self.seen.append(connection.recv(65536))
                    connection.sendall(REFUSAL)


@contextmanager
def environment_proxy(monkeypatch: pytest.MonkeyPatch, form: str = "http://{}") -> Iterator[Proxy]:
    """Yield a proxy that all variables of the environment name; ``form`` is given its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        proxy = Proxy(listening)
        for name in NAMES:
            monkeypatch.delenv(name.upper(), raising=False)
            monkeypatch.delenv(name, raising=False)
        for name in ("http_proxy", "HTTPS_PROXY", "all_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, form.format(proxy.host_and_port))
        thread = threading.Thread(target=proxy.serve, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()
