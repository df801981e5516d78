"""Clients that keep a connection up, watch it, and are usable from any thread.

Everything runs in the background loop (``background.py``). A protocol's gRPC client derives from
:class:`Client`, overrides :meth:`Client.check_server`, which is called on each new connection, and
opens streams on :meth:`Client.connected`. :class:`KeptConnection` is the part that knows no gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from collab_llm_nodes.errors import CollabError, DeadlineExceeded, Unavailable
from collab_llm_nodes.transport.background import background_loop, in_background_thread, within
from collab_llm_nodes.transport.connection import Connector
from collab_llm_nodes.transport.credentials import channel_credentials, is_local, read_token
from collab_llm_nodes.transport.heartbeat import CHECK, Heartbeat, HeartbeatConfig
from collab_llm_nodes.transport.settings import BACKOFF_S, ClientConfig

log = logging.getLogger(__name__)

C = TypeVar("C", bound="KeptConnection[Any]")
Connection = TypeVar("Connection")

_START_S = 10.0  # for the background loop to run a callback
CLOSE_GRACE_S = 1.0
"""Time for streams to end by themselves when their client is closed [s]."""
_LEFTOVERS_S = 30.0  # for calls to end on a connection that accepts no new ones
_SIGN_S = 2.0  # timeout of a health check; by then the connection counts as lost
_PROBE_S = 2.0  # deadline of, and pause between, checks of a server that is not UP

_NO_ANSWER = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


class KeptConnection(ABC, Generic[Connection]):
    """A connection to one server that is made again whenever it is lost.

    Args:
        config: its ``link`` has the deadline of an attempt, and the pauses between attempts.
        heartbeat: if given, a silent server is not UP either; else only a closed connection counts.

    Attributes:
        name: of the server, for messages.
        rtt_s: smoothed round trip [s]; 0 while unknown.
    """

    name = "server"

    def __init__(self, config: ClientConfig, heartbeat: HeartbeatConfig | None = None) -> None:
        self.server_config = config
        self._connection_state: tuple[str, CollabError | None] = ("CONNECTING", None)
        self.rtt_s = 0.0
        self._heartbeat = Heartbeat(heartbeat) if heartbeat is not None else None
        self._tasks: set[asyncio.Task[None]] = set()
        self.closed = False
        self._loop = background_loop()
        # grpc.aio binds a channel to the loop it is made in.
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(_START_S)

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all calls and the connection."""
        self.closed = True
        ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        if not in_background_thread():
            ended.result(CLOSE_GRACE_S + _START_S)

    def check_open(self) -> None:
        """Raise Unavailable if this client is closed."""
        if self.closed:
            raise Unavailable("this client is closed", remedy=f"make a new {type(self).__name__}")

    @property
    def connection_state(self) -> tuple[str, CollabError | None]:
        """The state of the connection, and the known reason why it is not UP.

        "UP": the server has passed all checks on the present connection and, with a heartbeat, is
        heard; else "CONNECTING" or "DOWN". The clock is read here, because a stuck background
        thread would not notice the silence.
        """
        (state, error), beat = self._connection_state, self._heartbeat
        if state != "UP" or beat is None or not beat.silent(self._loop.time()):
            return state, error
        silence = f"nothing heard for {beat.config.timeout_s:g} s"
        return "CONNECTING", DeadlineExceeded(silence, field=self.name)

    def post(self, call: Callable[..., None], *args: Any) -> None:
        """Call ``call`` in the background thread; does not block."""
        self._loop.call_soon_threadsafe(call, *args)

    # A client overrides these; they run in the background thread.

    @abstractmethod
    async def connect(self, deadline_s: float) -> Connection:
        """Return a new connection; raises CollabError if there is none."""

    @abstractmethod
    async def look_after(self, connection: Connection) -> None:
        """Check the server until it is UP, and return once ``connection`` is lost."""

    @abstractmethod
    async def disconnect(self, connection: Connection, grace_s: float | None = None) -> None:
        """Close ``connection``; calls on it may take ``grace_s`` to end."""

    def on_change(self) -> None:
        """Handle a change of :attr:`connection_state`."""

    def end_sessions(self) -> None:
        """End all streams, since this client is being closed."""

    # Everything below runs in the background thread.

    async def connected(self) -> Connection:
        """Return the connection when it stands; raises CollabError if the next attempt fails."""
        return await asyncio.shield(self._connection)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``coroutine`` in the background loop; it is awaited for a moment on ``close``."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def record_rtt(self, rtt_s: float) -> None:
        """Update ``rtt_s`` with a sample, smoothed as in TCP (RFC 6298: gain 1/8)."""
        sample, old = max(0.0, rtt_s), self.rtt_s
        self.rtt_s = sample if old == 0 else 0.875 * old + 0.125 * sample

    def heard(self) -> None:
        """Record that the server was heard."""
        if self._heartbeat is not None and self._heartbeat.on_heard(self._loop.time()):
            self.on_change()

    async def _start(self) -> None:
        self._connection: asyncio.Future[Connection] = self._loop.create_future()
        self._keeper = asyncio.ensure_future(self._keep_connected())

    async def _end(self) -> None:
        self.end_sessions()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_GRACE_S)
        self._keeper.cancel()
        await asyncio.wait({self._keeper})  # it closes what it opened

    async def _keep_connected(self) -> None:
        """Connect, and reconnect after each loss, with back-off after failures."""
        link = self.server_config.link
        pause = BACKOFF_S
        while True:
            try:
                connection = await self.connect(link.connect_deadline_s)
            except CollabError as error:
                self._attempt_failed(error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, link.backoff_max_s)
                continue
            pause = BACKOFF_S
            self._connection.set_result(connection)
            try:
                await self.look_after(connection)
            except asyncio.CancelledError:
                await self.disconnect(connection)
                raise
            self._connection = self._loop.create_future()
            self._change("CONNECTING", self._connection_state[1])
            self.spawn(self.disconnect(connection, _LEFTOVERS_S))

    def _attempt_failed(self, error: CollabError) -> None:
        """Raise ``error`` in all waiting calls; later calls wait for the next attempt."""
        attempt, self._connection = self._connection, self._loop.create_future()
        attempt.set_exception(error)
        attempt.exception()  # retrieved: it is no error if no call waits
        self._change("DOWN", error)

    async def keep_heartbeat(self, check: Callable[[], Awaitable[bool]]) -> None:
        """Send health checks while the server is silent, until cancelled.

        Args:
            check: returns True if the server has answered; an error is an answer as well.
        """
        beat, now = self._heartbeat, self._loop.time
        if beat is None:
            return
        self.heard()  # it has just accepted a connection

        async def ask() -> None:
            if await check():
                self.heard()

        questions: set[asyncio.Task[None]] = set()
        try:
            while True:
                due, changed = beat.on_time(now())
                if due:
                    question = asyncio.ensure_future(ask())
                    questions.add(question)
                    question.add_done_callback(questions.discard)
                if changed:
                    self.on_change()
                await asyncio.sleep(max(0.0, beat.next_time - now()))
        finally:
            for question in list(questions):
                question.cancel()

    def _change(self, state: str, error: CollabError | None) -> None:
        (old_state, old_error), self._connection_state = self._connection_state, (state, error)
        if (state, _description(error)) != (old_state, _description(old_error)):
            self.on_change()


