"""The laws of chain speculation: the accepted draft tokens, and the token after them.

Words are vLLM's: accepted tokens, then one recovered (after a rejection) or bonus token. Both laws
leave the output distributed exactly as the target alone (Leviathan et al. 2023, Theorem 3.5 for
"rejection"); under "coupled" the output does not depend on the draft at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from collab_llm_nodes.decoding.randomness import gumbel_of, sample, uniform
from collab_llm_nodes.decoding.sampling import (
    Distribution,
    SamplingConfig,
    SparseDistribution,
    to_wire,
)
from collab_llm_nodes.errors import InvalidInput


@dataclass(frozen=True)
class Outcome:
    """Result of judging one draft.

    Attributes:
        accepted: number of accepted draft tokens.
        next_token: the recovered or bonus token; -1 iff the last accepted one is an end token.
    """

    accepted: int
    next_token: int


class Draws(Protocol):
    """Source of a law's randomness; the tests enumerate it instead."""

    def accept(self, probability: float, position: int, purpose: str) -> bool: ...

    def pick(self, p: Distribution, position: int, purpose: str) -> int:
        """Draw a token of ``p``, which need not be normalised, and may hold zeros."""


@dataclass(frozen=True)
class KeyedDraws:
    """The streams of ``randomness``: equal on all sides, whatever the timing."""

    seed: int

    def accept(self, probability: float, position: int, purpose: str) -> bool:
        return uniform(self.seed, position, purpose) < probability

    def pick(self, p: Distribution, position: int, purpose: str) -> int:
        if purpose != "gumbel":
            return int(p.ids[sample(p.probs, uniform(self.seed, position, purpose))])
        noise = gumbel_of(self.seed, position, p.size, p.ids)
        return int(p.ids[np.argmax(np.log(p.probs) + noise)])


def verify_chain(
    p: Sequence[Distribution],
    draft: Sequence[int],
    q: Sequence[SparseDistribution] | None,
    config: SamplingConfig,
    position: int,
    eos: frozenset[int],
    draws: Draws | None = None,
) -> Outcome:
    """Judge ``draft`` against the target's distributions (paper 003, Algorithm 2).

    The same function judges an early exit (its own ``p``) and the final exit: both read the same
    random numbers, so they differ only where their distributions do.

    Args:
        p: [gamma + 1] target distributions after the prefix and after each draft token.
        draft: [gamma] proposed token ids.
        q: [gamma] distributions the tokens were drawn from; None when greedy or coupled.
        config: the output law.
        position: index of the first draft token, counted alike on both sides (from the start of
            the answer, since two models may spend different numbers of tokens on one image).
        eos: end tokens.
        draws: source of randomness; the keyed streams of ``config.seed`` by default.

    Raises:
        InvalidInput: shapes do not match, an id is outside the vocabulary, ``q`` is missing or not
            wanted, or a token has probability 0 under the distribution it claims to be drawn from.
    """
    _check(p, draft, q, config)
    if draws is None:
        draws = KeyedDraws(config.seed)
    if q is None:
        own = (_own_token(p_i, config, position + i, draws) for i, p_i in enumerate(p))
        return verify_own(own, draft, eos)
    for i, (token, sent) in enumerate(zip(draft, q, strict=True)):
        if len(sent.ids) == 1:
            # A certain proposal: the target's own token equals it with p(token), and follows p
            # without the token else. So the answer depends on no draft.
            stands = _own_token(p[i], config, position + i, draws)
        else:
            stands = verify_token(p[i], token, _law(sent, p[i].size), position + i, draws)
        if stands != token:
            return Outcome(i, stands)
        if token in eos:
            return Outcome(i + 1, -1)
    gamma = len(draft)
    return Outcome(gamma, draws.pick(p[gamma], position + gamma, "bonus"))


