"""The robot's client of the verifier: one connection, one session per answer, for any thread.

``transport/client.py`` keeps the connection. Each session is a ``SessionLink`` (deadlines,
back-off, replay); this module performs its actions on gRPC streams.

    with VerifierClient(ClientLinkConfig(address="cloud:50551")) as client:
        session = client.open(opened, on_message)   # on_message runs in the background thread
        session.send(draft)
        session.close()
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio

from collab_llm_nodes.config import setting
from collab_llm_nodes.errors import Cancelled, CollabError, InvalidInput
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud.info import ServerInfo
from collab_llm_nodes.protocols.edge_cloud.link import (
    Action,
    Connect,
    Deliver,
    Disconnect,
    LinkConfig,
    Send,
    SessionLink,
)
from collab_llm_nodes.protocols.edge_cloud.messages import (
    Draft,
    Open,
    Opened,
    ServerMessage,
    Verdict,
)
from collab_llm_nodes.transport.admission import URGENT
from collab_llm_nodes.transport.background import within
from collab_llm_nodes.transport.client import CLOSE_GRACE_S, Client
from collab_llm_nodes.transport.heartbeat import HeartbeatConfig
from collab_llm_nodes.transport.settings import ClientConfig
from collab_llm_nodes.transport.wire import Failure

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClientLinkConfig(ClientConfig):
    """Address of the verifier, TLS and time limits. File names are PEM files.

    Read when the connection is made, hence read-only as parameters: a new value needs a new node.
    """

    address: str = setting("127.0.0.1:50551", "Verifier, host:port.", read_only=True)
    link: LinkConfig = field(default_factory=LinkConfig)


@dataclass(frozen=True)
class LinkStatus:
    """State of the connection; counters are since the client was made.

    Attributes:
        state: "UP" if the verifier has answered Describe on the present connection, else
            "CONNECTING" or "DOWN" (names of LinkState.msg).
        rtt_s: smoothed time from draft to verdict without the verifier's own [s]; 0 while unknown.
        bytes_up, bytes_down: message bytes of all sessions.
        reconnects: number of streams that replaced a broken one.
        sessions: number of open sessions.
        model, vocabulary: of the verifier; empty while unknown.
        error_code, error_msg: reason why the state is not UP; the message ends with the remedy.
    """

    state: str = "DOWN"
    rtt_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    reconnects: int = 0
    sessions: int = 0
    model: str = ""
    vocabulary: str = ""
    error_code: str = ""
    error_msg: str = ""


class SessionHandle:
    """One answer's session; made by :meth:`VerifierClient.open`. All methods are thread-safe."""

    def __init__(
        self, client: VerifierClient, opened: Open, on_message: Callable[[ServerMessage], None]
    ) -> None:
        self._client = client
        self._link = SessionLink(opened, client.config.link)
        self._urgent = opened.for_motion
        self._on_message = on_message
        self._outbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._opened = False  # on the present stream: the next wait includes no prefill
        self._timed: tuple[int, float] | None = None  # a draft's round and when it was sent
        self.bytes_up = 0
        self.bytes_down = 0

    @property
    def reconnects(self) -> int:
        """Number of streams that replaced a broken one."""
        return self._link.reconnects

    def send(self, draft: Draft) -> None:
        """Have ``draft`` verified; does not block."""
        self._client.post(self._draft, draft)

    def close(self) -> None:
        """End the session; no message is delivered once the background thread has handled this."""
        self._client.post(self._close)

    # Everything below runs in the background thread.

    def _start(self) -> None:
        if self._client.closed:
            self._give_up()
            return
        self._client._sessions.add(self)
        self._perform(self._link.start(self._now()))

    def _draft(self, draft: Draft) -> None:
        self._perform(self._link.on_draft(draft, self._now()))

    def _close(self) -> None:
        self._perform(self._link.close())

    def _give_up(self) -> None:
        self._deliver(Failure(Cancelled.code, "the link to the verifier was closed"))
        self._close()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Connect):
                self._connect(action.deadline_s)
            elif isinstance(action, Send):
                self._send(action)
            elif isinstance(action, Deliver):
                self._deliver(action.message)
            elif isinstance(action, Disconnect):
                self._disconnect()
        if self._link.done:  # release the receiver, which may hold pictures and caches
            self._on_message = _to_nobody
        self._rearm()

    def _rearm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self._link.next_tick
        loop = asyncio.get_running_loop()
        self._timer = None if due is None else loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._perform(self._link.on_tick(self._now()))

    def _connect(self, deadline_s: float) -> None:
        if self._task is not None:
            self._task.cancel()
            self._client.reconnects += 1
        self._outbox = asyncio.Queue()
        self._opened = False
        self._task = self._client.spawn(self._run_stream(self._outbox, deadline_s))

    def _send(self, action: Send) -> None:
        try:
            data = codec.encode_client(action.message)
        except InvalidInput as error:
            self._failed(Failure.of(error))
            return
        if isinstance(action.message, Draft) and action.message.after is None:
            self._timed = (action.message.round, self._now()) if self._opened else None
        self._client.bytes_up += len(data)
        self.bytes_up += len(data)
        self._outbox.put_nowait(data)

    def _disconnect(self) -> None:
        self._client._sessions.discard(self)
        self._outbox.put_nowait(None)
        if self._task is not None:
            # Not at once: this may be the task that has just received the last verdict.
            asyncio.get_running_loop().call_later(CLOSE_GRACE_S, self._task.cancel)

    def _deliver(self, message: ServerMessage) -> None:
        try:
            self._on_message(message)
        except Exception:  # a fault of the receiver must not end the other sessions
            log.exception("a receiver of verifier messages failed")

    async def _run_stream(self, outbox: asyncio.Queue[bytes | None], deadline_s: float) -> None:
        """One stream, from connecting to its end. Cancelled when the next one replaces it."""
        try:
            channel = await within(self._client.connected(), deadline_s)
            call = self._client._session_call(channel, urgent=self._urgent)
            try:
                await within(call.wait_for_connection(), deadline_s)
                await self._exchange(call, outbox)
            finally:
                call.cancel()
            self._lost("the verifier ended the stream")
        except asyncio.TimeoutError:
            self._failed(Failure.of(self._client.connector.no_connection(deadline_s)))
        except grpc.aio.AioRpcError as error:
            self._failed(Failure.of(self._client.connector.error_of(error)))
        except CollabError as error:  # no connection, or an invalid message
            self._failed(Failure.of(error))
        except asyncio.CancelledError:
            if outbox is self._outbox:  # cancelled with its lost connection, not replaced by us
                self._lost("the connection was lost")
            raise

    async def _exchange(
        self, call: grpc.aio.StreamStreamCall, outbox: asyncio.Queue[bytes | None]
    ) -> None:
        if self._link.done:
            return
        self._perform(self._link.on_connected(self._now()))
        writer = asyncio.ensure_future(self._write(call, outbox))
        try:
            while (data := await call.read()) is not grpc.aio.EOF:
                self._receive(data)
        finally:
            writer.cancel()

    async def _write(
        self, call: grpc.aio.StreamStreamCall, outbox: asyncio.Queue[bytes | None]
    ) -> None:
        # A stream that ends while we write is noticed by its reader, which knows the reason.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while (data := await outbox.get()) is not None:
                await call.write(data)
            await call.done_writing()

    def _receive(self, data: bytes) -> None:
        self._client.heard()
        self._client.bytes_down += len(data)
        self.bytes_down += len(data)
        message = codec.decode_server(data)
        if isinstance(message, Opened):
            self._opened = True
        elif isinstance(message, Failure):
            self._outbox.put_nowait(None)  # end our side, for which the verifier waits
        elif isinstance(message, Verdict) and self._timed is not None:
            round_, sent_at = self._timed
            if message.round == round_:
                there_s = message.queue_s + message.compute_s
                self._client.record_rtt(self._now() - sent_at - there_s)
                self._timed = None
        self._perform(self._link.on_message(message, self._now()))

    def _lost(self, reason: str) -> None:
        self._perform(self._link.on_disconnected(reason, self._now()))

    def _failed(self, failure: Failure) -> None:
        self._perform(self._link.on_message(failure, self._now()))


