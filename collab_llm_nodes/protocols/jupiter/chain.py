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

from collab_llm_nodes.errors import CollabError, DeadlineExceeded, Unavailable
from collab_llm_nodes.protocols.jupiter.link import LinkConfig, StageLink
from collab_llm_nodes.protocols.jupiter.messages import (
    Connect,
    Connected,
    Load,
    Loaded,
    Pass,
    PassTimes,
    Report,
    Result,
    Step,
    WorkerInfo,
)
from collab_llm_nodes.transport.background import background_loop, within

log = logging.getLogger(__name__)

T = TypeVar("T")

LAST_PASSES = 128
"""Passes whose times a chain keeps."""
CHECK_S = 0.1
"""Period at which those who wait are asked whether they still want to."""
_SLACK_S = 5.0  # for the background thread of a busy machine


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
    """A worker does not answer any more, or cannot be reached by the one before it.

    Attributes:
        device: its address.
    """

    def __init__(self, device: str, why: CollabError) -> None:
        super().__init__(
            f"worker {device} is lost: {why.args[0]}", field="workers", remedy=why.remedy
        )
        self.device = device


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


Done = Callable[[Result | CollabError], None]


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
        self._waiting: dict[int, Done] = {}
        self._next_number = 0
        self._ready: asyncio.Future[None] | None = None
        self._times: deque[PassTimes] = deque(maxlen=LAST_PASSES)
        self._missing = 0  # answers until the present stage of the arrangement is done
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
        """Load all layers, then connect each worker with the next."""
        chain, info = secrets.token_hex(16), self.info
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
            await self._all_answer(len(loads), due, lambda: self._open_links(loads))
            await self._all_answer(len(loads) - 1, due, self._connect_links)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(
                "the workers did not load their layers in time",
                field="workers",
                remedy="raise the deadline, or see their logs",
            ) from None

    async def _all_answer(self, count: int, due: float, ask: Callable[[], None]) -> None:
        if not count:
            return
        self._missing, self._ready = count, self._loop.create_future()
        ask()
        await within(self._ready, max(0.0, due - time.monotonic()))

    def _open_links(self, loads: Sequence[Load]) -> None:
        for i, (part, load) in enumerate(zip(self.parts, loads, strict=True)):

            def on_report(report: Report, i: int = i) -> None:
                self._on_report(i, report)

            def on_lost(error: CollabError, device: str = part.device) -> None:
                self._on_lost(device, error)

            self._links.append(StageLink(self._config, part.device, load, on_report, on_lost))

    def _connect_links(self) -> None:
        for link, part in zip(self._links, self.parts[1:], strict=False):
            link.send(Connect(part.device))

    def _on_report(self, i: int, report: Report) -> None:
        if isinstance(report, Loaded):
            self.bytes[i] = report.bytes
        if isinstance(report, (Loaded, Connected)):
            self._missing -= 1
            if not self._missing and self._ready is not None and not self._ready.done():
                self._ready.set_result(None)
        elif isinstance(report, Result):
            self._times.append((report.number, report.spans))
            done = self._waiting.pop(report.number, None)
            if done is not None:
                done(report)

    def _on_lost(self, device: str, error: CollabError) -> None:
        """Note that the link to ``device`` has ended."""
        if isinstance(error, (Unavailable, DeadlineExceeded)):
            known = [part.device for part in self.parts]
            # A worker that has lost the next one names it.
            self._fail(WorkerLost(error.field if error.field in known else device, error))
        else:
            self._fail(error)

    def _send(self, steps: tuple[Step, ...], done: Done, features: bytes) -> None:
        if self.failed is not None:
            done(self.failed)
            return
        number, self._next_number = self._next_number, self._next_number + 1
        self._waiting[number] = done
        self._links[0].send(Pass(number, steps, features))

    def _fail(self, error: CollabError) -> None:
        if self.failed is not None:
            return
        self.failed, self.failed_at = error, time.monotonic()
        for link in self._links:
            link.close()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # perhaps nobody waits: that is no error
        waiting, self._waiting = self._waiting, {}
        for done in waiting.values():
            done(error)
