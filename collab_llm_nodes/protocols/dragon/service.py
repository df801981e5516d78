"""The cloud's side as a service: each stream is one answer, written together with one device.

``transport/streams.py`` admits, times and ends streams; this module handles their messages. Each
answer has a thread that runs its machine (``answering.py``). All share one compute thread, pass by
pass; each address gets an equal share of its time.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from collab_llm_nodes.config import MAX_TOKENS, check_max_tokens, setting
from collab_llm_nodes.decoding.aggregation import AggregationLaw, Party
from collab_llm_nodes.errors import (
    Busy,
    CollabError,
    ConfigError,
    InvalidInput,
    ProtocolError,
    Unavailable,
    VocabularyMismatch,
)
from collab_llm_nodes.protocols.dragon import codec
from collab_llm_nodes.protocols.dragon.answering import Heard, SideLoop
from collab_llm_nodes.protocols.dragon.machine import AheadConfig, SideMachine
from collab_llm_nodes.protocols.dragon.messages import (
    CloudInfo,
    CloudMessage,
    Draft,
    Identity,
    Line,
    Message,
    Open,
    Opened,
    Target,
)
from collab_llm_nodes.protocols.dragon.profiler import Profiler
from collab_llm_nodes.protocols.dragon.scheduler import ScheduleConfig, Scheduler
from collab_llm_nodes.protocols.dragon.side import Side, SideInfo
from collab_llm_nodes.serving.fair_thread import FairThread
from collab_llm_nodes.transport.settings import ServerConfig, StreamLimits
from collab_llm_nodes.transport.streams import ClientSession, StreamService, Unary

log = logging.getLogger(__name__)

_FREE_S = 0.5
"""Seconds for threads to free their resources at the end."""
Reply = Opened | Draft | Target
Client = ClientSession[Reply]


@dataclass(frozen=True)
class Limits(StreamLimits):
    """Bounds on the requests of one device."""

    max_message_bytes: int = setting(4 << 20, "One message [byte].", low=4096, high=256 << 20)
    max_sessions: int = setting(
        16,
        "Answers that hold KV caches at a time; others are refused with BUSY.",
        low=1,
        high=4096,
    )
    max_query_chars: int = setting(8192, "Text of a query [character].", low=1, high=1 << 20)
    max_tokens: int = setting(1024, "Tokens of one answer.", low=1, high=MAX_TOKENS)


@dataclass(frozen=True)
class CloudServiceConfig(ServerConfig):
    """Settings of the cloud's service, without its model and documents."""

    address: str = setting("127.0.0.1:50552", "Listen here, host:port; port 0 takes a free one.")
    limits: Limits = field(default_factory=Limits)
    prefill_tokens: int = setting(
        256,
        "Tokens of a prompt that are read in one pass at most; between two passes, other answers"
        " have their turn.",
        low=8,
        high=1 << 20,
    )
    other_models: bool = setting(
        False,
        "Take part in answers of devices with another model of the same vocabulary. The answer is"
        " then drawn from a mixture of two models.",
    )


