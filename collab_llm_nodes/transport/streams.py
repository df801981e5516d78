"""A service without a network: admission in fair shares, time limits, errors, draining.

A front end (gRPC in ``server.py``, Ray Serve in ``ray_serve.py``) passes each client's stream to
:meth:`StreamService.accept`. A protocol derives its service from :class:`StreamService` and defines
:meth:`StreamService.serve_stream` and the encoding of its messages. Everything runs in one asyncio
loop, which reads, checks and writes; other threads hand it messages (:class:`ThreadBridge`).
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import hmac
import logging
import math
import secrets
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from collab_llm_nodes.errors import Busy, CollabError, Unauthenticated, Unavailable
from collab_llm_nodes.transport.admission import MOST_WAIT_S, Admission, Allowance, Peer, Place
from collab_llm_nodes.transport.background import within
from collab_llm_nodes.transport.credentials import read_token
from collab_llm_nodes.transport.metrics import ServerMetrics
from collab_llm_nodes.transport.settings import ServerConfig

log = logging.getLogger(__name__)

M = TypeVar("M")
"""A message to a client, other than an error."""

Unary = Callable[[bytes], Awaitable[bytes]]
"""A method with one request and one response; raises CollabError."""

_OPEN_S = 10.0  # from a new stream to its first message
_TURNS = 8  # streams of one address that may send their first message at a time
_PARTING_S = 2.0  # from the last message to the client's end of the stream, at most
_PARTINGS = 32  # of streams that were refused a place, at a time
MAX_UNANSWERED = 128
"""Messages of one client between two answers; pushing drafts ahead takes a few."""
MAX_UNANSWERED_BYTES = 4 << 20


class Stream(Protocol):
    """One client's connection."""

    async def read(self) -> bytes | None:
        """Return the next message; None once the client has closed its side.

        Raises:
            ConnectionError: the client is gone.
        """

    async def write(self, data: bytes) -> None:
        """Send one message, waiting for a slow client.

        Raises:
            ConnectionError: the client is gone.
        """


class Outbox(Generic[M]):
    """Messages queued for one client, the oldest first. A protocol may rank or drop some."""

    def __init__(self) -> None:
        self._messages: deque[M | CollabError] = deque()

    def __len__(self) -> int:
        """Return the number of messages that must be sent."""
        return len(self._messages)

    def push(self, message: M | CollabError) -> None:
        """Append ``message``."""
        self._messages.append(message)

    def pop(self) -> M | CollabError | None:
        """Return the next message that must be sent."""
        return self._messages.popleft() if self._messages else None

    def pop_optional(self) -> M | None:
        """Return the next message that is sent only if nothing else is queued."""
        return None


