"""What the verifier says to whom, whatever carries the bytes: gRPC (``service.py``) or another.

A front end gives each client's stream to :meth:`Verifier.converse`. All of this runs in one asyncio
loop, which reads, checks and writes; the model and the sessions belong to the compute thread.
Reading goes on while a draft is verified, since more may be pushed ahead; early exits leave while
the forward pass goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import (
    Busy,
    CollabError,
    InvalidInput,
    ProtocolError,
    Unauthenticated,
    Unavailable,
)
from collab_llm_nodes.models.pictures import Picture
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt, pixel_limit
from collab_llm_nodes.models.vocabulary import check_same
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud.info import ServerInfo, version
from collab_llm_nodes.protocols.edge_cloud.messages import (
    Close,
    Draft,
    EarlyExit,
    Failure,
    Open,
    Opened,
    ServerMessage,
    Verdict,
    failure_of,
)
from collab_llm_nodes.protocols.edge_cloud.server import EarlyExitQueue
from collab_llm_nodes.protocols.edge_cloud.settings import VerifierConfig
from collab_llm_nodes.protocols.edge_cloud.target import TargetJudge, TargetSession
from collab_llm_nodes.protocols.edge_cloud.telemetry import Telemetry
from collab_llm_nodes.protocols.edge_cloud.verifier_client import read_token
from collab_llm_nodes.serving.compute import Compute
from collab_llm_nodes.serving.pictures import PictureLimits, PictureReader
from collab_llm_nodes.serving.turns import Turns
from collab_llm_nodes.transport.admission import MOST_WAIT_S, Admission, Allowance, Peer, Place
from collab_llm_nodes.transport.background import within

log = logging.getLogger(__name__)

_OPEN_S = 10.0  # from a new stream to its Open message
_FREE_S = 0.5  # at the end, for the compute thread to free what is left
_TURN_S = 0.2  # for a client's Open to arrive before the next of its address may come
_PARTING_S = 2.0  # from the last word to the client's end of the stream, at most
_PARTINGS = 32  # of streams that were refused a place, at a time
MAX_UNANSWERED = 128
"""Messages of one client between two verdicts; pushing ahead takes a few."""
MAX_UNANSWERED_BYTES = 4 << 20

Encode = Callable[[Prompt], EncodedPrompt]
Outgoing = Opened | EarlyExit | Verdict | CollabError


class Stream(Protocol):
    """One client's connection."""

    async def read(self) -> bytes | None:
        """The next message; None when the client has closed its side."""

    async def write(self, data: bytes) -> None:
        """Send one message, waiting for a slow client.

        Raises:
            ConnectionError: the client is gone.
        """


