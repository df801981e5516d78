"""Random streams that depend on (seed, position, purpose) and on nothing else.

Each draw has its own block of a counter-based generator (Philox 4x64; Salmon et al., SC 2011), so
neither the order of draws, nor timing, nor cache hits, nor the machine can change an output. Only
the raw bits of the generator are used: numpy guarantees those, not its derived distributions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Numbers are part of the protocol: both sides derive the same bits from them. Append only.
PURPOSES = {
    "draft": 1,
    "accept": 2,
    "recover": 3,
    "bonus": 4,
    "gumbel": 5,
    "draft_cloud": 6,
    "accept_cloud": 7,
    "recover_cloud": 8,
    "coin": 9,
}

_MASK = 2**64 - 1


@lru_cache(maxsize=4096)  # pre-drafts side by side and the exits of a pass ask for the same ones
def uniform(seed: int, position: int, purpose: str) -> float:
    """Return a multiple of 2**-53 in [0, 1) for the token at ``position`` of the session."""
    return int(_bits(seed, position, purpose, 1)[0]) * 2.0**-53


@lru_cache(maxsize=8)  # megabytes each with a large vocabulary
def gumbel(seed: int, position: int, vocab_size: int) -> NDArray[np.float64]:
    """Return standard Gumbel noise [vocab_size]; a smaller vocabulary gets a prefix of a larger's.

    The array is not to be written to.

    argmax(log p + noise) is distributed as p (Gumbel-max trick), and two distributions that share
    the noise mostly choose the same token.
    """
    noise = _noise(_gumbel_bits(seed, position, vocab_size))
    noise.flags.writeable = False
    return noise


def gumbel_of(
    seed: int, position: int, vocab_size: int, ids: NDArray[np.integer[Any]]
) -> NDArray[np.float64]:
    """Return the noise of the tokens ``ids`` alone: the logarithms are the cost of all of it."""
    if len(ids) == vocab_size:
        return gumbel(seed, position, vocab_size)
    return _noise(_gumbel_bits(seed, position, vocab_size)[ids])


def sample(p: NDArray[np.float64], u: float) -> int:
    """Inverse CDF: the index into ``p`` (not necessarily normalised) at ``u`` in [0, 1)."""
    cdf = p.cumsum()
    index = int(cdf.searchsorted(u * cdf[-1], side="right"))
    if index == len(p):  # u * cdf[-1] rounded up to cdf[-1]
        index = int(np.flatnonzero(p)[-1])
    return index


@lru_cache(maxsize=8)
def _gumbel_bits(seed: int, position: int, vocab_size: int) -> NDArray[np.uint64]:
    return _bits(seed, position, "gumbel", vocab_size)


def _noise(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    # Half a step up keeps the logarithm finite: (0, 1) instead of [0, 1).
    u = bits.astype(np.float64) * 2.0**-53 + 2.0**-54
    noise: NDArray[np.float64] = -np.log(-np.log(u))
    return noise


def _bits(seed: int, position: int, purpose: str, count: int) -> NDArray[np.uint64]:
    """Return ``count`` integers of 53 bits."""
    # Key = (seed, purpose); counter = (block within the draw, position): draws never overlap.
    key = np.array([seed & _MASK, PURPOSES[purpose]], dtype=np.uint64)
    counter = np.array([0, position & _MASK, 0, 0], dtype=np.uint64)
    raw = np.random.Philox(key=key, counter=counter).random_raw(count)
    bits: NDArray[np.uint64] = np.asarray(raw, dtype=np.uint64) >> np.uint64(11)
    return bits
