"""The coordinator's end of a chain of workers.

A chain is used until a worker is lost. Then every pass in flight fails with :class:`WorkerLost`,
and ``pipeline.py`` arranges another chain.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from torch import Tensor

from collab_llm_nodes.errors import (
    Busy,
    CollabError,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    ModelError,
    ProtocolError,
    Unauthenticated,
    Unavailable,
)
from collab_llm_nodes.protocols.jupiter.link import TICK_S, LinkConfig, StageLink, WorkerAtFault
from collab_llm_nodes.protocols.jupiter.messages import (
    Connect,
    Connected,
    Load,
    Loaded,
    Pass,
    PassTimes,
    Pong,
    Report,
    Result,
    Step,
    Taken,
    Want,
    WorkerInfo,
)
from collab_llm_nodes.protocols.jupiter.monitors import ProgressMonitor
from collab_llm_nodes.protocols.jupiter.partition import Placement
from collab_llm_nodes.protocols.jupiter.results import check_result
from collab_llm_nodes.protocols.jupiter.states import pack
from collab_llm_nodes.transport.background import background_loop, within
from collab_llm_nodes.transport.wire import Failure

log = logging.getLogger(__name__)

T = TypeVar("T")

LAST_PASSES = 128
"""Recent passes whose times a chain keeps."""
CHECK_S = 0.1
"""Period at which a waiting caller's cancel and deadline are checked."""
_SLACK_S = 5.0  # for the background thread on a busy machine
_SILENCES = 2.0
"""Time for a job relative to ``silence_s``: computing is delayed more easily than answering."""
_TRIAL_ROWS = 32
"""Tokens of the larger of two trial passes."""


class WorkerLost(Unavailable):
    """A worker no longer answers or computes, or the previous worker cannot reach it.

    Attributes:
        device: its address.
        at_fault: it can be reached, but computes nothing or breaks the protocol.
    """

    def __init__(self, device: str, why: CollabError) -> None:
        super().__init__(
            f"worker {device} is lost: {why.args[0]}", field="workers", remedy=why.remedy
        )
        self.device = device
        self.at_fault = isinstance(why, WorkerAtFault)


Check = Callable[[], None]
"""Called from time to time during a wait; an exception ends the wait."""


def no_check() -> None:
    """Never end a wait early."""


def wait_until(attempt: Callable[[float], bool], due: float, check: Check) -> bool:
    """Call ``attempt``, which waits up to the given seconds, until it returns True.

    Args:
        due: ``time.monotonic()`` at which to give up and return False.
    """
    while True:
        left = max(0.0, due - time.monotonic())
        if attempt(min(left, CHECK_S)):
            return True
        if not left:
            return False
        check()


def in_background(job: Coroutine[Any, Any, T], seconds: float, check: Check = no_check) -> T:
    """Run ``job`` in the background thread, and return its result.

    Args:
        seconds: deadline that ``job`` keeps itself.

    Raises:
        DeadlineExceeded: this machine is too busy to run the background thread.
    """
    running = asyncio.run_coroutine_threadsafe(job, background_loop())

    def done(timeout: float) -> bool:
        return bool(wait([running], timeout).done)

    try:
        if wait_until(done, time.monotonic() + max(0.0, seconds) + _SLACK_S, check):
            return running.result()
    except BaseException:
        running.cancel()
        raise
    running.cancel()
    raise DeadlineExceeded(
        "this machine is too busy to speak to the workers", field="workers", remedy="try again"
    )


_Answer = tuple[type[Report], int]
"""An answer that the arrangement waits for: its type, and the index of the worker."""
_TRIAL: _Answer = (Result, 0)

OnResult = Callable[[Result | CollabError], None]


@dataclass(frozen=True)
class _InFlight:
    """A pass that has been sent, and the callback for its result."""

    steps: tuple[Step, ...]
    on_result: OnResult
    sent_at: float


