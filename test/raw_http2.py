"""HTTP/2 by hand, for what no client would say: frames as a test makes them."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping

HEADERS, RESET, SETTINGS, PING, GOAWAY = 1, 3, 4, 6, 7
ACK, END_HEADERS = 1, 4
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
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, b""))

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
        self.send(frame(PING, 0, 0, bytes(8)))
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


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One frame (RFC 9113, 4.1)."""
    return (
        len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload
    )


def call(stream: int, path: bytes, metadata: Mapping[str, bytes] | None = None) -> bytes:
    """The HEADERS of a gRPC call; HPACK literals (RFC 7541, 6.2.2) below 127 bytes each."""
    fields = {
        ":method": b"POST",
        ":scheme": b"http",
        ":path": path,
        ":authority": b"localhost",
        "content-type": b"application/grpc",
        "te": b"trailers",
        **(metadata or {}),
    }
    block = b"".join(
        bytes((0, len(name))) + name.encode() + bytes((len(value),)) + value
        for name, value in fields.items()
    )
    return frame(HEADERS, END_HEADERS, stream, block)


def goaway(text: bytes) -> bytes:
    """The end of a connection, and why, in the sender's words."""
    return frame(GOAWAY, 0, 0, bytes(4) + (11).to_bytes(4, "big") + text)


def reset(stream: int) -> bytes:
    """Cancel a call."""
    return frame(RESET, 0, stream, (8).to_bytes(4, "big"))
