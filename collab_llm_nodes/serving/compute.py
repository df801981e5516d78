"""The compute thread: it owns the model and all jobs, and serves them in batched passes.

A :class:`Job` is one client's session, computed turn by turn; a :class:`Judge` evaluates the
results of a pass for all jobs together. A protocol provides both, and the messages.

Other threads post events (open, submit, leave) and never wait; results leave by each client's
``post``. So each job is used by one thread only, events are accepted while a pass runs, and the KV
cache of a client that has left is always freed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from collab_llm_nodes.engine.device import high_priority, synchronize
from collab_llm_nodes.engine.interface import Feed, OnExit, ServingEngine
from collab_llm_nodes.errors import (
    Cancelled,
    CollabError,
    InvalidInput,
    ModelError,
    Replay,
    Unavailable,
)
from collab_llm_nodes.models.devices import is_lost
from collab_llm_nodes.models.footprint import format_bytes
from collab_llm_nodes.serving.metrics import ComputeMetrics
from collab_llm_nodes.serving.scheduler import (
    BatchConfig,
    Evicted,
    Granted,
    ReadyQueue,
    Refused,
    Slots,
)

log = logging.getLogger(__name__)

Work = Any
"""Input that a client submits to its job, such as a draft."""
Message = Any
"""A message to a client; an error is a :class:`CollabError`."""
Finding = Any
"""A judge's evaluation of the logits of one job, for ``Job.conclude``."""


class Client(Protocol):
    """The receiver of one job's messages. An error is the last message."""

    id: str
    owner: str  # clients of one owner share KV caches; empty: shares with none
    urgent: bool  # comes before the others of its owner
    gone: threading.Event  # it has left: stop computing for it

    def post(self, message: Message, more: bool = False) -> None:
        """Queue ``message``, from the compute thread; must not block.

        Args:
            more: further messages are posted at once, to any client; they may be sent together.
        """


class Job(Protocol):
    """One client's session of the model. Once opened, only the compute thread uses it.

    First the prompt is read: ``read_on`` until nothing is ``unread``. Then come turns: when one is
    ``due``, ``begin`` returns its feed, and ``conclude`` receives the logits.
    """

    @property
    def unread(self) -> int:
        """Number of prompt tokens that have not been fed."""

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens that the KV cache will hold."""

    @property
    def due(self) -> bool:
        """True if a turn waits for :meth:`begin`."""

    @property
    def finished(self) -> bool:
        """True if the message of the last turn was the last of all."""

    def read_on(self, count: int) -> Feed:
        """Return the feed of the next ``count`` unread tokens."""

    def opened(self, client_id: str) -> Message:
        """Return the message to the client once the prompt is read."""

    def offer(self, work: Work) -> bool:
        """Accept ``work`` for this turn or a later one; return False if it is obsolete.

        Raises:
            CollabError: it is invalid; this ends the job.
        """

    def begin(self, on_exit: OnExit) -> Feed | None:
        """Start the turn that is due.

        Args:
            on_exit: for ``Feed``, if early exits are wanted, which the judge previews.
        """

    def conclude(
        self, logits: Tensor, compute_s: float, queue_s: float, finding: Finding
    ) -> Message:
        """Return the message to the client about the turn that was begun.

        Args:
            logits: of the last layer, [tokens fed, vocabulary].
            compute_s: duration of the pass [s].
            queue_s: time that the turn was due before it [s].
            finding: of the judge; None if it has none.
        """

    def close(self) -> None:
        """Free the KV cache."""


class Judge:
    """Evaluates the results of a pass for all jobs together, where that is cheaper than one by one.

    This base class leaves everything to the jobs and forwards no early exits.

    Attributes:
        min_lead_s: early exits are computed only if they precede the end of the pass by this time
            [s], and by enough to be worth their own time; 0: all are.
    """

    min_lead_s = math.inf

    def warm_up(self, layer: int, logits: Tensor) -> None:
        """Process ``logits`` like those of an exit, and discard the result."""

    def find(self, results: Sequence[tuple[Any, Tensor]]) -> Sequence[Finding]:
        """Return the finding for each job, given the logits of its turn."""
        return [None] * len(results)

    def preview(self, layer: int, exits: Sequence[tuple[Any, Tensor]]) -> Sequence[Message | None]:
        """Return the message to each job's client about the logits of an early exit."""
        return [None] * len(exits)

    def count(self, concluded: Sequence[Message]) -> None:
        """Record the messages that concluded the turns of one pass."""