class VerifierClient(Client):
    """A connection to one verifier.

    Args:
        on_state: called in the background thread whenever state or error change.
        heartbeat: see ``Client``.

    Raises:
        ConfigError: a certificate, key or token file cannot be read.
    """

    name = "verifier"

    def __init__(
        self,
        config: ClientLinkConfig,
        on_state: Callable[[LinkStatus], None] = lambda status: None,
        heartbeat: HeartbeatConfig | None = None,
    ) -> None:
        self.config = config
        self.bytes_up = 0
        self.bytes_down = 0
        self.reconnects = 0
        self._model = self._vocabulary = ""
        self.draft = ""  # the verifier's own draft model, by name
        self._on_state = on_state
        self._sessions: set[SessionHandle] = set()
        super().__init__(config, heartbeat)

    @property
    def status(self) -> LinkStatus:
        """The present status."""
        state, error = self.connection_state
        return LinkStatus(
            state=state,
            rtt_s=self.rtt_s,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            reconnects=self.reconnects,
            sessions=len(self._sessions),
            model=self._model,
            vocabulary=self._vocabulary,
            error_code=error.code if error is not None else "",
            error_msg=str(error) if error is not None else "",
        )

    def open(self, opened: Open, on_message: Callable[[ServerMessage], None]) -> SessionHandle:
        """Start a session; does not block. It connects at once, so the prefill overlaps drafting.

        Args:
            on_message: called with ``Opened`` (again after each reconnection), early exits,
                verdicts and, last, a ``Failure`` if the session cannot continue. Must not block.

        Raises:
            Unavailable: this client is closed.
        """
        self.check_open()
        session = SessionHandle(self, opened, on_message)
        self.post(session._start)
        return session

    def describe(self, deadline_s: float) -> ServerInfo:
        """Return the verifier's model and limits; retry until the deadline while it is not up.

        Raises:
            Unavailable: not reached within the deadline.
            Unauthenticated: the credentials were refused.
            DeadlineExceeded: reached, but it did not answer in time.
        """
        return codec.decode_info(self.ask(codec.DESCRIBE, b"", deadline_s))

    # Everything below runs in the background thread.

    async def check_server(self, channel: grpc.aio.Channel, deadline_s: float) -> None:
        info = codec.decode_info(await self.call(channel, codec.DESCRIBE, b"", deadline_s))
        self._model, self._vocabulary, self.draft = info.model, info.vocabulary, info.draft

    def on_change(self) -> None:
        try:
            self._on_state(self.status)
        except Exception:  # a fault of the receiver must not end the link
            log.exception("a receiver of link states failed")

    def end_sessions(self) -> None:
        for session in list(self._sessions):
            session._give_up()

    def _session_call(
        self, channel: grpc.aio.Channel, *, urgent: bool
    ) -> grpc.aio.StreamStreamCall:
        # Also in Open, but the address's allowance is checked before Open is read.
        mark = ((URGENT, "1"),) if urgent else ()
        return channel.stream_stream(codec.SESSION)(metadata=(*self.metadata, *mark))


def _to_nobody(message: ServerMessage) -> None:
    """Ignore a message of a session that has ended."""
