"""Prediction of a verdict by the draft model itself, before any early exit.

A verdict is a number of accepted tokens and one more. Both are predicted from the distributions
that
the draft was drawn from: the runners-up at each position, and the best tokens after the last one.
Drafts for predicted outcomes are verified like any other, so a wrong prediction costs time only.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from collab_llm_nodes.decoding.randomness import gumbel_of, sample, uniform
from collab_llm_nodes.decoding.sampling import Distribution, SamplingConfig, at_least

# Assumptions about the target p where only the draft model's q is known, for a typical pair of
# models. They only affect the order of the work.
_SPREAD = 0.5  # standard deviation of log(p/q) at a drafted token
_ALIKE = 0.8  # probability that p and q make the same token of one random number


@dataclass(frozen=True)
class Prediction:
    """Expectation of the verdict on one draft.

    Attributes:
        outcomes: verdicts that do not end the answer, the likeliest first, with probabilities.
        beliefs: [gamma] probability of each token to be accepted if those before it are.
    """

    outcomes: list[tuple[tuple[int, ...], float]]
    beliefs: list[float]


def predict(
    laws: Sequence[Distribution],
    draft: Sequence[int],
    sampling: SamplingConfig,
    position: int,
    eos: frozenset[int],
    count: int,
    temperature: float = 1.0,
    *,
    certain: bool = False,
) -> Prediction:
    """Return the ``count`` likeliest verdicts on ``draft``.

    Args:
        laws: [gamma + 1] distributions of the draft model, before each draft token and after the
            last one; of a greedy model the likeliest tokens suffice.
        draft: [gamma] drafted tokens.
        sampling: the output law; its randomness is known to both sides and used here too.
        position: of the first draft token in the answer.
        eos: end tokens.
        temperature: applied to the draft model's distribution to get the target's; above 1 for a
            draft model that is overconfident (greedy, coupled).
        certain: the draft was voted: it is judged as a certain proposal, not as one of ``laws``.
    """
    found: list[tuple[float, tuple[int, ...]]] = []
    beliefs = []
    reached = 1.0  # probability that all tokens before this one are accepted
    for i, law in enumerate(laws):
        drafted = draft[i] if i < len(draft) else None
        proposed = certain or len(law.ids) == 1  # judged as a certain proposal
        accepted, other = _belief(law, drafted, sampling, position + i, temperature, proposed)
        best = at_least(other, count)
        for token, probability in zip(law.ids[best].tolist(), other[best].tolist(), strict=True):
            if probability > 0 and token not in eos:
                found.append((reached * probability, (*draft[:i], token)))
        reached *= accepted
        if drafted is not None:
            beliefs.append(accepted)
        if drafted in eos:
            break
    likeliest = heapq.nlargest(count, found)
    return Prediction([(outcome, probability) for probability, outcome in likeliest], beliefs)


def _belief(
    law: Distribution,
    drafted: int | None,
    sampling: SamplingConfig,
    position: int,
    temperature: float,
    certain: bool,
) -> tuple[float, NDArray[np.float64]]:
    """Return the probabilities that the drafted token is accepted, and of the tokens instead of it.

    The latter are for the tokens of ``law``. ``drafted`` is None after the draft, at the position
    of the bonus token.
    """
    at = law.ids == drafted
    if sampling.greedy:
        own = law.probs ** (1.0 / temperature)
        own /= own.sum()
        accepted = float(own[at].sum())
    elif sampling.law == "coupled":
        z = np.log(law.probs) + gumbel_of(sampling.seed, position, law.size, law.ids)
        own = np.exp((z - z.max()) / temperature)
        own /= own.sum()
        accepted = float(own[at].sum())
    else:
        own = law.probs.copy()
        if drafted is None or certain:
            # The target's own token decides, which it draws by a random number known to both sides.
            shared = sample(own, uniform(sampling.seed, position, "bonus"))
            own *= 1.0 - _ALIKE
            own[shared] += _ALIKE
            accepted = float(own[at].sum())
        else:
            # It is accepted if p/q exceeds a random number known to both sides.
            threshold = max(uniform(sampling.seed, position, "accept"), 1e-300)
            accepted = NormalDist().cdf(-math.log(threshold) / _SPREAD)
            rest = 1.0 - own[at].sum()
            own *= (1.0 - accepted) / rest if rest > 0 else 0.0
    own[at] = 0.0
    return accepted, own
