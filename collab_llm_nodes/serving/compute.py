"""The compute thread: it owns the model and all sessions, and serves them in batched passes.

Others hand it events (open, draft, leave) from any thread and never wait for it; what comes of them
goes out through each session's ``post``. So nothing of a session is touched by two threads, drafts
are taken in while a pass runs, and whatever becomes of a client, its KV cache is freed here.
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
from typing import NamedTuple, Protocol

from torch import Tensor

from collab_llm_nodes.engine.engine import Engine, Feed, OnExit, wait_for
from collab_llm_nodes.errors import Cancelled, CollabError, Replay, Unavailable
from collab_llm_nodes.protocols.edge_cloud.messages import Draft, EarlyExit, Opened, Verdict
from collab_llm_nodes.protocols.edge_cloud.server import ExitConfig, Tops, tops_of
from collab_llm_nodes.protocols.edge_cloud.target import TargetSession
from collab_llm_nodes.protocols.edge_cloud.telemetry import Telemetry
from collab_llm_nodes.serving.scheduler import (
    BatchConfig,
    Evicted,
    Granted,
    ReadyQueue,
    Refused,
    Slots,
)

log = logging.getLogger(__name__)

Outgoing = Opened | EarlyExit | Verdict | CollabError


class Client(Protocol):
    """Who a session is for. An error posted to it is the last that it hears."""

    id: str
    owner: str  # shares KV caches with others of the same; empty: with nobody
    gone: threading.Event  # it left: stop computing for it

    def post(self, message: Outgoing, more: bool = False) -> None:
        """Take ``message``, from the compute thread; must not block.

        Args:
            more: others are posted at once, to whomever; they may go out together.
        """


@dataclass(eq=False)
class _Session:
    """What the compute thread keeps for one client."""

    target: TargetSession
    ready: bool = False  # the prompt is read
    evicted: bool = False


class Compute:
    """See the module docstring.

    Args:
        max_sessions: KV caches at a time.
        emulated_compute_s: EMULATION: a pass takes at least this long.
        on_failure: called, from the compute thread, when it can serve nobody any more.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        batch: BatchConfig,
        exits: ExitConfig,
        max_sessions: int,
        emulated_compute_s: float = 0.0,
        telemetry: Telemetry | None = None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._exits = exits
        self._emulated_s = emulated_compute_s
        self._telemetry = telemetry or Telemetry()
        self._inbox = _Inbox()
        self._sessions: dict[Client, _Session] = {}
        self._ready: ReadyQueue[Client] = ReadyQueue(batch)
        self._slots: Slots[Client] = Slots(max_sessions, batch)
        self._telemetry.caches.set_function(lambda: len(self._slots))
        self._telemetry.waiting.set_function(lambda: self._slots.waiting)
        self._expected_s = math.inf  # of a pass without its exits, smoothed; unknown: inf
        self._verdicts: list[tuple[Client, Verdict]] = []  # of the present pass
        self._told: set[Client] = set()  # a verdict of the last drafts, or Opened, and not back
        self._stopping = False
        self._failed = False
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._run, name="verifier-compute", daemon=True)
        self._thread.start()

    def open(self, client: Client, target: TargetSession) -> None:
        """Start a session; ``Opened`` is posted when its prompt is read."""
        self._inbox.put(partial(self._guarded, client, partial(self._open, client, target)))

    def draft(self, client: Client, draft: Draft) -> None:
        """Have ``draft`` verified when its round comes; after ``open`` only."""
        self._inbox.put(partial(self._guarded, client, partial(self._draft, client, draft)))

    def leave(self, client: Client) -> None:
        """Forget ``client``; nothing more is posted to it once this is seen."""
        client.gone.set()
        self._inbox.put(partial(self._end, client))

    def end_if_idle(self, client: Client, error: CollabError) -> None:
        """End the session of ``client`` with ``error`` unless the verifier owes it an answer."""
        self._inbox.put(partial(self._guarded, client, partial(self._end_if_idle, client, error)))

    def stop(self, timeout_s: float) -> bool:
        """Free everything and end the thread; False if a pass still runs after ``timeout_s``."""

        def stop() -> None:
            self._stopping = True

        self._inbox.put(stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # Everything below runs in the compute thread.

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            # A fault in here or of the device, in the midst of any change: nothing can be trusted.
            log.exception("the compute thread cannot go on")
            self._failed = True
            self._on_failure()
            for client in self._sessions:
                client.post(_no_longer())
            self._sessions.clear()  # not closed one by one: that may be what fails
            while not self._stopping:  # who comes now is told by _open
                self._inbox.wait(1, None)
                while self._inbox:
                    self._inbox.pop()()

    def _serve(self) -> None:
        while not self._stopping:
            self._take_in()
            starts_at = self._ready.starts_at(coming=len(self._told))
            if starts_at is not None and starts_at <= time.monotonic():
                self._pass()
        for client in tuple(self._sessions):
            self._end(client)

    def _take_in(self) -> None:
        """Handle what came; wait for it if there is nothing else to do."""
        times = (self._ready.starts_at(coming=len(self._told)), self._slots.due)
        next_at = min((t for t in times if t is not None), default=None)
        wait_s = None if next_at is None else next_at - time.monotonic()
        if wait_s is None or wait_s > 0:
            # Who waits for several drafts need not be woken, and contend with the loop, by each.
            self._inbox.wait(max(1, len(self._told)) if self._ready else 1, wait_s)
        while self._inbox:
            self._inbox.pop()()
        self._advance_slots()

    def _guarded(self, client: Client, event: Callable[[], None]) -> None:
        """An error ends the client's session, and no other."""
        if client.gone.is_set():
            return
        try:
            event()
        except Exception as error:  # noqa: BLE001  whatever it is: the thread serves others too
            self._fail(client, error)

    def _open(self, client: Client, target: TargetSession) -> None:
        if self._failed:
            raise _no_longer()
        self._sessions[client] = _Session(target)
        self._slots.request(client, time.monotonic(), client.owner)
        self._advance_slots()

    def _draft(self, client: Client, draft: Draft) -> None:
        session = self._sessions.get(client)
        if session is None:
            return  # it failed meanwhile; the client is being told
        if session.evicted:
            raise Replay("the KV cache went to another session", remedy="open a new stream")
        taken = session.target.offer(draft)
        (self._telemetry.taken if taken else self._telemetry.dropped).inc()
        if session.ready:
            self._queue_up(client, session)

    def _end_if_idle(self, client: Client, error: CollabError) -> None:
        session = self._sessions.get(client)  # None: its prompt is still to come
        if session is not None and session.ready and not session.target.due:
            raise error

    def _queue_up(self, client: Client, session: _Session) -> None:
        """Get in line if a draft is due."""
        if session.target.due:
            self._told.discard(client)
            self._slots.work(client)
            self._ready.add_draft(client, time.monotonic())

    def _advance_slots(self) -> None:
        for change in self._slots.advance(time.monotonic()):
            session = self._sessions[change.key]
            if isinstance(change, Granted):
                if session.target.unread:
                    unread, owner = session.target.unread, change.key.owner
                    self._ready.add_prompt(change.key, unread, time.monotonic(), owner)
                else:
                    self._opened(change.key, session)
            elif isinstance(change, Evicted):
                session.evicted = True
                session.target.close()
                self._telemetry.evictions.inc()
            elif isinstance(change, Refused):
                taken = f"all {len(self._slots)} sessions are taken"
                remedy = "try again later, or raise max_sessions on the verifier"
                self._fail(change.key, Unavailable(taken, field="session", remedy=remedy))

    def _opened(self, client: Client, session: _Session) -> None:
        session.ready = True
        self._told.add(client)
        client.post(Opened(client.id, session.target.prompt_tokens))
        self._slots.rest(client, time.monotonic())
        self._queue_up(client, session)

    def _pass(self) -> None:
        """One forward pass over everybody whose turn it is."""
        batch = self._ready.take()
        if batch.drafts:
            self._told.clear()
        run = _Pass(self._engine, self._emulated_s)
        spare = 1.0 - self._exits.min_lead_s / max(self._expected_s, 1e-6)
        for client, due_since in batch.drafts:
            target = self._sessions[client].target
            feed = target.begin(run.watch(client, target))
            assert feed is not None, "in line without a draft"
            run.add(client, feed, run.started - due_since)
        for client, count in batch.prompts:
            run.add(client, self._sessions[client].target.read_on(count))
        results = run.through(exits_until=spare * self._engine.num_layers)
        tops = self._tops(run.parts, results)
        wait_for(self._engine.device)
        compute_s = time.monotonic() - run.started
        if batch.drafts:
            # Without what exits took: they must not seem worth sending because they are sent.
            alone_s, old = max(compute_s - run.exits_s, self._emulated_s), self._expected_s
            self._expected_s = alone_s if math.isinf(old) else 0.75 * old + 0.25 * alone_s
        for part, result in zip(run.parts, results, strict=True):
            own = tops.get(part.client)
            self._guarded(part.client, partial(self._after, part, result, compute_s, own))
        self._telemetry.count_pass(len(batch.drafts), sum(n for _, n in batch.prompts), compute_s)
        self._telemetry.count_verdicts([verdict for _, verdict in self._verdicts])
        # All at once, or whoever sends the first would contend for the interpreter with the rest.
        for number, (client, verdict) in enumerate(self._verdicts, start=1):
            client.post(verdict, more=number < len(self._verdicts))
        self._verdicts.clear()

    def _tops(
        self, parts: Sequence[_Part], results: Sequence[Tensor | Exception]
    ) -> dict[Client, Tops | None]:
        """Of the logits of greedy sessions; others need whole distributions."""
        judged = {
            part.client: result
            for part, result in zip(parts, results, strict=True)
            if isinstance(result, Tensor)
            and len(result)
            and self._sessions[part.client].target.greedy
        }
        return dict(zip(judged, _tops_of(list(judged.values())), strict=True))

    def _after(
        self,
        part: _Part,
        result: Tensor | Exception,
        compute_s: float,
        tops: Tops | None,
    ) -> None:
        """What a pass means to one of its sessions."""
        if isinstance(result, Exception):
            raise result
        client = part.client
        session = self._sessions[client]
        if not session.ready:
            if not session.target.unread:
                self._opened(client, session)
            return
        verdict = session.target.conclude(result, compute_s, part.queue_s, tops)
        self._verdicts.append((client, verdict))
        if verdict.finished:
            self._end(client)
        else:
            self._told.add(client)
            self._slots.rest(client, time.monotonic())
            self._queue_up(client, session)

    def _fail(self, client: Client, error: Exception) -> None:
        if not isinstance(error, CollabError):
            log.error("session %s failed", client.id[:8], exc_info=error)
            remedy = f"see its log: session {client.id[:8]}"
            error = CollabError("the verifier failed", remedy=remedy)
        try:
            self._end(client)
        finally:
            client.post(error)

    def _end(self, client: Client) -> None:
        session = self._sessions.pop(client, None)
        if session is None:
            return
        self._ready.discard(client)
        self._told.discard(client)
        self._slots.leave(client)
        session.target.close()


def _no_longer() -> Unavailable:
    return Unavailable("the verifier has failed", field="session", remedy="try again, or another")


def _tops_of(parts: Sequence[Tensor], *, probabilities: bool = False) -> Sequence[Tops | None]:
    """As ``tops_of``; if that fails, such as for want of memory, each session has to find its own,
    and what fails then is its own error."""
    try:
        return tops_of(parts, probabilities=probabilities)
    except Exception as error:  # noqa: BLE001  whatever it is
        log.warning("sessions are judged one by one: %s", error)
        return [None] * len(parts)


class _Inbox:
    """Events for the compute thread, from any other."""

    def __init__(self) -> None:
        self._events: deque[Callable[[], None]] = deque()
        self._wanted = math.inf  # events for which the compute thread sleeps; it does not: inf
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: Callable[[], None]) -> None:
        self._events.append(event)
        if len(self._events) >= self._wanted:
            self._bell.put(None)

    def wait(self, count: int, timeout_s: float | None) -> None:
        """Sleep until ``count`` events are there, or ``timeout_s`` is over."""
        self._wanted = count
        if len(self._events) < count:  # asked after the line above: none is missed
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=timeout_s)
        self._wanted = math.inf
        while not self._bell.empty():
            self._bell.get()

    def pop(self) -> Callable[[], None]:
        """The oldest event."""
        return self._events.popleft()


