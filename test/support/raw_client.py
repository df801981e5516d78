"""A client of the verifier without a link of its own: what a test sends is what goes out."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

import grpc

from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud.messages import ClientMessage, ServerMessage

WAIT_S = 30.0  # upper bound of what takes milliseconds on an idle machine


class RawClient:
    """One stream, which may be sent anything.

    Attributes:
        replies: the gRPC call.
    """

    def __init__(self, channel: grpc.Channel, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self.channel = channel
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        session = channel.stream_stream(codec.SESSION)
        self.replies = session(iter(self._outbox.get, None), timeout=WAIT_S, metadata=metadata)

    def send(self, *messages: ClientMessage | bytes) -> None:
        for message in messages:
            self._outbox.put(
                message if isinstance(message, bytes) else codec.encode_client(message)
            )

    def half_close(self) -> None:
        """End the stream: it has nothing more to send."""
        self._outbox.put(None)

    def next(self) -> ServerMessage:
        return codec.decode_server(next(self.replies))

    def skip_to(self, kind: type) -> Any:
        while not isinstance(message := self.next(), kind):
            pass
        return message

    def next_but(self, kind: type) -> ServerMessage:
        while isinstance(message := self.next(), kind):
            pass
        return message

    def close(self) -> None:
        """End the stream and the connection."""
        self.half_close()
        self.channel.close()
