"""The robot's client of the verifier: sessions over one gRPC connection, for any thread.

with VerifierClient(ClientLinkConfig(address="cloud:50551")) as client:
    session = client.open(opened, on_message)   # on_message runs in the background thread
    session.send(draft)
    session.close()
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import grpc
import grpc.aio

from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud.info import ServerInfo
from collab_llm_nodes.protocols.edge_cloud.messages import (
    ClientMessage,
    Draft,
    Open,
    Opened,
    ServerMessage,
    Verdict,
)
from collab_llm_nodes.protocols.edge_cloud.sessions import (
    ClientLinkConfig,
    LinkStatus,
    Outbox,
    SessionClient,
    SessionHandle,
)
from collab_llm_nodes.transport.admission import URGENT
from collab_llm_nodes.transport.background import within
from collab_llm_nodes.transport.client import Client
from collab_llm_nodes.transport.wire import Failure

__all__ = ["ClientLinkConfig", "LinkStatus", "SessionHandle", "VerifierClient"]


class _GrpcSession(SessionHandle):
    """A session as one stream over gRPC."""

    def __init__(
        self, client: VerifierClient, opened: Open, on_message: Callable[[ServerMessage], None]
    ) -> None:
        super().__init__(client, opened, on_message)
        self._verifier = client
        self._urgent = opened.for_motion
        self._opened = False  # on the present stream: the next wait includes no prefill
        self._timed: tuple[int, float] | None = None  # a draft's round and when it was sent

    def _connect(self, deadline_s: float) -> None:
        self._opened = False
        super()._connect(deadline_s)

    def _send(self, message: ClientMessage) -> None:
        if isinstance(message, Draft) and message.after is None:
            self._timed = (message.round, self._now()) if self._opened else None
        super()._send(message)

    async def _exchange(self, outbox: Outbox, deadline_s: float) -> None:
        connector = self._verifier.connector
        try:
            channel = await within(self._verifier.connected(), deadline_s)
            call = self._verifier.session_call(channel, urgent=self._urgent)
            try:
                await within(call.wait_for_connection(), deadline_s)
                if self._connected():
                    await self._talk(call, outbox)
            finally:
                call.cancel()
        except asyncio.TimeoutError:
            raise connector.no_connection(deadline_s) from None
        except grpc.aio.AioRpcError as error:
            raise connector.error_of(error) from error

    async def _talk(self, call: grpc.aio.StreamStreamCall, outbox: Outbox) -> None:
        writer = asyncio.ensure_future(self._write(call, outbox))
        try:
            while (data := await call.read()) is not grpc.aio.EOF:
                self._read(data)
        finally:
            writer.cancel()

    async def _write(self, call: grpc.aio.StreamStreamCall, outbox: Outbox) -> None:
        # A stream that ends while we write is noticed by its reader, which knows the reason.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while (message := await outbox.get()) is not None:
                try:
                    data = codec.encode_client(message)
                except InvalidInput as error:
                    self._failed(error)
                    return
                self.count(len(data), 0)
                await call.write(data)
            await call.done_writing()

    def _read(self, data: bytes) -> None:
        self.count(0, len(data))
        message = codec.decode_server(data)
        if isinstance(message, Opened):
            self._opened = True
        elif isinstance(message, Failure):
            self._outbox.put_nowait(None)  # end our side, for which the verifier waits
        elif isinstance(message, Verdict) and self._timed is not None:
            round_, sent_at = self._timed
            if message.round == round_:
                there_s = message.queue_s + message.compute_s
                self._verifier.record_rtt(self._now() - sent_at - there_s)
                self._timed = None
        self.receive(message)


class VerifierClient(SessionClient[grpc.aio.Channel], Client):
    """A connection to one verifier; see ``SessionClient`` for the arguments.

    Raises:
        ConfigError: a certificate, key or token file cannot be read.
    """

    def describe(self, deadline_s: float) -> ServerInfo:
        """Return the verifier's model and limits; retry until the deadline while it is not up.

        Raises:
            Unavailable: not reached within the deadline.
            Unauthenticated: the credentials were refused.
            DeadlineExceeded: reached, but it did not answer in time.
        """
        return codec.decode_info(self.ask(codec.DESCRIBE, b"", deadline_s))

    def make_session(
        self, opened: Open, on_message: Callable[[ServerMessage], None]
    ) -> SessionHandle:
        return _GrpcSession(self, opened, on_message)

    # Everything below runs in the background thread.

    async def check_server(self, channel: grpc.aio.Channel, deadline_s: float) -> None:
        info = codec.decode_info(await self.call(channel, codec.DESCRIBE, b"", deadline_s))
        self.model, self.vocabulary = info.model, info.vocabulary
        self.draft = info.draft

    def session_call(self, channel: grpc.aio.Channel, *, urgent: bool) -> grpc.aio.StreamStreamCall:
        """Return a new stream on ``channel``."""
        # Also in Open, but the address's allowance is checked before Open is read.
        mark = ((URGENT, "1"),) if urgent else ()
        return channel.stream_stream(codec.SESSION)(metadata=(*self.metadata, *mark))