class Client(KeptConnection[grpc.aio.Channel]):
    """A gRPC connection to one server.

    Args:
        heartbeat: as of ``KeptConnection``.

    Raises:
        ConfigError: a certificate, key or token file cannot be read.
    """

    def __init__(self, config: ClientConfig, heartbeat: HeartbeatConfig | None = None) -> None:
        credentials = None
        if config.tls:
            credentials = channel_credentials(config.tls_ca, config.tls_cert, config.tls_key)
        self.connector = Connector(config, credentials, self.name)
        self.metadata = call_metadata(config)
        super().__init__(config, heartbeat)

    def ask(self, method: str, request: bytes, deadline_s: float) -> bytes:
        """Return the response of ``method`` ("/package.Service/Method").

        Retries until the deadline while the server is unavailable.

        Raises:
            Unavailable: not reached within the deadline.
            Unauthenticated: the credentials were refused.
            DeadlineExceeded: reached, but it did not answer in time.
        """
        self.check_open()
        question = self._ask_until(method, request, time.monotonic() + deadline_s)
        answer = asyncio.run_coroutine_threadsafe(question, self._loop)
        try:
            return answer.result(deadline_s + 1.0)
        except FutureTimeout:  # this machine is too busy to run the background thread
            answer.cancel()
            raise DeadlineExceeded(
                f"no answer within {deadline_s:g} s", field=self.name, remedy="try again"
            ) from None

    # A protocol's client overrides this; it runs in the background thread.

    async def check_server(self, channel: grpc.aio.Channel, deadline_s: float) -> None:
        """Check the server that ``channel`` leads to; by default, that it answers at all.

        Raises:
            CollabError: the state becomes DOWN.
        """
        await self.call(channel, CHECK, b"", deadline_s)

    # Everything below runs in the background thread.

    async def call(
        self, channel: grpc.aio.Channel, method: str, request: bytes, deadline_s: float
    ) -> bytes:
        """Return the response of ``method``; raises CollabError."""
        try:
            ask = channel.unary_unary(method)
            return await ask(request, timeout=deadline_s, metadata=self.metadata)
        except grpc.aio.AioRpcError as error:
            raise self.connector.error_of(error) from error

    async def connect(self, deadline_s: float) -> grpc.aio.Channel:
        return await self.connector.connect(deadline_s, self.rtt_s)

    async def disconnect(self, connection: grpc.aio.Channel, grace_s: float | None = None) -> None:
        await connection.close(grace_s)

    async def look_after(self, connection: grpc.aio.Channel) -> None:
        ready = grpc.ChannelConnectivity.READY
        beats = asyncio.ensure_future(self.keep_heartbeat(lambda: _is_alive(connection)))
        try:
            while connection.get_state() is ready:
                if self._connection_state[0] != "UP":
                    await self._probe(connection)
                pause = None if self._connection_state[0] == "UP" else _PROBE_S
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(connection.wait_for_state_change(ready), pause)
        finally:
            beats.cancel()

    async def _probe(self, channel: grpc.aio.Channel) -> None:
        started = time.monotonic()
        try:
            await self.check_server(channel, _PROBE_S)
        except CollabError as error:
            self._change("DOWN", error)
            return
        if self.rtt_s == 0:
            self.record_rtt(time.monotonic() - started)
        self._change("UP", None)

    async def _ask_until(self, method: str, request: bytes, deadline: float) -> bytes:
        pause = BACKOFF_S
        while True:
            left = max(0.001, deadline - time.monotonic())
            try:
                channel = await within(self.connected(), left)
                left = max(0.001, deadline - time.monotonic())
                return await self.call(channel, method, request, left)
            except asyncio.TimeoutError:
                raise self.connector.no_connection(left) from None
            except Unavailable:
                if time.monotonic() + pause >= deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, self.server_config.link.backoff_max_s)


async def _is_alive(channel: grpc.aio.Channel) -> bool:
    """Ask for the server's health; an error response is a sign of life as well."""
    try:
        await channel.unary_unary(CHECK)(b"", timeout=_SIGN_S)
    except grpc.aio.AioRpcError as error:
        return error.code() not in _NO_ANSWER
    return True


def call_metadata(config: ClientConfig) -> tuple[tuple[str, str], ...]:
    """Return the metadata of every call: the token, if there is one."""
    token = read_token(config.token, config.token_file)
    if token and not config.tls and not is_local(config.address):
        log.warning("the token goes to %s unencrypted: set tls, or tunnel the link", config.address)
    return (("authorization", f"Bearer {token}"),) if token else ()


def _description(error: CollabError | None) -> tuple[str, str]:
    """Return the code and text of ``error``, by which changes are noticed."""
    return (error.code, str(error)) if error is not None else ("", "")
