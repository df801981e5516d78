"""The messages between the two sides of one answer."""

from __future__ import annotations

from dataclasses import dataclass

from collab_llm_nodes.decoding.aggregation import Pair, Party, SideDraft


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
        accepted: it is the draft of device, of cloud.
        aggregator: the side that aggregates from the next position on.
        finished: the answer is complete.
        expected: see ``Judgement``.
        decode_s: time of the aggregator's last pass.
        rtt_s: the round trip that the aggregator has measured; 0: none yet.
    """

    position: int
    token: int
    accepted: tuple[bool, bool]
    aggregator: Party
    finished: bool
    expected: Pair
    decode_s: float
    rtt_s: float


Message = Draft | Target
