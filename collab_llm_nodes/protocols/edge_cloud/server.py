"""The verifier's side of one session (paper 003, Algorithm 2) as a state machine without I/O.

The caller runs the target model: it feeds the ids of :meth:`VerifierSession.begin`, passes each
exit layer's logits to :meth:`preview` and the last layer's to :meth:`conclude`, and begins again:
the next draft may be there already (pushed ahead, or an empty one of the verifier's own).
Verification is a pure function of (generated tokens, draft, sampling), so a lost session can be
rebuilt by replaying token ids.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collab_llm_nodes.config import MAX_TOKENS, check_ranges, setting
from collab_llm_nodes.decoding.rejection import verify_chain
from collab_llm_nodes.decoding.sampling import (
    Distribution,
    SamplingConfig,
    SparseDistribution,
    distributions,
    masked,
    previews_of,
)
from collab_llm_nodes.decoding.vote import proposal
from collab_llm_nodes.errors import (
    InvalidInput,
    ModelError,
    ProtocolError,
    VocabularyMismatch,
)
from collab_llm_nodes.protocols.edge_cloud.ahead import (
    MAX_AHEAD,
    MAX_AHEAD_ENTRIES,
    PushedDrafts,
    may_come,
)
from collab_llm_nodes.protocols.edge_cloud.messages import (
    MAX_DRAFT,
    Draft,
    EarlyExit,
    Open,
    Verdict,
)

if TYPE_CHECKING:  # llguidance is loaded where guides are used, torch where a model runs
    from torch import Tensor

    from collab_llm_nodes.models.guided_text import GuidedText


@dataclass(frozen=True)
class ExitConfig:
    """Choice and order of the early exits that are sent."""

    confidence: str = setting(
        "joint",
        "joint: probability of the whole outcome, the product over its tokens of the softmax"
        " maximum; max: the paper's rule, the largest of them (Algorithm 2, line 6), which a single"
        " easy token saturates.",
        choices=("joint", "max"),
    )
    queue: str = setting(
        "priority",
        "Order in which exits are sent (paper 003, Table 7, server side). fifo is for comparison.",
        choices=("priority", "fifo"),
    )
    min_lead_s: float = setting(
        0.002,
        "Least time by which an exit must precede the verdict to be sent, judged by the last"
        " passes; it must also be eight times its cost. 0: all are sent [s].",
        low=0.0,
        high=60.0,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


Laws = Sequence[Distribution] | ModelError
"""The target's distributions after the prefix and each draft token, or the error instead."""


@dataclass(frozen=True)
class Wanted:
    """A request for a draft.

    Attributes:
        answer: the tokens before the draft.
        gamma: tokens that the draft model is to choose at most.
        room: tokens of the draft at most, with those that a guide forces.
    """

    round: int
    answer: tuple[int, ...]
    gamma: int
    room: int


@dataclass(frozen=True)
class Proposal:
    """The draft that was wanted for ``round``; without tokens if there is none.

    Attributes:
        probs: as of ``Draft``.
        took_s: from the request to the draft [s].
    """

    round: int
    tokens: tuple[int, ...] = ()
    probs: tuple[SparseDistribution, ...] | None = None
    took_s: float = 0.0


class EarlyExitQueue:
    """Q_e: exits waiting for the link, most confident first; dropped when the verdict is out."""

    def __init__(self, config: ExitConfig) -> None:
        self._config = config
        self._heap: list[tuple[float, int, EarlyExit]] = []
        self._known: set[tuple[int, ...]] = set()
        self._pushed = 0

    def push(self, exit_: EarlyExit) -> None:
        """Queue ``exit_`` unless its outcome was queued before, which would only cost bandwidth."""
        if exit_.tokens in self._known:
            return
        self._known.add(exit_.tokens)
        self._pushed += 1
        key = -exit_.confidence if self._config.queue == "priority" else float(self._pushed)
        heapq.heappush(self._heap, (key, self._pushed, exit_))

    def pop(self) -> EarlyExit | None:
        """Return the next exit to send, if any."""
        return heapq.heappop(self._heap)[2] if self._heap else None

    def reset(self) -> None:
        """Drop all exits, because the verdict is out (Algorithm 2, line 10)."""
        self._heap.clear()
        self._known.clear()


