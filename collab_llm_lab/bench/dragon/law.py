"""The output law of speculative aggregation, by following every branch of its random choices."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from collab_llm_nodes.decoding.aggregation import AggregationConfig, AggregationLaw, Party, shares
from collab_llm_nodes.decoding.sampling import Distribution

_WEIGHTS = ((0.0, 0.0), (1.25, -0.25), (-2.0, 1.5), (-math.inf, 0.5))


class _Open(Exception):
    """The script ends here; these are the probabilities of what may come next."""

    def __init__(self, chances: list[float]) -> None:
        self.chances = chances


class _Script:
    """Draws that follow a list of choices."""

    def __init__(self, choices: tuple[int, ...]) -> None:
        self._choices = iter(choices)

    def accept(self, probability: float, position: int, purpose: str) -> bool:
        """Return the next choice; 0 is yes."""
        yes = min(1.0, probability)
        return self._next([yes, 1.0 - yes]) == 0

    def pick(self, p: Distribution, position: int, purpose: str) -> int:
        """Return the next choice among the tokens of ``p``."""
        return int(p.ids[self._next((p.probs / p.probs.sum()).tolist())])

    def _next(self, chances: list[float]) -> int:
        for choice in self._choices:
            return choice
        raise _Open(chances)


def law_tv(vocabulary: int = 5) -> float:
    """Return the largest total variation between a law's token and the mixture (Eq. 4).

    Over both laws, several gammas, truncations and weights, with sides drawn at random.
    """
    worst, chance = 0.0, np.random.default_rng(0)
    for law, gamma, top_p in (("shared", 0.5, 0.8), ("coin", 0.5, 0.8), ("coin", 0.2, 1.0)):
        config = AggregationConfig(law=law, gamma=gamma, top_p=top_p)
        for weights in _WEIGHTS:
            sides = chance.dirichlet(np.ones(vocabulary), 2)
            worst = max(worst, _variation(config, sides, weights))
    return worst


def _variation(config: AggregationConfig, sides: np.ndarray, weights: tuple[float, float]) -> float:
    size = sides.shape[1]
    wanted = np.zeros(size)
    for party, eta in zip(Party, shares(*weights), strict=True):
        kept = AggregationLaw(config, size).propose(sides[party], 0.0, 0, party).kept
        wanted[kept.ids] += eta * kept.law

    def token(draws: _Script) -> int:
        law = AggregationLaw(config, size, draws=draws)
        device, cloud = (law.propose(sides[s], weights[s], 0, s) for s in Party)
        return law.judge((device, cloud), 0).token

    return float(0.5 * np.abs(_output(token, size) - wanted).sum())


def _output(program: Callable[[_Script], int], size: int) -> np.ndarray:
    """Return the law of the result of ``program``."""
    law = np.zeros(size)
    branches: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    while branches:
        weight, choices = branches.pop()
        try:
            law[program(_Script(choices))] += weight
        except _Open as fork:
            branches += [
                (weight * p, (*choices, choice)) for choice, p in enumerate(fork.chances) if p > 0
            ]
    return law
