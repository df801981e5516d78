"""The partition of prompts into sub-sequences (paper 004, Eq. 2 and 3), for all lengths at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from collab_llm_nodes.protocols.jupiter.profile import Seconds

Slowest = Callable[[NDArray[np.int64], NDArray[np.int64]], Seconds]
"""Return h of sub-sequences of x tokens behind y: their time in the slowest stage [s]."""

_BLOCK = 1 << 17  # pairs (x, y) whose times are asked for at once


class SequenceTable:
    """W(1 -> y, k) of Eq. 2 for each y up to ``longest`` and each k up to ``most``.

    One sub-sequence may be of any length, so that prompts shorter than b have a plan as well.
    O(longest^2 most), a few numpy operations for each y.

    Args:
        slowest: see ``Slowest``.
        longest: S_max [tokens].
        most: sub-sequences, 4 |D| in the paper.
        least: b, the tokens that a sub-sequence must have if there are several.
        step: consider lengths that are multiples of it only; ``longest`` is one.

    Attributes:
        worst: W, [longest / step + 1, most + 1]; +inf where there is no partition.
    """

    def __init__(
        self, slowest: Slowest, longest: int, most: int, least: int, step: int = 1
    ) -> None:
        self.step = step
        self.most = most
        count = longest // step
        self.worst = np.full((count + 1, most + 1), np.inf)
        self._cut = np.zeros((count + 1, most + 1), np.int32)
        places = np.arange(count + 1) * step
        self.worst[1:, 1] = slowest(places[1:], np.zeros(count, np.int64))
        margin = -(-least // step)  # a cut leaves b tokens on either side: Eq. 3
        rows = max(1, _BLOCK // count)
        for begin in range(1, count + 1 if most > 1 else 0, rows):
            end = min(begin + rows, count + 1)
            new = places[begin:end, None] - places[None, :end]
            own = slowest(np.maximum(new, 0), np.broadcast_to(places[:end], new.shape))
            for y in range(max(begin, 2 * margin), end):
                high = y - margin + 1
                joined = np.maximum(
                    self.worst[margin:high, 1:-1], own[y - begin, margin:high, None]
                )
                cut = joined.argmin(0)
                self._cut[y, 2:] = margin + cut
                self.worst[y, 2:] = joined[cut, np.arange(most - 1)]

    def lengths(self, y: int, k: int) -> tuple[int, ...]:
        """Return the sub-sequences of a prompt of ``y`` tokens in ``k`` parts.

        ``y`` is a multiple of the step, and ``worst`` is finite there.
        """
        found, end = [], y // self.step
        for i in range(k, 0, -1):
            begin = int(self._cut[end, i]) if i > 1 else 0
            found.append((end - begin) * self.step)
            end = begin
        return tuple(reversed(found))

    def split(self, places: NDArray[np.intp], k: int) -> NDArray[np.int64]:
        """Return the sub-sequences of several prompts in ``k`` parts each, [k, places].

        Args:
            places: lengths of the prompts, in steps.
        """
        found = np.zeros((k, len(places)), np.int64)
        end = np.asarray(places)
        for i in reversed(range(k)):
            begin = self._cut[end, i + 1] if i else np.zeros_like(end)
            found[i] = (end - begin) * self.step
            end = begin
        return found


def equal_split(totals: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    """Return each of ``totals`` in ``k`` parts that differ by one token at most, [k, totals]."""
    found: NDArray[np.int64] = totals // k + (np.arange(k)[:, None] < totals % k)
    return found
