"""The models of collective speculation: they draft and verify for many requests in one pass.

Each model keeps a KV cache for each request. It receives the whole context every time, rolls the
cache back to their common prefix, and reads the rest. So rejected tokens are freed, and a model
that has missed rounds, or whose draft has lost the vote, catches up by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from torch import Tensor

from collab_llm_nodes.decoding.rejection import (
    own_token,
    propose,
    verify_chain,
)
from collab_llm_nodes.decoding.sampling import (
    Distribution,
    SamplingConfig,
    SparseDistribution,
    distributions_of,
)
from collab_llm_nodes.decoding.vote import proposes_likeliest
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.ensemble import Ensemble, can_share_passes
from collab_llm_nodes.engine.interface import DecodingSession, Feed, ServingEngine
from collab_llm_nodes.errors import CollabError, ModelError
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.protocols.collective.messages import Ask, Claim, Ids, Proposal, Verdict
from collab_llm_nodes.protocols.contexts import common_length

Answers = dict[int, list[Proposal | None] | Exception]
"""Proposals by the index of the model, or the error of one that has failed."""

_MAX_SUPPORT = 64
"""Entries of each distribution that the paper's rule divides by."""


class Context(NamedTuple):
    """The text of one request, for a model to read.

    Attributes:
        id: of the request.
        prompt: token ids of its prompt.
        tokens: those that follow it.
        wanted: logits are wanted after so many of the last tokens.
        member: of an ensemble, the model that reads.
    """

    id: str
    prompt: Ids
    tokens: Ids
    wanted: int
    member: int = 0


@dataclass
class _Held:
    """The KV cache of one request.

    Attributes:
        read: tokens that it holds.
        bytes: its size after the last pass.
    """

    session: DecodingSession
    read: Ids = ()
    bytes: int = 0


class Sessions:
    """The KV caches of one model, or of an ensemble, by request.

    Attributes:
        held_bytes: size of all KV caches; other threads may read it.
        peak_bytes: the most that they have been.
    """

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine
        self._held: dict[tuple[str, int], _Held] = {}
        self.held_bytes = self.peak_bytes = 0

    def run(self, contexts: Sequence[Context]) -> list[Tensor | CollabError]:
        """Read the contexts in one pass.

        Returns:
            For each its logits [wanted, V], or why there are none.

        Raises:
            Exception: the pass fails with an error that is no CollabError.
        """
        texts = [(*context.prompt, *context.tokens) for context in contexts]
        holders = [self._holder(context) for context in contexts]
        feeds = [
            self._feed(held, text, context.wanted)
            for held, text, context in zip(holders, texts, contexts, strict=True)
        ]
        results: list[Tensor | CollabError] = []
        for held, text, result in zip(holders, texts, self._engine.run(feeds), strict=True):
            if isinstance(result, Tensor):
                held.read = text
            elif not isinstance(result, CollabError):
                raise result
            results.append(result)
            self._measure(held)
        return results

    def _holder(self, context: Context) -> _Held:
        key = context.id, context.member
        if key not in self._held:
            self._held[key] = _Held(self._open(context))
        return self._held[key]

    def _feed(self, held: _Held, text: Ids, wanted: int) -> Feed[DecodingSession]:
        """Roll the cache back to its common prefix with ``text``; return the rest as a feed."""
        keep = min(common_length(held.read, text), len(text) - wanted)
        held.session.length = keep
        held.read = text[:keep]
        return Feed(held.session, text[keep:], last=wanted)

    def _open(self, context: Context) -> DecodingSession:
        prompt = EncodedPrompt(context.prompt)
        if isinstance(self._engine, Ensemble):
            return self._engine.open(prompt, member=context.member)
        return self._engine.open(prompt)

    def release(self, id: str) -> None:
        """Free the KV caches of a request, if there are any."""
        for key in [key for key in self._held if key[0] == id]:
            held = self._held.pop(key)
            held.session.close()
            self._measure(held)

    def close(self) -> None:
        """Free all KV caches."""
        for id in {id for id, _ in self._held}:
            self.release(id)

    def _measure(self, held: _Held) -> None:
        """Note the size of a KV cache, which a pass or its end has changed."""
        size = held.session.own_bytes
        self.held_bytes += size - held.bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        held.bytes = size