class StreamService(abc.ABC, Generic[M]):
    """A service whose clients each have a bidirectional stream.

    Attributes:
        name: for messages, logs, threads and metrics, such as "verifier".
        full_name: gRPC's name, such as "collab_llm.v2.Verifier".
        stream: name of the method with a bidirectional stream; empty: there is none.
        title: description for the log line of the start.
        max_unanswered_bytes: bytes that one client may send between two answers.
        most_wait_s: longest wait of a session of a busy address; then it is refused (BUSY).
        counts_sessions: ``shares.bytes_per_s`` also covers messages after the first one.
        failed: set once this process can compute nothing any more.
    """

    name: str
    full_name: str
    stream = "Session"
    max_unanswered_bytes = MAX_UNANSWERED_BYTES
    most_wait_s = MOST_WAIT_S
    counts_sessions = True

    def __init__(self, config: ServerConfig, metrics: ServerMetrics | None = None) -> None:
        self.server_config = config
        self.title = self.name
        self.metrics = metrics or ServerMetrics(self.name)
        self.failed = asyncio.Event()
        self._token = read_token(config.token, config.token_file).encode()
        self._admission = Admission(config.limits.max_streams, config.shares, self.name)
        self._begun = Allowance(config.shares.sessions_per_s)
        self._received = Allowance(config.shares.bytes_per_s)
        self._lines: WeakValueDictionary[str, _Line[M]] = WeakValueDictionary()
        self._unheard = asyncio.Semaphore(_TURNS)
        self._clients: set[ClientSession[M]] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._draining = False

    # A protocol overrides these.

    @abc.abstractmethod
    async def serve_stream(self, client: ClientSession[M]) -> None:
        """Serve one stream until its client ends it.

        Read by :meth:`read_first`, then :meth:`read`, and reply by ``client.deliver``.
        Messages that are still queued are sent after this returns.

        Raises:
            CollabError: it is sent to the client as the last message.
        """

    @abc.abstractmethod
    def encode(self, message: M | CollabError) -> bytes:
        """Serialise ``message``."""

    def unary(self) -> Mapping[str, Unary]:
        """Return the methods with one request and one response, by name."""
        return {}

    def make_outbox(self) -> Outbox[M]:
        """Return an empty outbox for a new client."""
        return Outbox()

    def is_last(self, message: M) -> bool:
        """Return True if ``message`` ends the session."""
        return False

    def is_answer(self, message: M) -> bool:
        """Return True if ``message`` resets the count of unanswered messages."""
        return True

    def on_silence(self, client: ClientSession[M], error: Unavailable) -> None:
        """End the session of ``client``, which neither sends nor reads.

        A service that may itself be late overrides this.
        """
        client.deliver(error)

    def on_disconnected(self, client: ClientSession[M]) -> None:
        """Free everything that belongs to ``client``; nothing more is sent to it."""

    def summary(self, sent: Counter[str]) -> dict[str, int]:
        """Return figures of a session for the log, given the number of messages sent by type."""
        return dict(sent)

    def start(self) -> None:
        """Start computing; call it in the loop that serves the clients."""
        self.bridge: ThreadBridge[M] = ThreadBridge(asyncio.get_running_loop())

    async def warm(self) -> None:
        """Return once no client would wait for slow first passes; called after :meth:`start`."""

    async def stop(self) -> bool:
        """Stop computing and free everything; False if a thread is still busy."""
        return True

    # The same for all protocols.

    async def drain(self, grace_s: float) -> None:
        """Refuse new sessions, and wait for the open ones for at most ``grace_s``."""
        self._draining = True
        with contextlib.suppress(asyncio.TimeoutError):
            await within(self._empty.wait(), grace_s)

    @property
    def serving(self) -> bool:
        """True while new sessions are accepted."""
        return not (self._draining or self.failed.is_set())

    @property
    def sessions(self) -> int:
        """Number of open sessions."""
        return sum(client.opened and not client.gone.is_set() for client in self._clients)

    def check_token(self, authorization: str) -> None:
        """Check the metadata ``authorization`` of a call.

        Raises:
            Unauthenticated: it does not hold the configured token.
        """
        if self._token and not hmac.compare_digest(
            authorization.encode(), b"Bearer " + self._token
        ):
            raise Unauthenticated(
                "wrong or missing token", field="token", remedy=f"give the {self.name}'s token"
            )

    async def accept(self, stream: Stream, peer: Peer | None = None) -> None:
        """Serve one client until the last message is sent, one side leaves, or an error occurs.

        Errors are sent to the client; none is raised.
        """
        client = ClientSession(self, stream, peer or Peer(), asyncio.current_task())
        self._clients.add(client)
        self._empty.clear()
        self.metrics.streams.inc()
        listening = asyncio.ensure_future(self._serve(client))
        try:
            await self._send_all(client)
            # If the server closes first, gRPC's Python client may drop the last unread message. So
            # clients end streams, after they have read it.
            if self._has_time_for(client):
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(self._until_end(client, listening), _PARTING_S)
        except ConnectionError as lost:
            log.debug("session %s: %s", client.id[:8], lost)
        finally:
            listening.cancel()
            self._clients.discard(client)
            if not self._clients:
                self._empty.set()
            self.metrics.streams.dec()

    async def read(self, client: ClientSession[M]) -> bytes | None:
        """Return the next message of ``client``; None once it has ended its side.

        Raises:
            Busy: it has sent too much since the last answer.
            ConnectionError: it has disconnected.
        """
        data = await self._receive(client)
        if data is None or client.gone.is_set():  # ignore messages after the end of the session
            return None
        client.count_received(len(data))
        return data

    async def read_first(self, client: ClientSession[M]) -> bytes | None:
        """Return the first message of ``client``, read in a turn of its address (:class:`_Line`).

        Turns wait until the address has allowance left; silent streams use up none.

        Raises:
            Busy: no turn came within ``most_wait_s``.
            ConnectionError: the client has disconnected.
        """
        assert client.place is not None
        client.place.since = math.inf
        account, loop = client.peer.account, asyncio.get_running_loop()
        allowances = (self._begun, self._received)
        line: _Line[M] = _Line(
            lambda: max(used.wait_s(account, loop.time()) for used in allowances),
            self.most_wait_s,
        )
        if account:
            line = self._lines.setdefault(account, line)
        try:
            try:
                await within(line.join(client), self.most_wait_s)
            except asyncio.TimeoutError as error:
                raise Busy(
                    "one address begins too many sessions, or sends too many bytes, in a second",
                    field="session",
                    remedy="try again later, or raise shares.sessions_per_s and shares.bytes_per_s"
                    f" on the {self.name}",
                ) from error
            client.place.since = loop.time()
            data = await self.read(client)
            if not client.half_closed:
                self._begun.use(account, 1.0, loop.time())
            return data
        finally:
            line.leave(client)

    def _has_time_for(self, client: ClientSession[M]) -> bool:
        """Return True while the client may still close the stream itself."""
        places = self.server_config.limits.max_streams
        refused = len(self._clients) - len(self._admission)
        return (
            (client.opened or self.serving)
            and not client.late
            and len(self._clients) <= places
            and (client.place is not None or refused <= _PARTINGS)
        )

    async def _until_end(self, client: ClientSession[M], listening: asyncio.Future[None]) -> None:
        """Read and drop the remaining messages of ``client``, unless it sends too many."""
        await listening
        loop = asyncio.get_running_loop()
        # Refused streams are read a few at a time: together their messages would fill the memory.
        async with contextlib.nullcontext() if client.opened else self._unheard:
            for _ in range(MAX_UNANSWERED):
                if client.half_closed:
                    break
                if self._received.wait_s(client.peer.account, loop.time()) > 0:
                    await asyncio.sleep(_PARTING_S)  # leave its messages unread
                await self._receive(client)

    def _admit(self, client: ClientSession[M]) -> None:
        """Find a place for ``client``; a silent stream may lose its place to it.

        Raises:
            Unavailable: there is none.
        """
        place, lost = self._admission.enter(client.peer, asyncio.get_running_loop().time())
        client.place = place
        for other in self._clients if lost is not None else ():
            if other.place is lost:
                other.end_late()

    async def _send_all(self, client: ClientSession[M]) -> None:
        """Send queued messages up to the last one, then end the session."""
        try:
            while (message := await client.next()) is not None:
                client.writing = True
                await client.stream.write(self.encode(message))
                client.writing = False
                if isinstance(message, CollabError):
                    client.failures += 1
                    self.metrics.failures.labels(message.code).inc()
                    break
                client.sent[type(message).__name__] += 1
                if self.is_last(message):
                    break
        finally:
            client.close()
            self.on_disconnected(client)
            if client.place is not None:
                self._admission.leave(client.place)
            log.info("session ended", extra=client.summary())

    async def _serve(self, client: ClientSession[M]) -> None:
        """Admit ``client`` and serve its stream; an error becomes its last message."""
        try:
            if not self.serving:
                raise Unavailable(
                    f"the {self.name} is shutting down",
                    field="session",
                    remedy="try again, or another",
                )
            self._admit(client)
            await self.serve_stream(client)
        except CollabError as error:
            client.deliver(error)
        except ConnectionError:
            pass  # as if it had closed its side
        except Exception:  # a fault of the service must end this session only
            log.exception("session %s failed", client.id[:8])
            remedy = f"see its log: session {client.id[:8]}"
            client.deliver(CollabError(f"the {self.name} failed", remedy=remedy))
        client.end()

    async def _receive(self, client: ClientSession[M]) -> bytes | None:
        data = await client.stream.read()
        client.half_closed = data is None
        if data is not None and (self.counts_sessions or not client.opened):
            now = asyncio.get_running_loop().time()
            self._received.use(client.peer.account, len(data), now)
        return data


