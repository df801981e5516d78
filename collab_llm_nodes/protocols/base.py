"""The interface of every protocol, for ROS, command line, benchmarks and tests.

A protocol is an :class:`Entry` in ``registry.py``. Its ``start`` loads the models and returns a
:class:`Running`, which answers one :class:`Request` per call of ``run``: it emits the answer so far
as :class:`Progress` and returns an :class:`Answer`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

from collab_llm_nodes.config import check_max_tokens
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import Cancelled, CollabError, DeadlineExceeded
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.metrics import GenerationMetrics
from collab_llm_nodes.models.turns import Turn


class Source(IntEnum):
    """Origin of a token of the answer (the words of vLLM's rejection sampler).

    With two sides that both draft, a token is ACCEPTED if both have drafted it.
    """

    ACCEPTED = 0
    RECOVERED = 1
    BONUS = 2
    UNVERIFIED = 3
    DEVICE = 4
    CLOUD = 5


@dataclass(frozen=True)
class Request:
    """A request for one answer.

    Attributes:
        id: identifies the answer in every message about it; unique.
        config: an ``Entry.config`` in which this request's options are set.
        options: names of the fields of ``config`` that the request has set for itself.
        turns: the chat; the last turn is the user's.
        images: JPEG bytes, in the order of the prompt.
        max_tokens: length limit of the answer [tokens]; 0: the configuration's, see ``length``.
        stamp_ns, frame_id: capture time and camera frame of the newest image, for derived messages.
        asked_at: ``time.monotonic()`` of the request, for the metrics.
        raw: the model reads the one turn as it is, without a chat template.
        for_motion: the robot is to move by the answer; a protocol serves it before others.
    """

    id: str
    config: Any
    turns: tuple[Turn, ...]
    images: tuple[bytes, ...] = ()
    documents: tuple[Document, ...] = ()
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    max_tokens: int = 0
    stamp_ns: int = 0
    frame_id: str = ""
    asked_at: float = 0.0
    raw: bool = False
    for_motion: bool = False
    options: frozenset[str] = frozenset()

    @property
    def prompt(self) -> str:
        """The text of the turn to answer."""
        return self.turns[-1].content

    def length(self, default: int) -> int:
        """Return the length limit of the answer [tokens]; ``default`` if the request sets none.

        Raises:
            InvalidInput: it is out of range.
        """
        limit = self.max_tokens or default
        check_max_tokens(limit)
        return limit


@dataclass(frozen=True)
class Progress:
    """The answer so far, as a whole.

    Attributes:
        text: may grow only at its end, between two reports of one answer.
        tokens, sources: [tokens] ids and the rule that produced each (``msg/GeneratedText``); empty
            if a protocol has text only.
        ends: [tokens] index in ``text`` after the last character of each token.
        verified: the target has verified every token.
        stage: the present step of the protocol, for people.
        share_done: share of the work that is done, 0 to 1; 0 while unknown.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    verified: bool = True
    stage: str = ""
    share_done: float = 0.0
    metrics: GenerationMetrics = field(default_factory=GenerationMetrics)


@dataclass(frozen=True)
class Answer(Progress):
    """A complete answer; with an ``error``, the part of it that exists."""

    error: CollabError | None = None


class Control:
    """Deadline and cancellation of one answer; thread-safe.

    Args:
        due: ``time.monotonic()`` by which the answer must be complete.
    """

    def __init__(self, due: float = math.inf) -> None:
        self.due = due
        self._cancelled = False
        self._wakes: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """Cancel the answer."""
        with self._lock:
            self._cancelled, wakes = True, [*self._wakes]
        for wake in wakes:
            wake()

    def check(self) -> None:
        """Check that the answer is still wanted; call it between two passes.

        Raises:
            Cancelled: the caller has cancelled it.
            DeadlineExceeded: its time is over.
        """
        if self._cancelled:
            raise Cancelled("the caller gave the answer up")
        if time.monotonic() >= self.due:
            raise DeadlineExceeded(
                "the answer was not complete within its deadline",
                field="deadline_s",
                remedy="raise deadline_s, or lower max_tokens",
            )

    def on_cancel(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Register ``wake`` to be called, from any thread, when the answer is cancelled.

        It is called at once if that has happened already. Returns a function that unregisters it.
        """
        with self._lock:
            self._wakes.append(wake)
            cancelled = self._cancelled
        if cancelled:
            wake()

        def unregister() -> None:
            with self._lock:
                self._wakes.remove(wake)

        return unregister


class Running(Protocol):
    """A protocol with its models loaded."""

    @property
    def parallel(self) -> int:
        """Number of concurrent calls of ``run``, beside one that is for motion."""

    def run(self, request: Request, emit: Callable[[Progress], None], control: Control) -> Answer:
        """Answer one request.

        Args:
            emit: callback for the answer so far. Call it while nothing waits: it wakes other
                processes.

        Raises:
            CollabError: there is no answer beyond what was emitted last.
        """

    def health(self) -> Mapping[str, object]:
        """Return figures for people: models, memory, mode.

        ``failure``, if present and not empty, is the reason why all requests are refused.
        """

    def close(self) -> None:
        """Free the protocol's resources; no call of ``run`` may be in progress."""


@dataclass(frozen=True)
class Resources:
    """Resources that a host gives to a protocol.

    Attributes:
        carrier: carries messages to the protocol's other half, if the host does that
            (``edge_cloud``: a ``Carrier``).
        log: for warnings to people.
    """

    carrier: Any = None
    log: logging.Logger | Any = field(default_factory=lambda: logging.getLogger(__name__))


def _accept(request: Request) -> None:
    """Accept every request."""


@dataclass(frozen=True)
class Entry:
    """One protocol.

    Attributes:
        name: the value of ``Generate.protocol``, and the namespace of its services.
        config: frozen dataclass with a default for every field: parameters, per-request options
            (fields made with ``setting(..., per_request=ANY)``, or another ``config.Direction``)
            and their documentation.
        start: loads the models; takes a ``config`` and the host's resources.
        takes: the inputs that it uses, of "chat" (more than one turn), "images" and "documents"; a
            request with others is refused.
        check: raises InvalidInput for a request that can be refused without the models.
        service: type in ``srv/`` of a blocking twin of the action, whose fields are named as in
            ``Generate``; it need not have all of them. The service is ``<name>_generate``.
    """

    name: str
    config: type
    start: Callable[[Any, Resources], Running]
    takes: frozenset[str] = frozenset()
    check: Callable[[Request], None] = _accept
    service: str = ""
