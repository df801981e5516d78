"""One side of speculative aggregation (paper 001, section 4) as a state machine without I/O.

Both sides run the same machine. Each drafts ahead on its own; one of them, the aggregator, judges
the pair of drafts at each position and sends the target token to the other side:

    device    own drafts  d4 d5 d6 ──┐
              answer t0..t3          ├─ judge ─▶ t4 ──▶ both sides: append; keep, or start anew
    cloud     own drafts  d4 d5 ─────┘

A rejected side discards all its drafts and goes on after the target token; its epoch grows, by
which both sides recognise earlier drafts. Only the aggregator needs drafts, so only the other side
sends them. When the aggregator changes, the old one sends the drafts it holds, together with the
target that announces the change.

A side whose documents do not continue as the answer does has no say (weight 0) for the rest of the
answer. The other side's draft is then the target token, so the aggregator waits for that side's
drafts only, announces this, and hands over if it has no say itself.

With the aggregator pinned to one side, that side sends only the target tokens and whether the other
side's draft was the target.

Drafts, acceptance and target are functions of the prefix and the position (``decoding/
aggregation.py``). So neither delays, nor hand-overs, nor a stream that breaks and is opened again
with the known answer can change a token.

The caller runs the model: it reads the next pass from :attr:`SideMachine.wanted`, reports the
result to :meth:`SideMachine.on_pass`, and sends the messages from :meth:`SideMachine.poll`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from collab_llm_nodes.config import LIMIT, check_ranges, setting
from collab_llm_nodes.decoding.aggregation import (
    Drafts,
    Judgement,
    Party,
    SideDraft,
    only_voice,
)
from collab_llm_nodes.errors import InvalidInput, ProtocolError
from collab_llm_nodes.protocols.base import Source
from collab_llm_nodes.protocols.dragon.messages import Draft, Message, Target
from collab_llm_nodes.protocols.dragon.profiler import Profiler
from collab_llm_nodes.protocols.dragon.scheduler import Scheduler

MOST_AHEAD = 64
"""Drafts that a side may hold without a target, whatever is configured."""
_SOURCES = {
    (True, True): Source.ACCEPTED,
    (True, False): Source.DEVICE,
    (False, True): Source.CLOUD,
    (False, False): Source.RECOVERED,
}
"""Origin of a token by the fates of the drafts of device and cloud."""


class Law(Protocol):
    """The rule by which drafts are drawn and judged (``AggregationLaw``, or a replayed trace)."""

    def propose(
        self, p: NDArray[np.floating[Any]], log_weight: float, position: int, party: Party
    ) -> SideDraft: ...

    def check(self, draft: SideDraft) -> None: ...

    def judge(self, drafts: Drafts, position: int) -> Judgement: ...


@dataclass(frozen=True)
class AheadConfig:
    """The length of a side's lead."""

    max_ahead: int = setting(
        0,
        "Drafts that a side makes beyond the last target token it knows; 0: as many as the round"
        " trip takes, and two more. 1: none beyond the next token, which is token-wise"
        " synchronisation.",
        low=0,
        high=MOST_AHEAD,
        per_request=LIMIT,
    )

    def __post_init__(self) -> None:
        check_ranges(self)

    def drafts(self, rtt_s: float, decode_s: float) -> int:
        """Return the drafts that a side may hold: a full round trip of passes, and two more."""
        if self.max_ahead:
            return self.max_ahead
        passes = math.ceil(rtt_s / decode_s) if decode_s > 0 else 0
        return min(MOST_AHEAD, max(4, passes + 2))


@dataclass(frozen=True)
class Pass:
    """One pass of the side's model: the distribution of the token after ``prefix``.

    Attributes:
        number: of the chain of drafts it belongs to; a pass of an earlier chain is void.
        prefix: the answer so far, followed by this side's own drafts.
    """

    number: int
    prefix: tuple[int, ...]


@dataclass
class Figures:
    """Counters of one answer on one side.

    Attributes:
        drafted: drafts made, of which ``discarded`` became void by a rejection.
        ended_passes: passes whose result was void.
        fates: of the drafts of device and cloud, for each position that was judged: accepted.
        handovers: times the aggregator changed.
    """

    drafted: int = 0
    discarded: int = 0
    ended_passes: int = 0
    fates: list[tuple[bool, bool]] = field(default_factory=list)
    handovers: int = 0


