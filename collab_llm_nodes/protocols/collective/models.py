"""The models behind the machine: they draft and verify for many requests in one pass.

Each model keeps a KV cache for each request. It is told the whole context every time, goes back to
what that has in common with what it has read, and reads the rest: so rejected tokens are freed, and
a model that has missed rounds, or whose draft has lost the vote, catches up by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from collab_llm_nodes.decoding.rejection import (
    Outcome,
    own_token,
    propose,
    verify_chain,
    verify_own,
)
from collab_llm_nodes.decoding.sampling import SparseDistribution, distribution, most_likely
from collab_llm_nodes.decoding.vote import proposes_likeliest
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.session import Feed, Session
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.protocols.collective.messages import Ask, Claim, Ids, Proposal, Verdict
from collab_llm_nodes.protocols.contexts import common_length

_MAX_SUPPORT = 64
"""Entries of each distribution that the paper's rule divides by."""


class Sessions:
    """The KV caches of one model, by request.

    Attributes:
        held_bytes: size of all KV caches after the last pass or release.
        peak_bytes: the most that they have been.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sessions: dict[str, tuple[Session, Ids]] = {}  # and the tokens it has read
        self.held_bytes = self.peak_bytes = 0

    def run(self, contexts: Sequence[tuple[str, Ids, Ids, int]]) -> list[Tensor | CollabError]:
        """Read the contexts in one pass.

        Args:
            contexts: of each request: its id, its prompt, the tokens behind that, and how many of
                the last of them logits are wanted after.

        Returns:
            For each its logits [wanted, V], or why there are none.
        """
        feeds = [self._feed(*context) for context in contexts]
        results: list[Tensor | CollabError] = []
        for (id, prompt, tokens, _), result in zip(contexts, self._engine.run(feeds), strict=True):
            if isinstance(result, Tensor):
                self._sessions[id] = (self._sessions[id][0], (*prompt, *tokens))
            elif not isinstance(result, CollabError):
                raise result
            results.append(result)
        self._measure()
        return results

    def _feed(self, id: str, prompt: Ids, tokens: Ids, wanted: int) -> Feed:
        if id not in self._sessions:
            self._sessions[id] = (self._engine.open(EncodedPrompt(prompt)), ())
        session, read = self._sessions[id]
        context = (*prompt, *tokens)
        keep = min(common_length(read, context), len(context) - wanted)
        session.length = keep
        self._sessions[id] = (session, read[:keep])
        return Feed(session, context[keep:], last=wanted)

    def release(self, id: str) -> None:
        """Free the KV cache of a request, if there is one."""
        if id in self._sessions:
            self._sessions.pop(id)[0].close()
            self._measure()

    def close(self) -> None:
        """Free all KV caches."""
        for id in list(self._sessions):
            self.release(id)

    def _measure(self) -> None:
        """Note the sizes for readers in other threads."""
        self.held_bytes = sum(session.own_bytes for session, _ in self._sessions.values())
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)


class DraftModel:
    """One draft model.

    Args:
        eos: the target's end tokens: a draft ends with one.
        index: of the model among the drafts; under the paper's rule it has random streams of its
            own.
    """

    def __init__(self, engine: Engine, eos: frozenset[int], index: int) -> None:
        self.sessions = Sessions(engine)
        self._eos = eos
        self._index = index

    def draw(self, asks: Sequence[Ask]) -> list[Proposal | None]:
        """Draft for all requests side by side, one pass per token; None where that fails."""
        tokens: list[list[int]] = [[] for _ in asks]
        q: list[list[SparseDistribution]] = [[] for _ in asks]
        failed: set[int] = set()
        while True:
            open_ = [
                i
                for i, (ask, own) in enumerate(zip(asks, tokens, strict=True))
                if len(own) < ask.count and not (own and own[-1] in self._eos) and i not in failed
            ]
            if not open_:
                break
            rows = self.sessions.run(
                [(asks[i].id, asks[i].prompt, (*asks[i].answer, *tokens[i]), 1) for i in open_]
            )
            fine = [(i, row) for i, row in zip(open_, rows, strict=True) if isinstance(row, Tensor)]
            failed |= set(open_) - {i for i, _ in fine}
            if not fine:
                continue
            logits = torch.cat([row for _, row in fine])
            likely = most_likely(logits)
            for row, (i, _) in enumerate(fine):
                self._append(asks[i], logits[row], likely[row], tokens[i], q[i])
        return [
            None if i in failed else Proposal(tuple(own), tuple(q[i]) if asks[i].send_q else None)
            for i, own in enumerate(tokens)
        ]

    def _append(
        self,
        ask: Ask,
        logits: Tensor,
        likely: int,
        tokens: list[int],
        q: list[SparseDistribution],
    ) -> None:
        """Choose the token with which a draft goes on."""
        position, sampling = len(ask.answer) + len(tokens), ask.sampling
        if ask.send_q:
            own = replace(sampling, seed=sampling.seed + self._index + 1)
            law = distribution(logits, sampling)
            token, sent = propose(law, own, position, _MAX_SUPPORT)
            assert sent is not None
            q.append(sent)
        elif proposes_likeliest(sampling):
            token = likely
        else:
            token = own_token(distribution(logits, sampling), sampling, position)
        tokens.append(token)


class Target:
    """The target model."""

    def __init__(self, engine: Engine) -> None:
        self.sessions = Sessions(engine)
        self._eos = engine.eos

    def verify(self, claims: Sequence[Claim]) -> list[Verdict]:
        """Judge the drafts of all requests in one pass."""
        rows = self.sessions.run(
            [
                (claim.id, claim.prompt, (*claim.answer, *claim.draft), len(claim.draft) + 1)
                for claim in claims
            ]
        )
        logits = [row for row in rows if isinstance(row, Tensor)]
        likely = most_likely(torch.cat(logits)) if logits else []
        verdicts: list[Verdict] = []
        start = 0
        for claim, row in zip(claims, rows, strict=True):
            if isinstance(row, CollabError):
                verdicts.append(row)
                continue
            end = start + len(row)
            verdicts.append(self._judge(claim, row, likely[start:end]))
            start = end
        return verdicts

    def _judge(self, claim: Claim, logits: Tensor, likely: Sequence[int]) -> Outcome:
        if claim.sampling.greedy:
            return verify_own(likely, claim.draft, self._eos)
        p = distribution(logits, claim.sampling)
        position = len(claim.answer)
        return verify_chain(p, claim.draft, claim.q, claim.sampling, position, self._eos)
