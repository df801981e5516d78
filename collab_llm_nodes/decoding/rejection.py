"""The laws of chain speculation: which draft tokens stand, and which token comes next.

Words are vLLM's: accepted tokens, then one recovered (after a rejection) or bonus token. Both laws
leave the output distributed exactly as the target alone (Leviathan et al. 2023, Theorem 3.5 for
"rejection"); under "coupled" the output does not depend on the draft at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from collab_llm_nodes.decoding.randomness import gumbel, sample, uniform
from collab_llm_nodes.decoding.sampling import SamplingConfig, SparseDistribution, to_wire_rows
from collab_llm_nodes.errors import InvalidInput

Probabilities = NDArray[np.float64]


@dataclass(frozen=True)
class Outcome:
    """Result of judging one draft.

    Attributes:
        accepted: draft tokens that stand.
        next_token: the recovered or bonus token; -1 iff the last accepted one is an end token.
    """

    accepted: int
    next_token: int


class Draws(Protocol):
    """Source of a law's randomness; the tests enumerate it instead."""

    def accept(self, probability: float, position: int, purpose: str) -> bool: ...

    def pick(self, p: Probabilities, position: int, purpose: str) -> int:
        """An index into ``p``, which need not be normalised."""


@dataclass(frozen=True)
class KeyedDraws:
    """The streams of ``randomness``: equal on all sides, whatever the timing."""

    seed: int

    def accept(self, probability: float, position: int, purpose: str) -> bool:
        return uniform(self.seed, position, purpose) < probability

    def pick(self, p: Probabilities, position: int, purpose: str) -> int:
        if purpose != "gumbel":
            return sample(p, uniform(self.seed, position, purpose))
        support = np.flatnonzero(p)
        noise = gumbel(self.seed, position, len(p))
        return int(support[np.argmax(np.log(p[support]) + noise[support])])


def verify_chain(
    p: Probabilities,
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
        p: [gamma + 1, V] target distributions after the prefix and after each draft token.
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
            stands = verify_token(p[i], token, sent.ids, sent.law, position + i, draws)
        if stands != token:
            return Outcome(i, stands)
        if token in eos:
            return Outcome(i + 1, -1)
    gamma = len(draft)
    return Outcome(gamma, draws.pick(p[gamma], position + gamma, "bonus"))


def verify_token(
    p: Probabilities,
    token: int,
    ids: NDArray[np.integer[Any]],
    q: Probabilities,
    position: int,
    draws: Draws,
    purposes: tuple[str, str] = ("accept", "recover"),
) -> int:
    """Return ``token`` if it stands, else the one recovered: distributed as ``p`` if it was as q.

    Args:
        p: [V], the target's distribution.
        ids, q: [k] ids in ascending order, and their probabilities in the distribution of which
            ``token`` was drawn; that is 0 elsewhere.
        purposes: the streams of the two draws.
    """
    if draws.accept(p[token] / q[ids.searchsorted(token)], position, purposes[0]):
        return token
    residual = p.copy()
    residual[ids] = np.maximum(p[ids] - q, 0.0)
    if not residual.any():  # p and q differ by rounding only
        residual = p
    return draws.pick(residual, position, purposes[1])


def verify_own(tokens: Iterable[int], draft: Sequence[int], eos: frozenset[int]) -> Outcome:
    """Judge ``draft`` by the target's own tokens: all there is to the greedy and the coupled law.

    Args:
        tokens: [gamma + 1], what the target alone emits after the prefix and after each draft
            token; read only as far as the draft stands.
    """
    for i, own in enumerate(tokens):
        if i == len(draft) or draft[i] != own:
            return Outcome(i, own)
        if own in eos:
            return Outcome(i + 1, -1)
    raise InvalidInput(f"{len(draft)} draft tokens need one more of the target's", field="draft")


def own_token(p: Probabilities, config: SamplingConfig, position: int) -> int:
    """Return the token that a model with distribution ``p`` [V] alone emits at ``position``."""
    return _own_token(p, config, position, KeyedDraws(config.seed))


def _own_token(p: Probabilities, config: SamplingConfig, position: int, draws: Draws) -> int:
    if config.greedy:
        return int(p.argmax())
    return draws.pick(p, position, "gumbel" if config.law == "coupled" else "bonus")


def propose(
    q: Probabilities,
    config: SamplingConfig,
    position: int,
    max_support: int,
    draws: Draws | None = None,
) -> tuple[int, SparseDistribution | None]:
    """Draw the draft token at ``position`` from ``q`` [V], and what must be sent along with it.

    Under the rejection law the token is drawn from the rounded distribution that is sent.
    """
    return propose_rows(q[None], config, [position], max_support, draws)[0]


def propose_rows(
    q: Probabilities,
    config: SamplingConfig,
    positions: Sequence[int],
    max_support: int,
    draws: Draws | None = None,
) -> list[tuple[int, SparseDistribution | None]]:
    """Propose like :func:`propose` for several continuations with distributions ``q`` [n, V]."""
    if draws is None:
        draws = KeyedDraws(config.seed)
    if not config.sends_probabilities:
        return [
            (_own_token(q_i, config, position, draws), None)
            for q_i, position in zip(q, positions, strict=True)
        ]
    return [
        (int(sent.ids[draws.pick(sent.probs.astype(np.float64), position, "draft")]), sent)
        for sent, position in zip(to_wire_rows(q, max_support), positions, strict=True)
    ]


def _check(
    p: Probabilities,
    draft: Sequence[int],
    q: Sequence[SparseDistribution] | None,
    config: SamplingConfig,
) -> None:
    if p.ndim != 2 or len(p) != len(draft) + 1:
        raise InvalidInput(
            f"{len(draft)} draft tokens need {len(draft) + 1} target distributions, got {len(p)}",
            field="draft",
        )
    for token in draft:
        if not 0 <= token < p.shape[1]:
            raise InvalidInput(
                f"token {token} is outside the vocabulary of {p.shape[1]}", field="draft"
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
        if q_i.ids[-1] >= p.shape[1]:
            raise InvalidInput(
                f"id {q_i.ids[-1]} is outside the vocabulary of {p.shape[1]}",
                field=f"probs[{i}].ids",
                remedy="use the draft model whose tokenizer the verifier expects",
            )
        if token not in q_i.ids:
            raise InvalidInput(
                f"token {token} has probability 0 in the distribution it was drawn from",
                field=f"probs[{i}]",
                remedy="send the rounded distribution and draw the token from it",
            )