class ClientSession(Generic[M]):
    """One client's stream: its queued messages, and the time since it was last heard.

    ``post`` may be called by any thread, everything else only by the loop.

    Attributes:
        owner: equal for all sessions that share scarce resources; empty: shares with none.
        urgent: served before the other sessions of its owner; set before ``open``.
        gone: set once nothing more is sent to it: stop computing for it.
        opened: its first message has been accepted.
    """

    def __init__(
        self,
        service: StreamService[M],
        stream: Stream,
        peer: Peer,
        task: asyncio.Task[None] | None,
    ) -> None:
        self.id = secrets.token_hex(16)
        self.stream = stream
        self.peer = peer
        self.owner = peer.address
        self.urgent = False
        self.place: Place | None = None  # until it is admitted
        self.gone = threading.Event()
        self.opened = False
        self.writing = False
        self.late = False  # ended because others waited for its first message
        self.half_closed = False  # the client has ended its side of the stream
        self.sent: Counter[str] = Counter()
        self.failures = 0
        self._service = service
        self._task = task
        self._outbox = service.make_outbox()
        self._ended = False
        self._wake = asyncio.Event()
        self._idle_s = service.server_config.limits.idle_s
        self._loop = asyncio.get_running_loop()
        self._since = self._heard_at = self._loop.time()
        self._unanswered = self._unanswered_bytes = 0
        self._timer = self._loop.call_later(min(_OPEN_S, self._idle_s), self._check_silence)

    @property
    def unread(self) -> int:
        """Number of messages that wait until the client has read earlier ones."""
        return len(self._outbox)

    def open(self) -> None:
        """Record that the client's first message has been accepted."""
        assert self.place is not None
        self.opened = self.place.opened = True

    def post(self, message: M | CollabError, more: bool = False) -> None:
        """Queue ``message`` from another thread; see :meth:`ThreadBridge.post`."""
        self._service.bridge.post(self, message, more)

    def deliver(self, message: M | CollabError) -> None:
        """Queue ``message``; an error is the last one."""
        self._heard_at = self._loop.time()  # a client that waits for us is not silent
        if not isinstance(message, CollabError) and self._service.is_answer(message):
            self._unanswered = self._unanswered_bytes = 0
        self._outbox.push(message)
        self._wake.set()

    def end_late(self) -> None:
        """End the stream at once, because others wait and its first message did not come."""
        self.late = True
        self.deliver(
            Unavailable(
                "streams are scarce and the first message did not come in time",
                field="session",
                remedy="send it at once, on a new stream",
            )
        )

    async def next(self) -> M | CollabError | None:
        """Return the next message to send; None once the client has ended its side."""
        while True:
            if (message := self._outbox.pop()) is not None:
                return message
            if self._ended:
                return None
            if (optional := self._outbox.pop_optional()) is not None:
                return optional
            self._wake.clear()
            await self._wake.wait()

    def end(self) -> None:
        """Record that the client has ended its side; queued messages are still sent."""
        self._ended = True
        self._wake.set()

    def count_received(self, size: int) -> None:
        """Count a message of ``size`` bytes from the client.

        Raises:
            Busy: too many messages or bytes since the last answer.
        """
        self._heard_at = self._loop.time()
        if not self.opened:
            return
        self._unanswered += 1
        self._unanswered_bytes += size
        most_bytes = self._service.max_unanswered_bytes
        if self._unanswered > MAX_UNANSWERED or self._unanswered_bytes > most_bytes:
            raise Busy(
                f"{self._unanswered} messages of {self._unanswered_bytes} bytes since the last"
                " answer",
                field="message",
                remedy="wait for answers, or send fewer ahead",
            )

    def close(self) -> None:
        """Mark the client as gone and stop its timer."""
        self.gone.set()
        self._timer.cancel()

    def summary(self) -> dict[str, object]:
        """Return the session's figures for the log."""
        return {
            "session": self.id[:8],
            "seconds": round(self._loop.time() - self._since, 3),
            **self._service.summary(self.sent),
            "failures": self.failures,
        }

    def _check_silence(self) -> None:
        """End the session of a client that neither sends nor reads for ``idle_s``."""
        limit = self._idle_s if self.opened else min(_OPEN_S, self._idle_s)
        left = self._heard_at + limit - self._loop.time()
        if left <= 0 and self.writing:
            assert self._task is not None
            self._task.cancel()  # a message about it could not be written either
            return
        if left <= 0:
            silent = Unavailable(
                f"nothing came for {limit:g} s", field="session", remedy="use a new stream"
            )
            if self.opened:  # the server may be the late side
                self._service.on_silence(self, silent)
            else:
                self.deliver(silent)
        # Even after the last message: a client that does not read would block its writing.
        self._timer = self._loop.call_later(left if left > 0 else limit, self._check_silence)


