"""A service without a network: streams admitted in fair shares, timed, told of errors, drained.

A front end (gRPC in ``server.py``, Ray Serve in ``ray_serve.py``) gives each client's stream to
:meth:`StreamService.converse`. A protocol derives its service from :class:`StreamService`: it says
how a stream is served (:meth:`StreamService.hold`) and how its messages become bytes. All of this
runs in one asyncio loop, which reads, checks and writes; other threads hand it messages
(:class:`ThreadBridge`).
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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from collab_llm_nodes.errors import Busy, CollabError, Unauthenticated, Unavailable
from collab_llm_nodes.transport.admission import MOST_WAIT_S, Admission, Allowance, Peer, Place
from collab_llm_nodes.transport.background import within
from collab_llm_nodes.transport.credentials import read_token
from collab_llm_nodes.transport.figures import ServerFigures
from collab_llm_nodes.transport.settings import ServerConfig

log = logging.getLogger(__name__)

M = TypeVar("M")
"""A message to a client, other than an error."""

Unary = Callable[[bytes], Awaitable[bytes]]
"""One question, one answer; raises CollabError."""

_OPEN_S = 10.0  # from a new stream to its first message
_TURNS = 8  # streams of one address whose first message is awaited at a time
_PARTING_S = 2.0  # from the last word to the client's end of the stream, at most
_PARTINGS = 32  # of streams that were refused a place, at a time
MAX_UNANSWERED = 128
"""Messages of one client between two answers; pushing ahead takes a few."""
MAX_UNANSWERED_BYTES = 4 << 20


class Stream(Protocol):
    """One client's connection."""

    async def read(self) -> bytes | None:
        """Return the next message; None when the client has closed its side.

        Raises:
            ConnectionError: the client is gone.
        """

    async def write(self, data: bytes) -> None:
        """Send one message, waiting for a slow client.

        Raises:
            ConnectionError: the client is gone.
        """


class Outbox(Generic[M]):
    """Messages that wait for one client, the oldest first. A protocol may rank or drop some."""

    def __init__(self) -> None:
        self._messages: deque[M | CollabError] = deque()

    def __len__(self) -> int:
        """Messages that must be sent."""
        return len(self._messages)

    def push(self, message: M | CollabError) -> None:
        """Take ``message`` in."""
        self._messages.append(message)

    def pop(self) -> M | CollabError | None:
        """Return the next message that must be sent."""
        return self._messages.popleft() if self._messages else None

    def pop_optional(self) -> M | None:
        """Return the next of those that are sent only when all else is, and the client listens."""
        return None


