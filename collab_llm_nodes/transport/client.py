"""The client's end of a connection: kept up, watched, usable from any thread.

The background loop (``background.py``) owns everything here. A protocol's client derives from
:class:`Client`: it says what the server is asked once a connection stands (:meth:`Client.look`),
and opens streams on :meth:`Client.connected`.
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
from collab_llm_nodes.transport.settings import ClientConfig

log = logging.getLogger(__name__)

C = TypeVar("C", bound="Client")

_START_S = 10.0  # for the background loop to do what it does at once
CLOSE_GRACE_S = 1.0
"""Time for a stream to end by itself when its client is closed [s]."""
_LEFTOVERS_S = 30.0  # for calls to end on a connection that takes no new ones
_SIGN_S = 2.0  # an answer that comes later is none: the connection will be given up
_PROBE_S = 2.0  # deadline of, and pause between, looks at a server that does not answer well

_NO_ANSWER = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


class Client:
    """See the module docstring.

    Args:
        config: where and how.
        heartbeat: with it, a server that falls silent is not UP; without, only one whose
            connection was closed.

    Attributes:
        name: of the server, for messages.
        rtt_s: smoothed round trip [s]; 0 while unknown.

    Raises:
        ConfigError: a certificate, key or token file cannot be read.
    """

    name = "server"

    def __init__(self, config: ClientConfig, heartbeat: HeartbeatConfig | None = None) -> None:
        self.server_config = config
        self._standing: tuple[str, CollabError | None] = ("CONNECTING", None)
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
        """End all that is under way, and the connection."""
        self.closed = True
        ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        if not in_background_thread():
            ended.result(CLOSE_GRACE_S + _START_S)

    def ask(self, method: str, request: bytes, deadline_s: float) -> bytes:
        """Return the answer of ``method`` ("/package.Service/Method").

        Waits for the server to come up until the deadline, and asks again where it is unavailable.

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
    def standing(self) -> tuple[str, CollabError | None]:
        """The state of the connection, and why it is not UP as far as that is known.

        "UP": the server has answered :meth:`look` on the present connection and, with a heartbeat,
        is heard; else "CONNECTING" or "DOWN". Judged by the clock: a background thread that is
        stuck could not tell that nothing is heard.
        """
        (state, error), beat = self._standing, self._heartbeat
        if state != "UP" or beat is None or not beat.silent(self._loop.time()):
            return state, error
        silence = f"nothing heard for {beat.config.timeout_s:g} s"
        return "CONNECTING", DeadlineExceeded(silence, field=self.name)

    def post(self, call: Callable[..., None], *args: Any) -> None:
        """Have ``call`` made in the background thread; does not block."""
        self._loop.call_soon_threadsafe(call, *args)

    # A protocol's client fills in these; they run in the background thread.

    async def look(self, channel: grpc.aio.Channel, deadline_s: float) -> None:
        """Ask what ``channel`` leads to, here for its health.

        Raises:
            CollabError: it does not answer well: the state is DOWN.
        """
        await self.call(channel, CHECK, b"", deadline_s)

    def on_change(self) -> None:
        """Note that :attr:`standing` has changed."""

    def end_sessions(self) -> None:
        """End all streams, since this client is being closed."""

    # Everything below runs in the background thread.

    async def connected(self) -> grpc.aio.Channel:
        """Return the connection when it stands; raises CollabError if the next attempt fails."""
        return await asyncio.shield(self._connection)

    async def call(
        self, channel: grpc.aio.Channel, method: str, request: bytes, deadline_s: float
    ) -> bytes:
        """Return the answer of ``method``; raises CollabError."""
        try:
            ask = channel.unary_unary(method)
            return await ask(request, timeout=deadline_s, metadata=self.metadata)
        except grpc.aio.AioRpcError as error:
            raise self.connector.error_of(error) from error

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``coroutine`` until it ends, or until shortly after this client is closed."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def measure(self, rtt_s: float) -> None:
        """Take a round trip into account, smoothed as TCP does (RFC 6298: gain 1/8)."""
        sample, old = max(0.0, rtt_s), self.rtt_s
        self.rtt_s = sample if old == 0 else 0.875 * old + 0.125 * sample

    def heard(self) -> None:
        """Note that the server has said something."""
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
        """Connect, and again when the connection is lost; back off from what fails."""
        link = self.server_config.link
        pause = link.backoff_initial_s
        while True:
            try:
                channel = await self.connector.connect(link.connect_deadline_s, self.rtt_s)
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
            self._change("CONNECTING", self._standing[1])
            self.spawn(channel.close(_LEFTOVERS_S))

    def _attempt_failed(self, error: CollabError) -> None:
        """Tell those who wait why; their next wait is for the next attempt."""
        attempt, self._connection = self._connection, self._loop.create_future()
        attempt.set_exception(error)
        attempt.exception()  # perhaps nobody waits: that is no error
        self._change("DOWN", error)

    async def _look_after(self, channel: grpc.aio.Channel) -> None:
        """Return once the connection is lost; until it answers well, ask what it leads to."""
        ready = grpc.ChannelConnectivity.READY
        beats = asyncio.ensure_future(self._feel_pulse(channel))
        try:
            while channel.get_state() is ready:
                if self._standing[0] != "UP":
                    await self._probe(channel)
                pause = None if self._standing[0] == "UP" else _PROBE_S
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(channel.wait_for_state_change(ready), pause)
        finally:
            beats.cancel()

    async def _feel_pulse(self, channel: grpc.aio.Channel) -> None:
        """Ask a silent verifier for signs of life, until cancelled."""
        beat, now = self._heartbeat, self._loop.time
        if beat is None:
            return
        self.heard()  # it has just accepted a connection
        questions: set[asyncio.Task[None]] = set()
        try:
            while True:
                ask, changed = beat.on_time(now())
                if ask:
                    question = asyncio.ensure_future(self._ask_for_a_sign(channel))
                    questions.add(question)
                    question.add_done_callback(questions.discard)
                if changed:
                    self.on_change()
                await asyncio.sleep(max(0.0, beat.next_time - now()))
        finally:
            for question in list(questions):
                question.cancel()

    async def _ask_for_a_sign(self, channel: grpc.aio.Channel) -> None:
        """Ask for health: a server that answers is there, even if it knows no such service."""
        try:
            await channel.unary_unary(CHECK)(b"", timeout=_SIGN_S)
        except grpc.aio.AioRpcError as error:
            if error.code() in _NO_ANSWER:
                return
        self.heard()

    async def _probe(self, channel: grpc.aio.Channel) -> None:
        started = time.monotonic()
        try:
            await self.look(channel, _PROBE_S)
        except CollabError as error:
            self._change("DOWN", error)
            return
        if self.rtt_s == 0:
            self.measure(time.monotonic() - started)
        self._change("UP", None)

    def _change(self, state: str, error: CollabError | None) -> None:
        (old_state, old_error), self._standing = self._standing, (state, error)
        if (state, _told(error)) != (old_state, _told(old_error)):
            self.on_change()

    async def _ask_until(self, method: str, request: bytes, deadline: float) -> bytes:
        pause = self.server_config.link.backoff_initial_s
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
    """Return what each call carries: the token, if there is one."""
    token = read_token(config.token, config.token_file)
    if token and not config.tls and not is_local(config.address):
        log.warning("the token goes to %s unencrypted: set tls, or tunnel the link", config.address)
    return (("authorization", f"Bearer {token}"),) if token else ()


def _told(error: CollabError | None) -> tuple[str, str]:
    """Return what people see of ``error``."""
    return (error.code, str(error)) if error is not None else ("", "")