class ThreadBridge(Generic[M]):
    """Carries messages from another thread into the loop, and wakes it once for several."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._messages: deque[tuple[ClientSession[M], M | CollabError]] = deque()
        self._called = False

    def post(self, client: ClientSession[M], message: M | CollabError, more: bool = False) -> None:
        """Have ``client`` deliver ``message``; call it from one thread only.

        Args:
            more: another message follows at once, so the loop need not be woken yet.
        """
        self._messages.append((client, message))
        if not (more or self._called):
            self._called = True
            with contextlib.suppress(RuntimeError):  # the loop has ended, and so have all clients
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._called = False  # before reading: later messages wake the loop again
        while self._messages:
            client, message = self._messages.popleft()
            client.deliver(message)


class _Line(Generic[M]):
    """The queue of one address's streams for the turns in which they send their first message.

    The number of turns bounds the unaccounted bytes in memory. A silent stream ends if another
    waits for its turn: at once if its connection has two turns more than the other's, else after
    half of the time for which the other may wait, or sooner if many wait.

    Args:
        allowed_in_s: returns the time until the address has allowance left [s].
        most_wait_s: longest wait for a turn.
    """

    def __init__(self, allowed_in_s: Callable[[], float], most_wait_s: float) -> None:
        self._allowed_in_s = allowed_in_s
        self._most_wait_s = most_wait_s
        self._turns: dict[ClientSession[M], float] = {}  # since; the longest first
        self._waiting: dict[ClientSession[M], asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def join(self, client: ClientSession[M]) -> None:
        """Wait for a turn; :meth:`leave` must follow in any case."""
        called = self._waiting[client] = asyncio.get_running_loop().create_future()
        self._call()
        await called

    def leave(self, client: ClientSession[M]) -> None:
        """Give back the turn of ``client``, or its place in the queue."""
        self._turns.pop(client, None)
        self._waiting.pop(client, None)
        self._call()

    def _call(self) -> None:
        """Give turns to all that may have one, and set a timer for the next."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        while self._waiting:
            held = Counter(client.peer.connection for client in self._turns)
            client = min(self._waiting, key=lambda c: held[c.peer.connection])
            silent, left_s = self._gives_way(client, held, loop.time())
            if (left_s := max(left_s, self._allowed_in_s())) > 0:
                self._timer = loop.call_later(left_s, self._call)
                return
            if silent is not None:
                del self._turns[silent]
                silent.end_late()
            self._turns[client] = loop.time()
            called = self._waiting.pop(client)
            if not called.done():
                called.set_result(None)

    def _gives_way(
        self, client: ClientSession[M], held: Counter[str], now: float
    ) -> tuple[ClientSession[M] | None, float]:
        """Return the stream that must end for ``client`` to have a turn, and when [s].

        The stream is None if a turn is free.
        """
        if len(self._turns) < _TURNS:
            return None, 0.0
        greediest = max(held, key=held.__getitem__)
        if greediest and held[greediest] >= held[client.peer.connection] + 2:
            return next(c for c in self._turns if c.peer.connection == greediest), 0.0
        silent, since = next(iter(self._turns.items()))
        patience_s = self._most_wait_s * min(0.5, 0.6 * _TURNS / len(self._waiting))
        return silent, since + patience_s - now