class DraftModel:
    """Draft models at work in one thread.

    Args:
        engine: of one model, or an ensemble.
        eos: the target's end tokens: a draft ends with one.
        indices: of its models among all drafts; under the paper's rule each has random streams of
            its own.
    """

    def __init__(self, engine: ServingEngine, eos: frozenset[int], *indices: int) -> None:
        self.sessions = Sessions(engine)
        self.indices = indices
        self._eos = eos

    def draw(self, asks: Sequence[Ask]) -> list[Proposal | None]:
        """Draft with the only model, see :meth:`draw_all`."""
        (index,) = self.indices
        return self.draw_all({index: asks})[index]

    def answers(self, asks: Mapping[int, Sequence[Ask]]) -> Answers:
        """Return the result of :meth:`draw_all`, with the error of each model that has failed."""
        try:
            return dict(self.draw_all(asks))
        except Exception as error:  # noqa: BLE001 - whatever it is, it leaves out one model
            if len(asks) == 1:
                return dict.fromkeys(asks, error)
        each = [self.answers({index: own}) for index, own in asks.items()]
        return {index: found for one in each for index, found in one.items()}

    def draw_all(self, asks: Mapping[int, Sequence[Ask]]) -> dict[int, list[Proposal | None]]:
        """Draft for all requests side by side, one pass per token; None where that fails.

        Args:
            asks: by the index of the model.
        """
        growing = [
            _Growing(index, self.indices.index(index), ask)
            for index, own in asks.items()
            for ask in own
        ]
        while True:
            open_ = [each for each in growing if each.grows(self._eos)]
            if not open_:
                break
            rows = self.sessions.run([each.context for each in open_])
            fine = []
            for each, row in zip(open_, rows, strict=True):
                if isinstance(row, Tensor):
                    fine.append((each, row))
                else:
                    each.failed = True
            if not fine:
                continue
            laws = distributions_of([row for _, row in fine], [each.law for each, _ in fine])
            for (each, _), law in zip(fine, laws, strict=True):
                if isinstance(law, ModelError):
                    raise law
                self._append(each, law[0])
        found = iter(growing)
        return {
            index: [each.proposal() for each in islice(found, len(own))]
            for index, own in asks.items()
        }

    def _append(self, growing: _Growing, law: Distribution) -> None:
        """Choose the token with which a draft goes on."""
        ask = growing.ask
        position = len(ask.answer) + len(growing.tokens)
        if ask.send_q:
            own = replace(ask.sampling, seed=ask.sampling.seed + growing.index + 1)
            token, sent = propose(law, own, position, _MAX_SUPPORT)
            assert sent is not None
            growing.q.append(sent)
        else:
            token = own_token(law, growing.law, position)
        growing.tokens.append(token)


@dataclass
class _Growing:
    """A draft of one model for one request.

    Attributes:
        index, member: of the model, among all drafts and in the ensemble.
    """

    index: int
    member: int
    ask: Ask
    tokens: list[int] = field(default_factory=list)
    q: list[SparseDistribution] = field(default_factory=list)
    failed: bool = False

    @property
    def law(self) -> SamplingConfig:
        """The law of its tokens: a voter proposes its likeliest ones under most."""
        sampling = self.ask.sampling
        likeliest = proposes_likeliest(sampling) and not self.ask.send_q
        return SamplingConfig() if likeliest else sampling

    def grows(self, eos: frozenset[int]) -> bool:
        ended = bool(self.tokens) and self.tokens[-1] in eos
        return not self.failed and not ended and len(self.tokens) < self.ask.count

    @property
    def context(self) -> Context:
        ask = self.ask
        return Context(ask.id, ask.prompt, (*ask.answer, *self.tokens), 1, self.member)

    def proposal(self) -> Proposal | None:
        """Return the draft, unless it has failed."""
        if self.failed:
            return None
        return Proposal(tuple(self.tokens), tuple(self.q) if self.ask.send_q else None)


class Drafts:
    """The draft models of one thread: alike ones share their passes, others have their turn.

    Args:
        indices: of the models among all drafts.
    """

    def __init__(
        self, engines: Sequence[Engine], eos: frozenset[int], indices: Sequence[int]
    ) -> None:
        self.indices = tuple(indices)
        if len(engines) > 1 and can_share_passes(engines):
            self._groups = [DraftModel(Ensemble(engines), eos, *indices)]
        else:
            pairs = zip(engines, indices, strict=True)
            self._groups = [DraftModel(engine, eos, index) for engine, index in pairs]

    @property
    def held_bytes(self) -> int:
        """Size of all KV caches."""
        return sum(group.sessions.held_bytes for group in self._groups)

    def answers(self, asks: Mapping[int, Sequence[Ask]]) -> Iterator[Answers]:
        """Yield the answers of each group, as soon as they are there."""
        for group in self._groups:
            own = {index: asks[index] for index in group.indices if index in asks}
            if own:
                yield group.answers(own)

    def release(self, id: str) -> None:
        """Free the KV caches of a request."""
        for group in self._groups:
            group.sessions.release(id)

    def close(self) -> None:
        """Free all KV caches."""
        for group in self._groups:
            group.sessions.close()


class Target:
    """The target model."""

    def __init__(self, engine: ServingEngine) -> None:
        self.sessions = Sessions(engine)
        self._eos = engine.eos

    def verify(self, claims: Sequence[Claim]) -> list[Verdict]:
        """Judge the drafts of all requests in one pass.

        Returns:
            For each claim its verdict, or the error of a request that cannot be judged.

        Raises:
            Exception: the pass fails with an error that is no CollabError.
        """
        rows = self.sessions.run(
            [
                Context(
                    claim.id,
                    claim.prompt,
                    (*claim.answer, *claim.draft),
                    len(claim.draft) + 1,
                )
                for claim in claims
            ]
        )
        read = [
            (claim, row) for claim, row in zip(claims, rows, strict=True) if isinstance(row, Tensor)
        ]
        judged = iter(self._judge_all(read))
        return [row if isinstance(row, CollabError) else next(judged) for row in rows]

    def _judge_all(self, read: Sequence[tuple[Claim, Tensor]]) -> list[Verdict]:
        """Return the verdicts on claims, by the logits [draft + 1, V] of each.

        A claim that cannot be judged, such as by logits that are not finite, gets the error; the
        others do not suffer.
        """
        laws = distributions_of(
            [logits for _, logits in read], [claim.sampling for claim, _ in read]
        )
        return [self._judge(claim, law) for (claim, _), law in zip(read, laws, strict=True)]

    def _judge(self, claim: Claim, p: Sequence[Distribution] | ModelError) -> Verdict:
        if isinstance(p, ModelError):
            return p
        position = len(claim.answer)
        try:
            return verify_chain(p, claim.draft, claim.q, claim.sampling, position, self._eos)
        except CollabError as error:
            return error
