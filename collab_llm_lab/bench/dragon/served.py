"""A cloud's side over real gRPC and an emulated link, with all bytes that leave the device."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from collab_llm_lab.bench import http2
from collab_llm_lab.bench.link.proxy import LinkProxy
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.protocols.dragon.client import CloudConfig, DragonClient
from collab_llm_nodes.protocols.dragon.service import CloudServiceConfig, DragonService
from collab_llm_nodes.protocols.dragon.side import Side
from collab_llm_nodes.transport.server import ServerHandle

_ARRIVAL_S = 10.0


class Capture:
    """All bytes that a client sends, as they enter the link; there is no TLS below it.

    Any thread may use it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: dict[str, bytearray] = {}

    def __call__(self, lane: str, data: bytes) -> None:
        """Take in what enters the link by ``lane``; see ``LinkProxy``."""
        if lane.startswith("up"):
            with self._lock:
                self._connections.setdefault(lane, bytearray()).extend(data)

    @property
    def connections(self) -> dict[str, bytes]:
        """All bytes so far, by connection."""
        with self._lock:
            return {name: bytes(data) for name, data in self._connections.items()}

    def messages(self) -> list[bytes]:
        """Return the gRPC messages in these bytes that are not empty."""
        found = (message for data in self.connections.values() for message in messages_in(data))
        return [message for message in found if message]


def messages_in(data: bytes) -> list[bytes]:
    """Return the gRPC messages that a client sent on one connection (HTTP/2, RFC 9113).

    Headers are passed over. A message at the end that is not complete is left out.

    Raises:
        CollabError: the messages are compressed, or the frames padded: nobody asked for that.
    """
    start = len(http2.PREFACE)
    parts: dict[int, bytearray] = {}  # of a message, by stream
    found: list[bytes] = []
    while start + 9 <= len(data):
        end = start + 9 + int.from_bytes(data[start : start + 3], "big")
        kind, flags = data[start + 3], data[start + 4]
        stream = int.from_bytes(data[start + 5 : start + 9], "big")
        if kind == http2.DATA and end <= len(data):
            part = parts.setdefault(stream, bytearray())
            part += data[start + 9 : end]
            while len(part) >= 5 and len(part) >= 5 + (size := int.from_bytes(part[1:5], "big")):
                if part[0] or flags & http2.PADDED:
                    raise CollabError("compressed or padded messages", remedy="capture them plain")
                found.append(bytes(part[5 : 5 + size]))
                del part[: 5 + size]
        start = end
    return found


@dataclass(frozen=True)
class Served:
    """A cloud that is served, and the device's way to it; made by :func:`served`."""

    client: DragonClient
    link: LinkProxy
    capture: Capture


class Audit:
    """All that leaves the device from now on, until :meth:`end`."""

    def __init__(self, cloud: Served) -> None:
        self._cloud = cloud
        self._bytes = {name: len(data) for name, data in cloud.capture.connections.items()}
        self._messages = len(cloud.capture.messages())
        self._told: list[bytes] = []
        cloud.client.tap = self._told.append

    def end(self) -> tuple[bytes, tuple[bytes, ...]]:
        """Return all bytes on the wire, and the messages in them.

        Raises:
            CollabError: the wire has other messages than the client says it has sent.
        """
        due, capture = time.monotonic() + _ARRIVAL_S, self._cloud.capture
        while (sent := capture.messages()[self._messages :]) != self._told:
            if time.monotonic() > due:
                raise CollabError(
                    f"{len(sent)} messages on the wire, {len(self._told)} from the client",
                    remedy="report this",
                )
            time.sleep(0.002)
        wire = b"".join(
            data[self._bytes.get(name, 0) :] for name, data in capture.connections.items()
        )
        return wire, tuple(sent)


@contextlib.contextmanager
def served(side: Side, name: str) -> Iterator[Served]:
    """Serve ``side`` as the cloud's, and yield the way to it."""
    with contextlib.ExitStack() as stack:
        config, capture = CloudServiceConfig(address="127.0.0.1:0"), Capture()
        server = stack.enter_context(ServerHandle(DragonService(config, side, name, "")))
        link = stack.enter_context(LinkProxy(f"127.0.0.1:{server.port}", tap=capture))
        client = stack.enter_context(DragonClient(CloudConfig(address=link.address)))
        client.describe(60.0)
        yield Served(client, link, capture)