class VerifierSession:
    """State of one session at the verifier: confirmed tokens, round, present and later drafts.

    Args:
        vocab_size: ids that the client knows are below it. The target may give others.
        room: tokens that fit into the target's context after the prompt. The client does not know
            it, so the answer ends there, and drafts are cut to it.
        guide: limits the target's law.
        co_located: tokens that the verifier's own draft model proposes in place of a draft without
            tokens, at most; 0: there is no such model.
    """

    def __init__(
        self,
        opened: Open,
        *,
        eos: frozenset[int],
        vocab_size: int,
        exits: ExitConfig | None = None,
        room: int = MAX_TOKENS,
        guide: GuidedText | None = None,
        co_located: int = 0,
    ) -> None:
        self._open = opened
        self._co_located = co_located
        self._proposed = Proposal(-1)  # the own draft model's latest
        self._guide = guide
        self._allowed: NDArray[np.bool_] | None = None  # [gamma + 1, V], once it is needed
        self._length = min(opened.max_tokens, room)
        self._eos = eos
        self._vocab_size = vocab_size
        self._exits = exits or ExitConfig()
        self.generated: list[int] = list(opened.replay)
        self.round = opened.round
        self.finished = False
        self._draft: Draft | None = None  # under verification
        self._next: Draft | None = None  # for this round
        self._ahead = PushedDrafts()
        self._check_ids(opened.replay, "replay")
        if len(opened.replay) >= self._length:
            raise InvalidInput(
                "replay is as long as the answer may be", field="replay", remedy="raise max_tokens"
            )
        if guide is not None and not guide.allows(self.generated):
            raise InvalidInput(
                "the guide does not allow it", field="replay", remedy="replay confirmed tokens"
            )

    def offer(self, draft: Draft) -> bool:
        """Accept ``draft`` for this round or a later one; return False if it is stale or void.

        Raises:
            ProtocolError: a round from the future, a gap, too many drafts ahead, or a session that
                is over.
            InvalidInput: token ids out of the vocabulary, malformed distributions.
        """
        taken = self._draft is not None or self._next is not None
        if draft.round < self.round or (draft.round == self.round and taken):
            return False
        if self.finished:
            if draft.after is not None:
                return False  # on its way when the last verdict was
            raise ProtocolError(
                "the answer is complete", field="round", remedy="open a new session"
            )
        if draft.after is None:
            self._check_due(draft)
        self._check_content(draft)
        if not may_come(draft, self.round, self.generated):
            return False
        draft = self._cut(draft)
        if draft.round == self.round:
            self._next = draft
        elif not self._ahead.has_room_for(draft):
            raise ProtocolError(
                f"more than {MAX_AHEAD} drafts or {MAX_AHEAD_ENTRIES} probabilities ahead",
                field="after",
                remedy="push fewer",
            )
        else:
            self._ahead.add(draft)
        return True

    @property
    def due(self) -> bool:
        """True if a draft waits for :meth:`begin`."""
        return self._draft is None and self._next is not None and self.wanted is None

    @property
    def wanted(self) -> Wanted | None:
        """What the own draft model is to propose before :meth:`begin`; None if nothing."""
        draft = self._next
        if not self._co_located or draft is None or draft.tokens:
            return None
        if self._proposed.round == draft.round:
            return None
        room = max(0, min(MAX_DRAFT, self._length - len(self.generated) - 1))
        gamma = min(self._co_located, room)
        return Wanted(draft.round, tuple(self.generated), gamma, room)

    def propose(self, proposal: Proposal) -> bool:
        """Take in what was :attr:`wanted`; return False if it is not any more."""
        if self.wanted is None or proposal.round != self.round:
            return False
        self._proposed = proposal
        return True

    @property
    def ahead(self) -> tuple[Draft, ...]:
        """Drafts for later rounds, in order of arrival."""
        return tuple(self._ahead)

    @property
    def autoregressive_rounds(self) -> int:
        """Rounds to decode alone after the draft under verification."""
        return 0 if self._draft is None else self._draft.autoregressive_rounds

    def begin(self) -> tuple[int, ...] | None:
        """Start verifying this round's draft; return its ids, or None if there is no draft.

        In place of a draft without tokens the own draft model's are verified, or the guide's forced
        ones.
        """
        if self._draft is not None or self._next is None:
            return None
        draft, self._next, self._allowed = self._next, None, None
        self._draft = draft if draft.tokens else replace(draft, **self._own())
        return self._draft.tokens

    def _own(self) -> dict[str, Any]:
        """Return what the own draft model proposes, or else the guide forces."""
        proposed = self._proposed
        if proposed.round != self.round:
            return self._forced()
        # Neither target nor client need know all of the draft model's tokens.
        known = takewhile(lambda token: token < self._vocab_size, proposed.tokens)
        tokens = (*known,)
        if not tokens:
            return self._forced()
        probs = None if proposed.probs is None else proposed.probs[: len(tokens)]
        return {"tokens": tokens, "probs": probs}

    def _forced(self) -> dict[str, Any]:
        """Return tokens and distributions of a draft that the guide forces."""
        if self._guide is None:
            return {}
        room = min(MAX_DRAFT, self._length - len(self.generated) - 1)
        try:
            tokens = self._guide.forced(self.generated, room)
        except InvalidInput:  # raised again with the verdict, which is this session's alone
            return {}
        return {"tokens": tokens, "probs": proposal(tokens, self.sampling)}

    def limited(self, logits: Tensor) -> Tensor:
        """Return ``logits`` [gamma + 1, V] over the tokens that the guide allows, if there is one.

        Raises:
            InvalidInput: the guide takes too much work.
        """
        if self._guide is None or self._draft is None:
            return logits
        if self._allowed is None:
            self._allowed = self._guide.rows(self.generated, self._draft.tokens)
        return masked(logits, self._allowed)

    def preview(
        self,
        layer: int,
        logits: Tensor,
        seen: tuple[Laws, Sequence[float]] | None = None,
    ) -> EarlyExit:
        """Return the outcome by an exit's logits, with the random numbers of the final one.

        Args:
            layer: index of the exit.
            logits: [gamma + 1, vocabulary].
            seen: result of ``previews_of`` for the :meth:`limited` logits, if the caller has it.

        Raises:
            ModelError: the logits are not finite.
            VocabularyMismatch: the client does not know a token of the outcome.
        """
        laws, sure = seen or previews_of([self.limited(logits)], [self.sampling])[0]
        draft, tokens, accepted, finished = self._judge(laws)
        sure = sure[: len(tokens)]
        confidence = math.prod(sure) if self._exits.confidence == "joint" else max(sure)
        return EarlyExit(draft.round, layer, tokens, accepted, finished, confidence)

    @property
    def sampling(self) -> SamplingConfig:
        """The law of the answer."""
        return self._open.sampling

    def conclude(
        self,
        logits: Tensor,
        compute_s: float,
        queue_s: float = 0.0,
        laws: Laws | None = None,
    ) -> Verdict:
        """Return the verdict by the last layer's logits [gamma + 1, vocabulary].

        Args:
            laws: the ``distributions`` of the :meth:`limited` logits, if the caller has them.

        Raises:
            ModelError: the logits are not finite.
            VocabularyMismatch: the client does not know a token of the outcome.
        """
        if laws is None:
            laws = distributions(self.limited(logits), self.sampling)
        return self.decide(laws, compute_s, queue_s)

    def decide(self, laws: Laws, compute_s: float, queue_s: float = 0.0) -> Verdict:
        """Return the verdict by the target's distributions [gamma + 1].

        Raises:
            ModelError: there are none, as the logits were not finite.
        """
        draft, tokens, accepted, self.finished = self._judge(laws)
        self._draft = None
        self.generated += tokens
        self.round += 1
        if not self.finished:
            self._next = self._ahead.next(draft, self.round, self.generated)
        drafted_s = self._proposed.took_s if self._proposed.round == draft.round else 0.0
        return Verdict(draft.round, tokens, accepted, self.finished, compute_s, queue_s, drafted_s)

    def _judge(self, laws: Laws) -> tuple[Draft, tuple[int, ...], int, bool]:
        """Return the draft, its outcome's tokens, how many are accepted, and whether it ends."""
        draft, sampling = self._draft, self.sampling
        if draft is None:
            raise ProtocolError("no draft is under verification", field="round")
        if isinstance(laws, ModelError):
            raise laws
        outcome = verify_chain(
            laws, draft.tokens, draft.probs, sampling, len(self.generated), self._eos
        )
        extra = () if outcome.next_token < 0 else (outcome.next_token,)
        tokens = draft.tokens[: outcome.accepted] + extra
        self._check_known(tokens)
        full = len(self.generated) + len(tokens) >= self._length
        return draft, tokens, outcome.accepted, full or tokens[-1] in self._eos

    def _check_known(self, tokens: tuple[int, ...]) -> None:
        """Refuse an outcome that the client can neither read nor show; an end token is neither."""
        for token in tokens:
            if token >= self._vocab_size and token not in self._eos:
                raise VocabularyMismatch(
                    f"the target answers with its token {token}, but the draft's vocabulary has"
                    f" only {self._vocab_size}",
                    field="vocabulary",
                    remedy="use a draft with the target's own tokenizer, or a guide that does not"
                    " allow the token",
                )

    def _check_due(self, draft: Draft) -> None:
        if draft.round > self.round:
            raise ProtocolError(
                f"got round {draft.round}, expected {self.round}",
                field="round",
                remedy="wait for each verdict before the next draft, or send it ahead with after",
            )
        if draft.start != len(self.generated):
            raise ProtocolError(
                f"draft starts at token {draft.start}, {len(self.generated)} are confirmed",
                field="start",
                remedy="reopen the session with the confirmed tokens as replay",
            )

    def _check_content(self, draft: Draft) -> None:
        self._check_ids(draft.tokens, "tokens")
        self._check_ids(draft.after or (), "after")
        if len(draft.after or ()) > draft.start:
            raise InvalidInput(
                "longer than the answer before it", field="after", remedy="see start"
            )
        room = self._open.max_tokens - draft.start
        if len(draft.tokens) + 1 > room or draft.autoregressive_rounds > room:
            raise InvalidInput(
                "the draft goes past max_tokens", field="tokens", remedy="draft fewer tokens"
            )
        self._check_probs(draft)

    def _cut(self, draft: Draft) -> Draft:
        most = max(0, self._length - draft.start - 1)
        probs = None if draft.probs is None else draft.probs[:most]
        return replace(draft, tokens=draft.tokens[:most], probs=probs)

    def _check_ids(self, ids: tuple[int, ...], field: str) -> None:
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise InvalidInput(
                    f"token id {token} is outside the vocabulary of {self._vocab_size}",
                    field=field,
                    remedy="use the same tokenizer for draft and target",
                )

    def _check_probs(self, draft: Draft) -> None:
        if not self._open.sampling.sends_probabilities:
            return
        if draft.probs is None or len(draft.probs) != len(draft.tokens):
            raise InvalidInput(
                "the rejection law needs one distribution for each draft token",
                field="probs",
                remedy="send the distributions the tokens were drawn from, or use law=coupled",
            )
        for token, q in zip(draft.tokens, draft.probs, strict=True):
            self._check_ids((int(q.ids[-1]),), "probs.ids")
            if token not in q.ids:
                raise InvalidInput(
                    f"token {token} has no probability in its own distribution",
                    field="probs",
                    remedy="send the distribution that the token was drawn from",
                )