class StreamService(abc.ABC, Generic[M]):
    """See the module docstring.

    Attributes:
        name: for messages, logs, threads and metrics, such as "verifier".
        full_name: gRPC's, such as "collab_llm.v1.Verifier".
        stream: name of the method with a bidirectional stream; empty: there is none.
        title: for the log, once it listens.
        max_unanswered_bytes: of one client between two answers.
        most_wait_s: longest wait for the turn of an address; then it is BUSY.
        counts_sessions: charge what comes once a session is open to ``shares.bytes_per_s``, too.
        failed: set when nothing can be computed any more: only another process can.
    """

    name: str
    full_name: str
    stream = "Session"
    max_unanswered_bytes = MAX_UNANSWERED_BYTES
    most_wait_s = MOST_WAIT_S
    counts_sessions = True

    def __init__(self, config: ServerConfig, figures: ServerFigures | None = None) -> None:
        self.server_config = config
        self.title = self.name
        self.figures = figures or ServerFigures(self.name)
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

    # A protocol fills in these.

    @abc.abstractmethod
    async def hold(self, client: ClientSession[M]) -> None:
        """Serve one stream until its client has nothing more to say.

        Begin a session within :meth:`turn`; read by :meth:`read`; tell by ``client.deliver``. What
        has been told is still sent after this returns.

        Raises:
            CollabError: it is told to the client, as its last message.
        """

    @abc.abstractmethod
    def encode(self, message: M | CollabError) -> bytes:
        """Return ``message`` in bytes."""

    def unary(self) -> Mapping[str, Unary]:
        """Return the methods without a stream, by name."""
        return {}

    def make_outbox(self) -> Outbox[M]:
        """Return an empty outbox for a new client."""
        return Outbox()

    def is_last(self, message: M) -> bool:
        """Return True if nothing comes after ``message``."""
        return False

    def is_answer(self, message: M) -> bool:
        """Return True if ``message`` entitles its client to send more."""
        return True

    def on_silence(self, client: ClientSession[M], error: Unavailable) -> None:
        """End the session of ``client``, which neither sends nor reads, unless we are late."""
        client.deliver(error)

    def on_left(self, client: ClientSession[M]) -> None:
        """Free what was kept for ``client``, which is told nothing more."""

    def summary(self, sent: Counter[str]) -> dict[str, int]:
        """Return what the log tells of a session, from the messages sent, by their type's name."""
        return dict(sent)

    def start(self) -> None:
        """Start computing; call it in the loop in which clients are spoken to."""
        self.bridge: ThreadBridge[M] = ThreadBridge(asyncio.get_running_loop())

    async def stop(self) -> bool:
        """Stop computing and free everything; False if a thread is still busy."""
        return True

    # The rest is the same for all.

    async def drain(self, grace_s: float) -> None:
        """Refuse new sessions from now on, and wait ``grace_s`` at most for the open ones."""
        self._draining = True
        with contextlib.suppress(asyncio.TimeoutError):
            await within(self._empty.wait(), grace_s)

    @property
    def serving(self) -> bool:
        """New sessions are taken."""
        return not (self._draining or self.failed.is_set())

    @property
    def sessions(self) -> int:
        """Sessions open now."""
        return sum(client.opened and not client.gone.is_set() for client in self._clients)

    def check_token(self, authorization: str) -> None:
        """Check ``authorization``, which is what the client's metadata of that name holds.

        Raises:
            Unauthenticated: it is not what is configured.
        """
        if self._token and not hmac.compare_digest(
            authorization.encode(), b"Bearer " + self._token
        ):
            raise Unauthenticated(
                "wrong or missing token", field="token", remedy=f"give the {self.name}'s token"
            )

    async def converse(self, stream: Stream, peer: Peer | None = None) -> None:
        """Serve one client until the last message is out, one side leaves, or something is wrong.

        Every error is the client's to know: it is told, then this returns.
        """
        client = ClientSession(self, stream, peer or Peer(), asyncio.current_task())
        self._clients.add(client)
        self._empty.clear()
        self.figures.streams.inc()
        listening = asyncio.ensure_future(self._listen(client))
        try:
            await self._tell(client)
            # If the server closes first, gRPC's client may drop the last unread message. So it is
            # for clients to end streams, who read before they do; a round trip later if they do it
            # at once.
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
            self.figures.streams.dec()

    async def read(self, client: ClientSession[M]) -> bytes | None:
        """Return the next message of ``client``; None when it has nothing more to say.

        Raises:
            Busy: it sends more than anybody needs to.
            ConnectionError: it is gone.
        """
        data = await self._receive(client)
        if data is None or client.gone.is_set():  # nothing counts that comes after the last word
            return None
        client.hear(len(data))
        return data

    @contextlib.asynccontextmanager
    async def turn(self, client: ClientSession[M]) -> AsyncIterator[None]:
        """Hold a turn of the client's address to begin a session, as its allowance lets it.

        A turn lasts until the first message is read. See :class:`_Line` for those who say nothing;
        they use up nothing.

        Raises:
            Busy: the turn would not come soon.
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
            yield
            if not client.hung_up:
                self._begun.use(account, 1.0, loop.time())
        finally:
            line.leave(client)

    def _has_time_for(self, client: ClientSession[M]) -> bool:
        """Return True while the client may still close the stream itself: nobody waits for that."""
        places = self.server_config.limits.max_streams
        refused = len(self._clients) - len(self._admission)
        return (
            (client.opened or self.serving)
            and not client.late
            and len(self._clients) <= places
            and (client.place is not None or refused <= _PARTINGS)
        )

    async def _until_end(self, client: ClientSession[M], listening: asyncio.Future[None]) -> None:
        """Read, and forget, what ``client`` still sends, unless it is a flood."""
        await listening
        loop = asyncio.get_running_loop()
        # What was refused unread is read by a few at a time: all together would fill the memory.
        async with contextlib.nullcontext() if client.opened else self._unheard:
            for _ in range(MAX_UNANSWERED):
                if client.hung_up:
                    break
                if self._received.wait_s(client.peer.account, loop.time()) > 0:
                    await asyncio.sleep(_PARTING_S)  # its messages stay where they are
                await self._receive(client)

    def _admit(self, client: ClientSession[M]) -> None:
        """Find a place for ``client``; another may lose its own, and is told so.

        Raises:
            Unavailable: there is none.
        """
        place, lost = self._admission.enter(client.peer, asyncio.get_running_loop().time())
        client.place = place
        for other in self._clients if lost is not None else ():
            if other.place is lost:
                other.end_late()

    async def _tell(self, client: ClientSession[M]) -> None:
        """Write what there is to tell, up to the last word; then the session is over."""
        try:
            while (message := await client.next()) is not None:
                client.writing = True
                await client.stream.write(self.encode(message))
                client.writing = False
                if isinstance(message, CollabError):
                    client.failures += 1
                    self.figures.failures.labels(message.code).inc()
                    break
                client.sent[type(message).__name__] += 1
                if self.is_last(message):
                    break
        finally:
            client.close()
            self.on_left(client)
            if client.place is not None:
                self._admission.leave(client.place)
            log.info("session ended", extra=client.summary())

    async def _listen(self, client: ClientSession[M]) -> None:
        """Read what the client sends until it has nothing more to say."""
        try:
            if not self.serving:
                raise Unavailable(
                    f"the {self.name} is shutting down",
                    field="session",
                    remedy="try again, or another",
                )
            self._admit(client)
            await self.hold(client)
        except CollabError as error:
            client.deliver(error)
        except ConnectionError:
            pass  # as if it had closed its side
        except Exception:  # whatever it is, it is a fault here, and one client's session
            log.exception("session %s failed", client.id[:8])
            remedy = f"see its log: session {client.id[:8]}"
            client.deliver(CollabError(f"the {self.name} failed", remedy=remedy))
        client.end()

    async def _receive(self, client: ClientSession[M]) -> bytes | None:
        data = await client.stream.read()
        client.hung_up = data is None
        if data is not None and (self.counts_sessions or not client.opened):
            now = asyncio.get_running_loop().time()
            self._received.use(client.peer.account, len(data), now)
        return data


class ClientSession(Generic[M]):
    """One client's stream: what is to be told to it, and how long it has been silent.

    ``post`` is called by any thread, everything else by the loop.

    Attributes:
        owner: equal for all that share what is scarce; empty: nobody.
        urgent: it comes before the others of its owner; set before ``open``.
        gone: it is told nothing more: stop computing for it.
        opened: it has said what it wants.
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
        self.late = False  # its first message did not come while others waited
        self.hung_up = False  # the client has ended its side of the stream
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
        """Messages that wait for the client to read those before them."""
        return len(self._outbox)

    def open(self) -> None:
        """Note that the client has said what it wants, and that it may have it."""
        assert self.place is not None
        self.opened = self.place.opened = True

    def post(self, message: M | CollabError, more: bool = False) -> None:
        """Have ``message`` delivered, from another thread; with ``more``, when the next one is."""
        self._service.bridge.post(self, message, more)

    def deliver(self, message: M | CollabError) -> None:
        """Have ``message`` sent; an error is the last."""
        self._heard_at = self._loop.time()  # while it has to wait for us, it is not silent
        if not isinstance(message, CollabError) and self._service.is_answer(message):
            self._unanswered = self._unanswered_bytes = 0
        self._outbox.push(message)
        self._wake.set()

    def end_late(self) -> None:
        """End the stream, because its first message did not come while others wait.

        It is closed at once: what it would still send has not been waited for.
        """
        self.late = True
        self.deliver(
            Unavailable(
                "streams are scarce and the first message did not come in time",
                field="session",
                remedy="send it at once, on a new stream",
            )
        )

    async def next(self) -> M | CollabError | None:
        """Return the next message to send; None when the client wants no more."""
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
        """Note that the client says nothing more; what waits in the outbox is still sent."""
        self._ended = True
        self._wake.set()

    def hear(self, size: int) -> None:
        """Count a message of ``size`` bytes that came.

        Raises:
            Busy: more than anybody needs to send before the next answer.
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
        """End the conversation."""
        self.gone.set()
        self._timer.cancel()

    def summary(self) -> dict[str, object]:
        """Return what the log tells of the session."""
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
            self._task.cancel()  # telling it would take as long
            return
        if left <= 0:
            silent = Unavailable(
                f"nothing came for {limit:g} s", field="session", remedy="use a new stream"
            )
            if self.opened:  # it may be we who are late
                self._service.on_silence(self, silent)
            else:
                self.deliver(silent)
        # Also behind a farewell: to write it may take for ever.
        self._timer = self._loop.call_later(left if left > 0 else limit, self._check_silence)


class ThreadBridge(Generic[M]):
    """Carries messages from another thread into the loop, waking it once for many."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._messages: deque[tuple[ClientSession[M], M | CollabError]] = deque()
        self._called = False

    def post(self, client: ClientSession[M], message: M | CollabError, more: bool = False) -> None:
        """Have ``client`` deliver ``message``, from any one thread.

        Args:
            more: another follows at once; they may be carried together.
        """
        self._messages.append((client, message))
        if not (more or self._called):
            self._called = True
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all clients with it
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._called = False  # before reading: what comes from now on calls again
        while self._messages:
            client, message = self._messages.popleft()
            client.deliver(message)


