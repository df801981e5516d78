"""Weights of the draft models: rewarded and punished by their acceptance (paper 002, 3.2).

The paper gives no values for thresholds and factors. Those here come from a sweep on the simulated
streams of ``test_weights.py``, which repeats it: with thresholds from 0.5 and 0.3 to 0.9 and 0.7,
and factors from 1.1 and 0.9 to 2 and 0.5, acceptance is within 0.02 of the best. So none of them is
a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from collab_llm_nodes.config import check_ranges, fixed

PER_REQUEST, VOTED = "per_request", "voted"

REWARD_FROM, PUNISH_TO = 0.75, 0.5
"""Acceptance rates from which on, and up to which, a model is rewarded or punished."""
REWARD, PUNISHMENT = 1.6, 0.5
"""Factors of a rewarded and of a punished weight."""
DRIFT = 0.1
"""Share of the distance, on a log scale, that the weights of new requests move towards those with
which a request has ended."""


@dataclass(frozen=True)
class WeightsConfig:
    """The rule by which weights change."""

    rule: str = fixed(
        PER_REQUEST,
        "per_request: each request has weights of its own, and every draft is scored against the"
        " verified tokens; voted: one set of weights, and only voted drafts are scored, as in paper"
        " 002.",
        choices=(PER_REQUEST, VOTED),
    )
    floor: float = fixed(
        0.02,
        "Smallest weight, the largest being 1: a model that is out of favour can come back.",
        low=1e-6,
        high=1.0,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


class Weights:
    """One set of weights, the largest 1.

    Attributes:
        values: [k].
    """

    def __init__(self, config: WeightsConfig, values: Sequence[float]) -> None:
        self._config = config
        self.values = tuple(values)

    @classmethod
    def equal(cls, config: WeightsConfig, models: int) -> Weights:
        """Return the same weight for each of ``models`` models."""
        return cls(config, (1.0,) * models)

    def copy(self) -> Weights:
        """Return weights that begin with these values."""
        return Weights(self._config, self.values)

    def drift(self, towards: Weights) -> None:
        """Learn from the weights of a request that has ended, for those to come."""
        pairs = zip(self.values, towards.values, strict=True)
        self._normalise([own ** (1.0 - DRIFT) * other**DRIFT for own, other in pairs])

    def update(self, rates: Sequence[float | None]) -> None:
        """Reward and punish.

        Args:
            rates: [k] average acceptance rates (Eq. 1), 0 to 1; None where nothing is known.
        """
        pairs = zip(self.values, rates, strict=True)
        self._normalise([weight * self._factor(rate) for weight, rate in pairs])

    def _normalise(self, values: Sequence[float]) -> None:
        top = max(values, default=1.0)
        self.values = tuple(max(value / top, self._config.floor) for value in values)

    @staticmethod
    def _factor(rate: float | None) -> float:
        if rate is None:
            return 1.0
        if rate >= REWARD_FROM:
            return REWARD
        return PUNISHMENT if rate <= PUNISH_TO else 1.0


def agreement(draft: Sequence[int] | None, verified: Sequence[int]) -> float | None:
    """Return the share of a draft's tokens that agree with the verified ones, as a chain.

    Only positions that the target has verified count: nothing is known of later ones.

    Args:
        draft: a model's own tokens; None if there are none.
        verified: the accepted tokens and the one that the target added.
    """
    known = 0 if draft is None else min(len(draft), len(verified))
    if draft is None or not known:
        return None
    same = 0
    while same < known and draft[same] == verified[same]:
        same += 1
    return same / known


def hit_rate(proposed: Sequence[int] | None, verified: Sequence[int]) -> float | None:
    """Return the share of tokens that agree, each proposed after the verified ones before it.

    For drafts that all go on from the voted prefix: a miss says nothing about later tokens.
    """
    known = 0 if proposed is None else min(len(proposed), len(verified))
    if proposed is None or not known:
        return None
    return sum(a == b for a, b in zip(proposed, verified, strict=False)) / known


def average(rates: Iterable[Sequence[float | None]], models: int) -> list[float | None]:
    """Return each model's mean over the requests of a batch (Eq. 1); None where it has no rate.

    Args:
        rates: [batch, k].
    """
    sums, counts = [0.0] * models, [0] * models
    for request in rates:
        for model, rate in enumerate(request):
            if rate is not None:
                sums[model] += rate
                counts[model] += 1
    return [total / count if count else None for total, count in zip(sums, counts, strict=True)]
