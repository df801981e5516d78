"""The coordinator's end of a chain of workers: arranged, fed with passes, found broken.

A chain is used until a worker is lost. Then every pass that is under way fails with
:class:`WorkerLost`, and the chain is of no more use: ``pipeline.py`` arranges the next one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

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
from collab_llm_nodes.protocols.jupiter.progress import Progress
from collab_llm_nodes.protocols.jupiter.results import check_result
from collab_llm_nodes.transport.background import background_loop, within
from collab_llm_nodes.transport.wire import Failure

log = logging.getLogger(__name__)

T = TypeVar("T")

LAST_PASSES = 128
"""Passes whose times a chain keeps."""
CHECK_S = 0.1
"""Period at which those who wait are asked whether they still want to."""
_SLACK_S = 5.0  # for the background thread of a busy machine
_SILENCES = 2.0
"""Silences that a worker which answers may take for a job: computing is held up more easily."""
_TRIAL_ROWS = 32


class Part(Protocol):
    """Layers ``first`` to ``last - 1`` on the worker at the address ``device``."""

    @property
    def device(self) -> str: ...
    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int: ...


@dataclass(frozen=True)
class Layers:
    """A plain :class:`Part`."""

    device: str
    first: int
    last: int


class WorkerLost(Unavailable):
    """A worker does not answer or compute any more, or cannot be reached by the one before it.

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


def go_on() -> None:
    """Give up nothing."""


def wait_until(attempt: Callable[[float], bool], due: float, check: Callable[[], None]) -> bool:
    """Return True as soon as ``attempt``, which waits for so many seconds, does; False when due.

    Args:
        check: is called between attempts; what it raises ends the wait.
    """
    while True:
        left = max(0.0, due - time.monotonic())
        if attempt(min(left, CHECK_S)):
            return True
        if not left:
            return False
        check()


def in_background(
    job: Coroutine[Any, Any, T], seconds: float, check: Callable[[], None] = go_on
) -> T:
    """Return the result of ``job``, which keeps to ``seconds`` itself, from the background thread.

    Args:
        check: is called now and then; what it raises ends the job.

    Raises:
        DeadlineExceeded: this machine is too busy to run that thread.
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
"""An answer that an arrangement waits for: its type, and the worker's number."""
_TRIAL: _Answer = (Result, 0)

Done = Callable[[Result | CollabError], None]


@dataclass(frozen=True)
class _UnderWay:
    """A pass that has been sent, and who waits for its result."""

    steps: tuple[Step, ...]
    done: Done
    sent_at: float


