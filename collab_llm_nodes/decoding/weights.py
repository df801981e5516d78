"""Weights of the draft models: rewarded and punished for what the target accepts (paper 002, 3.2).

The paper gives no values for thresholds and factors. The defaults come from a sweep on the
simulated streams of ``test_weights.py``, which repeats it: with thresholds from 0.5 and 0.3 to 0.9
and 0.7, and factors from 1.1 and 0.9 to 2 and 0.5, acceptance is within 0.02 of the best.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import ConfigError

PER_REQUEST, VOTED = "per_request", "voted"

_fixed = partial(setting, read_only=True)  # the machine is built once


@dataclass(frozen=True)
class WeightsConfig:
    """The rule by which weights change."""

    rule: str = _fixed(
        PER_REQUEST,
        "per_request: each request has weights of its own, and every draft is scored against the"
        " verified tokens; voted: one set of weights, and only voted drafts are scored, as in paper"
        " 002.",
        choices=(PER_REQUEST, VOTED),
    )
    reward_threshold: float = _fixed(
        0.75, "A model is rewarded from this acceptance rate on.", low=0.0, high=1.0
    )
    punish_threshold: float = _fixed(
        0.5, "A model is punished up to this acceptance rate.", low=0.0, high=1.0
    )
    reward_factor: float = _fixed(1.6, "Multiplies a rewarded weight.", low=1.0, high=100.0)
    punish_factor: float = _fixed(0.5, "Multiplies a punished weight.", low=0.01, high=1.0)
    floor: float = _fixed(
        0.02,
        "Smallest weight, the largest being 1: a model that is out of favour can come back.",
        low=1e-6,
        high=1.0,
    )
    drift: float = _fixed(
        0.1,
        "per_request: a new request's weights go this share of the way towards those with which a"
        " request has ended, on a log scale.",
        low=0.0,
        high=1.0,
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.punish_threshold >= self.reward_threshold:
            raise ConfigError(
                f"{self.punish_threshold} is not below reward_threshold {self.reward_threshold}",
                field="punish_threshold",
                remedy="a rate is rewarded or punished, not both",
            )


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
        share = self._config.drift
        pairs = zip(self.values, towards.values, strict=True)
        self._normalise([own ** (1.0 - share) * other**share for own, other in pairs])

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

    def _factor(self, rate: float | None) -> float:
        if rate is None:
            return 1.0
        if rate >= self._config.reward_threshold:
            return self._config.reward_factor
        if rate <= self._config.punish_threshold:
            return self._config.punish_factor
        return 1.0


def agreement(draft: Sequence[int] | None, verified: Sequence[int]) -> float | None:
    """Return the share of a draft's tokens that agree with the verified ones, as a chain.

    Only tokens that stand where the target has spoken count: nothing is known behind them.

    Args:
        draft: a model's own tokens; None if it gave none.
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
    """Return the share of tokens that agree, each proposed behind the verified ones before it.

    For drafts that all go on from the voted prefix: a miss says nothing about the tokens behind it.
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
