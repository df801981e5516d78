"""The messages between the two sides of one answer."""

from __future__ import annotations

from dataclasses import dataclass

from collab_llm_nodes.decoding.aggregation import AggregationConfig, Pair, Party, SideDraft
from collab_llm_nodes.errors import CollabError

Line = tuple[float, float, float]


@dataclass(frozen=True)
class Draft:
    """A side's draft, for the side that aggregates.

    Attributes:
        position: of the token in the answer.
        epoch: times that drafts of the sender have been rejected on this stream. Drafts of an
            earlier epoch are void.
        decode_s: time of the pass that made it.
        known: target tokens that the sender knew.
        held_s: time between the arrival of the last of them and this message; the aggregator
            measures the round trip by both.
    """

    position: int
    epoch: int
    draft: SideDraft
    decode_s: float
    known: int
    held_s: float


@dataclass(frozen=True)
class Target:
    """The target token at one position, for the side that does not aggregate.

    Attributes:
        accepted: it is the draft of device, of cloud; never that of a side without a say. With a
            pinned aggregator, its own entry is False unless it is ``sole``, and ``expected`` and
            ``decode_s`` are 0: the other side has no use for them.
        aggregator: the side that aggregates from the next position on.
        finished: the answer is complete.
        expected: see ``Judgement``.
        decode_s: time of the aggregator's last pass.
        rtt_s: the round trip that the aggregator has measured; 0: none yet.
        sole: ``aggregator`` is the only side that has a say in the rest of the answer. It needs no
            drafts of the other side.
    """

    position: int
    token: int
    accepted: tuple[bool, bool]
    aggregator: Party
    finished: bool
    expected: Pair
    decode_s: float
    rtt_s: float
    sole: bool = False


@dataclass(frozen=True)
class Identity:
    """Facts that both sides must share; see ``SideInfo``."""

    vocabulary: str
    model: str
    scorer: str


@dataclass(frozen=True)
class Open:
    """The device asks the cloud to take part in one answer.

    Attributes:
        query: the question; the only text that leaves the device.
        replay: target tokens that the device knows already.
        identity: of the device's side.
        law, temperature, seed: of the answer, see ``AggregationLaw``.
        aggregate_on: see ``ScheduleConfig``.
        max_ahead: see ``AheadConfig``.
        rtt_s: of the link; 0: unknown.
        decode: k_a, k_b, k_c of the device's passes (``DecodeModel``), if they were measured.
    """

    query: str
    max_tokens: int
    identity: Identity
    law: AggregationConfig
    temperature: float = 1.0
    seed: int = 0
    aggregate_on: str = "auto"
    max_ahead: int = 0
    rtt_s: float = 0.0
    replay: tuple[int, ...] = ()
    decode: Line | None = None


@dataclass(frozen=True)
class Opened:
    """The cloud takes part.

    Attributes:
        model: its name.
        decode: as in ``Open``, of the cloud's passes.
        documents: pieces in its store; without any, its side has no say.
    """

    model: str
    decode: Line | None = None
    documents: int = 0


@dataclass(frozen=True)
class CloudInfo:
    """Answer to Describe.

    Attributes:
        model: name of the cloud's model.
        version: of its package.
        max_tokens, max_query_chars: bounds on a request.
        sessions: answers under way.
    """

    model: str
    identity: Identity
    vocab_size: int
    version: str
    max_tokens: int
    max_query_chars: int
    sessions: int


Message = Draft | Target
DeviceMessage = Open | Message
CloudMessage = Opened | Message | CollabError
