"""A connection that speaks HTTP/2 by hand, for what no client would say."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping

from collab_llm_lab.bench.http2 import (
    ACK,
    PING,
    PREFACE,
    SETTINGS,
    frame,
    grpc_fields,
    header_block,
    headers,
)

WAIT_S = 30.0


class RawConnection:
    """A connection to ``port`` of this machine that has said as much as HTTP/2 asks for.

    Args:
        authority: PEM file by which the server is known; empty: no TLS.
        source: own address.
    """

    def __init__(self, port: int, authority: str = "", source: str = "127.0.0.1") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), WAIT_S, (source, 0))
        if authority:
            context = ssl.create_default_context(cafile=authority)
            context.set_alpn_protocols(["h2"])
            self.socket = context.wrap_socket(self.socket, server_hostname="localhost")
        self.socket.sendall(PREFACE + frame(SETTINGS))

    def send(self, *frames: bytes) -> bool:
        """Return whether the other side still takes them."""
        try:
            self.socket.sendall(b"".join(frames))
        except OSError:
            return False
        return True

    def next(self) -> tuple[int, int, int, bytes]:
        """The next frame: kind, flags, stream, payload.

        Raises:
            ConnectionError: the other side has closed the connection.
        """
        head = self._read(9)
        payload = self._read(int.from_bytes(head[:3], "big"))
        return head[3], head[4], int.from_bytes(head[5:], "big"), payload

    def heard(self) -> None:
        """Return when the other side has read all that was sent; raises as :meth:`next`."""
        self.send(frame(PING, payload=bytes(8)))
        while self.next()[:2] != (PING, ACK):
            pass

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            if not part:
                raise ConnectionError("closed")
            data += part
        return data

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def call(stream: int, path: bytes, metadata: Mapping[str, bytes] | None = None) -> bytes:
    """Return the HEADERS of a gRPC call."""
    fields = grpc_fields(path, "localhost")
    return headers(stream, header_block([*fields, *(metadata or {}).items()]))