class DragonService(StreamService[Reply]):
    """The cloud's side without a network.

    Args:
        side: model and public documents.
        model: its name, for people.
        version: of this package.
        decode: the line of the side's passes, if it was measured.
    """

    name = "dragon"
    full_name = codec.SERVICE
    stream = "Answer"

    def __init__(
        self,
        config: CloudServiceConfig,
        side: Side,
        model: str,
        version: str,
        decode: Line | None = None,
    ) -> None:
        super().__init__(config)
        self.config = config
        self.title = f"DRAGON's cloud with {model}"
        self._side, self._model, self._version = side, model, version
        self.decode = decode
        self._answers: set[_Answer] = set()
        self._info = side.info  # hashes the model: before anyone waits

    def start(self) -> None:
        super().start()
        self.compute = FairThread("dragon-compute")

    async def stop(self) -> bool:
        for answer in list(self._answers):
            answer.leave()
        self.compute.shutdown()
        due = time.monotonic() + _FREE_S
        while self._answers and time.monotonic() < due:
            await asyncio.sleep(0.01)
        return not self._answers

    def unary(self) -> Mapping[str, Unary]:
        return {"Describe": self._describe}

    async def _describe(self, request: bytes) -> bytes:
        info, limits = self._info, self.config.limits
        return codec.encode_info(
            CloudInfo(
                self._model,
                Identity(info.vocabulary, info.model, info.scorer),
                info.vocab_size,
                self._version,
                limits.max_tokens,
                limits.max_query_chars,
                self.sessions,
            )
        )

    def encode(self, message: CloudMessage) -> bytes:
        return codec.encode_cloud(message)

    def is_last(self, message: Reply) -> bool:
        return isinstance(message, Target) and message.finished

    async def serve_stream(self, client: Client) -> None:
        """Read Open, then drafts and targets."""
        data = await self.read_first(client)
        if data is None:
            return
        opened = codec.decode_device(data)
        if not isinstance(opened, Open):
            raise ProtocolError(
                "the first message must be Open", field="message", remedy="send Open first"
            )
        answer = self._begin(client, opened)
        most = codec.largest_draft(opened.law, self._info.vocab_size)
        try:
            while (data := await self.read(client)) is not None:
                if len(data) > most:  # parsing a million tokens would delay all answers
                    raise InvalidInput(
                        f"has {len(data)} bytes",
                        field="message",
                        remedy=f"at most {most}, by the law's max_support and the vocabulary",
                    )
                message = codec.decode_device(data)
                if isinstance(message, Open):
                    raise ProtocolError(
                        "the answer is open already", field="message", remedy="use a new stream"
                    )
                answer.hear(message, len(data))
        finally:
            answer.leave()

    def _begin(self, client: Client, opened: Open) -> _Answer:
        limits = self.config.limits
        check_open(opened, self._info, limits, other_models=self.config.other_models)
        if len(self._answers) >= limits.max_sessions:
            self._make_room(client.owner)
        answer = _Answer(self, client, opened, self._info)
        self._answers.add(answer)
        client.open()
        client.deliver(Opened(self._model, self.decode, self._side.pieces))
        answer.start(self._side, self._answers.discard)
        return answer

    def _make_room(self, owner: str) -> None:
        """End an answer of the address that has most of them, for one that has two fewer.

        The device that loses it opens it again with what it knows, as after a broken connection.

        Raises:
            Busy: the places are shared out evenly.
        """
        answers = tuple(self._answers)
        held = Counter(answer.owner for answer in answers)
        greediest = max(held, key=held.__getitem__)
        if held[greediest] < held[owner] + 2:
            raise Busy(
                f"{len(self._answers)} answers are under way",
                field="session",
                remedy="try again later, or raise limits.max_sessions",
            )
        oldest = min(
            (answer for answer in answers if answer.owner == greediest),
            key=lambda answer: answer.heard_at,
        )
        self._answers.discard(oldest)
        oldest.end(Unavailable("others wait for a place", field="session", remedy="open it again"))


