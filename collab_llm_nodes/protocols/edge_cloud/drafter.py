"""The draft models of one session, for drafts and pre-drafts (paper 003, Eq. 1 and 7).

One model proposes tokens drawn from its own distribution. Several models vote on each token (paper
002): a vote is a certain proposal (``decoding/vote.py``). The law of the answer is the target's in
both cases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from collab_llm_nodes.decoding.rejection import own_token, propose
from collab_llm_nodes.decoding.sampling import (
    Distribution,
    SamplingConfig,
    SparseDistribution,
    distributions,
    masked,
)
from collab_llm_nodes.decoding.vote import proposal, proposes_likeliest, vote
from collab_llm_nodes.decoding.weights import Weights, WeightsConfig, hit_rate
from collab_llm_nodes.engine.interface import DecodingEngine
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.protocols.contexts import common_length
from collab_llm_nodes.protocols.edge_cloud.client import DraftJob
from collab_llm_nodes.protocols.edge_cloud.continuations import Continuations, Node
from collab_llm_nodes.protocols.edge_cloud.messages import Draft
from collab_llm_nodes.protocols.edge_cloud.prediction import Prediction, predict

if TYPE_CHECKING:  # llguidance is loaded where guides are used
    from collab_llm_nodes.models.guided_text import GuidedText

MAX_SUPPORT = 64
"""Entries of each distribution sent upstream, about 250 bytes a token.

Drafts are drawn from what is sent, so this affects how often they are accepted, never the answer.
"""
_BELIEFS = SamplingConfig(1.0, top_k=64)
"""Law that keeps the likeliest candidates of a greedy draft model: more than a prediction uses."""
_SMALL = 1024
"""Vocabulary size up to which it is faster to keep all candidates."""
_SCORED = 4
"""Tokens of the answer between two updates of the weights of a vote: paper 002's draft length."""


@dataclass
class DraftInProgress:
    """A partial draft; ``draft`` is set when it is complete.

    Attributes:
        chosen: number of tokens that the models chose; a guide forced the others.
        weights: [models] weights of the vote; empty before the first token, and without a vote.
    """

    job: DraftJob
    cached: bool = False
    tokens: list[int] = field(default_factory=list)
    chosen: int = 0
    probs: list[SparseDistribution] = field(default_factory=list)
    draft: Draft | None = None
    weights: tuple[float, ...] = ()

    @property
    def answer(self) -> tuple[int, ...]:
        """The answer with what is drafted so far."""
        return (*self.job.prefix, *self.tokens)