class Chain:
    """See the module docstring. Usable from any thread.

    Args:
        parts: the workers in the order of their layers.
        info: of the model that all workers hold.
        load: what each worker is sent, apart from its layers.
        due: ``time.monotonic()`` by which all layers must be loaded.

    Attributes:
        parts: as given.
        bytes: of the tensors loaded, by worker.
        failed: the reason why the chain can no longer be used; None while it can.
        failed_at: ``time.monotonic()`` of the failure.

    Raises:
        WorkerLost: a worker cannot be reached.
        CollabError: a worker refuses, for example other weights or another version.
    """

    def __init__(
        self,
        config: LinkConfig,
        parts: Sequence[Placement],
        info: WorkerInfo,
        load: Load,
        *,
        due: float,
        check: Check = no_check,
    ) -> None:
        self.parts = tuple(parts)
        self.info = info
        self.bytes = [0] * len(parts)
        self.failed: CollabError | None = None
        self.failed_at = 0.0
        self._config = config
        self._states = load.states
        self._loop = background_loop()
        self._links: list[StageLink] = []
        self._waiting: dict[int, _InFlight] = {}  # by number, the oldest first
        self._next_number = 0
        self._progress = ProgressMonitor(
            [_weights(part, info) for part in parts],
            tick_s=TICK_S,
            grace_s=_SILENCES * config.silence_s,
            row_s=info.width * 4 * 8 / (config.least_mbps * 1e6),
        )
        self._watching: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._times: deque[PassTimes] = deque(maxlen=LAST_PASSES)
        self._missing: set[_Answer] = set()  # in the current stage of the arrangement
        try:
            in_background(self._arrange(load, due), due - time.monotonic(), check)
        except BaseException:
            self.close()
            raise

    @property
    def passes(self) -> list[PassTimes]:
        """Times of the last passes, in the order of their ends."""
        return list(self._times.copy())

    def submit(
        self, steps: Sequence[Step], on_result: OnResult, features: Tensor | None = None
    ) -> None:
        """Start a pass.

        Args:
            on_result: called with the result or the error, in the background thread.
            features: of the pictures in all steps [k, width].

        Raises:
            ModelError: the form of hidden states cannot hold the features.
        """
        packed = b"" if features is None else pack(features, self._states)
        self._loop.call_soon_threadsafe(self._send, tuple(steps), on_result, packed)

    def run(self, steps: Sequence[Step], due: float, features: Tensor | None = None) -> Result:
        """Run one pass, and return its result; ``features`` as for :meth:`submit`.

        Raises:
            DeadlineExceeded: it did not end in time.
            CollabError: the chain has failed.
        """
        found: SimpleQueue[Result | CollabError] = SimpleQueue()
        self.submit(steps, found.put, features)
        try:
            result = found.get(timeout=max(0.0, due - time.monotonic()))
        except Empty:
            raise DeadlineExceeded(
                "a pass was not done in time", field="workers", remedy="see the workers' load"
            ) from None
        if isinstance(result, CollabError):
            raise result
        return result

    def close(self) -> None:
        """End the chain; the workers keep their layers."""
        self._loop.call_soon_threadsafe(self._fail, Unavailable("the chain is closed"))

    # The methods below run in the background thread.

    async def _arrange(self, load: Load, due: float) -> None:
        """Load all layers, connect each worker with the next, and run trial passes.

        Trial passes find a worker that computes nothing before a request waits for it. They also
        bound the time of later passes, since the first ones take longer.
        """
        self._watching = asyncio.ensure_future(self._watch())
        try:
            stages = range(len(self.parts))
            await self._all_answer(
                [(Loaded, i) for i in stages], due, partial(self._open_links, load)
            )
            await self._all_answer([(Connected, i) for i in stages[:-1]], due, self._connect_links)
            await self._all_answer([_TRIAL], due, self._try_out)
            self._times.clear()
        except asyncio.TimeoutError:
            slow = sorted(self.parts[i].device for kind, i in self._missing if kind is not Result)
            raise DeadlineExceeded(
                f"the workers did not load their layers in time: {', '.join(slow) or 'all'}",
                field="workers",
                remedy="raise the deadline, or see their logs",
            ) from None

    async def _all_answer(
        self, answers: Sequence[_Answer], due: float, ask: Callable[[], None]
    ) -> None:
        if self.failed is not None:
            raise self.failed
        if not answers:
            return
        self._missing, self._ready = set(answers), self._loop.create_future()
        ask()
        await within(self._ready, max(0.0, due - time.monotonic()))

    def _open_links(self, load: Load) -> None:
        for i, part in enumerate(self.parts):
            own = replace(load, first=part.first, last=part.last)
            callbacks = partial(self._on_report, i), partial(self._on_lost, i)
            self._links.append(StageLink(self._config, part.device, own, *callbacks))

    def _connect_links(self) -> None:
        for link, part in zip(self._links, self.parts[1:], strict=False):
            link.send(Connect(part.device))

    def _try_out(self) -> None:
        """Start trial passes of one row and of several."""
        rows = min(_TRIAL_ROWS, self.info.context - 1)

        def on_end(result: Result | CollabError) -> None:
            if isinstance(result, Result):  # after an error, _fail ends the arrangement
                self._answered(_TRIAL)

        self._send((Step(0, 0, (0,), want=Want.VERDICT, rows=1),), lambda result: None, b"")
        self._send((Step(0, 1, (0,) * rows, want=Want.VERDICT, rows=1),), lambda result: None, b"")
        self._send((Step(0, close=True),), on_end, b"")

    async def _watch(self) -> None:
        """Fail the chain when a worker makes no progress."""
        while True:
            await asyncio.sleep(TICK_S)
            if (found := self._progress.tick()) is not None:
                self._fail(self._at_fault(*found))

    def _answered(self, answer: _Answer) -> None:
        """Record an answer that the arrangement waits for.

        Raises:
            KeyError: it does not wait for this answer.
        """
        self._missing.remove(answer)
        if not self._missing and self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    def _on_report(self, i: int, report: Report) -> None:
        """Process a report of worker ``i``.

        Raises:
            WorkerLost: it breaks the protocol.
        """
        self._progress.on_message(i)
        try:
            if isinstance(report, Pong):
                self._progress.on_pong(i, report)
            elif isinstance(report, Result):
                self._on_result(i, report)
            elif isinstance(report, (Loaded, Connected)):
                self._answered((type(report), i))
                if isinstance(report, Loaded):
                    self.bytes[i] = report.bytes
            elif not isinstance(report, (Taken, Failure)):  # a Failure ends the link
                raise ProtocolError(f"{type(report).__name__} was not expected", field="message")
        except KeyError:
            raise self._at_fault(i, f"{type(report).__name__} was not expected") from None
        except ProtocolError as error:
            raise self._at_fault(i, error.args[0]) from error

    def _on_result(self, i: int, result: Result) -> None:
        if i != len(self.parts) - 1 or result.number != next(iter(self._waiting), None):
            raise ProtocolError(f"a result of pass {result.number} was not expected")
        passed = self._waiting[result.number]
        check_result(result, passed.steps, len(self.parts), self.info)
        del self._waiting[result.number]
        self._progress.on_result(result.spans, time.monotonic() - passed.sent_at)
        self._times.append((result.number, result.spans))
        passed.on_result(result)

    def _at_fault(self, i: int, reason: str, remedy: str = "") -> WorkerLost:
        device = self.parts[i].device
        return WorkerLost(device, WorkerAtFault(reason, field=device, remedy=remedy))

    def _may_refuse(self, i: int, error: CollabError) -> bool:
        """Return True if worker ``i`` may refuse its task with ``error``, so is not at fault.

        It may refuse to load, and later only a pass larger than the trial passes.
        """
        if self._missing:
            refusals = (ConfigError, ModelError, Busy, Unauthenticated)
            return (Loaded, i) in self._missing and isinstance(error, refusals)
        steps = [step for passed in self._waiting.values() for step in passed.steps]
        if isinstance(error, InvalidInput):  # logits are limited by the size of a message
            logits = sum(step.rows for step in steps if step.want is Want.LOGITS)
            return error.field == "steps.rows" and logits > 1
        # The bytes of waiting passes are limited, too.
        large = sum(len(step.ids) for step in steps) > _TRIAL_ROWS
        return isinstance(error, Busy) and error.field in ("states", "message") and large

    def _on_lost(self, i: int, error: CollabError) -> None:
        """Fail the chain, because the link to worker ``i`` has ended."""
        device = self.parts[i].device
        if isinstance(error, WorkerLost):
            self._fail(error)
        elif isinstance(error, (Unavailable, DeadlineExceeded)):
            following = [part.device for part in self.parts[i + 1 : i + 2]]
            # A worker that has lost the next one names that one.
            self._fail(WorkerLost(error.field if error.field in following else device, error))
        elif self._may_refuse(i, error):
            words = f"worker {device}: {error.args[0]}"
            self._fail(type(error)(words, field=error.field, remedy=error.remedy))
        elif i and isinstance(error, ProtocolError) and error.field == "states":
            words = f"the next worker cannot read its states: {error.args[0]}"
            self._fail(self._at_fault(i - 1, words))
        else:  # whatever the error: all passes of all requests would fail like this
            self._fail(self._at_fault(i, error.args[0], error.remedy))

    def _send(self, steps: tuple[Step, ...], on_result: OnResult, features: bytes) -> None:
        if self.failed is not None:
            on_result(self.failed)
            return
        # A worker's refusal would count as its fault.
        if not all(0 <= token < self.info.vocab_size for step in steps for token in step.ids):
            on_result(InvalidInput("a token outside the vocabulary", field="prompt"))
            return
        number, self._next_number = self._next_number, self._next_number + 1
        self._waiting[number] = _InFlight(steps, on_result, time.monotonic())
        self._progress.on_sent(sum(len(step.ids) for step in steps))
        self._links[0].send(Pass(number, steps, features))

    def _fail(self, error: CollabError) -> None:
        if self.failed is not None:
            return
        self.failed, self.failed_at = error, time.monotonic()
        if self._watching is not None:
            self._watching.cancel()
        for link in self._links:
            link.close()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # mark as retrieved: perhaps nothing waits for it
        waiting, self._waiting = self._waiting, {}
        for passed in waiting.values():
            passed.on_result(error)


def _weights(part: Placement, info: WorkerInfo) -> float:
    """Return a rough size of a stage's weights [byte]; the exact one is known after Load."""
    ends = (part.first == 0) + (part.last == info.num_layers)
    return (
        4.0 * info.width * (16.0 * info.width * (part.last - part.first) + info.vocab_size * ends)
    )
