"""A client that keeps a connection up, watches it, and is usable from any thread.

Everything runs in the background loop (``background.py``). A protocol's client derives from
:class:`Client`, overrides :meth:`Client.check_server`, which is called on each new connection, and
opens streams on :meth:`Client.connected`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import grpc
import grpc.aio

from collab_llm_nodes.errors import CollabError, DeadlineExceeded, Unavailable
from collab_llm_nodes.transport.background import background_loop, in_background_thread, within
from collab_llm_nodes.transport.connection import Connector
from collab_llm_nodes.transport.credentials import channel_credentials, is_local, read_token
from collab_llm_nodes.transport.heartbeat import CHECK, Heartbeat, HeartbeatConfig
from collab_llm_nodes.transport.settings import BACKOFF_S, ClientConfig

log = logging.getLogger(__name__)

C = TypeVar("C", bound="Client")

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


class Client:
    """A connection to one server.

    Args:
        heartbeat: if given, a silent server is not UP either; else only a closed connection counts.

    Attributes:
        name: of the server, for messages.
        rtt_s: smoothed round trip [s]; 0 while unknown.

    Raises:
        ConfigError: a certificate, key or token file cannot be read.
    """

    name = "server"

    def __init__(self, config: ClientConfig, heartbeat: HeartbeatConfig | None = None) -> None:
        self.server_config = config
        self._connection_state: tuple[str, CollabError | None] = ("CONNECTING", None)
        self.rtt_s = 0.0
        credentials = None
        if config.tls:
            credentials = channel_credentials(config.tls_ca, config.tls_cert, config.tls_key)
        self.connector = Connector(config, credentials, self.name)
        self.metadata = call_metadata(config)
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

    def check_open(self) -> None:
        """Raise Unavailable if this client is closed."""
        if self.closed:
            raise Unavailable("this client is closed", remedy=f"make a new {type(self).__name__}")

    @property
    def connection_state(self) -> tuple[str, CollabError | None]:
        """The state of the connection, and the known reason why it is not UP.

        "UP": the server has passed :meth:`check_server` on the present connection and, with a
        heartbeat, is heard; else "CONNECTING" or "DOWN". The clock is read here, because a stuck
        background thread would not notice the silence.
        """
        (state, error), beat = self._connection_state, self._heartbeat
        if state != "UP" or beat is None or not beat.silent(self._loop.time()):
            return state, error
        silence = f"nothing heard for {beat.config.timeout_s:g} s"
        return "CONNECTING", DeadlineExceeded(silence, field=self.name)

    def post(self, call: Callable[..., None], *args: Any) -> None:
        """Call ``call`` in the background thread; does not block."""
        self._loop.call_soon_threadsafe(call, *args)

    # A protocol's client overrides these; they run in the background thread.

    async def check_server(self, channel: grpc.aio.Channel, deadline_s: float) -> None:
        """Check the server that ``channel`` leads to; by default, that it answers at all.

        Raises:
            CollabError: the state becomes DOWN.
        """
        await self.call(channel, CHECK, b"", deadline_s)

    def on_change(self) -> None:
        """Handle a change of :attr:`connection_state`."""

    def end_sessions(self) -> None:
        """End all streams, since this client is being closed."""

    # Everything below runs in the background thread.

    async def connected(self) -> grpc.aio.Channel:
        """Return the connection when it stands; raises CollabError if the next attempt fails."""
        return await asyncio.shield(self._connection)

    async def call(
        self, channel: grpc.aio.Channel, method: str, request: bytes, deadline_s: float
    ) -> bytes:
        """Return the response of ``method``; raises CollabError."""
        try:
            ask = channel.unary_unary(method)
            return await ask(request, timeout=deadline_s, metadata=self.metadata)
        except grpc.aio.AioRpcError as error:
            raise self.connector.error_of(error) from error

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
        self._connection: asyncio.Future[grpc.aio.Channel] = self._loop.create_future()
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
                channel = await self.connector.connect(link.connect_deadline_s, self.rtt_s)
            except CollabError as error:
                self._attempt_failed(error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, link.backoff_max_s)
                continue
            pause = BACKOFF_S
            self._connection.set_result(channel)
            try:
                await self._look_after(channel)
            except asyncio.CancelledError:
                await channel.close()
                raise
            self._connection = self._loop.create_future()
            self._change("CONNECTING", self._connection_state[1])
            self.spawn(channel.close(_LEFTOVERS_S))

    def _attempt_failed(self, error: CollabError) -> None:
        """Raise ``error`` in all waiting calls; later calls wait for the next attempt."""
        attempt, self._connection = self._connection, self._loop.create_future()
        attempt.set_exception(error)
        attempt.exception()  # retrieved: it is no error if no call waits
        self._change("DOWN", error)

    async def _look_after(self, channel: grpc.aio.Channel) -> None:
        """Check the server until it is UP, and return once the connection is lost."""
        ready = grpc.ChannelConnectivity.READY
        beats = asyncio.ensure_future(self._keep_heartbeat(channel))
        try:
            while channel.get_state() is ready:
                if self._connection_state[0] != "UP":
                    await self._probe(channel)
                pause = None if self._connection_state[0] == "UP" else _PROBE_S
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(channel.wait_for_state_change(ready), pause)
        finally:
            beats.cancel()

    async def _keep_heartbeat(self, channel: grpc.aio.Channel) -> None:
        """Send health checks while the server is silent, until cancelled."""
        beat, now = self._heartbeat, self._loop.time
        if beat is None:
            return
        self.heard()  # it has just accepted a connection
        questions: set[asyncio.Task[None]] = set()
        try:
            while True:
                ask, changed = beat.on_time(now())
                if ask:
                    question = asyncio.ensure_future(self._check_health(channel))
                    questions.add(question)
                    question.add_done_callback(questions.discard)
                if changed:
                    self.on_change()
                await asyncio.sleep(max(0.0, beat.next_time - now()))
        finally:
            for question in list(questions):
                question.cancel()

    async def _check_health(self, channel: grpc.aio.Channel) -> None:
        """Ask for the server's health; an error response is a sign of life as well."""
        try:
            await channel.unary_unary(CHECK)(b"", timeout=_SIGN_S)
        except grpc.aio.AioRpcError as error:
            if error.code() in _NO_ANSWER:
                return
        self.heard()

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

    def _change(self, state: str, error: CollabError | None) -> None:
        (old_state, old_error), self._connection_state = self._connection_state, (state, error)
        if (state, _description(error)) != (old_state, _description(old_error)):
            self.on_change()

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


def call_metadata(config: ClientConfig) -> tuple[tuple[str, str], ...]:
    """Return the metadata of every call: the token, if there is one."""
    token = read_token(config.token, config.token_file)
    if token and not config.tls and not is_local(config.address):
        log.warning("the token goes to %s unencrypted: set tls, or tunnel the link", config.address)
    return (("authorization", f"Bearer {token}"),) if token else ()


def _description(error: CollabError | None) -> tuple[str, str]:
    """Return the code and text of ``error``, by which changes are noticed."""
    return (error.code, str(error)) if error is not None else ("", "")