class SideMachine:
    """See the module's text. All times are of one clock of the caller's.

    Args:
        vocab_size: token ids are below this.
        eos: tokens that end the answer.
        max_tokens: length limit of the answer.
        answer: target tokens that are known already (a stream that was opened again).

    Attributes:
        answer: the target tokens so far.
        sources: the rule that gave each of them.
        aggregator: the side that judges the next position, as far as this side knows.
        sole: the only side that has a say in the rest of the answer, once that is known.
        finished: the answer is complete.
        linked: messages reach the other side.
        alone: the device writes the rest of the answer without the cloud.
    """

    def __init__(
        self,
        party: Party,
        law: Law,
        scheduler: Scheduler,
        profiler: Profiler,
        *,
        vocab_size: int,
        eos: frozenset[int],
        max_tokens: int,
        ahead: AheadConfig | None = None,
        answer: Sequence[int] = (),
        linked: bool = True,
    ) -> None:
        self.party = party
        self._vocab_size = vocab_size
        self._eos = eos
        self._max_tokens = max_tokens
        self.answer: list[int] = list(answer)
        self.sources: list[Source] = [Source.ACCEPTED] * len(self.answer)
        self.aggregator = scheduler.first
        self.sole: Party | None = None
        self.finished = self._is_complete()
        self.linked = linked
        self.alone = False
        self.figures = Figures()
        self.profiler = profiler
        self._law = law
        self._scheduler = scheduler
        self._ahead = ahead or AheadConfig()
        self._drafts: tuple[deque[Draft], deque[Draft]] = (deque(), deque())
        self._epochs = [0, 0]
        self._chain = 0
        self._sent = 0  # own drafts, from the oldest on, that the other side has
        self._target_at = 0.0  # arrival of the last target
        self._void = 0  # drafts of the other side that came after their predecessor was rejected
        self._targets_at: dict[int, float] = {}  # known tokens: time at which the last was sent
        self._outbox: list[Message] = []

    # ------------------------------------------------------------------ actions

    @property
    def wanted(self) -> Pass | None:
        """The pass to run next; None while nothing more is worth drafting."""
        own = self._own
        length = len(self.answer) + len(own)
        if self.finished or self.sole is self.party.other:
            return None
        if length >= self._max_tokens or len(own) >= self._most_ahead:
            return None
        if own and own[-1].draft.token in self._eos:
            return None
        return Pass(self._chain, (*self.answer, *(draft.draft.token for draft in own)))

    def is_void(self, running: Pass) -> bool:
        """Return True if the result of ``running`` is not wanted any more: end it."""
        return self.finished or running.number != self._chain

    @property
    def waits_for_peer(self) -> bool:
        """True while only the other side can bring the answer forward."""
        if self.finished or not self.linked:
            return False
        if self.sole is self.party.other:
            return True
        return bool(self._own) and not (self.aggregator is self.party and self._theirs)

    def poll(self) -> list[Message]:
        """Return the messages to send now, in this order."""
        outbox, self._outbox = self._outbox, []
        return outbox

    # ------------------------------------------------------------------ events

    def on_pass(
        self,
        done: Pass,
        p: NDArray[np.floating[Any]],
        log_weight: float,
        decode_s: float,
        now: float,
    ) -> None:
        """Process the distribution ``p`` [V] of a finished pass."""
        if self.is_void(done):
            self.figures.ended_passes += 1
            return
        position = len(done.prefix)
        self.profiler.on_pass(self.party, position, decode_s)
        draft = self._law.propose(p, log_weight, position, self.party)
        self.figures.drafted += 1
        self._own.append(Draft(position, self._epochs[self.party], draft, decode_s, 0, 0.0))
        self._go_on(now)

    def on_message(self, message: Message, now: float, size: int = 0) -> bool:
        """Process a message of the other side, ``size`` bytes on the wire.

        Returns:
            True if this side needed it: a target, or a draft where this side aggregates.

        Raises:
            ProtocolError, InvalidInput: the message is not allowed; close the stream.
        """
        if isinstance(message, Draft):
            needed = self._on_draft(message, now, size) and self.aggregator is self.party
        else:
            self._on_target(message, now)
            needed = True
        self._go_on(now)
        return needed

    def on_linked(self, now: float) -> None:
        """Start over with a peer that knows :attr:`answer` and no drafts."""
        self.linked = True
        self.aggregator = self._scheduler.first
        self.sole = None
        self._theirs.clear()
        self._epochs = [0, 0]
        self._sent = self._void = 0
        self._targets_at.clear()
        self._target_at = now
        self._outbox.clear()
        self._go_on(now)

    def on_lost(self) -> None:
        """Note that the connection to the other side is lost."""
        self.linked = False
        self.sole = None
        self._theirs.clear()
        self._outbox.clear()

    def go_alone(self, now: float) -> None:
        """Finish the answer from this side's documents alone; its tokens are unverified."""
        self.on_lost()
        self.alone = True
        self._go_on(now)

    # ------------------------------------------------------------------ internals

    @property
    def _own(self) -> deque[Draft]:
        return self._drafts[self.party]

    @property
    def _theirs(self) -> deque[Draft]:
        return self._drafts[self.party.other]

    @property
    def _most_ahead(self) -> int:
        decode_s = self.profiler.decode_s(self.party, len(self.answer))
        return self._ahead.drafts(self.profiler.rtt_s, decode_s)

    def _go_on(self, now: float) -> None:
        """Judge the available drafts, and queue messages for the other side."""
        while self.alone and self._own and not self.finished:
            self._append(self._own.popleft().draft.token, Source.UNVERIFIED)
        if not self.linked:
            return
        while self.aggregator is self.party and self._can_judge and not self.finished:
            self._judge(now)
        if self.aggregator is not self.party and not self.finished:
            self._send_drafts(now)

    @property
    def _can_judge(self) -> bool:
        """True if the drafts for the next position are there: both, or that of the sole side."""
        if self.sole is not None:
            return bool(self._drafts[self.sole])
        return bool(self._own and self._theirs)

    def _judge(self, now: float) -> None:
        position = len(self.answer)
        decode_s = self._own[0].decode_s if self._own else 0.0
        judged = self._judgement(position)
        self._settle(judged.token, judged.accepted)
        fresh = not any(self._epochs)
        following = self._scheduler.choose(
            self.party, judged.accepted, self.profiler.estimates(position), fresh, self.sole
        )
        self._hand_over(following)
        self._targets_at[len(self.answer)] = now
        target = Target(
            position,
            judged.token,
            judged.accepted,
            following,
            self.finished,
            judged.expected,
            decode_s,
            self.profiler.rtt_s,
            self.sole is following,
        )
        self._outbox.append(self._discreet(target) if self._scheduler.pinned else target)

    def _judgement(self, position: int) -> Judgement:
        """Judge the first drafts; the draft of the sole side is the target."""
        if self.sole is None:
            pair = (self._drafts[0][0].draft, self._drafts[1][0].draft)
            self.sole = only_voice(pair)
            if self.sole is None:
                judged = self._law.judge(pair, position)
                self.profiler.on_judged(judged.expected)
                return judged
        fates = (self.sole is Party.DEVICE, self.sole is Party.CLOUD)
        token = self._drafts[self.sole][0].draft.token
        return Judgement(token, fates, (float(fates[0]), float(fates[1])))

    def _discreet(self, target: Target) -> Target:
        """Omit the fields that the other side needs only to aggregate.

        The fate of this side's draft reveals something about its documents, unless this side is the
        only one with a say.
        """
        accepted = list(target.accepted)
        accepted[self.party] &= target.sole
        return replace(
            target, accepted=(accepted[0], accepted[1]), expected=(0.0, 0.0), decode_s=0.0
        )

    def _on_draft(self, message: Draft, now: float, size: int) -> bool:
        """Process a draft; return False if it is void."""
        sender = self.party.other
        if self.finished:
            return False
        if message.epoch < self._epochs[sender]:  # it was in flight at the rejection
            self._void += 1
            if self._void > MOST_AHEAD * self._epochs[sender]:
                raise ProtocolError(
                    f"{self._void} drafts of earlier epochs",
                    field="epoch",
                    remedy=f"draft {MOST_AHEAD} ahead at most, and nothing twice",
                )
            return False
        self._law.check(message.draft)
        self.profiler.on_pass(sender, message.position, message.decode_s)
        sent_at = self._targets_at.get(message.known)
        if sent_at is not None:  # the first draft that answers this target
            self.profiler.on_round_trip(size, now - sent_at - message.held_s)
            for known in [known for known in self._targets_at if known <= message.known]:
                del self._targets_at[known]
        due = len(self.answer) + len(self._theirs)
        if message.epoch > self._epochs[sender] or message.position != due:
            raise ProtocolError(
                f"a draft for position {message.position} of epoch {message.epoch}, expected"
                f" {due} of {self._epochs[sender]}",
                field="position",
                remedy="send all drafts in order, on one stream",
            )
        if due >= self._max_tokens or len(self._theirs) >= MOST_AHEAD:
            raise ProtocolError(
                f"{len(self._theirs)} drafts wait, and the answer has {self._max_tokens} tokens",
                field="position",
                remedy=f"draft {MOST_AHEAD} ahead at most",
            )
        self._theirs.append(message)
        return True

    def _on_target(self, message: Target, now: float) -> None:
        if self.finished:
            return
        if self.aggregator is self.party:
            raise ProtocolError(
                "a target from the side that does not aggregate",
                field="aggregator",
                remedy="judge only what was handed over",
            )
        dismissed = message.sole and message.aggregator is not self.party
        if message.position != len(self.answer) or not (self._sent or dismissed):
            raise ProtocolError(
                f"a target for position {message.position}, expected {len(self.answer)}",
                field="position",
                remedy="judge each position once, from both drafts",
            )
        if message.token >= self._vocab_size:
            raise InvalidInput(
                f"token {message.token} is outside the vocabulary of {self._vocab_size}",
                field="token",
                remedy="use one tokenizer on both sides",
            )
        drafted = not dismissed and self._own[0].draft.token == message.token
        if message.accepted[self.party] != drafted:
            raise ProtocolError(
                "the target says otherwise than its token whether the draft was accepted",
                field="accepted",
                remedy="accept a draft if, and only if, it is the target, and its side has a say",
            )
        self._target_at = now
        self.profiler.on_told_rtt(message.rtt_s)
        if not self._scheduler.pinned:
            if not message.sole:
                self.profiler.on_judged(message.expected)
            self.profiler.on_pass(self.party.other, message.position, message.decode_s)
        self._settle(message.token, message.accepted)
        if message.finished != self.finished:
            raise ProtocolError(
                "the sides disagree on the end of the answer",
                field="finished",
                remedy="use one tokenizer and one length limit on both sides",
            )
        self._hand_over(message.aggregator)
        if message.sole:
            self.sole = message.aggregator

    def _settle(self, token: int, accepted: tuple[bool, bool]) -> None:
        """Append the target token; each side keeps its further drafts, or loses them all."""
        self.figures.fates.append(accepted)
        for party, queue in zip(Party, self._drafts, strict=True):
            mine = party is self.party
            if accepted[party]:
                if queue:
                    queue.popleft()
                if mine:
                    self._sent = max(0, self._sent - 1)
                continue
            self._epochs[party] += 1
            if mine:
                self.figures.discarded += len(queue)
                self._chain += 1
                self._sent = 0
            queue.clear()
        self._append(token, _SOURCES[accepted])
        if self.finished:
            self.figures.discarded += len(self._own)

    def _append(self, token: int, source: Source) -> None:
        self.answer.append(token)
        self.sources.append(source)
        self.finished = self._is_complete()

    def _is_complete(self) -> bool:
        ended = bool(self.answer) and self.answer[-1] in self._eos
        return ended or len(self.answer) >= self._max_tokens

    def _hand_over(self, following: Party) -> None:
        self.figures.handovers += following is not self.aggregator
        self.aggregator = following

    def _send_drafts(self, now: float) -> None:
        """Queue the own drafts that the aggregator has not got."""
        for index in range(self._sent, len(self._own)):
            draft = self._own[index]
            self._outbox.append(
                Draft(
                    draft.position,
                    self._epochs[self.party],
                    draft.draft,
                    draft.decode_s,
                    len(self.answer),
                    now - self._target_at,
                )
            )
        self._sent = len(self._own)
