"""Agreement of exits with their target, and their calibration, on held-out answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_BINS = 10
"""Number of bins of the calibration error."""


@dataclass(frozen=True)
class HeldOut:
    """The exits' answers to the held-out prompts.

    Attributes:
        same: of each answer, whether the best tokens are the target's, [exits, n].
        sure: the exits' confidence in them.
    """

    same: list[NDArray[np.bool_]]
    sure: list[NDArray[np.float32]]

    def agreement(self) -> NDArray[np.float64]:
        """Share of tokens that each exit says as the target does."""
        return np.concatenate(self.same, axis=1).mean(axis=1)

    def calibration_error(self) -> NDArray[np.float64]:
        """Mean distance of confidence from agreement, over bins of confidence."""
        same, sure = np.concatenate(self.same, axis=1), np.concatenate(self.sure, axis=1)
        bins = np.minimum((sure * _BINS).astype(int), _BINS - 1)
        error = np.zeros(len(same))
        for number in range(_BINS):
            inside = bins == number
            error += np.abs(np.sum((same - sure) * inside, axis=1)) / same.shape[1]
        return error

    def rounds(self, tau: int) -> NDArray[np.bool_]:
        """Return which exits say all of ``tau`` tokens in a row, [exits, rounds]."""
        found = [
            np.lib.stride_tricks.sliding_window_view(each, tau, axis=1).all(axis=-1)
            for each in self.same
            if each.shape[1] >= tau
        ]
        return np.concatenate(found or [np.zeros((len(self.same[0]), 0), bool)], axis=1)
