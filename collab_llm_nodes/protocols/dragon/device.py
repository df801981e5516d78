"""One answer on the device: its own side, the cloud's over the wire, and both together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from collab_llm_nodes.decoding.aggregation import (
    AggregationConfig,
    AggregationLaw,
    Pair,
    Party,
)
from collab_llm_nodes.errors import (
    Busy,
    Cancelled,
    CollabError,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    ProtocolError,
    Unauthenticated,
    Unavailable,
    VocabularyMismatch,
)
from collab_llm_nodes.protocols.base import Control, Source
from collab_llm_nodes.protocols.dragon.answering import SideLoop
from collab_llm_nodes.protocols.dragon.client import DragonClient, Stream, StreamEvent
from collab_llm_nodes.protocols.dragon.link import DeviceLink, PatienceConfig, Step
from collab_llm_nodes.protocols.dragon.machine import AheadConfig, SideMachine
from collab_llm_nodes.protocols.dragon.messages import Identity, Line, Message, Open, Opened
from collab_llm_nodes.protocols.dragon.metrics import DragonMetrics
from collab_llm_nodes.protocols.dragon.profiler import UNKNOWN, Profiler
from collab_llm_nodes.protocols.dragon.scheduler import ScheduleConfig, Scheduler
from collab_llm_nodes.protocols.dragon.side import Side, SideInfo

log = logging.getLogger(__name__)

_REFUSALS = (ConfigError, InvalidInput, Unauthenticated, VocabularyMismatch)
"""Errors by which a cloud refuses this request or device for good."""
_PASSING = (Unavailable, Busy, DeadlineExceeded, Cancelled)
"""Errors that may not occur at the next attempt."""


@dataclass(frozen=True)
class Rules:
    """The rules of an answer."""

    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ahead: AheadConfig = field(default_factory=AheadConfig)
    patience: PatienceConfig = field(default_factory=PatienceConfig)


@dataclass(frozen=True)
class Question:
    """A request for one answer."""

    query: str
    max_tokens: int
    temperature: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class AnswerSoFar:
    """The answer so far."""

    tokens: tuple[int, ...]
    sources: tuple[Source, ...]
    metrics: DragonMetrics


class _Woken:
    """An event that only wakes the loop, to check the control."""


class DeviceAnswer:
    """One answer, run by the caller's thread.

    Args:
        compute: the device's compute thread.
        client: None: there is no cloud, the device answers alone.
        decode: the line of the device's passes, if it was measured.
        acceptance: estimate from earlier answers; ``Profiler.acceptance`` is the new one.
    """

    def __init__(
        self,
        side: Side,
        compute: Executor,
        client: DragonClient | None,
        rules: Rules,
        question: Question,
        decode: Line | None = None,
        acceptance: Pair = UNKNOWN,
    ) -> None:
        self._side, self._compute, self._client = side, compute, client
        self._rules, self._question = rules, question
        info = side.info
        rtt_s = client.rtt_s if client is not None else 0.0
        law = AggregationLaw(
            rules.aggregation,
            info.vocab_size,
            question.temperature,
            question.seed,
            most_log_weight=info.most_log_weight,
        )
        self.machine = SideMachine(
            Party.DEVICE,
            law,
            Scheduler(rules.schedule),
            Profiler(rtt_s=rtt_s, acceptance=acceptance),
            vocab_size=info.vocab_size,
            eos=info.eos,
            max_tokens=question.max_tokens,
            ahead=rules.ahead,
            linked=False,
        )
        self._decode = decode
        self.machine.profiler.on_line(Party.DEVICE, decode)
        self._loop = SideLoop(self.machine, self._send)
        absent = client is not None and client.absent
        self._link = DeviceLink(rules.patience, time.monotonic(), absent=absent)
        self._stream: Stream | None = None
        self._bytes = [0, 0]  # of streams before the present one
        self._told = 0
        self._since = 0.0
        self._first_s = 0.0
        self._cloud_documents = 0

    def run(
        self, emit: Callable[[AnswerSoFar], None], control: Control, asked_at: float
    ) -> AnswerSoFar:
        """Return the whole answer; ``emit`` takes it as it grows.

        Raises:
            CollabError: the device's model failed, the caller cancelled, or the cloud refused
                before the first token.
        """
        self._since = asked_at
        self._open_stream()  # first, so that both sides retrieve at the same time
        forget = control.on_cancel(lambda: self._loop.post(_Woken()))
        try:
            side, question = self._side, self._question
            self._loop.begin(
                self._compute, lambda: side.decoder(question.query, question.max_tokens)
            )
            while not self.machine.finished:
                control.check()
                event = self._loop.next_event(min(control.due, self._link.next_time))
                if event is not None:
                    self._serve(event)
                self._watch()
                self._loop.follow()
                if len(self.machine.answer) > self._told:
                    self._first_s = self._first_s or time.monotonic() - self._since
                    self._told = len(self.machine.answer)
                    emit(self.so_far)
            return self.so_far
        finally:
            forget()
            self._loop.close()
            self._drop_stream()

    @property
    def so_far(self) -> AnswerSoFar:
        """The answer so far."""
        machine, figures = self.machine, self.machine.figures
        up, down = self._bytes
        if self._stream is not None:
            up, down = up + self._stream.bytes_up, down + self._stream.bytes_down
        metrics = DragonMetrics(
            rounds=len(figures.fates),
            tokens=len(machine.answer),
            unverified=machine.sources.count(Source.UNVERIFIED),
            time_to_first_token_s=self._first_s,
            total_s=time.monotonic() - self._since,
            bytes_up=up,
            bytes_down=down,
            accepted_device=sum(fate[0] for fate in figures.fates),
            accepted_cloud=sum(fate[1] for fate in figures.fates),
            discarded=figures.discarded,
            ended_passes=figures.ended_passes,
            handovers=figures.handovers,
            reconnects=self._link.reopened,
            cloud_documents=self._cloud_documents,
        )
        return AnswerSoFar(tuple(machine.answer), tuple(machine.sources), metrics)

    def _serve(self, event: object) -> None:
        now = time.monotonic()
        if not isinstance(event, StreamEvent):
            self._loop.serve(event, now)
            return
        event.stream.taken += 1
        if event.stream is not self._stream:
            return
        if isinstance(event.news, CollabError):
            self._lost(event.news, now)
        elif isinstance(event.news, Opened) is self._link.up:
            self._lost(
                ProtocolError(
                    f"{type(event.news).__name__} has no place here",
                    field="cloud",
                    remedy="Opened comes first, and once",
                ),
                now,
            )
        elif isinstance(event.news, Opened):
            self._link.on_opened(now)
            self._note_absent(False)
            self._cloud_documents = event.news.documents
            self.machine.profiler.on_line(Party.CLOUD, event.news.decode)
            self.machine.on_linked(now)
        else:
            self._hear(event.news, event.size, now)

    def _hear(self, message: Message, size: int, now: float) -> None:
        """Process a draft or a target; go on alone after an invalid one."""
        try:
            needed = self.machine.on_message(message, now, size)
        except CollabError as error:
            words = f"the cloud sent an invalid message: {error.args[0]}"
            self._lost(ProtocolError(words, field=error.field, remedy=error.remedy), now)
            return
        if needed:
            self._link.on_heard()
        self._loop.follow()

    def _watch(self) -> None:
        """Open the stream again, or go on alone, as the link decides."""
        now = time.monotonic()
        self._link.on_wait(self.machine.waits_for_peer, now)
        step = self._link.on_time(now)
        if step is Step.OPEN:
            self.machine.on_lost()
            self._open_stream()
        elif step is Step.GIVE_UP:
            self._note_absent(True)
            self._go_alone(Unavailable("the cloud does not answer", field="cloud"))

    def _note_absent(self, absent: bool) -> None:
        if self._client is not None:
            self._client.absent = absent

    def _lost(self, error: CollabError, now: float) -> None:
        opened = self._link.up
        self._drop_stream()
        self.machine.on_lost()
        if isinstance(error, _PASSING):
            log.info("the stream to the cloud was lost: %s", error)
            self._link.on_lost(now)
            return
        self._link.on_refused()
        if isinstance(error, _REFUSALS) and not (opened or self.machine.answer):
            raise error
        self._go_alone(error)

    def _go_alone(self, reason: CollabError) -> None:
        self._drop_stream()
        if self._rules.patience.without_cloud == "fail":
            raise reason
        log.warning("the device answers without the cloud: %s", reason)
        if self._client is not None:
            self._client.left = reason
        self.machine.go_alone(time.monotonic())

    def _open_stream(self) -> None:
        self._drop_stream()
        if self._client is None:
            self._link.on_refused()
            self.machine.go_alone(time.monotonic())
            return
        rules, question = self._rules, self._question
        opened = Open(
            question.query,
            question.max_tokens,
            identity_of(self._side.info),
            rules.aggregation,
            question.temperature,
            question.seed,
            rules.schedule.aggregate_on,
            rules.ahead.max_ahead,
            self.machine.profiler.rtt_s,
            tuple(self.machine.answer),
            self._decode,
        )
        self._stream = self._client.open(opened, self._loop.post)

    def _drop_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._bytes[0] += self._stream.bytes_up
            self._bytes[1] += self._stream.bytes_down
            self._stream = None

    def _send(self, message: Message) -> None:
        if self._stream is not None:
            self._stream.send(message)


def identity_of(info: SideInfo) -> Identity:
    """Return the identity that a side sends in the handshake."""
    return Identity(info.vocabulary, info.model, info.scorer)