class Chain:
    """See the module docstring. Usable from any thread.

    Args:
        coordinator: a name that this process keeps: its chains replace one another.
        parts: the workers in the order of their layers.
        info: of the model that all of them have.
        lanes: that may be open at a time.
        states: form of hidden states between workers, one of ``messages.STATES``.
        path: their way, one of ``messages.PATHS``.
        due: ``time.monotonic()`` by which all layers must be loaded.
        check: is called now and then until they are; what it raises ends that.

    Attributes:
        parts: as given.
        bytes: of the tensors loaded, by worker.
        failed: why it is of no more use; None while it is.
        failed_at: ``time.monotonic()`` of that.

    Raises:
        WorkerLost: a worker is not reached.
        CollabError: a worker refuses: other weights, another version, or no room.
    """

    def __init__(
        self,
        config: LinkConfig,
        coordinator: str,
        parts: Sequence[Part],
        info: WorkerInfo,
        *,
        lanes: int,
        states: str,
        path: str,
        due: float,
        check: Callable[[], None] = go_on,
    ) -> None:
        self.parts = tuple(parts)
        self.info = info
        self.bytes = [0] * len(parts)
        self.failed: CollabError | None = None
        self.failed_at = 0.0
        self._config, self._coordinator = config, coordinator
        self._lanes, self._states, self._path = lanes, states, path
        self._loop = background_loop()
        self._links: list[StageLink] = []
        self._waiting: dict[int, _UnderWay] = {}  # by number, the oldest first
        self._next_number = 0
        self._progress = Progress(
            [_weights(part, info) for part in parts],
            tick_s=TICK_S,
            grace_s=_SILENCES * config.silence_s,
            row_s=info.width * 4 * 8 / (config.least_mbps * 1e6),
        )
        self._watching: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._times: deque[PassTimes] = deque(maxlen=LAST_PASSES)
        self._missing: set[_Answer] = set()  # answers until this stage of the arrangement is done
        try:
            in_background(self._arrange(due), due - time.monotonic(), check)
        except BaseException:
            self.close()
            raise

    @property
    def passes(self) -> list[PassTimes]:
        """Times of the last passes, in the order in which they ended."""
        return list(self._times.copy())

    def submit(self, steps: Sequence[Step], done: Done, features: bytes = b"") -> None:
        """Start a pass; ``done`` gets its result or error, in the background thread.

        Args:
            features: of the pictures in all steps, packed as hidden states are.
        """
        self._loop.call_soon_threadsafe(self._send, tuple(steps), done, features)

    def run(self, steps: Sequence[Step], due: float, features: bytes = b"") -> Result:
        """Return the result of one pass; ``features`` as for :meth:`submit`.

        Raises:
            DeadlineExceeded: it was not there in time.
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

    # Everything below runs in the background thread.

    async def _arrange(self, due: float) -> None:
        """Load all layers, connect each worker with the next, and have all compute something.

        What a worker computes first takes longer, and says how long later passes may take. One that
        computes nothing is found before a request waits for it.
        """
        chain, info = secrets.token_hex(16), self.info
        self._watching = asyncio.ensure_future(self._watch())
        try:
            loads = [
                Load(
                    self._coordinator,
                    chain,
                    info.version,
                    info.weights,
                    part.first,
                    part.last,
                    self._lanes,
                    self._states,
                    self._path,
                )
                for part in self.parts
            ]
            stages = range(len(loads))
            await self._all_answer(
                [(Loaded, i) for i in stages], due, lambda: self._open_links(loads)
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

    def _open_links(self, loads: Sequence[Load]) -> None:
        for i, (part, load) in enumerate(zip(self.parts, loads, strict=True)):

            def on_report(report: Report, i: int = i) -> None:
                self._on_report(i, report)

            def on_lost(error: CollabError, i: int = i) -> None:
                self._on_lost(i, error)

            self._links.append(StageLink(self._config, part.device, load, on_report, on_lost))

    def _connect_links(self) -> None:
        for link, part in zip(self._links, self.parts[1:], strict=False):
            link.send(Connect(part.device))

    def _try_out(self) -> None:
        """Start passes of one row and of several."""
        rows = min(_TRIAL_ROWS, self.info.context - 1)

        def on_end(result: Result | CollabError) -> None:
            if isinstance(result, Result):  # else _fail ends the arrangement
                self._answered(_TRIAL)

        self._send((Step(0, 0, (0,), want=Want.VERDICT, rows=1),), lambda result: None, b"")
        self._send((Step(0, 1, (0,) * rows, want=Want.VERDICT, rows=1),), lambda result: None, b"")
        self._send((Step(0, close=True),), on_end, b"")

    async def _watch(self) -> None:
        """Find the worker that does not go on."""
        while True:
            await asyncio.sleep(TICK_S)
            if (found := self._progress.tick()) is not None:
                worker, omits = found
                self._fail(self._at_fault(worker, omits))

    def _answered(self, answer: _Answer) -> None:
        """Note an answer that the arrangement waits for.

        Raises:
            KeyError: it does not.
        """
        self._missing.remove(answer)
        if not self._missing and self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    def _on_report(self, i: int, report: Report) -> None:
        """Take what a worker says.

        Raises:
            WorkerLost: it breaks the protocol.
        """
        self._progress.on_heard(i)
        try:
            if isinstance(report, Pong):
                self._progress.on_pong(i, report)
            elif isinstance(report, Result):
                self._on_result(i, report)
            elif isinstance(report, (Loaded, Connected)):
                self._answered((type(report), i))
                if isinstance(report, Loaded):
                    self.bytes[i] = report.bytes
            elif not isinstance(report, (Taken, Failure)):  # a failure ends the link
                raise ProtocolError(f"{type(report).__name__} has no place here", field="message")
        except KeyError:
            raise self._at_fault(i, f"{type(report).__name__} has no place here") from None
        except ProtocolError as error:
            raise self._at_fault(i, error.args[0]) from error

    def _on_result(self, i: int, result: Result) -> None:
        if i != len(self.parts) - 1 or result.number != next(iter(self._waiting), None):
            raise ProtocolError(f"a result of pass {result.number} has no place here")
        passed = self._waiting[result.number]
        check_result(result, passed.steps, len(self.parts), self.info)
        del self._waiting[result.number]
        self._progress.on_result(result.spans, time.monotonic() - passed.sent_at)
        self._times.append((result.number, result.spans))
        passed.done(result)

    def _at_fault(self, i: int, words: str, remedy: str = "") -> WorkerLost:
        device = self.parts[i].device
        return WorkerLost(device, WorkerAtFault(words, field=device, remedy=remedy))

    def _may_refuse(self, i: int, error: CollabError) -> bool:
        """Return True if ``error`` is about what worker ``i`` was asked for, and so no fault of it.

        It may refuse to load, and later only a pass that is larger than those of the trial.
        """
        if self._missing:
            refusals = (ConfigError, ModelError, Busy, Unauthenticated)
            return (Loaded, i) in self._missing and isinstance(error, refusals)
        steps = [step for passed in self._waiting.values() for step in passed.steps]
        if isinstance(error, InvalidInput):  # a message of logits has a limit
            logits = sum(step.rows for step in steps if step.want is Want.LOGITS)
            return error.field == "steps.rows" and logits > 1
        # So have the bytes of passes that wait.
        large = sum(len(step.ids) for step in steps) > _TRIAL_ROWS
        return isinstance(error, Busy) and error.field in ("states", "message") and large

    def _on_lost(self, i: int, error: CollabError) -> None:
        """End the chain, because the link to worker ``i`` has ended."""
        device = self.parts[i].device
        if isinstance(error, WorkerLost):
            self._fail(error)
        elif isinstance(error, (Unavailable, DeadlineExceeded)):
            following = [part.device for part in self.parts[i + 1 : i + 2]]
            # A worker that has lost the next one names it.
            self._fail(WorkerLost(error.field if error.field in following else device, error))
        elif self._may_refuse(i, error):
            words = f"worker {device}: {error.args[0]}"
            self._fail(type(error)(words, field=error.field, remedy=error.remedy))
        elif i and isinstance(error, ProtocolError) and error.field == "states":
            words = f"the worker behind it cannot read its states: {error.args[0]}"
            self._fail(self._at_fault(i - 1, words))
        else:  # whatever it says: all passes of all requests would end so
            self._fail(self._at_fault(i, error.args[0], error.remedy))

    def _send(self, steps: tuple[Step, ...], done: Done, features: bytes) -> None:
        if self.failed is not None:
            done(self.failed)
            return
        # What a worker refuses counts as its fault.
        if not all(0 <= token < self.info.vocab_size for step in steps for token in step.ids):
            done(InvalidInput("a token outside the vocabulary", field="prompt"))
            return
        number, self._next_number = self._next_number, self._next_number + 1
        self._waiting[number] = _UnderWay(steps, done, time.monotonic())
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
            self._ready.exception()  # perhaps nobody waits: that is no error
        waiting, self._waiting = self._waiting, {}
        for passed in waiting.values():
            passed.done(error)


def _weights(part: Part, info: WorkerInfo) -> float:
    """Return the size of a part's weights [byte], roughly: they are not known before Load."""
    ends = (part.first == 0) + (part.last == info.num_layers)
    return (
        4.0 * info.width * (16.0 * info.width * (part.last - part.first) + info.vocab_size * ends)
    )