class Drafter:
    """Draws drafts after any prefixes of one answer.

    Args:
        engine, prompt: the draft model, and the prompt in its encoding.
        others: further draft models of the same vocabulary. With them, each token of a draft is a
            vote of all, and all go on from the voted one.
        guide: limits the models' laws; the tokens that it forces need no forward pass.

    Attributes:
        room: tokens of an answer that all models can read.
        branches: they read several continuations side by side; else one draft at a time.
        between_pieces: called between two passes over a long prompt; may raise to end the read.
        on_pass: called after each forward pass with the number of tokens read and its duration [s],
            the choice of the next tokens included; with several models, for all of them together.
    """

    def __init__(
        self,
        engine: DecodingEngine,
        prompt: EncodedPrompt,
        sampling: SamplingConfig,
        others: Sequence[tuple[DecodingEngine, EncodedPrompt]] = (),
        guide: GuidedText | None = None,
    ) -> None:
        self._guide = guide
        own = self._own if others else None
        self.between_pieces: Callable[[], None] = _nothing
        models = [(engine, prompt), *others]
        self.room = min(model.context - len(read.ids) for model, read in models)
        self.branches = all(model.grows_trees for model, _ in models)
        self._models = [
            Continuations(model, read, self._laws, own, lambda: self.between_pieces())
            for model, read in models
        ]
        self._scored: tuple[int, ...] = ()  # the answer that was scored last
        self._weights_after = [Weights.equal(WeightsConfig(), len(models))]  # its first i blocks
        self._eos = engine.eos
        self._vocab_size = engine.vocab_size
        self._sampling = sampling
        self.on_pass: Callable[[int, float], None] = _to_nobody

    def check(self, answer: tuple[int, ...], outcome: tuple[int, ...]) -> None:
        """Check that ``answer`` can go on after ``outcome``.

        Raises:
            InvalidInput: a token outside the vocabulary, one that ends the answer, or one that the
                guide does not allow.
        """
        for i, token in enumerate(outcome):
            if not 0 <= token < self._vocab_size:
                what = f"{token} is outside the vocabulary of {self._vocab_size}"
                raise InvalidInput(what, field=f"outcome[{i}]", remedy="use the session's models")
            if token in self._eos:
                what = f"{token} ends the answer"
                raise InvalidInput(what, field=f"outcome[{i}]", remedy="needs no draft")
        if self._guide is not None and not self._guide.allows((*answer, *outcome)):
            raise InvalidInput("the guide does not allow it", field="outcome", remedy="expect less")

    def begin(self, job: DraftJob, *, cached: bool = False) -> DraftInProgress:
        """Begin a draft of up to ``gamma`` tokens for ``job``; :meth:`step` continues it."""
        partial = DraftInProgress(job, cached)
        self._extend(partial)
        return partial

    def step(
        self, partials: Sequence[DraftInProgress], read: Sequence[tuple[int, ...]] = ()
    ) -> None:
        """Make one forward pass: each of the (incomplete) ``partials`` gets its next token.

        The tokens that the guide forces after it come with it. A partial draft may be left out for
        some passes; its tokens stay in the cache.

        Args:
            read: answers to read in the same pass, for :meth:`predict`.
        """
        ends, tokens, took_s = self._read([*(partial.answer for partial in partials), *read])
        begun = time.perf_counter()
        chosen = self._choose(partials, [own[: len(partials)] for own in ends]) if partials else []
        self._passed(tokens, took_s + time.perf_counter() - begun)
        for partial, (token, q) in zip(partials, chosen, strict=True):
            partial.tokens.append(token)
            partial.chosen += 1
            if q is not None:
                partial.probs.append(q)
            self._extend(partial)

    def draft(
        self, job: DraftJob, *, cached: bool = False, stop: Callable[[], bool] = lambda: False
    ) -> Draft | None:
        """Make one draft; return None once ``stop``, called before each forward pass, is true."""
        partial = self.begin(job, cached=cached)
        while partial.draft is None:
            if stop():
                return None
            self.step([partial])
        return partial.draft

    def predict(
        self, job: DraftJob, draft: Draft, count: int, temperature: float = 1.0
    ) -> Prediction:
        """Return the ``count`` likeliest verdicts on ``draft``, made for ``job``.

        Reads the rest of the draft that :meth:`step` has not read.
        """
        ends = [(*job.prefix, *draft.tokens[:i]) for i in range(len(draft.tokens) + 1)]
        read, tokens, took_s = self._read(ends)
        self._passed(tokens, took_s)
        laws = [node.law for node in read[0]]
        if len(read) > 1:
            weights = self._weights(job.prefix)
            laws = [
                _mixture([node.law for node in nodes], weights) for nodes in zip(*read, strict=True)
            ]
        return predict(
            laws,
            draft.tokens,
            self._sampling,
            len(job.prefix),
            self._eos,
            count,
            temperature,
            certain=len(read) > 1,
        )

    def next_token(self, answer: tuple[int, ...]) -> int:
        """Return the token that the guide forces after ``answer``, or the (first) model's own."""
        if forced := self._forced(answer, 1):
            return forced[0]
        ((end,), *_), tokens, took_s = self._read([answer])
        self._passed(tokens, took_s)
        return own_token(end.law, self._sampling, len(answer))

    def chosen(self, answer: tuple[int, ...], tokens: Sequence[int]) -> int:
        """Return how many of ``tokens`` after ``answer`` the guide leaves a choice of."""
        ends = ((*answer, *tokens[:i]) for i in range(len(tokens)))
        return sum(not self._forced(end, 1) for end in ends)

    def advance(self, answer: tuple[int, ...]) -> None:
        """Drop the continuations of other answers than ``answer``, which is confirmed."""
        for model in self._models:
            model.advance(answer)

    def close(self) -> None:
        """Free the KV caches."""
        for model in self._models:
            model.close()
        self.on_pass, self.between_pieces = _to_nobody, _nothing  # their owners may refer to this

    def _choose(
        self, partials: Sequence[DraftInProgress], ends: Sequence[Sequence[Node]]
    ) -> list[tuple[int, SparseDistribution | None]]:
        """Choose the next token of each draft, and the distribution to send with it.

        Args:
            ends: [models, partials].
        """
        if len(self._models) > 1:
            return [
                self._vote(*each) for each in zip(partials, zip(*ends, strict=True), strict=True)
            ]
        return [
            propose(end.law, self._sampling, len(partial.answer), MAX_SUPPORT)
            for partial, end in zip(partials, ends[0], strict=True)
        ]

    def _vote(
        self, partial: DraftInProgress, ends: Sequence[Node]
    ) -> tuple[int, SparseDistribution | None]:
        """Choose the next token of a draft by the majority: a certain proposal (paper 002)."""
        if not partial.weights:
            partial.weights = self._weights(partial.job.prefix)
        position = len(partial.answer)
        pairs = zip(self._models, ends, strict=True)
        choices = [(model.own_at(end, position),) for model, end in pairs]
        made = vote(choices, partial.weights)
        q = proposal(made.tokens, self._sampling)
        return made.tokens[0], q[0] if q else None

    def _weights(self, prefix: tuple[int, ...]) -> tuple[float, ...]:
        """Return the models' weights after ``prefix``: each is scored by its tokens.

        A function of the prefix alone, so that a draft does not depend on when it is made. Blocks
        that the prefix shares with the previous one are not scored again.
        """
        known = common_length(prefix, self._scored) // _SCORED
        new = prefix[known * _SCORED :]
        own = [model.own_tokens(prefix, known * _SCORED) for model in self._models]
        del self._weights_after[known + 1 :]
        self._scored = prefix
        for start in range(0, len(new) - _SCORED + 1, _SCORED):
            block = slice(start, start + _SCORED)
            weights = self._weights_after[-1].copy()
            weights.update([hit_rate(each[block], new[block]) for each in own])
            self._weights_after.append(weights)
        return self._weights_after[-1].values

    def _laws(self, logits: Tensor, answers: Sequence[tuple[int, ...]]) -> list[Distribution]:
        """Return the distributions to keep of ``logits`` [n, V] after ``answers``."""
        sampling = self._sampling
        if self._guide is not None:
            logits = masked(logits, np.stack([self._guide.allowed(answer) for answer in answers]))
        if sampling.greedy:
            sampling = _BELIEFS if logits.shape[-1] > _SMALL else SamplingConfig(1.0)
        return distributions(logits, sampling)

    def _own(self, law: Distribution, position: int) -> int:
        """Return the token that one of several models proposes."""
        if proposes_likeliest(self._sampling):
            return law.likeliest
        return own_token(law, self._sampling, position)

    def _forced(self, answer: tuple[int, ...], most: int) -> tuple[int, ...]:
        return () if self._guide is None else self._guide.forced(answer, most)

    def _extend(self, partial: DraftInProgress) -> None:
        """Append the tokens that the guide forces; complete a draft that has all its tokens."""
        job = partial.job
        if job.gamma:
            forced = self._forced(partial.answer, job.room - len(partial.tokens))
            partial.tokens += forced
            partial.probs += proposal(forced, self._sampling) or ()
        ended = bool(partial.tokens) and partial.tokens[-1] in self._eos
        if ended or partial.chosen >= job.gamma or len(partial.tokens) >= job.room:
            self._finish(partial)

    def _finish(self, partial: DraftInProgress) -> None:
        """Complete a draft."""
        job = partial.job
        probs = tuple(partial.probs) if self._sampling.sends_probabilities else None
        tokens = tuple(partial.tokens)
        partial.draft = Draft(
            job.round,
            len(job.prefix),
            tokens,
            probs,
            partial.cached,
            autoregressive_rounds=job.autoregressive_rounds,
        )

    def _read(self, answers: Sequence[tuple[int, ...]]) -> tuple[list[list[Node]], int, float]:
        """Read the unread tokens of ``answers`` by all models.

        Returns:
            Each model's nodes at their ends, the number of tokens read, and the duration [s].
        """
        if not answers:
            return [[] for _ in self._models], 0, 0.0
        reads = [model.read(answers) for model in self._models]
        tokens, took_s = max(read for _, read, _ in reads), sum(took for _, _, took in reads)
        return [ends for ends, _, _ in reads], tokens, took_s

    def _passed(self, tokens: int, seconds: float) -> None:
        if tokens:
            self.on_pass(tokens, seconds)


def _mixture(laws: Sequence[Distribution], weights: Sequence[float]) -> Distribution:
    """Return the models' weighted mean, by which votes are predicted."""
    ids = np.unique(np.concatenate([law.ids for law in laws]))
    probs = np.zeros(len(ids))
    for law, weight in zip(laws, weights, strict=True):
        probs[ids.searchsorted(law.ids)] += weight / sum(weights) * law.probs
    likely = probs > 0
    return Distribution(ids[likely], probs[likely], laws[0].size)


def _to_nobody(tokens: int, seconds: float) -> None:
    pass


def _nothing() -> None:
    pass