class _Answer:
    """One answer on the cloud's side, in a thread of its own."""

    def __init__(
        self, service: DragonService, client: Client, opened: Open, info: SideInfo
    ) -> None:
        self.owner = client.owner
        self.heard_at = time.monotonic()
        self._client = client
        self._opened = opened
        self._compute = service.compute.share(client.owner)
        self._left = threading.Event()
        schedule = ScheduleConfig(aggregate_on=opened.aggregate_on)
        law = AggregationLaw(
            opened.law,
            info.vocab_size,
            opened.temperature,
            opened.seed,
            most_log_weight=info.most_log_weight,
        )
        machine = SideMachine(
            Party.CLOUD,
            law,
            Scheduler(schedule),
            Profiler(rtt_s=opened.rtt_s),
            vocab_size=info.vocab_size,
            eos=info.eos,
            max_tokens=opened.max_tokens,
            ahead=AheadConfig(opened.max_ahead),
            answer=opened.replay,
        )
        machine.profiler.on_line(Party.CLOUD, service.decode)
        machine.profiler.on_line(Party.DEVICE, opened.decode)
        self._loop = SideLoop(machine, client.post, service.config.prefill_tokens)

    def start(self, side: Side, ended: Callable[[_Answer], None]) -> None:
        """Begin; ``ended`` is called with this answer at the end."""
        thread = threading.Thread(
            target=self._run, args=(side, ended), name="dragon-answer", daemon=True
        )
        thread.start()

    def hear(self, message: Message, size: int) -> None:
        """Process a message of the device."""
        self.heard_at = time.monotonic()
        self._loop.post(Heard(message, size))

    def end(self, error: CollabError) -> None:
        """End the answer, and send ``error`` to the device."""
        self._client.deliver(error)
        self.leave()

    def leave(self) -> None:
        """End the answer without a message."""
        self._left.set()
        self._loop.post(None)

    def _run(self, side: Side, ended: Callable[[_Answer], None]) -> None:
        opened, machine = self._opened, self._loop.machine
        try:
            self._loop.begin(self._compute, lambda: side.decoder(opened.query, opened.max_tokens))
            while not (machine.finished or self._left.is_set() or self._client.gone.is_set()):
                event = self._loop.next_event(time.monotonic() + 3600.0)
                if event is not None:
                    self._loop.serve(event, time.monotonic())
        except CollabError as error:
            self._client.post(error)
        except Exception:  # a fault here ends one answer, not the service
            log.exception("answer %s failed", self._client.id[:8])
            self._client.post(CollabError("the cloud's side failed", remedy="see its log"))
        finally:
            self._loop.close()
            ended(self)


def check_open(opened: Open, info: SideInfo, limits: Limits, *, other_models: bool) -> None:
    """Check a request as far as possible without the model.

    Raises:
        VocabularyMismatch: token ids mean different things on the two sides.
        ConfigError: the sides differ in scorer or model, so that they cannot write one answer.
        InvalidInput: a value is out of range.
    """
    identity = opened.identity
    if identity.vocabulary != info.vocabulary:
        raise VocabularyMismatch(
            "device and cloud have different vocabularies",
            field="identity.vocabulary",
            remedy="use models with one tokenizer",
        )
    if identity.scorer != info.scorer:
        raise ConfigError(
            "device and cloud weigh documents by different scorers",
            field="identity.scorer",
            remedy="use one encoder, temperature, update rule and side.answers on both sides",
        )
    if identity.model != info.model and not other_models:
        raise ConfigError(
            "device and cloud have different models",
            field="identity.model",
            remedy="use one model in one precision, or set other_models in the cloud",
        )
    if not opened.query.strip() or len(opened.query) > limits.max_query_chars:
        raise InvalidInput(
            f"has {len(opened.query)} characters",
            field="query",
            remedy=f"1 to {limits.max_query_chars}, not only blanks",
        )
    check_max_tokens(opened.max_tokens, limits.max_tokens)
    if len(opened.replay) >= opened.max_tokens:
        raise InvalidInput(
            "is as long as the answer may be", field="replay", remedy="raise max_tokens"
        )
    if any(token >= info.vocab_size or token in info.eos for token in opened.replay):
        raise InvalidInput(
            f"an id is outside the vocabulary of {info.vocab_size}, or ends the answer",
            field="replay",
            remedy="use models with one tokenizer, and replay what is not complete",
        )
    try:
        ScheduleConfig(aggregate_on=opened.aggregate_on)
        AheadConfig(opened.max_ahead)
    except ConfigError as error:
        raise InvalidInput(error.args[0], field=error.field, remedy=error.remedy) from error
