"""The interface of every protocol, whatever carries it: ROS, command line, benchmark or test.

A protocol is an :class:`Entry` in ``registry.py``. Its ``start`` loads the models and returns a
:class:`Running`, which answers one :class:`Request` per call of ``run``: it tells the answer so far
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
    """One answer asked for.

    Attributes:
        id: names the answer in every message about it; unique.
        config: an ``Entry.config`` in which this request's options are set.
        options: names of the fields of ``config`` that the request has set for itself.
        turns: the chat; the last turn is the user's.
        images: JPEG bytes, in the order of the prompt.
        max_tokens: length limit of the answer [tokens]; 0: the configuration's, see ``length``.
        stamp_ns, frame_id: capture time and camera frame of the newest image, for messages that
            are derived from it.
        asked_at: ``time.monotonic()`` of the request, for the metrics.
        raw: the model reads the one turn as it is, without a chat template.
        for_motion: the robot is to move by the answer; a protocol lets it go before others.
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
        """The turn to be answered."""
        return self.turns[-1].content

    def length(self, default: int) -> int:
        """Return the length limit of the answer [tokens], which is ``default`` if it names none.

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
        tokens, sources: [tokens] ids, and which rule produced each (``msg/GeneratedText``); empty
            where a protocol has text only.
        ends: [tokens] index in ``text`` after the last character of each token.
        verified: the target stands for every token.
        stage: what is being done, in the protocol's words.
        share_done: share of the work that is done, 0 to 1; 0 while nobody knows.
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
    """The end of an answer; with an ``error``, the rest is what there is of it."""

    error: CollabError | None = None


class Control:
    """Deadline and cancellation of one answer; used by several threads.

    Args:
        due: ``time.monotonic()`` by which the answer must be complete.
    """

    def __init__(self, due: float = math.inf) -> None:
        self.due = due
        self._cancelled = False
        self._wakes: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """Give the answer up."""
        with self._lock:
            self._cancelled, wakes = True, [*self._wakes]
        for wake in wakes:
            wake()

    def check(self) -> None:
        """Return if the answer is still wanted; call it between two passes.

        Raises:
            Cancelled: the caller gave it up.
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
        """Have ``wake`` called, from any thread, when the caller gives the answer up; at once if
        that has happened already. Returns a function that takes this back."""
        with self._lock:
            self._wakes.append(wake)
            cancelled = self._cancelled
        if cancelled:
            wake()

        def forget() -> None:
            with self._lock:
                self._wakes.remove(wake)

        return forget


class Running(Protocol):
    """A protocol with its models loaded."""

    @property
    def parallel(self) -> int:
        """Calls of ``run`` that may be made at the same time, beside one that is for motion."""

    def run(self, request: Request, emit: Callable[[Progress], None], control: Control) -> Answer:
        """Answer one request.

        Args:
            emit: takes the answer so far. Call it where nothing waits: it wakes other processes.

        Raises:
            CollabError: why there is no answer. What was emitted last is then what there is of it.
        """

    def health(self) -> Mapping[str, object]:
        """Return figures for people: models, memory, mode.

        ``failure``, where it is there and not empty, tells why all requests are refused.
        """

    def close(self) -> None:
        """Free what the protocol holds; no call of ``run`` is under way."""


@dataclass(frozen=True)
class Resources:
    """The things that a host gives to a protocol.

    Attributes:
        carrier: passes messages on to the other half of the protocol, where that is not the
            protocol's own business (``edge_cloud``: a ``Carrier``).
        log: for warnings to people.
    """

    carrier: Any = None
    log: logging.Logger | Any = field(default_factory=lambda: logging.getLogger(__name__))


def _accept(request: Request) -> None:
    """Refuse nothing."""


@dataclass(frozen=True)
class Entry:
    """One protocol.

    Attributes:
        name: the value of ``Generate.protocol``, and the namespace of its services.
        config: frozen dataclass with a default for every field: parameters, per-request options
            (fields made with ``setting(..., per_request=ANY)``, or another ``config.Direction``)
            and their documentation.
        start: loads the models; takes a ``config`` and the host's resources.
        takes: which of "chat" (more than one turn), "images" and "documents" it makes use of; a
            request with others is refused.
        check: raises InvalidInput for a request that can be refused without the models.
        service: type in ``srv/`` of a blocking twin of the action, whose fields are named as in
            ``Generate`` and may lack those it has no use for; the service is ``<name>_generate``.
    """

    name: str
    config: type
    start: Callable[[Any, Resources], Running]
    takes: frozenset[str] = frozenset()
    check: Callable[[Request], None] = _accept
    service: str = ""