class _Part(NamedTuple):
    """What one client has in a pass; ``queue_s`` is how long its draft waited for it."""

    client: Client
    feed: Feed
    queue_s: float


class _Pass:
    """One forward pass in the making.

    EMULATION of a slower model: the pass takes at least ``at_least_s``, and passes each layer no
    earlier than in proportion to its depth. The sleep is in the compute thread because it stands
    for a device that is busy.

    Attributes:
        exits_s: what early exits have taken, from the adapter to the message.
    """

    def __init__(self, engine: Engine, at_least_s: float) -> None:
        self.parts: list[_Part] = []
        self.started = time.monotonic()
        self.exits_s = 0.0
        self._engine = engine
        self._at_least_s = at_least_s
        self._exits: list[tuple[Client, TargetSession, Tensor]] = []  # of one layer

    def add(self, client: Client, feed: Feed, queue_s: float = 0.0) -> None:
        """``client`` takes part with ``feed``."""
        self.parts.append(_Part(client, feed, queue_s))

    def watch(self, client: Client, target: TargetSession) -> OnExit:
        """What takes the early exits of ``target`` while the pass goes on."""

        def on_exit(layer: int, logits: Tensor) -> None:
            if client.gone.is_set():
                raise Cancelled("the client is gone")
            self._exits.append((client, target, logits))

        return on_exit

    def through(self, exits_until: float) -> Sequence[Tensor | Exception]:
        """Run it; one result for each part."""
        feeds = [part.feed for part in self.parts]
        try:
            results = self._engine.run(feeds, exits_until=exits_until, after_exit=self._post_exits)
        except Exception as error:  # noqa: BLE001  such as no memory: all of this pass, not more
            results = [error] * len(self.parts)
        self._sleep_until(self._engine.num_layers)
        return results

    def _post_exits(self, layer: int, took_s: float) -> None:
        """Judge what all sessions show at ``layer`` together, and send it on together."""
        self.exits_s += took_s
        exits, self._exits = self._exits, []
        if not exits:
            return
        begun = time.monotonic()
        all_tops = _tops_of([logits for _, _, logits in exits], probabilities=True)
        previews = [
            (client, preview)
            for (client, target, logits), tops in zip(exits, all_tops, strict=True)
            if (preview := target.preview(layer, logits, tops)) is not None
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