class _Line(Generic[M]):
    """The streams of one address that have not said what they want: few may do so at a time.

    So little of what they send is in memory before it counts. A stream that says nothing ends if
    another waits for its turn: at once if its connection has two turns more than the other's, else
    after half of the time for which the other may wait, or sooner if many wait.

    Args:
        allowed_in_s: returns the time until the address may use up more [s].
        most_wait_s: longest wait for a turn.
    """

    def __init__(self, allowed_in_s: Callable[[], float], most_wait_s: float) -> None:
        self._allowed_in_s = allowed_in_s
        self._most_wait_s = most_wait_s
        self._turns: dict[ClientSession[M], float] = {}  # since; the longest first
        self._waiting: dict[ClientSession[M], asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def join(self, client: ClientSession[M]) -> None:
        """Wait for a turn of ``client``, which must :meth:`leave` whether it got one or not."""
        called = self._waiting[client] = asyncio.get_running_loop().create_future()
        self._call()
        await called

    def leave(self, client: ClientSession[M]) -> None:
        """Take back the turn of ``client``, or its place in the line."""
        self._turns.pop(client, None)
        self._waiting.pop(client, None)
        self._call()

    def _call(self) -> None:
        """Give turns to all who may have one, and look again when the next one may."""
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
        """Return the stream that must end for ``client`` to have a turn, and in how many seconds.

        None if a turn is free.
        """
        if len(self._turns) < _TURNS:
            return None, 0.0
        greediest = max(held, key=held.__getitem__)
        if greediest and held[greediest] >= held[client.peer.connection] + 2:
            return next(c for c in self._turns if c.peer.connection == greediest), 0.0
        silent, since = next(iter(self._turns.items()))
        patience_s = self._most_wait_s * min(0.5, 0.6 * _TURNS / len(self._waiting))
        return silent, since + patience_s - now
