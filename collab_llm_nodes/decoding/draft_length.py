"""Estimators for the length of drafts, which several protocols share.

A longer draft yields more tokens in each verification, and takes more time. :class:`Acceptance`
estimates the tokens. Each protocol predicts the time by a formula of its own. Predictions age, so
:class:`Trials` now and then has a protocol use what seems slower.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import numpy as np

_MEMORY = 1000
"""Draft tokens that an acceptance chance is estimated from: a few requests say little of others."""
_FORGET = 1.0 - 1.0 / _MEMORY
_ALIKE = 32
"""Judged tokens that the chance of the run one token shorter counts as."""
_RUN = 16
"""Length of a run from which on its chances count as equal [tokens]."""
_LONGEST_RUN = 2048
"""Longest run that is considered [tokens]."""


class Acceptance:
    """The chance of a draft token to be accepted, and the tokens that drafts of any length yield.

    All lengths are compared by one estimate: the accepted tokens of a few drafts vary more than
    the means of neighbouring lengths differ.

    Texts have easy and hard passages, and requests differ: the more draft tokens have been accepted
    since the last rejected one, the likelier is the next. Such a *run* continues from draft to
    draft, and its chances hardly depend on the length of the drafts.
    """

    def __init__(self) -> None:
        # By the length of the run before: draft tokens that were judged, and accepted
        self._judged = np.zeros(_RUN)
        self._accepted = np.zeros(_RUN)

    @classmethod
    def assumed(cls, chance: float) -> Acceptance:
        """Return an estimate by which every draft token has the same chance."""
        found = cls()
        found._judged += 1.0
        found._accepted += chance
        return found

    def add(self, run: int | None, s: int, accepted: int) -> None:
        """Learn from one draft.

        Args:
            run: draft tokens accepted since the last rejected one; None if unknown.
            s: requested length [tokens]; tokens that the end of an answer cuts off count as
                rejected.
        """
        if run is None:
            return
        for place in range(min(s, accepted + 1)):
            before = min(run + place, _RUN - 1)
            self._judged[before] = _FORGET * self._judged[before] + 1.0
            self._accepted[before] = _FORGET * self._accepted[before] + (place < accepted)

    def tokens(self, s: int, ends: float = 0.0) -> float:
        """Return the mean tokens of a verification: those accepted, and the target's own.

        Args:
            s: tokens of a draft.
            ends: chance of a token to end the answer; nothing follows an end.
        """
        return self.by_length(s, ends)[s]

    def by_length(self, longest: int, ends: float = 0.0) -> list[float]:
        """Return :meth:`tokens` of each length up to ``longest``."""
        if not self._judged.any():
            return [1.0] * (longest + 1)
        lasts = ((1.0 - ends) * self._chances()).cumprod()
        total = lasts.sum()
        # A run takes one draft, and another one after each s of its tokens but the last ones.
        drafts = (1.0 + lasts[s - 1 : -1 : s].sum() for s in range(1, longest + 1))
        return [1.0, *(float(1.0 + total / count) for count in drafts)]

    def _chances(self) -> np.ndarray:
        """Return the chance of the next token after runs of 0, 1, ... tokens.

        A run that was seldom judged counts as similar to a shorter one, the shortest to all.
        """
        chance = self._accepted.sum() / self._judged.sum()
        chances = np.empty(_LONGEST_RUN)
        for run in range(_RUN):
            chance = (self._accepted[run] + _ALIKE * chance) / (self._judged[run] + _ALIKE)
            chances[run] = chance
        chances[_RUN:] = chance
        return chances


Option = TypeVar("Option", bound=Hashable)


class Trials(Generic[Option]):
    """Schedules the use of options that seem slower than the best one.

    Args:
        share: of the time that trials may lose.
        every: turns before an option is tried again, at least.
    """

    def __init__(self, share: float, every: int) -> None:
        self.share = share
        self._every = every
        self._turn = 0
        self._last: dict[Option, int] = {}

    def choose(self, best: Option, turn_s: float, losses: Sequence[tuple[Option, float]]) -> Option:
        """Return the option of the next turn: the first rival whose trial is paid for, or ``best``.

        Args:
            turn_s: time of a turn with ``best`` [s].
            losses: each rival, and what a turn with it is expected to lose [s]. It may lose its
                part of ``share`` of the time since its last turn.
        """
        self._turn += 1

        def is_due(rival: Option, loss_s: float) -> bool:
            waited = self._turn - self._last.get(rival, 0)
            paid_s = waited * turn_s * self.share / len(losses)
            return waited >= self._every and loss_s <= paid_s

        chosen = next((rival for rival, loss_s in losses if is_due(rival, loss_s)), best)
        self._last[chosen] = self._turn
        return chosen
