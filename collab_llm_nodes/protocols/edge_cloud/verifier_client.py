"""The robot's end of the link: one connection, one session per answer, usable from any thread.

The background loop (``background.py``) owns everything here. Each session is a ``SessionLink``
(deadlines, back-off, replay); this module performs its actions on gRPC streams.

    with VerifierClient(ClientLinkConfig(address="cloud:50551")) as client:
        session = client.open(opened, on_message)   # on_message runs in the background thread
        session.send(draft)
        session.close()
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio

from collab_llm_nodes.config import check_address, check_ranges, setting
from collab_llm_nodes.errors import (
    Cancelled,
    CollabError,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    Unavailable,
)
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud.connection import (
    Connector,
    failure_of_status,
    no_connection,
)
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
    Failure,
    Open,
    Opened,
    ServerMessage,
    Verdict,
    error_of,
    failure_of,
)
from collab_llm_nodes.transport.background import (
    background_loop,
    in_background_thread,
    within,
)
from collab_llm_nodes.transport.credentials import channel_credentials, is_local, read_token
from collab_llm_nodes.transport.heartbeat import CHECK, Heartbeat, HeartbeatConfig

log = logging.getLogger(__name__)

_START_S = 10.0  # for the background loop to do what it does at once
_CLOSE_GRACE_S = 1.0  # for a stream to end by itself after Close
_LEFTOVERS_S = 30.0  # for calls to end on a connection that takes no new ones
_SIGN_S = 2.0  # an answer that comes later is none: the connection will be given up
_PROBE_S = 2.0  # deadline of, and pause between, looks at a verifier that does not answer well

_NO_ANSWER = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


@dataclass(frozen=True)
class ClientLinkConfig:
    """Where the verifier is and how to speak to it. File names are PEM files.

    Read when the connection is made, hence read-only as parameters: a new value needs a new node.
    """

    address: str = setting("127.0.0.1:50551", "Verifier, host:port.", read_only=True)
    tls: bool = setting(False, "Encrypt, and check the verifier's certificate.", read_only=True)
    tls_ca: str = setting(
        "", "Certificate authority of the verifier; empty: the system's.", read_only=True
    )
    tls_cert: str = setting(
        "", "Own certificate, for a verifier that asks for one.", read_only=True
    )
    tls_key: str = setting("", "Key of tls_cert.", read_only=True)
    tls_server_name: str = setting(
        "", "Name in the verifier's certificate if not the host's.", read_only=True
    )
    token: str = field(default="", repr=False, metadata={"secret": True})
    token_file: str = setting("", "File that holds the bearer token.", read_only=True)
    max_message_bytes: int = setting(
        16 << 20, "One message at most [byte].", low=4096, read_only=True
    )
    keepalive_s: float = setting(
        2.0,
        "A silent connection is probed after this time [s].",
        low=0.1,
        high=3600.0,
        read_only=True,
    )
    link: LinkConfig = field(default_factory=LinkConfig)

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.address.startswith("unix:"):
            check_address("address", self.address)
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("tls_cert and tls_key go together", field="tls_cert")
        if (self.tls_ca or self.tls_cert) and not self.tls:
            raise ConfigError("certificates need tls: true", field="tls")
        if self.token and self.token_file:
            raise ConfigError("give token or token_file, not both", field="token")


@dataclass(frozen=True)
class LinkStatus:
    """The connection as it stands; counters are since the client was made.

    Attributes:
        state: "UP" when the verifier answered Describe on the present connection, else
            "CONNECTING" or "DOWN" (names of LinkState.msg).
        rtt_s: smoothed time between draft and verdict that the verifier did not compute [s];
            0 while unknown.
        bytes_up, bytes_down: message bytes, all sessions.
        reconnects: times a session's stream was made again.
        sessions: open now.
        model, vocabulary: of the verifier; empty while unknown.
        error_code, error_msg: why the state is not UP; the message ends with the remedy.
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
        self._on_message = on_message
        self._outbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._opened = False  # Opened came on the present stream: no prefill in the next wait
        self._timed: tuple[int, float] | None = None  # a draft's round and when it was sent
        self.bytes_up = 0
        self.bytes_down = 0

    @property
    def reconnects(self) -> int:
        """Times the stream was made again."""
        return self._link.reconnects

    def send(self, draft: Draft) -> None:
        """Have ``draft`` verified; does not block."""
        self._client._post(self._draft, draft)

    def close(self) -> None:
        """End the session; no message is delivered once the background thread has seen it."""
        self._client._post(self._close)

    # Everything below runs in the background thread.

    def _start(self) -> None:
        if self._client._closed:
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
        if self._link.done:  # what the receiver holds, pictures and caches, may go with the caller
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
        self._task = self._client._spawn(self._run_stream(self._outbox, deadline_s))

    def _send(self, action: Send) -> None:
        try:
            data = codec.encode(action.message)
        except InvalidInput as error:
            self._failed(failure_of(error))
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
            # It may be this very task that has just received the last verdict.
            asyncio.get_running_loop().call_later(_CLOSE_GRACE_S, self._task.cancel)

    def _deliver(self, message: ServerMessage) -> None:
        try:
            self._on_message(message)
        except Exception:  # the caller's fault, whatever it is; the link's other sessions go on
            log.exception("a receiver of verifier messages failed")

    async def _run_stream(self, outbox: asyncio.Queue[bytes | None], deadline_s: float) -> None:
        """One stream, from connecting to its end. Cancelled when the next one replaces it."""
        try:
            channel = await within(self._client._connected(), deadline_s)
            call = self._client._session_call(channel)
            try:
                await within(call.wait_for_connection(), deadline_s)
                await self._talk(call, outbox)
            finally:
                call.cancel()
            self._lost("the verifier ended the stream")
        except asyncio.TimeoutError:
            self._failed(failure_of(no_connection(self._client.config.address, deadline_s)))
        except grpc.aio.AioRpcError as error:
            self._failed(failure_of_status(error))
        except CollabError as error:  # no connection, or the verifier speaks nonsense
            self._failed(failure_of(error))
        except asyncio.CancelledError:
            if outbox is self._outbox:  # not replaced by us: what was left of a lost connection
                self._lost("the connection was lost")
            raise

    async def _talk(
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
        # A stream that ends while we write is noticed by its reader, who knows the reason.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while (data := await outbox.get()) is not None:
                await call.write(data)
            await call.done_writing()

    def _receive(self, data: bytes) -> None:
        self._client._heard()
        self._client.bytes_down += len(data)
        self.bytes_down += len(data)
        message = codec.decode_server(data)
        if isinstance(message, Opened):
            self._opened = True
        elif isinstance(message, Failure):
            self._outbox.put_nowait(None)  # the verifier waits for our end of the stream
        elif isinstance(message, Verdict) and self._timed is not None:
            round_, sent_at = self._timed
            if message.round == round_:
                there_s = message.queue_s + message.compute_s
                self._client._measure(self._now() - sent_at - there_s)
                self._timed = None
        self._perform(self._link.on_message(message, self._now()))

    def _lost(self, reason: str) -> None:
        self._perform(self._link.on_disconnected(reason, self._now()))

    def _failed(self, failure: Failure) -> None:
        self._perform(self._link.on_message(failure, self._now()))


class VerifierClient:
    """See the module docstring.

    Args:
        config: where and how.
        on_state: called in the background thread whenever state or error change.
        heartbeat: with it, a verifier that falls silent is not UP; without, only one whose
            connection was closed.

    Raises:
        ConfigError: a certificate, key or token file cannot be read.
    """

    def __init__(
        self,
        config: ClientLinkConfig,
        on_state: Callable[[LinkStatus], None] = lambda status: None,
        heartbeat: HeartbeatConfig | None = None,
    ) -> None:
        self.config = config
        self._heartbeat = Heartbeat(heartbeat) if heartbeat is not None else None
        self.bytes_up = 0
        self.bytes_down = 0
        self.reconnects = 0
        self._connector = Connector(config, _credentials(config))
        self._metadata = _metadata(config)
        self._on_state = on_state
        self._status = LinkStatus("CONNECTING")
        self._sessions: set[SessionHandle] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._loop = background_loop()
        # grpc.aio binds a channel to the loop it is made in.
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(_START_S)

    def __enter__(self) -> VerifierClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def status(self) -> LinkStatus:
        """A snapshot."""
        status, beat = self._status, self._heartbeat
        # By the clock: a background thread that is stuck could not tell that nothing is heard.
        if status.state == "UP" and beat is not None and beat.silent(self._loop.time()):
            silent = DeadlineExceeded(
                f"nothing heard for {beat.config.timeout_s:g} s", field="verifier"
            )
            status = replace(
                status, state="CONNECTING", error_code=silent.code, error_msg=str(silent)
            )
        return replace(
            status,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            reconnects=self.reconnects,
            sessions=len(self._sessions),
        )

    def open(self, opened: Open, on_message: Callable[[ServerMessage], None]) -> SessionHandle:
        """Start a session; does not block. Connects at once, so the prefill overlaps with drafting.

        Args:
            opened: the prompt, the law, the draft model's vocabulary.
            on_message: gets ``Opened`` (again after each reconnection), early exits, verdicts and,
                last, a ``Failure`` if the session cannot go on. Must not block.

        Raises:
            Unavailable: this client is closed.
        """
        if self._closed:
            raise Unavailable("this client is closed", remedy="make a new VerifierClient")
        session = SessionHandle(self, opened, on_message)
        self._post(session._start)
        return session

    def describe(self, deadline_s: float) -> ServerInfo:
        """Ask the verifier what it is; waits for it to come up until the deadline.

        Raises:
            Unavailable: not reached within the deadline.
            Unauthenticated: the credentials were refused.
            DeadlineExceeded: reached, but it did not answer in time.
        """
        if self._closed:
            raise Unavailable("this client is closed", remedy="make a new VerifierClient")
        question = self._describe_until(time.monotonic() + deadline_s)
        answer = asyncio.run_coroutine_threadsafe(question, self._loop)
        try:
            return answer.result(deadline_s + 1.0)
        except FutureTimeout:  # this machine is too busy to run the background thread
            answer.cancel()
            raise DeadlineExceeded(
                f"no answer within {deadline_s:g} s", field="verifier", remedy="try again"
            ) from None

    def close(self) -> None:
        """End all sessions (each gets a ``Failure`` CANCELLED) and the connection."""
        self._closed = True
        ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        if not in_background_thread():
            ended.result(_CLOSE_GRACE_S + _START_S)

    # Everything below runs in the background thread, but for _post.

    def _post(self, call: Callable[..., None], *args: Any) -> None:
        self._loop.call_soon_threadsafe(call, *args)

    async def _start(self) -> None:
        self._connection: asyncio.Future[grpc.aio.Channel] = self._loop.create_future()
        self._keeper = asyncio.ensure_future(self._keep_connected())

    async def _end(self) -> None:
        for session in list(self._sessions):
            session._give_up()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_GRACE_S)
        self._keeper.cancel()
        await asyncio.wait({self._keeper})  # it closes what it opened

    async def _connected(self) -> grpc.aio.Channel:
        """The connection, when it stands; raises CollabError if the next attempt fails."""
        return await asyncio.shield(self._connection)

    def _session_call(self, channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall:
        return channel.stream_stream(codec.SESSION)(metadata=self._metadata)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _measure(self, rtt_s: float) -> None:
        """Smooth as TCP does (RFC 6298: gain 1/8)."""
        sample, old = max(0.0, rtt_s), self._status.rtt_s
        new = sample if old == 0 else 0.875 * old + 0.125 * sample
        self._status = replace(self._status, rtt_s=new)

    async def _keep_connected(self) -> None:
        """Connect, and again when the connection is lost; back off from what fails."""
        link = self.config.link
        pause = link.backoff_initial_s
        while True:
            try:
                channel = await self._connector.connect(link.connect_deadline_s, self._status.rtt_s)
            except CollabError as error:
                self._attempt_failed(error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, link.backoff_max_s)
                continue
            pause = link.backoff_initial_s
            self._connection.set_result(channel)
            try:
                await self._look_after(channel)
            except asyncio.CancelledError:
                await channel.close()
                raise
            self._connection = self._loop.create_future()
            self._change(state="CONNECTING")
            self._spawn(channel.close(_LEFTOVERS_S))

    def _attempt_failed(self, error: CollabError) -> None:
        """Tell those who wait why; their next wait is for the next attempt."""
        attempt, self._connection = self._connection, self._loop.create_future()
        attempt.set_exception(error)
        attempt.exception()  # perhaps nobody waits: that is no error
        self._change(state="DOWN", error_code=error.code, error_msg=str(error))

    async def _look_after(self, channel: grpc.aio.Channel) -> None:
        """Until the connection is lost; asks what it leads to until that is answered well."""
        ready = grpc.ChannelConnectivity.READY
        beats = asyncio.ensure_future(self._feel_pulse(channel))
        try:
            while channel.get_state() is ready:
                if self._status.state != "UP":
                    await self._probe(channel)
                pause = None if self._status.state == "UP" else _PROBE_S
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(channel.wait_for_state_change(ready), pause)
        finally:
            beats.cancel()

    async def _feel_pulse(self, channel: grpc.aio.Channel) -> None:
        """Ask a silent verifier for signs of life, until cancelled."""
        beat, now = self._heartbeat, self._loop.time
        if beat is None:
            return
        self._heard()  # it has just accepted a connection
        questions: set[asyncio.Task[None]] = set()
        try:
            while True:
                ask, changed = beat.on_time(now())
                if ask:
                    question = asyncio.ensure_future(self._ask_for_a_sign(channel))
                    questions.add(question)
                    question.add_done_callback(questions.discard)
                if changed:
                    self._tell()
                await asyncio.sleep(max(0.0, beat.next_time - now()))
        finally:
            for question in list(questions):
                question.cancel()

    async def _ask_for_a_sign(self, channel: grpc.aio.Channel) -> None:
        """Whoever answers is there, even if it knows no such service."""
        try:
            await channel.unary_unary(CHECK)(b"", timeout=_SIGN_S)
        except grpc.aio.AioRpcError as error:
            if error.code() in _NO_ANSWER:
                return
        self._heard()

    def _heard(self) -> None:
        if self._heartbeat is not None and self._heartbeat.on_heard(self._loop.time()):
            self._tell()

    async def _probe(self, channel: grpc.aio.Channel) -> None:
        started = time.monotonic()
        try:
            info = await self._describe(channel, _PROBE_S)
        except CollabError as error:
            self._change(state="DOWN", error_code=error.code, error_msg=str(error))
            return
        if self._status.rtt_s == 0:
            self._measure(time.monotonic() - started)
        self._change(
            state="UP", model=info.model, vocabulary=info.vocabulary, error_code="", error_msg=""
        )

    def _change(self, **fields: str) -> None:
        changed = replace(self._status, **fields)  # type: ignore[arg-type]
        if changed == self._status:
            return
        self._status = changed
        self._tell()

    def _tell(self) -> None:
        try:
            self._on_state(self.status)
        except Exception:  # as above
            log.exception("a receiver of link states failed")

    async def _describe_until(self, deadline: float) -> ServerInfo:
        pause = self.config.link.backoff_initial_s
        while True:
            left = max(0.001, deadline - time.monotonic())
            try:
                channel = await within(self._connected(), left)
                return await self._describe(channel, max(0.001, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                raise no_connection(self.config.address, left) from None
            except Unavailable:
                if time.monotonic() + pause >= deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, self.config.link.backoff_max_s)

    async def _describe(self, channel: grpc.aio.Channel, deadline_s: float) -> ServerInfo:
        ask = channel.unary_unary(codec.DESCRIBE)
        try:
            return codec.decode_info(await ask(b"", timeout=deadline_s, metadata=self._metadata))
        except grpc.aio.AioRpcError as error:
            raise error_of(failure_of_status(error)) from error


def _to_nobody(message: ServerMessage) -> None:
    """The receiver of a session that has ended."""


def _credentials(config: ClientLinkConfig) -> grpc.ChannelCredentials | None:
    if not config.tls:
        return None
    return channel_credentials(config.tls_ca, config.tls_cert, config.tls_key)


def _metadata(config: ClientLinkConfig) -> tuple[tuple[str, str], ...]:
    token = read_token(config.token, config.token_file)
    if token and not config.tls and not is_local(config.address):
        log.warning("the token goes to %s unencrypted: set tls, or tunnel the link", config.address)
    return (("authorization", f"Bearer {token}"),) if token else ()