class Verifier:
    """The service without a network.

    Args:
        engine: the target model.
        encode: prompts to token ids.

    Attributes:
        failed: set when nothing can be computed any more: only another process can.
    """

    def __init__(self, config: VerifierConfig, engine: Engine, encode: Encode) -> None:
        self.config = config
        self.model = Path(engine.loaded.config.path).name
        self.telemetry = Telemetry()
        self._engine = engine
        self._encode = encode
        self._limits = replace(
            config.limits,
            max_image_pixels=pixel_limit(config.limits.max_image_pixels, engine.loaded),
        )
        self._pictures = (
            PictureReader(
                config.pictures,
                PictureLimits(
                    self._limits.max_message_bytes,
                    self._limits.max_image_bytes,
                    self._limits.max_image_pixels,
                    self._limits.max_image_scans,
                ),
                engine.loaded,
                "verifier",
            )
            if engine.loaded.image_processor is not None
            else None
        )
        self._token = read_token(config.token, config.token_file).encode()
        self._admission = Admission(config.limits.max_streams, config.shares)
        self._begun = Allowance(config.shares.sessions_per_s)
        self._received = Allowance(config.shares.bytes_per_s)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._seats: set[_Seat] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._draining = False
        self.failed = asyncio.Event()

    def start(self) -> None:
        """Start computing; call it in the loop in which clients are spoken to."""
        c = self.config
        loop = asyncio.get_running_loop()

        def fail() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all seats with it
                loop.call_soon_threadsafe(self.failed.set)

        self._post_office = _PostOffice(loop)
        # Reading a prompt takes as long as some passes: not in the compute thread, not in the loop.
        self._reader = ThreadPoolExecutor(1, "verifier-reader")
        self._reading = Turns(1)
        if self._pictures is not None:
            self._pictures.start()
        self._compute = Compute(
            self._engine,
            batch=c.batch,
            max_sessions=c.limits.max_sessions,
            emulated_compute_s=c.emulated_compute_s,
            judge=TargetJudge(c.exits, self.telemetry.count_verdicts),
            name="verifier",
            figures=self.telemetry.compute,
            on_failure=fail,
        )
        if c.emulated_compute_s:
            log.warning("EMULATION: a forward pass takes at least %g s", c.emulated_compute_s)

    async def drain(self, grace_s: float) -> None:
        """Refuse new sessions from now on, and wait ``grace_s`` at most for the open ones."""
        self._draining = True
        with contextlib.suppress(asyncio.TimeoutError):
            await within(self._empty.wait(), grace_s)

    async def stop(self) -> bool:
        """Stop computing and free everything; False if a thread is still busy."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        if self._pictures is not None:
            await self._pictures.stop()
        loop = asyncio.get_running_loop()
        ended = await asyncio.gather(
            loop.run_in_executor(None, self._compute.stop, _FREE_S), self._reading.idle(_FREE_S)
        )
        if not all(ended):
            log.warning("the model is still busy")
        return all(ended)

    @property
    def serving(self) -> bool:
        """Whether new sessions are taken."""
        return not (self._draining or self.failed.is_set())

    @property
    def sessions(self) -> int:
        """Sessions open now, with or without a KV cache."""
        return sum(seat.opened and not seat.gone.is_set() for seat in self._seats)

    def check_token(self, authorization: str) -> None:
        """``authorization`` is what the client's metadata of that name holds.

        Raises:
            Unauthenticated: it is not what is configured.
        """
        if self._token and not hmac.compare_digest(
            authorization.encode(), b"Bearer " + self._token
        ):
            raise Unauthenticated(
                "wrong or missing token", field="token", remedy="give the verifier's token"
            )

    def describe(self) -> bytes:
        """The answer to Describe."""
        engine = self._engine
        return codec.encode_info(
            ServerInfo(
                self.model,
                engine.vocabulary,
                engine.vocab_size,
                engine.exit_layers,
                version(),
                self._limits,
                self.sessions,
            )
        )

    async def converse(self, stream: Stream, peer: Peer | None = None) -> None:
        """Serve one client until the answer is complete, one side leaves, or something is wrong.

        Every error is the client's to know: it is told by a ``Failure``, then this returns.
        """
        seat = _Seat(
            self._post_office, self._compute, self.config, peer or Peer(), asyncio.current_task()
        )
        self._seats.add(seat)
        self._empty.clear()
        self.telemetry.streams.inc()
        listening = asyncio.ensure_future(self._listen(seat, stream))
        try:
            await self._tell(seat, stream)
            # Whoever writes to a stream that has ended is told so by gRPC, and of nothing that
            # came before and was not read yet, such as the last word. So it is for clients to end
            # streams, who read before they do; a round trip later if they do it at once.
            if self._has_time_for(seat):
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(self._until_end(seat, stream, listening), _PARTING_S)
        except ConnectionError as lost:
            log.debug("session %s: %s", seat.id[:8], lost)
        finally:
            listening.cancel()
            self._seats.discard(seat)
            if not self._seats:
                self._empty.set()
            self.telemetry.streams.dec()

    def _has_time_for(self, seat: _Seat) -> bool:
        """Whether no other client, and no shutdown, has to wait for the parting from this one."""
        places = self.config.limits.max_streams
        refused = len(self._seats) - len(self._admission)
        return (
            (seat.opened or self.serving)
            and len(self._seats) <= places
            and (seat.place is not None or refused <= _PARTINGS)
        )

    async def _until_end(
        self, seat: _Seat, stream: Stream, listening: asyncio.Future[None]
    ) -> None:
        """Read, and forget, what the client of ``stream`` still sends, unless it is a flood."""
        await listening
        loop = asyncio.get_running_loop()
        for _ in range(MAX_UNANSWERED):
            if seat.hung_up:
                break
            if self._received.wait_s(seat.peer.address, loop.time()) > 0:
                await asyncio.sleep(_PARTING_S)  # its messages stay where they are
            await self._receive(seat, stream)

    def _admit_stream(self, seat: _Seat) -> None:
        """Find a place for ``seat``; another may lose its own, and is told so.

        Raises:
            Unavailable: there is none.
        """
        place, lost = self._admission.enter(seat.peer, asyncio.get_running_loop().time())
        seat.place = place
        for other in self._seats if lost is not None else ():
            if other.place is lost:
                other.deliver(
                    Unavailable(
                        "streams are scarce and no Open came in time",
                        field="session",
                        remedy="send Open at once, on a new stream",
                    )
                )

    async def _tell(self, seat: _Seat, stream: Stream) -> None:
        """Write what there is to tell, up to the last word; then the session is over."""
        try:
            while (message := await seat.next()) is not None:
                seat.writing = True
                await stream.write(codec.encode(message))
                seat.writing = False
                seat.sent[type(message).__name__] += 1
                if isinstance(message, Failure):
                    self.telemetry.failures.labels(message.code).inc()
                    break
                if isinstance(message, Verdict) and message.finished:
                    break
        finally:
            seat.close()
            self._compute.leave(seat)
            if seat.place is not None:
                self._admission.leave(seat.place)
            log.info("session ended", extra=seat.summary())

    async def _listen(self, seat: _Seat, stream: Stream) -> None:
        """Read what the client sends until it has nothing more to say."""
        try:
            if not self.serving:
                raise Unavailable(
                    "the verifier is shutting down", field="session", remedy="try again, or another"
                )
            self._admit_stream(seat)
            asked = await self._hear_open(seat, stream)
            if asked is not None:
                await self._open(seat, *asked)
                del asked
                await self._take_drafts(seat, stream)
        except CollabError as error:
            seat.deliver(error)
        except ConnectionError:
            pass  # as if it had closed its side
        except Exception:  # whatever it is, it is a fault here, and one client's session
            log.exception("session %s failed", seat.id[:8])
            remedy = f"see its log: session {seat.id[:8]}"
            seat.deliver(CollabError("the verifier failed", remedy=remedy))
        seat.end()

    @contextlib.asynccontextmanager
    async def _turn(self, address: str) -> AsyncIterator[None]:
        """Hold the turn of ``address`` to begin a session, as its allowance lets it.

        Its sessions begin one after another. One that takes long to say what it wants holds up the
        next for ``_TURN_S`` only.

        Raises:
            Busy: the turn would not come soon.
        """
        lock = self._turns.setdefault(address, asyncio.Lock()) if address else asyncio.Lock()
        loop = asyncio.get_running_loop()

        async def take() -> _Once:
            await lock.acquire()
            over = _Once(lock.release)
            try:
                await asyncio.sleep(
                    max(used.wait_s(address, loop.time()) for used in (self._begun, self._received))
                )
            except BaseException:
                over()
                raise
            loop.call_later(_TURN_S, over)
            return over

        try:
            over = await within(take(), MOST_WAIT_S)
        except asyncio.TimeoutError as error:
            raise Busy(
                "one address begins too many sessions, or sends too many bytes, in a second",
                field="session",
                remedy="try again later, or raise shares.sessions_per_s and shares.bytes_per_s on"
                " the verifier",
            ) from error
        self._begun.use(address, 1.0, loop.time())
        try:
            yield
        finally:
            over()

    async def _hear_open(self, seat: _Seat, stream: Stream) -> tuple[Open, Prompt] | None:
        """Read Open and decode its pictures; their files are not kept, and may be large."""
        async with self._turn(seat.peer.address):
            opened = await self._read(seat, stream)
        if isinstance(opened, Draft):
            raise ProtocolError(
                "the first message must be Open", field="message", remedy="send Open first"
            )
        if not isinstance(opened, Open):
            return None
        self._admit(opened)
        assert seat.place is not None
        seat.opened = seat.place.opened = True
        decoded: tuple[Picture, ...] = ()
        if self._pictures is not None:
            decoded = await self._pictures.read_all(opened.images, seat.peer)
        prompt = Prompt(opened.text, (b"",) * len(opened.images), decoded)
        return replace(opened, images=()), prompt

    async def _open(self, seat: _Seat, opened: Open, prompt: Prompt) -> None:
        loop = asyncio.get_running_loop()
        target = await self._reading.run(
            seat.peer,
            1.0 + len(prompt.images),
            lambda: loop.run_in_executor(self._reader, self._read_prompt, seat, prompt, opened),
        )
        self._compute.open(seat, target)

    def _read_prompt(self, seat: _Seat, asked: Prompt, opened: Open) -> TargetSession:
        """In the reader's thread: prompt to ids, pictures to features."""
        prompt = self._encode(asked)
        room = self._engine.context - len(prompt.ids)
        if opened.max_tokens > room:
            raise InvalidInput(
                f"a prompt of {len(prompt.ids)} tokens leaves room for {room}",
                field="max_tokens",
                remedy="lower max_tokens or shorten the prompt",
            )
        target = TargetSession(self._engine, prompt, opened, self.config.exits)
        if not seat.gone.is_set():
            target.encode_images()
        return target

    async def _take_drafts(self, seat: _Seat, stream: Stream) -> None:
        while isinstance(message := await self._read(seat, stream), Open | Draft):
            if isinstance(message, Open):
                raise ProtocolError(
                    "the session is open already", field="message", remedy="use a new stream"
                )
            self._compute.submit(seat, message)

    async def _read(self, seat: _Seat, stream: Stream) -> Open | Draft | Close | None:
        data = await self._receive(seat, stream)
        if data is None or seat.gone.is_set():  # nothing counts that comes after the last word
            return None
        seat.hear(len(data))
        return codec.decode_client(data)

    async def _receive(self, seat: _Seat, stream: Stream) -> bytes | None:
        data = await stream.read()
        seat.hung_up = data is None
        if data is not None:
            now = asyncio.get_running_loop().time()
            self._received.use(seat.peer.address, len(data), now)
        return data

    def _admit(self, opened: Open) -> None:
        """Check all that can be checked without the model."""
        limits = self.config.limits
        check_same(opened.vocabulary, self._engine.vocabulary, draft="model", target=self.model)
        if not opened.text.strip():
            raise InvalidInput("the prompt is empty", field="text", remedy="say what is wanted")
        _at_most(len(opened.text), limits.max_prompt_chars, "text", "characters")
        _at_most(len(opened.images), limits.max_images, "images", "images")
        for i, image in enumerate(opened.images):
            _at_most(len(image), limits.max_image_bytes, f"images[{i}]", "bytes")
        _at_most(opened.max_tokens, limits.max_tokens, "max_tokens", "tokens")
        if opened.max_tokens < 1:
            raise InvalidInput("must be >= 1", field="max_tokens", remedy="ask for some tokens")


