"""The thread that owns the machine, does what it asks for, and tells it the results."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from collab_llm_nodes.errors import CollabError, Unavailable
from collab_llm_nodes.protocols.collective.machine import Ended, Grown, Incident, Job, Machine
from collab_llm_nodes.protocols.collective.messages import Draw, Proposal, Release, Verify
from collab_llm_nodes.protocols.collective.models import Target
from collab_llm_nodes.protocols.collective.workers import (
    DraftWorker,
    Executor,
    Failed,
    Here,
    InThread,
    Proposed,
    as_model_error,
)

Event = Callable[[float], None]
"""Tells the machine something; called with the time by the thread that owns it."""
News = Callable[[Grown | Ended], None]

_LONGEST_WAIT_S = 60.0


class Runner:
    """See the module's text.

    Args:
        machine: whose state is this runner's from now on.
        pipelined: verify in a thread of its own, so that the machine is served meanwhile.
        workers: given the callbacks for results, returns the draft models at work.

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
    ) -> None:
        self._machine = machine
        self._target = target
        self._log = log
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._listeners: dict[str, News] = {}
        self._closing = False
        self._failure: CollabError | None = None
        self._verify: Executor = InThread("collective-target") if pipelined else Here()
        self._workers = workers(self._proposed, self._failed)
        self._thread = threading.Thread(target=self._run, name="collective", daemon=True)
        self._thread.start()

    @property
    def drafts_held_bytes(self) -> int:
        """Size of the KV caches of all draft models."""
        return sum(worker.held_bytes for worker in self._workers)

    def submit(self, job: Job, listener: News) -> None:
        """Have an answer made; ``listener`` is told of it by the runner's thread.

        The last news is an ``Ended``, also where the request is refused.
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

        self._inbox.put(event)

    def cancel(self, id: str) -> None:
        """Give an answer up."""
        self._inbox.put(lambda now: self._machine.cancel(id))

    def close(self) -> None:
        """End all answers, and free the models."""

        def event(now: float) -> None:
            self._closing = True
            self._machine.on_target_failure(Unavailable("it is shutting down"))

        self._inbox.put(event)
        self._thread.join()
        for worker in self._workers:
            worker.close()
        self._verify(self._target.sessions.close)
        self._verify.close()

    # ------------------------------------------------------------------ the thread that owns it

    def _run(self) -> None:
        try:
            while not self._closing:
                self._act()
                self._wait()
            self._act()
        except Exception as error:  # noqa: BLE001 - those who wait must be told
            self._log.error(f"collective speculation has failed: {error!r}")
            self._failure = as_model_error(error)
            self._break_off(self._failure)
            self._refuse()

    def _act(self) -> None:
        # The target last: its thread then takes the interpreter from this one.
        actions = self._machine.poll(time.monotonic())
        for action in sorted(actions, key=lambda each: isinstance(each, Verify)):
            if isinstance(action, Draw):
                self._workers[action.model].draw(action)
            elif isinstance(action, Verify):
                self._verify(lambda asked=action: self._make_verdicts(asked))  # type: ignore[misc]
            elif isinstance(action, Release):
                for worker in self._workers:
                    worker.release(action.id)
                self._verify(lambda id=action.id: self._target.sessions.release(id))  # type: ignore[misc]
            elif isinstance(action, Incident):
                self._log.warning(f"draft model {action.model} is left out: {action.error}")
                if action.silent:
                    self._workers[action.model].recover()
            elif isinstance(action, Ended):
                self._listeners.pop(action.id)(action)
            else:
                self._listeners[action.id](action)

    def _wait(self) -> None:
        """Handle events: wait for the first until the machine wants to be asked again."""
        timeout = min(self._machine.wake_at() - time.monotonic(), _LONGEST_WAIT_S)
        try:
            event = self._inbox.get(timeout=max(timeout, 0.0))
            while True:
                event(time.monotonic())
                event = self._inbox.get_nowait()
        except queue.Empty:
            pass

    def _refuse(self) -> None:
        """Tell the failure to all who still ask, until this is closed."""
        while not self._closing:
            event = self._inbox.get()
            with contextlib.suppress(Exception):  # the machine may be in any state
                event(time.monotonic())

    def _break_off(self, error: CollabError) -> None:
        for id, listener in self._listeners.items():
            listener(Ended(id, error))
        self._listeners.clear()

    # ------------------------------------------------------------------ results, from any thread

    def _proposed(self, draw: Draw, proposals: list[Proposal | None]) -> None:
        done = time.monotonic()
        self._inbox.put(
            lambda now: self._machine.on_proposals(
                draw.model, draw.batch, draw.step, proposals, done
            )
        )

    def _failed(self, model: int, error: CollabError) -> None:
        self._inbox.put(lambda now: self._machine.on_draft_failure(model, error, now))

    def _make_verdicts(self, asked: Verify) -> None:
        try:
            verdicts = self._target.verify(asked.claims)
        except Exception as error:  # noqa: BLE001 - all answers end with it
            failure = as_model_error(error)
            self._inbox.put(lambda now: self._machine.on_target_failure(failure))
        else:
            done = time.monotonic()
            self._inbox.put(lambda now: self._machine.on_verdicts(asked.batch, verdicts, done))
