"""The device's client: one connection, one stream for each answer, usable from any thread.

with DragonClient(CloudConfig(address="cloud:50552")) as client:
    stream = client.open(opened, on_event)   # called in the background thread
    stream.send(message)
    stream.close()
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from collab_llm_nodes.config import setting
from collab_llm_nodes.errors import CollabError, InvalidInput, ProtocolError, Unavailable
from collab_llm_nodes.protocols.dragon import codec
from collab_llm_nodes.protocols.dragon.messages import CloudInfo, Message, Open, Opened
from collab_llm_nodes.transport.client import CLOSE_GRACE_S, Client
from collab_llm_nodes.transport.heartbeat import HeartbeatConfig
from collab_llm_nodes.transport.settings import ClientConfig

log = logging.getLogger(__name__)

_MOST_UNTAKEN, _PAUSE_S = 256, 0.01
"""Messages that may wait to be handled; beyond that, reading pauses."""


@dataclass(frozen=True)
class CloudConfig(ClientConfig):
    """Connection to the cloud's side. File names are PEM files."""

    address: str = setting(
        "127.0.0.1:50552",
        "The cloud's side (`collab-llm dragon-cloud`), host:port.",
        read_only=True,
    )


@dataclass(frozen=True)
class StreamEvent:
    """An event of one stream.

    Attributes:
        stream: its stream.
        news: a message of the cloud, or the error that has ended the stream.
        size: of the message in bytes.
    """

    stream: Stream
    news: Opened | Message | CollabError
    size: int = 0


class Stream:
    """One answer's stream; made by :meth:`DragonClient.open`. Methods may be called by any thread.

    Attributes:
        bytes_up, bytes_down: of its messages.
        taken: events that the receiver has handled; counted by the receiver.
    """

    def __init__(
        self, client: DragonClient, opened: Open, on_event: Callable[[StreamEvent], None]
    ) -> None:
        self._client = client
        self._on_event = on_event
        self._outbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self.bytes_up = 0
        self.bytes_down = 0
        self.taken = self._told = 0
        self._first = codec.encode_device(opened)

    def send(self, message: Message) -> None:
        """Send ``message``; does not block."""
        self._put(codec.encode_device(message))

    def close(self) -> None:
        """End the stream; no event follows once the background thread has seen it."""
        self._client.post(self._close)

    def _put(self, data: bytes) -> None:
        self._client.tap(data)
        self.bytes_up += len(data)
        self._client.post(self._outbox.put_nowait, data)

    # Everything below runs in the background thread.

    def _start(self) -> None:
        if self._client.closed:
            self._on_event(StreamEvent(self, Unavailable("the link to the cloud was closed")))
            return
        self._client.streams.add(self)
        self._task = self._client.spawn(self._run())

    def _close(self) -> None:
        self._on_event = _to_nobody
        self._outbox.put_nowait(None)
        if self._task is not None:
            asyncio.get_running_loop().call_later(CLOSE_GRACE_S, self._task.cancel)

    async def _run(self) -> None:
        client = self._client
        try:
            channel = await client.connected()
            call = channel.stream_stream(codec.ANSWER)(metadata=client.metadata)
            try:
                await self._talk(call)
            finally:
                call.cancel()
            self._end(Unavailable("the cloud ended the stream"))
        except grpc.aio.AioRpcError as error:
            meant = client.connector.error_of(error)
            self._end(meant if not isinstance(meant, InvalidInput) else _no_message(meant))
        except CollabError as error:
            self._end(error)
        except Exception as error:  # whatever it is, the answer is to go on
            log.exception("a stream to the cloud failed")
            self._end(CollabError(f"the stream failed: {error!r}", field="cloud"))
        except asyncio.CancelledError:
            self._end(Unavailable("the link to the cloud was closed"))
            raise
        finally:
            client.streams.discard(self)

    async def _talk(self, call: grpc.aio.StreamStreamCall) -> None:
        await call.write(self._first)
        writer = asyncio.ensure_future(self._write(call))
        try:
            while (data := await call.read()) is not grpc.aio.EOF:
                self._client.heard()
                self.bytes_down += len(data)
                try:
                    news = codec.decode_cloud(data)
                except CollabError as error:
                    raise _no_message(error) from error
                if isinstance(news, CollabError):
                    raise news
                while self._told - self.taken > _MOST_UNTAKEN:  # a flood stays in gRPC's buffers
                    await asyncio.sleep(_PAUSE_S)
                self._told += 1
                self._on_event(StreamEvent(self, news, len(data)))
        finally:
            writer.cancel()

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        # The reader learns why a stream ends.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while (data := await self._outbox.get()) is not None:
                await call.write(data)
            await call.done_writing()

    def _end(self, error: CollabError) -> None:
        self._on_event(StreamEvent(self, error))
        self._on_event = _to_nobody


class DragonClient(Client):
    """See the module's text.

    Args:
        config: address and credentials.
        heartbeat: see ``Client``.

    Attributes:
        streams: open now.
        info: the cloud's description; None until it has answered.
        absent: the last answer went on without it.
        left: why an answer last went on without it; None if none has.
        tap: called with each message that leaves the device, for audits.

    Raises:
        ConfigError: a certificate, key or token file cannot be read.
    """

    name = "cloud"

    def __init__(self, config: CloudConfig, heartbeat: HeartbeatConfig | None = None) -> None:
        self.streams: set[Stream] = set()
        self.info: CloudInfo | None = None
        self.absent = False
        self.left: CollabError | None = None
        self.tap: Callable[[bytes], object] = lambda data: None
        super().__init__(config, heartbeat)

    def open(self, opened: Open, on_event: Callable[[StreamEvent], None]) -> Stream:
        """Begin an answer; does not block.

        Args:
            on_event: called with each event, in the background thread; must not block. An error is
                the last event.

        Raises:
            Unavailable: this client is closed.
            InvalidInput: ``opened`` cannot be sent.
        """
        self.check_open()
        stream = Stream(self, opened, on_event)
        self.tap(stream._first)
        stream.bytes_up += len(stream._first)
        self.post(stream._start)
        return stream

    def describe(self, deadline_s: float) -> CloudInfo:
        """Ask the cloud for its model and limits; waits for it to come up until the deadline.

        Raises:
            Unavailable: not reached within the deadline.
            Unauthenticated: the credentials were refused.
            DeadlineExceeded: reached, but it did not answer in time.
        """
        return codec.decode_info(self.ask(codec.DESCRIBE, b"", deadline_s))

    async def look(self, channel: grpc.aio.Channel, deadline_s: float) -> None:
        self.info = codec.decode_info(await self.call(channel, codec.DESCRIBE, b"", deadline_s))

    def end_sessions(self) -> None:
        for stream in list(self.streams):
            stream._end(Unavailable("the link to the cloud was closed"))
            stream._close()


def _no_message(error: CollabError) -> ProtocolError:
    """Return the error for bytes that are no message of the cloud."""
    return ProtocolError(
        f"the cloud sent an invalid message: {error.args[0]}", field="cloud", remedy=error.remedy
    )


def _to_nobody(event: StreamEvent) -> None:
    """Ignore an event of a closed stream."""
