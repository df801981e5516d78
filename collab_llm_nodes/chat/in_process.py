"""Chat model in this process: one thread owns the engine and batches the jobs of all callers."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from collab_llm_nodes.chat.base import (
    MAX_JOBS,
    ChatRequest,
    Control,
    Finish,
    OnResult,
    Reply,
    Usage,
    check_jobs,
    ignore_result,
)
from collab_llm_nodes.chat.batch import Batch, BatchConfig, Ended, Job
from collab_llm_nodes.chat.quoting import Quoting
from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import (
    Cancelled,
    CollabError,
    DeadlineExceeded,
    ModelError,
    Unavailable,
)
from collab_llm_nodes.models.detokenising import REPLACEMENT
from collab_llm_nodes.models.guide import Guide
from collab_llm_nodes.models.prompt import Prompt, PromptLimits, encode
from collab_llm_nodes.models.turns import MAX_TURNS

if TYPE_CHECKING:  # llguidance is loaded where guides are used
    from collab_llm_nodes.models.guided_text import GuidedText

log = logging.getLogger(__name__)

_GRACE_S = 10.0
"""Grace period in which a running pass ends after the deadline."""


@dataclass(frozen=True)
class ChatLimits:
    """Limits of a prompt, which may hold a whole document."""

    max_characters: int = setting(1 << 20, "Longest text, all turns together.", low=1)

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class InProcessConfig:
    """Limits of a chat model in this process."""

    batch: BatchConfig = field(default_factory=BatchConfig)
    prompt: ChatLimits = field(default_factory=ChatLimits)


@dataclass(eq=False)
class _Call:
    """One call of ``ask``; the owner thread writes its results until ``over`` is set."""

    control: Control
    results: list[Reply | CollabError | None]
    begun: float
    on_result: OnResult
    indices: dict[Job, int] = field(default_factory=dict)
    cancelled: bool = False
    error: CollabError | None = None
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def active(self) -> bool:
        return not self.cancelled and time.monotonic() < self.control.due


class InProcessChat:
    """``base.ChatModel`` over an engine, which the caller closes.

    Args:
        name: of the model, as in a price table.
    """

    def __init__(
        self, engine: Engine, config: InProcessConfig | None = None, name: str = "local"
    ) -> None:
        self._engine = engine
        self._config = config or InProcessConfig()
        self._name = name
        self._limits = PromptLimits(self._config.prompt.max_characters, max_turns=MAX_TURNS)
        self._batch = Batch(engine, self._config.batch)
        self._calls: list[_Call] = []  # of the owner thread
        self._jobs = 0
        self._lock = threading.Lock()  # of _jobs and _closing
        self._closing = False
        self._spent = Usage()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"chat-{name}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._name

    def ask(
        self,
        requests: Sequence[ChatRequest],
        control: Control,
        on_result: OnResult = ignore_result,
    ) -> list[Reply | CollabError]:
        """Answer ``requests``; see ``base.ChatModel``.

        A request whose prompt cannot be encoded, or whose guide cannot be used, gives InvalidInput.
        """
        call = _Call(control, [None] * len(requests), time.monotonic(), on_result)
        control.check()
        self._admit(len(requests))
        try:
            for index, request in enumerate(requests):
                control.check()  # thousands of long prompts take seconds
                self._encode(request, index, call)
            if call.indices:
                self._wait_for(call)
        finally:
            with self._lock:
                self._jobs -= len(requests)
        results = [result for result in call.results if result is not None]
        assert len(results) == len(requests), "a request has no result"
        return results

    @property
    def parameters(self) -> int:
        """Number of the model's parameters."""
        return sum(each.numel() for each in self._engine.loaded.model.parameters())

    def health(self) -> Mapping[str, object]:
        """Return figures for diagnostics, read without a lock."""
        return {
            "model": self._name,
            "jobs": self._jobs,
            "active": self._batch.active,
            "passes": self._batch.passes,
            "prefill_tokens": self._spent.prefill,
            "cached_tokens": self._spent.cached,
            "decode_tokens": self._spent.decode,
        }

    def close(self) -> None:
        """End running calls with Unavailable and free the KV caches, but not the engine."""
        with self._lock:
            self._closing = True
        self._events.put(lambda: None)
        self._thread.join(_GRACE_S)

    def _admit(self, jobs: int) -> None:
        with self._lock:
            if self._closing:
                raise _closed()
            check_jobs(self._jobs, jobs, MAX_JOBS)
            self._jobs += jobs

    def _encode(self, request: ChatRequest, index: int, call: _Call) -> None:
        prompt = Prompt(request.turns[-1].content, turns=request.turns[:-1])
        try:
            encoded = encode(prompt, self._engine.loaded, self._limits)
            guided = self._guided(request.guide)
        except CollabError as error:
            call.results[index] = error
            call.on_result(index, error)
            return
        ids = np.array(encoded.ids, dtype=np.int32)
        quoting = (
            Quoting(request.quotable, self._ids, self._engine.decode) if request.quotable else None
        )
        job = Job(call, ids, request.sampling, request.max_tokens, quoting, guide=guided)
        call.indices[job] = index

    def _guided(self, guide: Guide | None) -> GuidedText | None:
        """Return the state of ``guide``; None where replies begin in a thought."""
        loaded = self._engine.loaded
        return None if guide is None or loaded.begun_thought else loaded.guides.open(guide)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        found: list[list[int]] = self._engine.loaded.tokenizer(
            texts, add_special_tokens=False
        ).input_ids
        return found

    def _wait_for(self, call: _Call) -> None:
        """Pass ``call`` to the owner thread and wait until it is over.

        Raises:
            Cancelled, Unavailable: see ``base.ChatModel``.
            DeadlineExceeded: a pass does not end.
        """

        def cancel() -> None:
            call.cancelled = True
            self._events.put(lambda: None)

        with self._lock:
            if self._closing:
                raise _closed()
            self._events.put(lambda: self._begin(call))  # at the latest, the last drain reads it
        unregister = call.control.on_cancel(cancel)
        try:
            left_s = call.control.due - time.monotonic() + _GRACE_S
            if not call.over.wait(None if math.isinf(left_s) else max(0.0, left_s)):
                cancel()
                raise DeadlineExceeded(
                    f"a pass of {self._name} did not end within {_GRACE_S:g} s after the deadline",
                    field="deadline_s",
                    remedy="lower prefill_tokens or max_batch",
                )
        finally:
            unregister()
        if call.error is not None:
            raise call.error

    # Everything below runs in the owner thread.

    def _run(self) -> None:
        while not self._closing:
            try:
                self._step()
            except Exception as error:  # a bug: these calls fail, later ones are served
                log.exception("the model %s failed", self._name)
                self._fail(ModelError(f"the model failed: {error}", remedy="see the log"))
        while not self._events.empty():
            self._events.get()()
        for call in tuple(self._calls):
            self._end(call, _closed())
        self._batch.close()

    def _step(self) -> None:
        """Handle all waiting events and make one pass."""
        with contextlib.suppress(queue.Empty):
            self._events.get(block=self._batch.idle)()
            while True:
                self._events.get_nowait()()
        self._end_inactive()
        if not self._batch.idle:
            with contextlib.suppress(Cancelled):
                self._deliver(self._batch.step(self._check))

    def _fail(self, error: CollabError) -> None:
        """End all calls with ``error`` and start a new batch, since the state is unknown."""
        for call in self._calls:
            call.error = error
            call.over.set()
        self._calls.clear()
        self._batch = Batch(self._engine, self._config.batch)

    def _begin(self, call: _Call) -> None:
        self._calls.append(call)
        self._batch.add(list(call.indices))

    def _check(self) -> None:
        """Cancel a pass without an active call."""
        if self._closing or not any(call.active for call in self._calls):
            raise Cancelled("no call is active")

    def _end_inactive(self) -> None:
        for call in tuple(self._calls):
            if call.cancelled:
                self._end(call, Cancelled("the caller cancelled the requests"))
            elif not call.active:
                self._deliver(self._batch.end(call, Finish.DEADLINE))

    def _end(self, call: _Call, error: CollabError) -> None:
        """End the whole ``call`` with ``error``."""
        call.error = error
        self._batch.end(call, error)
        self._calls.remove(call)
        call.over.set()

    def _deliver(self, ended: Sequence[Ended]) -> None:
        """Deliver the results of jobs to their calls."""
        for job, usage, reason in ended:
            call = job.owner
            assert isinstance(call, _Call)
            self._spent += usage
            seconds = time.monotonic() - call.begun
            result = (
                reason
                if isinstance(reason, CollabError)
                else Reply(self._text(job, reason), reason, usage, seconds=seconds)
            )
            index = call.indices.pop(job)
            call.results[index] = result
            call.on_result(index, result)
            if not call.indices:
                self._calls.remove(call)
                call.over.set()

    def _text(self, job: Job, finish: Finish) -> str:
        text = self._engine.loaded.begun_thought + self._engine.decode(job.tokens)
        return text if finish is Finish.STOP else text.rstrip(REPLACEMENT)  # of half a character


def _closed() -> Unavailable:
    return Unavailable("the model was closed", remedy="start it again")
