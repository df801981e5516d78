"""An interpolated n-gram model of token ids: the yardstick of the perplexities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BITS = 12
"""Ids are below 2 ** BITS, so that five of them are one 64-bit key."""


class NGram:
    """Witten-Bell smoothing, interpolated down to the uniform law (Chen and Goodman 1999, 2.4).

    p(w | h) = (c(h w) + T(h) p(w | h')) / (c(h) + T(h)) with T(h) the number of different words
    that followed h, and h' the context without its oldest word.

    Args:
        texts: token ids; contexts do not reach from one text into the next.
        vocabulary: number of ids.
        order: of the longest grams, 1 to 5.
    """

    def __init__(self, texts: Sequence[np.ndarray], vocabulary: int, order: int = 4) -> None:
        if vocabulary > 1 << BITS or not 1 <= order <= 5:
            raise ValueError(f"{vocabulary} ids or order {order} do not fit the 64-bit keys")
        self.vocabulary = vocabulary
        self.order = order
        self._grams: list[tuple[np.ndarray, np.ndarray]] = []
        self._contexts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for n in range(1, order + 1):
            keys = np.concatenate([_keys(text, n) for text in texts])
            grams, counts = np.unique(keys, return_counts=True)
            self._grams.append((grams, counts))
            contexts, first = np.unique(grams >> BITS, return_index=True)
            followed = np.diff(np.append(first, len(grams)))
            self._contexts.append((contexts, np.add.reduceat(counts, first), followed))

    def probabilities(self, text: np.ndarray) -> np.ndarray:
        """Return p of each token of ``text`` given those before it, float64 [len(text)]."""
        p = np.full(len(text), 1.0 / self.vocabulary)
        for n in range(1, self.order + 1):
            keys = _keys(text, n)
            counts = _look_up(self._grams[n - 1][0], self._grams[n - 1][1], keys)
            contexts, totals, followed = self._contexts[n - 1]
            total = _look_up(contexts, totals, keys >> BITS)
            kinds = _look_up(contexts, followed, keys >> BITS)
            known = total > 0
            shorter = p[n - 1 :]
            mixed = (counts + kinds * shorter) / np.where(known, total + kinds, 1)
            p[n - 1 :] = np.where(known, mixed, shorter)
        return p


def _keys(text: np.ndarray, n: int) -> np.ndarray:
    """Return the key of each ``n``-gram of ``text``, int64 [max(0, len(text) - n + 1)]."""
    ids = text.astype(np.int64)
    count = max(0, len(ids) - n + 1)
    keys = np.zeros(count, np.int64)
    for k in range(n):
        keys = (keys << BITS) | ids[k : k + count]
    return keys


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the value of each wanted key in the sorted ``keys``, 0 where it is absent."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
