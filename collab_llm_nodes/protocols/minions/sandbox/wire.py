"""Messages between the host and its sandbox process: a length, then JSON."""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

PREPARE, AGGREGATE = "prepare", "aggregate"
"""What a program is run for: to prepare jobs, or to aggregate their outputs."""
_LENGTH = struct.Struct(">Q")


class TooLong(Exception):
    """A message is longer than its reader allows."""


def send(peer: socket.socket, message: dict[str, Any]) -> None:
    """Send one message.

    Raises:
        OSError: the peer has gone, or the socket timed out.
    """
    # Documents may contain lone surrogates, which strict UTF-8 cannot encode.
    body = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
    peer.sendall(_LENGTH.pack(len(body)))
    peer.sendall(body)


def receive(peer: socket.socket, max_bytes: int, due: float | None = None) -> dict[str, Any]:
    """Wait for one message.

    Args:
        max_bytes: longest message that is read.
        due: deadline on the clock of ``time.monotonic()``; None: none.

    Raises:
        EOFError: the peer has gone.
        TimeoutError: the deadline passed.
        TooLong: the message is longer than ``max_bytes``.
        ValueError: the message is no JSON object.
    """
    (length,) = _LENGTH.unpack(_exactly(peer, _LENGTH.size, due))
    if length > max_bytes:
        raise TooLong
    message = json.loads(_exactly(peer, length, due))
    if not isinstance(message, dict):
        raise ValueError("no JSON object")
    return message


def _exactly(peer: socket.socket, count: int, due: float | None) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        if due is not None:
            left = due - time.monotonic()
            if left <= 0:
                raise TimeoutError
            peer.settimeout(left)
        got = peer.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return data