@dataclass(eq=False)
class _Session:
    """One client's job and its state."""

    job: Job
    ready: bool = False  # the prompt is read
    evicted: bool = False


_EXIT_PAYS = 8
"""Least lead of an exit over the verdict, as a multiple of its own duration.

An exit delays the verdicts of all sessions by its duration. Its lead helps only a robot that did
not predict the outcome itself: for one verdict in five with the shipped pair (docs/benchmarks).
"""
_DRAFT_ROWS = 16
"""Rows of a draft for which memory is kept free beside the KV caches."""
_SESSION_TOKENS = 4096
"""Tokens of a session for which a server must have memory, or it does not start."""


class Compute:
    """Serves all clients from one thread.

    Args:
        max_sessions: KV caches at a time, if there is memory for them.
        pixels: of the largest picture that is encoded beside the passes.
        cache_share: part of the free memory that is for KV caches of ``engine``.
        judge: of all jobs.
        name: of the service, for messages.
        emulated_compute_s: EMULATION: a pass takes at least this long.
        on_failure: called from the compute thread when it can compute nothing any more.

    Attributes:
        warm: set after the first passes, which are slow, or their failure.
    """

    def __init__(
        self,
        engine: ServingEngine,
        *,
        batch: BatchConfig,
        max_sessions: int,
        pixels: int = 0,
        cache_share: float = 1.0,
        judge: Judge | None = None,
        name: str = "server",
        emulated_compute_s: float = 0.0,
        metrics: ComputeMetrics | None = None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._judge = judge or Judge()
        self._name = name
        self._emulated_s = emulated_compute_s
        self._metrics = metrics or ComputeMetrics(name)
        self._inbox = _Inbox()
        self._sessions: dict[Client, _Session] = {}
        self._ready: ReadyQueue[Client] = ReadyQueue(batch)
        self._slots: Slots[Client] = Slots(max_sessions, batch)
        self._metrics.caches.set_function(lambda: len(self._slots))
        self._metrics.waiting.set_function(lambda: self._slots.waiting)
        self._batch = batch
        self._max_sessions = max_sessions
        self._pixels = pixels
        self._cache_share = cache_share
        self._expected_s = math.inf  # of a pass without its exits, smoothed; unknown: inf
        self._exit_s = 0.0  # of one exit of a pass, smoothed
        self._concluded: list[tuple[Client, Message]] = []  # of the present pass
        self._coming: set[Client] = set()  # have had a message, and may send work soon
        self._stopping = False
        self._failed = False
        self._on_failure = on_failure
        self.warm = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name}-compute", daemon=True)
        self._thread.start()

    def open(self, client: Client, job: Job) -> None:
        """Start ``job`` for ``client``, which gets a message when its prompt is read."""
        self._inbox.put(partial(self._guarded, client, partial(self._open, client, job)))

    def submit(self, client: Client, work: Work) -> None:
        """Offer ``work`` to the job of ``client``, which must be open."""
        self._inbox.put(partial(self._guarded, client, partial(self._submit, client, work)))

    def leave(self, client: Client) -> None:
        """Drop ``client``; nothing more is posted to it once the thread has handled this."""
        client.gone.set()
        self._inbox.put(partial(self._end, client))

    def end_if_idle(self, client: Client, error: CollabError) -> None:
        """End the session of ``client`` with ``error`` unless it waits for an answer."""
        self._inbox.put(partial(self._guarded, client, partial(self._end_if_idle, client, error)))

    def stop(self, timeout_s: float) -> bool:
        """Free everything and end the thread; return False if a pass runs beyond ``timeout_s``."""

        def stop() -> None:
            self._stopping = True

        self._inbox.put(stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # Everything below runs in the compute thread.

    def _run(self) -> None:
        try:
            with high_priority(self._engine.device):
                self._engine.warm_up(self._judge.warm_up)
                self._slots.room = self._cache_room()
                self.warm.set()
                self._serve()
        except Exception:
            # A fault of this code or of the device, in the midst of any change: no state is
            # reliable.
            log.exception("the compute thread cannot go on")
            self._failed = True
            self.warm.set()
            self._on_failure()
            for client in self._sessions:
                client.post(self._failure())
            self._sessions.clear()  # not closed one by one: closing may be what fails
            while not self._stopping:  # _open refuses later clients
                self._inbox.wait(1, None)
                while self._inbox:
                    self._inbox.pop()()

    def _cache_room(self) -> float:
        """Return the bytes that KV caches may take together.

        Raises:
            ModelError: too few for one session.
        """
        drafted = self._batch.max_batch * _DRAFT_ROWS
        rows = drafted + self._batch.prefill_tokens
        room = self._engine.cache_room(
            rows=rows, logits=drafted, pixels=self._pixels, share=self._cache_share
        )
        session = self._engine.cache_bytes(min(_SESSION_TOKENS, self._engine.context))
        if room < session:
            raise ModelError(
                f"{format_bytes(room)} are left for KV caches beside the largest pass; a session of"
                f" {_SESSION_TOKENS} tokens takes {format_bytes(session)}",
                field="model",
                remedy="set quantization, lower batch.max_batch or limits.max_image_pixels, or free"
                " the device",
            )
        return room

    def _serve(self) -> None:
        while not self._stopping:
            self._take_in()
            starts_at = self._ready.starts_at(coming=len(self._coming))
            if starts_at is not None and starts_at <= time.monotonic():
                self._pass()
        for client in tuple(self._sessions):
            self._end(client)

    def _take_in(self) -> None:
        """Handle all events; wait for one if there is nothing else to do."""
        times = (self._ready.starts_at(coming=len(self._coming)), self._slots.due)
        next_at = min((t for t in times if t is not None), default=None)
        wait_s = None if next_at is None else next_at - time.monotonic()
        if wait_s is None or wait_s > 0:
            # Wake once per expected batch, not once per draft: each waking contends with the loop.
            self._inbox.wait(max(1, len(self._coming)) if self._ready else 1, wait_s)
        while self._inbox:
            self._inbox.pop()()
        self._advance_slots()

    def _guarded(self, client: Client, event: Callable[[], None]) -> None:
        """Handle ``event``; an error ends the session of ``client`` and no other."""
        if client.gone.is_set():
            return
        try:
            event()
        except Exception as error:  # noqa: BLE001  it must not end the other sessions
            self._fail(client, error)

    def _open(self, client: Client, job: Job) -> None:
        if self._failed:
            raise self._failure()
        size = self._engine.cache_bytes(job.most_tokens)
        if size > self._slots.room:
            job.close()
            raise InvalidInput(
                f"a KV cache of {job.most_tokens} tokens takes {format_bytes(size)}, all sessions"
                f" together have {format_bytes(self._slots.room)}",
                field="max_tokens",
                remedy="lower max_tokens or shorten the prompt",
            )
        self._sessions[client] = _Session(job)
        self._slots.request(client, time.monotonic(), client.owner, size, urgent=client.urgent)
        self._advance_slots()

    def _submit(self, client: Client, work: Work) -> None:
        session = self._sessions.get(client)
        if session is None:
            return  # it has failed meanwhile, and the client gets that error
        if session.evicted:
            raise _evicted()
        taken = session.job.offer(work)
        (self._metrics.taken if taken else self._metrics.dropped).inc()
        if session.ready:
            self._queue_up(client, session)

    def _end_if_idle(self, client: Client, error: CollabError) -> None:
        session = self._sessions.get(client)  # None: its prompt is still to come
        if session is not None and session.ready and not session.job.due:
            raise error

    def _queue_up(self, client: Client, session: _Session) -> None:
        """Enter the queue if a turn is due."""
        if session.job.due:
            self._coming.discard(client)
            self._slots.mark_busy(client)
            self._ready.add_turn(client, time.monotonic(), client.owner, urgent=client.urgent)

    def _advance_slots(self) -> None:
        for change in self._slots.advance(time.monotonic()):
            session = self._sessions[change.key]
            if isinstance(change, Granted):
                if session.job.unread:
                    client, unread = change.key, session.job.unread
                    self._ready.add_prompt(
                        client, unread, time.monotonic(), client.owner, urgent=client.urgent
                    )
                else:
                    self._opened(change.key, session)
            elif isinstance(change, Evicted):
                self._metrics.evictions.inc()
                if session.ready and not session.job.due:  # _submit reports it
                    session.evicted = True
                    session.job.close()
                else:
                    self._fail(change.key, _evicted())
            elif isinstance(change, Refused):
                self._fail(change.key, self._all_taken())

    def _opened(self, client: Client, session: _Session) -> None:
        session.ready = True
        self._coming.add(client)
        client.post(session.job.opened(client.id))
        self._slots.mark_idle(client, time.monotonic())
        self._queue_up(client, session)

    def _pass(self) -> None:
        """Run one forward pass over all jobs whose turn it is."""
        batch = self._ready.take()
        if batch.turns:
            self._coming.clear()
        run = _Pass(self._engine, self._judge, self._emulated_s)
        lead_s = self._judge.min_lead_s and max(self._judge.min_lead_s, _EXIT_PAYS * self._exit_s)
        spare = 1.0 - lead_s / max(self._expected_s, 1e-6)
        for client, due_since in batch.turns:
            job = self._sessions[client].job
            feed = job.begin(run.watch(client, job))
            assert feed is not None, "queued without a turn"
            run.add(client, feed, run.started - due_since)
        for client, count in batch.prompts:
            run.add(client, self._sessions[client].job.read_on(count))
        results = run.through(exits_until=spare * self._engine.num_layers)
        findings = self._find(run.parts[: len(batch.turns)], results)
        synchronize(self._engine.device)
        compute_s = time.monotonic() - run.started
        if batch.turns:
            # Exits' own time is left out, or they would make passes seem long enough for exits.
            alone_s, old = max(compute_s - run.exits_s, self._emulated_s), self._expected_s
            self._expected_s = alone_s if math.isinf(old) else 0.75 * old + 0.25 * alone_s
            self._exit_s = _cost_of_exit(self._exit_s, run)
        for part, result in zip(run.parts, results, strict=True):
            finding = findings.get(part.client)
            self._guarded(part.client, partial(self._after, part, result, compute_s, finding))
        self._metrics.count_pass(len(batch.turns), sum(n for _, n in batch.prompts), compute_s)
        self._judge.count([message for _, message in self._concluded])
        # All at once: sending the first would contend for the interpreter with the others.
        for number, (client, message) in enumerate(self._concluded, start=1):
            client.post(message, more=number < len(self._concluded))
        self._concluded.clear()

    def _find(
        self, turns: Sequence[_Part], results: Sequence[Tensor | Exception]
    ) -> dict[Client, Finding]:
        """Return the judge's finding for each of ``turns`` that has a result."""
        judged = {
            part.client: result
            for part, result in zip(turns, results, strict=False)  # those of prompts come after
            if isinstance(result, Tensor)
        }
        jobs = [(self._sessions[client].job, result) for client, result in judged.items()]
        return dict(zip(judged, self._judge.find(jobs), strict=True))

    def _after(
        self, part: _Part, result: Tensor | Exception, compute_s: float, finding: Finding
    ) -> None:
        """Handle the result of a pass for one of its sessions."""
        if isinstance(result, Exception):
            raise result
        client = part.client
        session = self._sessions[client]
        if not session.ready:
            if not session.job.unread:
                self._opened(client, session)
            return
        message = session.job.conclude(result, compute_s, part.queue_s, finding)
        self._metrics.queued.observe(part.queue_s)
        self._concluded.append((client, message))
        if session.job.finished:
            self._end(client)
        else:
            self._coming.add(client)
            self._slots.mark_idle(client, time.monotonic())
            self._queue_up(client, session)

    def _fail(self, client: Client, error: Exception) -> None:
        if not isinstance(error, CollabError):
            log.error("session %s failed", client.id[:8], exc_info=error)
            remedy = f"see its log: session {client.id[:8]}"
            error = CollabError(f"the {self._name} failed", remedy=remedy)
        try:
            self._end(client)
        finally:
            client.post(error)

    def _end(self, client: Client) -> None:
        session = self._sessions.pop(client, None)
        if session is None:
            return
        self._ready.discard(client)
        self._coming.discard(client)
        self._slots.leave(client)
        session.job.close()

    def _all_taken(self) -> Unavailable:
        count, held = len(self._slots), format_bytes(self._slots.held_bytes)
        remedy = "try again later"
        if count >= self._max_sessions:
            taken = f"all {count} sessions are taken"
            remedy += f", or raise max_sessions on the {self._name}"
        else:
            taken = f"{count} sessions hold {held}, all memory for KV caches"
        return Unavailable(taken, field="session", remedy=remedy)

    def _failure(self) -> Unavailable:
        return Unavailable(
            f"the {self._name} has failed", field="session", remedy="try again, or another"
        )


def _evicted() -> Replay:
    return Replay("the KV cache went to another session", remedy="open a new stream")


def _cost_of_exit(before_s: float, run: _Pass) -> float:
    """Return the smoothed cost of an exit after one more pass.

    Without exits the cost decays; otherwise a high one would last, since exits that seem too costly
    are not taken. A pass that stalls counts at most twice the known cost.
    """
    if not run.exits:
        return 0.9 * before_s
    found_s = run.exits_s / run.exits
    if not before_s:
        return found_s
    return 0.75 * before_s + 0.25 * min(found_s, 2.0 * before_s)


class _Inbox:
    """Events for the compute thread, from any other."""

    def __init__(self) -> None:
        self._events: deque[Callable[[], None]] = deque()
        self._wanted = math.inf  # number of events that wakes the compute thread; awake: inf
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: Callable[[], None]) -> None:
        self._events.append(event)
        if len(self._events) >= self._wanted:
            self._bell.put(None)

    def wait(self, count: int, timeout_s: float | None) -> None:
        """Sleep until there are ``count`` events, or ``timeout_s`` has passed."""
        self._wanted = count
        if len(self._events) < count:  # checked after the line above, so that none is missed
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=timeout_s)
        self._wanted = math.inf
        while not self._bell.empty():
            self._bell.get()

    def pop(self) -> Callable[[], None]:
        """Return the oldest event."""
        return self._events.popleft()