def verify_token(
    p: Distribution,
    token: int,
    q: Distribution,
    position: int,
    draws: Draws,
    purposes: tuple[str, str] = ("accept", "recover"),
) -> int:
    """Return ``token`` if it is accepted, else a recovered one: distributed as ``p``.

    Args:
        p: the target's distribution.
        q: the distribution that ``token`` was drawn from.
        purposes: the streams of the two draws.
    """
    if draws.accept(p[token] / q[token], position, purposes[0]):
        return token
    residual = p.probs.copy()
    places = p.ids.searchsorted(q.ids).clip(max=len(p.ids) - 1)
    shared = p.ids[places] == q.ids
    places = places[shared]
    residual[places] = np.maximum(p.probs[places] - q.probs[shared], 0.0)
    if not residual.any():  # p and q differ by rounding only
        residual = p.probs
    return draws.pick(Distribution(p.ids, residual, p.size), position, purposes[1])


def verify_own(tokens: Iterable[int], draft: Sequence[int], eos: frozenset[int]) -> Outcome:
    """Judge ``draft`` by the target's own tokens, as the greedy and the coupled law do.

    Args:
        tokens: [gamma + 1], the target's own after the prefix and after each draft token; read
            only as far as the draft is accepted.
    """
    for i, own in enumerate(tokens):
        if i == len(draft) or draft[i] != own:
            return Outcome(i, own)
        if own in eos:
            return Outcome(i + 1, -1)
    raise InvalidInput(f"{len(draft)} draft tokens need one more of the target's", field="draft")


def own_token(p: Distribution, config: SamplingConfig, position: int) -> int:
    """Return the token that a model with distribution ``p`` alone emits at ``position``."""
    return _own_token(p, config, position, KeyedDraws(config.seed))


def _own_token(p: Distribution, config: SamplingConfig, position: int, draws: Draws) -> int:
    if config.greedy:
        return p.likeliest
    return draws.pick(p, position, "gumbel" if config.law == "coupled" else "bonus")


def propose(
    q: Distribution,
    config: SamplingConfig,
    position: int,
    max_support: int,
    draws: Draws | None = None,
) -> tuple[int, SparseDistribution | None]:
    """Draw the draft token at ``position`` from ``q``; return it with the distribution to send.

    Under the rejection law the token is drawn from the rounded distribution that is sent.
    """
    draws = draws or KeyedDraws(config.seed)
    if not config.sends_probabilities:
        return _own_token(q, config, position, draws), None
    sent = to_wire(q, max_support)
    return draws.pick(_law(sent, q.size), position, "draft"), sent


def _law(sent: SparseDistribution, size: int) -> Distribution:
    return Distribution(sent.ids, sent.law, size)


def _check(
    p: Sequence[Distribution],
    draft: Sequence[int],
    q: Sequence[SparseDistribution] | None,
    config: SamplingConfig,
) -> None:
    if len(p) != len(draft) + 1:
        raise InvalidInput(
            f"{len(draft)} draft tokens need {len(draft) + 1} target distributions, got {len(p)}",
            field="draft",
        )
    for token in draft:
        if not 0 <= token < p[0].size:
            raise InvalidInput(
                f"token {token} is outside the vocabulary of {p[0].size}", field="draft"
            )
    if (q is not None) != config.sends_probabilities:
        need = "needs" if config.sends_probabilities else "takes no"
        raise InvalidInput(
            f"law {config.law!r} at temperature {config.temperature} {need} draft probabilities",
            field="probs",
            remedy="use the same sampling settings on both sides",
        )
    if q is None:
        return
    if len(q) != len(draft):
        raise InvalidInput(f"{len(draft)} tokens but {len(q)} distributions", field="probs")
    for i, (token, q_i) in enumerate(zip(draft, q, strict=True)):
        if q_i.ids[-1] >= p[0].size:
            raise InvalidInput(
                f"id {q_i.ids[-1]} is outside the vocabulary of {p[0].size}",
                field=f"probs[{i}].ids",
                remedy="use the draft model whose tokenizer the verifier expects",
            )
        if token not in q_i.ids:
            raise InvalidInput(
                f"token {token} has probability 0 in the distribution it was drawn from",
                field=f"probs[{i}]",
                remedy="send the rounded distribution and draw the token from it",
            )