class _Seat:
    """One client's place: what is to be told to it, and how long it has been silent.

    ``post`` is called by the compute thread, everything else by the loop.
    """

    def __init__(
        self,
        post_office: _PostOffice,
        compute: Compute,
        config: VerifierConfig,
        peer: Peer,
        task: asyncio.Task[None] | None,
    ) -> None:
        self.id = secrets.token_hex(16)
        self.peer = peer
        self.owner = peer.address
        self.place: Place | None = None  # until it is admitted
        self.gone = threading.Event()
        self.opened = False
        self.writing = False
        self.hung_up = False  # the client has ended its side of the stream
        self.sent: Counter[str] = Counter()
        self._post_office = post_office
        self._compute = compute
        self._task = task
        self._outbox: deque[ServerMessage] = deque()  # bounded: one answer's verdicts at most
        self._exits = EarlyExitQueue(config.exits)
        self._ended = False
        self._wake = asyncio.Event()
        self._idle_s = config.limits.idle_s
        self._loop = asyncio.get_running_loop()
        self._since = self._heard_at = self._loop.time()
        self._unanswered = self._unanswered_bytes = 0
        self._timer = self._loop.call_later(min(_OPEN_S, self._idle_s), self._check_silence)

    def post(self, message: Outgoing, more: bool = False) -> None:
        """Have ``message`` delivered, from any thread; with ``more``, when the next one is."""
        self._post_office.post(self, message, more)

    def deliver(self, message: Outgoing) -> None:
        """Have ``message`` sent. Exits wait for all else and are dropped when their verdict is."""
        self._heard_at = self._loop.time()  # while the verifier has it wait, it is not silent
        if isinstance(message, EarlyExit):
            self._exits.push(message)
        elif isinstance(message, CollabError):
            self._outbox.append(failure_of(message))
        else:
            if isinstance(message, Verdict):
                self._exits.reset()
                self._unanswered = self._unanswered_bytes = 0
            self._outbox.append(message)
        self._wake.set()

    async def next(self) -> ServerMessage | None:
        """The next message to send; None when the client wants no more."""
        while True:
            if self._outbox:
                return self._outbox.popleft()
            if self._ended:
                return None
            if (exit_ := self._exits.pop()) is not None:
                return exit_
            self._wake.clear()
            await self._wake.wait()

    def end(self) -> None:
        """The client says nothing more: what is in the outbox is sent, and that is all."""
        self._ended = True
        self._wake.set()

    def hear(self, size: int) -> None:
        """A message of ``size`` bytes came.

        Raises:
            Busy: more than anybody needs to send before the next verdict.
        """
        self._heard_at = self._loop.time()
        if not self.opened:
            return
        self._unanswered += 1
        self._unanswered_bytes += size
        if self._unanswered > MAX_UNANSWERED or self._unanswered_bytes > MAX_UNANSWERED_BYTES:
            raise Busy(
                f"{self._unanswered} messages of {self._unanswered_bytes} bytes since the last"
                " verdict",
                field="message",
                remedy="wait for verdicts, or push fewer drafts ahead",
            )

    def close(self) -> None:
        """The conversation is over."""
        self._timer.cancel()

    def summary(self) -> dict[str, object]:
        """For the log."""
        return {
            "session": self.id[:8],
            "seconds": round(self._loop.time() - self._since, 3),
            "verdicts": self.sent["Verdict"],
            "early_exits": self.sent["EarlyExit"],
            "failures": self.sent["Failure"],
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
            if self.opened:  # it may be the verifier that is late: the compute thread knows
                self._compute.end_if_idle(self, silent)
            else:
                self.deliver(silent)
        # Also behind a farewell: to write it may take for ever.
        self._timer = self._loop.call_later(left if left > 0 else limit, self._check_silence)


class _PostOffice:
    """Carries messages from the compute thread into the loop, waking it once for many."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: deque[tuple[_Seat, Outgoing]] = deque()
        self._called = False

    def post(self, seat: _Seat, message: Outgoing, more: bool) -> None:
        """Have ``seat`` deliver ``message``; from the compute thread."""
        self._letters.append((seat, message))
        if not (more or self._called):
            self._called = True
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all seats with it
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._called = False  # before reading: what comes from now on calls again
        while self._letters:
            seat, message = self._letters.popleft()
            seat.deliver(message)


class _Once:
    """Calls ``job`` the first time it is called."""

    def __init__(self, job: Callable[[], None]) -> None:
        self._job: Callable[[], None] | None = job

    def __call__(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job()


def _at_most(value: int, limit: int, field_name: str, unit: str) -> None:
    if value > limit:
        raise InvalidInput(f"{value} {unit}, {limit} at most", field=field_name, remedy="send less")