class _Part(NamedTuple):
    """One client's share of a pass; ``queue_s`` is the wait of its turn before it [s]."""

    client: Client
    feed: Feed
    queue_s: float


class _Pass:
    """One forward pass.

    EMULATION of a slower model: the pass takes at least ``at_least_s``, and reaches each layer no
    earlier than in proportion to its depth. The compute thread sleeps, as if its device were busy.

    Attributes:
        exits: layers whose early exits were taken.
        exits_s: their total duration, from the adapter to the message [s].
    """

    def __init__(self, engine: ServingEngine, judge: Judge, at_least_s: float) -> None:
        self.parts: list[_Part] = []
        self.started = time.monotonic()
        self.exits = 0
        self.exits_s = 0.0
        self._engine = engine
        self._judge = judge
        self._at_least_s = at_least_s
        self._exits: list[tuple[Client, Job, Tensor]] = []  # of one layer

    def add(self, client: Client, feed: Feed, queue_s: float = 0.0) -> None:
        """Add ``feed`` of ``client``."""
        self.parts.append(_Part(client, feed, queue_s))

    def watch(self, client: Client, job: Job) -> OnExit:
        """Return the callback for the early exits of ``job``."""

        def on_exit(layer: int, logits: Tensor) -> None:
            if client.gone.is_set():
                raise Cancelled("the client is gone")
            self._exits.append((client, job, logits))

        return on_exit

    def through(self, exits_until: float) -> Sequence[Tensor | Exception]:
        """Run the pass; return one result for each part."""
        feeds = [part.feed for part in self.parts]
        try:
            results = self._engine.run(feeds, exits_until=exits_until, after_exit=self._post_exits)
        except Exception as error:  # such as no memory: it ends this pass only
            if is_lost(error):
                raise
            results = [error] * len(self.parts)
        self._sleep_until(self._engine.num_layers)
        return results

    def _post_exits(self, layer: int, took: Callable[[], float]) -> None:
        """Judge the exits of all sessions at ``layer`` together, and post them together."""
        took_s = took()  # waits for the exits alone, not for the layers before them
        self.exits_s += took_s
        exits, self._exits = self._exits, []
        if not exits:
            return
        self.exits += 1
        begun = time.monotonic()
        shown = self._judge.preview(layer, [(job, logits) for _, job, logits in exits])
        previews = [
            (client, preview)
            for (client, _, _), preview in zip(exits, shown, strict=True)
            if preview is not None
        ]
        judged = time.monotonic()
        self._sleep_until(layer)
        awake = time.monotonic()
        for number, (client, preview) in enumerate(previews, start=1):
            client.post(preview, more=number < len(previews))
        self.exits_s += judged - begun + time.monotonic() - awake

    def _sleep_until(self, layer: int) -> None:
        if self._at_least_s:
            due = self.started + self._at_least_s * layer / self._engine.num_layers
            while (left := due - time.monotonic()) > 0:
                time.sleep(left)
