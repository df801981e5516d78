"""The loop that runs one side's machine: events come in from any thread, one thread handles them.

                                  ┌── peer's messages, stream lost ... (any thread)
    compute thread ── Decoded ──▶ inbox ──▶ SideLoop ──▶ machine ──▶ send(message)
        ▲                                      │
        └───────── wanted pass, or its end ────┘

Device and cloud use the same loop; they differ in what carries the messages.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import numpy as np

from collab_llm_nodes.errors import Cancelled, CollabError
from collab_llm_nodes.protocols.dragon.machine import Pass, SideMachine
from collab_llm_nodes.protocols.dragon.messages import Message
from collab_llm_nodes.protocols.dragon.side import SideDecoder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ready:
    """The documents are found and the prompt can be read."""


@dataclass(frozen=True)
class Decoded:
    """A pass returned a distribution ``seconds`` after its request."""

    done: Pass
    p: np.ndarray
    log_weight: float
    seconds: float


@dataclass(frozen=True)
class Ended:
    """A pass was ended without a result."""

    done: Pass


@dataclass(frozen=True)
class Failed:
    """The model cannot go on."""

    error: CollabError


@dataclass(frozen=True)
class Heard:
    """A message of the peer, ``size`` bytes long."""

    message: Message
    size: int


ModelEvent = Ready | Decoded | Ended | Failed


class Passes:
    """The model's work on one answer, done in the side's compute thread, one pass at a time.

    Args:
        compute: runs one job at a time; answers take turns in it, pass by pass.
        open_decoder: finds the documents and opens the decoder.
        on_event: called with results and errors, in the compute thread.
        part: tokens of a prompt that are read in one turn at most; None: all.

    Attributes:
        running: the pass under way.
        ready: passes may be started.
    """

    def __init__(
        self,
        compute: Executor,
        open_decoder: Callable[[], SideDecoder],
        on_event: Callable[[ModelEvent], None],
        part: int | None = None,
    ) -> None:
        self._compute = compute
        self._part = part
        self._open_decoder = open_decoder
        self._on_event = on_event
        self._decoder: SideDecoder | None = None
        self._held: list[int] = []  # tokens that the decoder has been given
        self._future: Future[None] | None = None
        self.running: Pass | None = None
        self.ready = False

    def open(self) -> None:
        """Start to find the documents."""
        self._submit(self._open)

    def start(self, wanted: Pass) -> None:
        """Start the pass ``wanted``."""
        self.running = wanted
        asked_at = time.perf_counter()
        self._future = self._submit(lambda: self._run(wanted, asked_at))

    def end(self) -> None:
        """End the current pass. Unless it had not begun, ``Ended`` or its result still comes."""
        if self.running is None or self._future is None:
            return
        if self._future.cancel():  # it had not begun
            self.running = None
        elif self._decoder is not None:
            self._decoder.cancel()

    def close(self) -> None:
        """End the current work and free the decoder, as soon as the compute thread can."""
        self.end()
        self.ready = False
        self._submit(self._close)

    def _submit(self, job: Callable[[], None]) -> Future[None] | None:
        try:
            return self._compute.submit(job)
        except RuntimeError:  # the executor was shut down, and its thread frees all at its end
            return None

    # In the compute thread.

    def _open(self) -> None:
        with self._telling():
            self._decoder = self._open_decoder()
            self._on_event(Ready())

    def _run(self, wanted: Pass, asked_at: float) -> None:
        decoder = self._decoder
        if decoder is None:  # closed between two parts of the prompt
            return
        with self._telling():
            self._align(decoder, wanted.prefix)
            try:
                if self._part is not None and decoder.read_on(self._part):
                    self._future = self._submit(lambda: self._run(wanted, asked_at))
                    return
                p, log_weight = decoder.next()
            except Cancelled:
                self._on_event(Ended(wanted))
            else:
                self._on_event(Decoded(wanted, p, log_weight, time.perf_counter() - asked_at))

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Report an error to the loop, which waits for this thread."""
        try:
            yield
        except CollabError as error:
            self._on_event(Failed(error))
        except Exception as error:  # ends this answer, not the thread
            log.exception("a pass failed")
            self._on_event(Failed(CollabError(f"the model failed: {error}", remedy="see the log")))

    def _align(self, decoder: SideDecoder, prefix: tuple[int, ...]) -> None:
        """Roll the decoder back to what it shares with ``prefix``, and push the rest."""
        common = 0
        for held, token in zip(self._held, prefix, strict=False):
            if held != token:
                break
            common += 1
        if common < len(self._held):
            decoder.rollback(common)
            del self._held[common:]
        for token in prefix[common:]:
            decoder.push(token)
            self._held.append(token)

    def _close(self) -> None:
        if self._decoder is not None:
            self._decoder.close()
            self._decoder = None


class SideLoop:
    """One machine with its passes. One thread calls everything but :meth:`post`.

    Args:
        send: takes the messages for the peer; called in the loop's thread.
        part: see :class:`Passes`.
    """

    def __init__(
        self, machine: SideMachine, send: Callable[[Message], None], part: int | None = None
    ) -> None:
        self.machine = machine
        self._part = part
        self._send = send
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._passes: Passes | None = None

    def post(self, event: object) -> None:
        """Queue ``event``; from any thread."""
        self._inbox.put(event)

    def begin(self, compute: Executor, open_decoder: Callable[[], SideDecoder]) -> None:
        """Start to find the documents; drafting follows."""
        self._passes = Passes(compute, open_decoder, self.post, self._part)
        self._passes.open()

    def next_event(self, due: float) -> object | None:
        """Wait for an event until ``due`` (``time.monotonic()``); None: none came."""
        try:
            return self._inbox.get(timeout=min(3600.0, max(0.0, due - time.monotonic())))
        except queue.Empty:
            return None

    def serve(self, event: object, now: float) -> None:
        """Handle an event of the model or of the peer.

        Raises:
            CollabError: the model cannot go on, or the peer says what it may not.
        """
        passes = self._passes
        assert passes is not None
        if isinstance(event, Decoded | Ended) and passes.running is event.done:
            passes.running = None
        if isinstance(event, Ready):
            passes.ready = True
        elif isinstance(event, Decoded):
            self.machine.on_pass(event.done, event.p, event.log_weight, event.seconds, now)
        elif isinstance(event, Ended):
            self.machine.figures.ended_passes += 1
        elif isinstance(event, Failed):
            raise event.error
        elif isinstance(event, Heard):
            self.machine.on_message(event.message, now, event.size)
        self.follow()

    def follow(self) -> None:
        """Send the machine's messages, and start or end its pass."""
        passes, machine = self._passes, self.machine
        assert passes is not None
        for message in machine.poll():
            self._send(message)
        if passes.running is not None and machine.is_void(passes.running):
            passes.end()
        if passes.running is None and passes.ready and (wanted := machine.wanted) is not None:
            passes.start(wanted)

    def close(self) -> None:
        """End the current pass and free the model's caches."""
        if self._passes is not None:
            self._passes.close()
