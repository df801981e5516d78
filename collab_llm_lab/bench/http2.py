"""HTTP/2 frames by hand (RFC 9113): for cheap load generators and for clients that break the rules.

Nothing here opens a connection: write ``PREFACE``, ``frame(SETTINGS)`` and whatever else to a
socket, or let ``wire.py`` hold the connection.
"""

from __future__ import annotations

from collections.abc import Iterable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
"""Kinds of frames."""
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
"""Flags."""
CANCEL = 8
"""A reason for ``reset``."""


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """Return one frame; ``stream`` 0 is the connection."""
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
    return head + payload


NO_WINDOW = frame(SETTINGS, payload=b"\0\4" + bytes(4))
"""INITIAL_WINDOW_SIZE 0 (6.5.2): the other side may send nothing on new streams."""


def grpc_fields(
    path: str | bytes, authority: str, *, scheme: str = "http", token: str = ""
) -> list[tuple[str, str | bytes]]:
    """Return the header fields of a gRPC call, the only ones a server asks for."""
    fields: list[tuple[str, str | bytes]] = [
        (":method", "POST"),
        (":scheme", scheme),
        (":path", path),
        (":authority", authority),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
    return [*fields, ("authorization", f"Bearer {token}")] if token else fields


def header_block(fields: Iterable[tuple[str, str | bytes]]) -> bytes:
    """Return ``fields`` in HPACK (RFC 7541, 6.2.2): literals that enter no table.

    Names and values are shorter than 127 bytes; a value of bytes may be no text at all.
    """
    block = bytearray()
    for name, value in fields:
        text = value if isinstance(value, bytes) else value.encode()
        block += bytes((0, len(name))) + name.encode() + bytes((len(text),)) + text
    return bytes(block)


def headers(stream: int, block: bytes) -> bytes:
    """Return the frame that begins ``stream``; see :func:`header_block`."""
    return frame(HEADERS, END_HEADERS, stream, block)


def message(stream: int, data: bytes, *, last: bool = False) -> bytes:
    """Return the frame with one gRPC message; ``last`` ends the sender's side of the stream."""
    return frame(
        DATA, END_STREAM if last else 0, stream, b"\0" + len(data).to_bytes(4, "big") + data
    )


def reset(stream: int, why: int = CANCEL) -> bytes:
    """Return the frame that ends ``stream`` at once."""
    return frame(RST_STREAM, 0, stream, why.to_bytes(4, "big"))


def goaway(debug: bytes, why: int = 0) -> bytes:
    """Return the frame that ends a connection; gRPC logs ``debug``, whatever it is."""
    return frame(GOAWAY, 0, 0, bytes(4) + why.to_bytes(4, "big") + debug)
