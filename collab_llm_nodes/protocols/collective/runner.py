"""The runner of the machine: it carries out actions and reports the results.

Results and requests wait in an inbox until a thread serves the machine: it hands over all of them
and carries out the actions that follow. A thread of the runner does so whenever the bell rings or
a deadline passes. Threads that deliver results do so as well: to wake another thread for each would
slow a fast target.
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
from functools import partial
from typing import Any

from collab_llm_nodes.errors import CollabError, Unavailable, as_collab_error
from collab_llm_nodes.protocols.collective.machine import (
    AnswerUpdate,
    Ended,
    Incident,
    Job,
    Machine,
)
from collab_llm_nodes.protocols.collective.messages import Draw, Proposal, Release, Verify
from collab_llm_nodes.protocols.collective.models import Target
from collab_llm_nodes.protocols.collective.workers import (
    STOP_DEADLINE_S,
    DraftWorker,
    Executor,
    Failed,
    Inline,
    InThread,
    Proposed,
)

Event = Callable[[float], None]
"""Reports something to the machine; called with the time, by one thread at a time."""
News = Callable[[AnswerUpdate | Ended], None]

_LONGEST_WAIT_S = 60.0


class Runner:
    """A machine at work with its models, until it is closed.

    Args:
        machine: only the runner calls it from now on.
        pipelined: verify in a thread of its own, so that the machine is served meanwhile.
        workers: given the callbacks for results, returns the draft models at work.
        clock: returns the machine's time [s]; by default a monotonic one.

    Raises:
        CollabError: a draft model cannot be loaded.
    """

    def __init__(
        self,
        machine: Machine,
        target: Target,
        workers: Callable[[Proposed, Failed], Sequence[DraftWorker]],
        *,
        pipelined: bool,
        log: logging.Logger | Any,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._machine = machine
        self._target = target
        self._log = log
        self._clock = clock or time.monotonic
        self._inbox: deque[Event] = deque()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the machine and all below
        self._listeners: dict[str, News] = {}
        self._passes: deque[Callable[[], None]] = deque()  # of the target, in the machine's order
        self._closing = False
        self._failure: CollabError | None = None
        self._wakes_at = -math.inf  # time until which the thread waits for the bell, if it does
        self._workers = workers(self._proposed, self._failed)  # may fail: no thread runs before
        self._verify: Executor = InThread("collective-target") if pipelined else Inline()
        self._thread = threading.Thread(target=self._run, name="collective", daemon=True)
        self._thread.start()

    @property
    def drafts_held_bytes(self) -> int:
        """Size of the KV caches of all draft models."""
        return sum(worker.held_bytes for worker in self._workers)

    @property
    def failure(self) -> str:
        """Reason why all requests are refused until a restart; empty while they are not."""
        return "" if self._failure is None else str(self._failure)

    def submit(self, job: Job, listener: News) -> Callable[[], None]:
        """Submit a request; threads of the runner call ``listener``, one at a time.

        The last call is with an ``Ended``, also where the request is refused.

        Returns:
            A function that cancels the answer; it does nothing once the answer has ended.
        """

        def event(now: float) -> None:
            if self._failure is not None:
                listener(Ended(job.id, self._failure))
                return
            try:
                self._machine.submit(job, now)
            except CollabError as error:
                listener(Ended(job.id, error))
            else:
                self._listeners[job.id] = listener

        def give_up(now: float) -> None:
            if self._listeners.get(job.id) is listener:  # else it is another request's name
                self._machine.cancel(job.id)

        self._post(event)
        return lambda: self._post(give_up)

    def close(self) -> None:
        """End all answers, and free the models; a pass that hangs is given up."""

        def event(now: float) -> None:
            self._closing = True
            self._machine.on_target_failure(Unavailable("it is shutting down"))

        self._post(event)
        self._thread.join(STOP_DEADLINE_S)
        for worker in self._workers:
            worker.close()
        self._verify(self._target.sessions.close)
        self._verify.close()

    # ------------------------------------------------------------------ serving the machine

    def _run(self) -> None:
        self._serve()
        while not self._closing:
            self._wait()
            self._serve()

    def _serve(self, *, wait: bool = True) -> None:
        """Hand the inbox to the machine, and carry out its actions.

        Args:
            wait: wait for another thread that serves the machine; else ring the bell again.
        """
        if not self._lock.acquire(blocking=wait):
            self._bell.put(None)
            return
        try:
            self._attend()
        finally:
            self._lock.release()
        if self._passes:
            self._verify(self._make_passes)

    def _make_passes(self) -> None:
        """Make the queued passes of the target, in the machine's order.

        A ``Verify`` after its request's ``Release`` would open a KV cache that is never freed.
        """
        while self._passes:
            self._passes.popleft()()

    def _attend(self) -> None:
        """Carry out the machine's actions; the passes of the target are queued."""
        try:
            if not self._failure:
                self._act()
        except Exception as error:  # noqa: BLE001 - the listeners must be notified
            self._log.error(f"collective speculation has failed: {error!r}")
            self._failure = as_collab_error(error)
            self._break_off(self._failure)
        if self._failure:
            self._refuse()
        elif self._machine.wake_at() < self._wakes_at:
            self._bell.put(None)

    def _act(self) -> None:
        while self._inbox:
            self._inbox.popleft()(self._clock())
        draws: list[Draw] = []  # those of a step go together, for a worker may have several models
        for action in self._machine.poll(self._clock()):
            if isinstance(action, Draw):
                draws.append(action)
                continue
            self._have_drawn(draws)
            if isinstance(action, Verify):
                self._passes.append(partial(self._make_verdicts, action))
            elif isinstance(action, Release):
                for worker in self._workers:
                    worker.release(action.id)
                self._passes.append(partial(self._target.sessions.release, action.id))
            elif isinstance(action, Incident):
                self._log.warning(f"draft model {action.model} is left out: {action.error}")
                if action.silent:
                    next(w for w in self._workers if action.model in w.models).recover()
            elif isinstance(action, Ended):
                self._listeners.pop(action.id)(action)
            else:
                self._listeners[action.id](action)
        self._have_drawn(draws)

    def _have_drawn(self, draws: list[Draw]) -> None:
        """Hand each worker its draws, and empty the list."""
        for worker in self._workers if draws else ():
            own = [draw for draw in draws if draw.model in worker.models]
            if own:
                worker.draw(own)
        draws.clear()

    def _wait(self) -> None:
        """Wait for the bell, or until the machine's next deadline."""
        with self._lock:
            now = self._clock()
            self._wakes_at = now + _LONGEST_WAIT_S
            if self._failure is None:
                self._wakes_at = min(self._wakes_at, self._machine.wake_at())
            timeout = max(self._wakes_at - now, 0.0)
        with contextlib.suppress(queue.Empty):
            self._bell.get(timeout=timeout)
            while True:
                self._bell.get_nowait()
        self._wakes_at = -math.inf

    def _refuse(self) -> None:
        """Refuse the queued requests with the failure."""
        while self._inbox:
            with contextlib.suppress(Exception):  # the machine may be in any state
                self._inbox.popleft()(self._clock())

    def _break_off(self, error: CollabError) -> None:
        for id, listener in self._listeners.items():
            listener(Ended(id, error))
        self._listeners.clear()

    # ------------------------------------------------------------------ results, from any thread

    def _post(self, event: Event) -> None:
        self._inbox.append(event)
        self._bell.put(None)

    def _proposed(self, draw: Draw, proposals: list[Proposal | None]) -> None:
        done = self._clock()
        self._inbox.append(
            lambda now: self._machine.on_proposals(
                draw.model, draw.batch, draw.step, proposals, done
            )
        )
        self._serve(wait=False)  # a draft model may be called by a thread that serves

    def _failed(self, model: int, error: CollabError) -> None:
        self._post(lambda now: self._machine.on_draft_failure(model, error, now))

    def _make_verdicts(self, asked: Verify) -> None:
        event: Event
        try:
            verdicts = self._target.verify(asked.claims)
        except Exception as error:  # noqa: BLE001 - all answers end with it
            failure = as_collab_error(error)
            event = lambda now: self._machine.on_target_failure(failure)  # noqa: E731
        else:
            done = self._clock()
            event = lambda now: self._machine.on_verdicts(asked.batch, verdicts, done)  # noqa: E731
        self._inbox.append(event)
        self._serve()
