"""The distribution that is sampled, made from logits, and its compact form for the wire."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import ConfigError, InvalidInput, ModelError

if TYPE_CHECKING:  # the ROS nodes and the codec import this module without torch
    from torch import Tensor


@dataclass(frozen=True)
class SamplingConfig:
    """The output law; identical on the edge and in the cloud."""

    temperature: float = setting(0.0, "Divides the logits; 0 is greedy.", low=0.0)
    top_k: int = setting(
        0, "Keep the k most probable tokens and what ties with the last; 0 is off.", low=0
    )
    top_p: float = setting(
        1.0,
        "Keep the smallest set of most probable tokens with this mass; 1 is off.",
        low=0,
        high=1,
    )
    seed: int = setting(0, "Key of all random streams (modulo 2**64).")
    law: str = setting(
        "rejection",
        "rejection: accept with min(1, p/q), as in paper 003; coupled: both sides take"
        " argmax(log p + Gumbel noise) with the same noise, so no probabilities are sent.",
        choices=("rejection", "coupled"),
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.top_p == 0:
            raise ConfigError("keeps no token at all", field="top_p", remedy="1 switches it off")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def sends_probabilities(self) -> bool:
        """Return True if a draft must travel with the distributions it was drawn from."""
        return not self.greedy and self.law == "rejection"


def distribution(
    logits: Tensor | NDArray[np.floating[Any]], config: SamplingConfig
) -> NDArray[np.float64]:
    """Return the float64 distribution [..., V] that ``config`` samples from; greedy is one-hot.

    The order temperature, top-k, top-p and the treatment of ties are those of ``transformers``.

    Raises:
        ModelError: a logit is NaN or +inf, or a row has no finite one (-inf alone means "never").
    """
    x = _array(logits)
    top = x.max(axis=-1, keepdims=True).astype(np.float64)
    check_finite(bool(np.isfinite(top).all()))  # max propagates NaN
    if config.greedy:
        one_hot = np.zeros(x.shape)
        np.put_along_axis(one_hot, x.argmax(axis=-1)[..., None], 1.0, axis=-1)
        return one_hot
    size = x.shape[-1]
    possible = np.flatnonzero((x > -np.inf).reshape(-1, size).any(axis=0))
    if len(possible) < size // 2:  # an exit that scores candidates only: leave the others out
        p = np.zeros(x.shape)
        p[..., possible] = distribution(x[..., possible], config)
        return p
    z = (x.astype(np.float64) - top) / config.temperature
    if 0 < config.top_k < z.shape[-1]:
        kth = np.partition(z, -config.top_k, axis=-1)[..., -config.top_k, None]
        z = np.where(z < kth, -np.inf, z)
    p = np.exp(z)
    p /= p.sum(axis=-1, keepdims=True)
    if config.top_p < 1:
        for row in np.ndindex(p.shape[:-1]):
            keep_nucleus(p[row], config.top_p)
    return p


def most_likely(logits: Tensor) -> list[int]:
    """The tokens [rows] that greedy sampling takes from ``logits`` [rows, V], the first in a tie.

    As the argmax of :func:`distribution`, without a float64 copy of the logits.

    Raises:
        ModelError: as :func:`distribution`.
    """
    if logits.device.type == "cpu" and logits.itemsize >= 4:  # numpy has no bfloat16
        rows = logits.numpy()  # whose argmax takes a tenth of torch's time
        chosen = rows.argmax(axis=-1)  # of NaN, where there is one
        top = rows[np.arange(len(rows)), chosen]
        check_finite(bool(np.isfinite(top).all()))
    else:
        highest, chosen = logits.max(dim=-1)  # propagates NaN
        check_finite(all(map(math.isfinite, highest.tolist())))
    tokens: list[int] = chosen.tolist()
    return tokens


def check_finite(finite: bool) -> None:
    """Raise ModelError unless the logits are ``finite``."""
    if not finite:
        raise ModelError("the logits are not finite", remedy="use float32 or bfloat16")


_TO_WIRE = "make distributions by to_wire"


@dataclass(frozen=True, eq=False)
class SparseDistribution:
    """A draft distribution as it crosses the wire: the law is ``probs / sum(probs)`` in float64.

    Each prob is exactly representable in fp16, so sending fp16 or float32 loses nothing, and both
    sides compute the last normalisation from the same numbers in the same order.

    Attributes:
        ids: int32 [k], strictly increasing.
        probs: float32 [k], each > 0.

    Raises:
        InvalidInput: the arrays do not describe a distribution (they may come from a peer).
    """

    ids: NDArray[np.int32]
    probs: NDArray[np.float32]

    def __post_init__(self) -> None:
        ids = np.asarray(self.ids, dtype=np.int32)
        probs = np.asarray(self.probs, dtype=np.float32)
        if ids.ndim != 1 or ids.shape != probs.shape or not ids.size:
            raise InvalidInput(
                "ids and probs must be 1-D, not empty, equally long", field="probs", remedy=_TO_WIRE
            )
        if ids[0] < 0 or (ids[1:] <= ids[:-1]).any():
            raise InvalidInput(
                "ids must be >= 0 and strictly increasing", field="probs.ids", remedy=_TO_WIRE
            )
        if not 0 < probs.min() <= probs.max() < np.inf:  # false for NaN
            raise InvalidInput("must be finite and positive", field="probs.probs", remedy=_TO_WIRE)
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "probs", probs)

    @classmethod
    def _unchecked(cls, ids: NDArray[np.int32], probs: NDArray[np.float32]) -> SparseDistribution:
        """Make one from arrays of this module without the checks, which are a fifth of the cost."""
        made = object.__new__(cls)
        object.__setattr__(made, "ids", ids)
        object.__setattr__(made, "probs", probs)
        return made

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SparseDistribution):
            return NotImplemented
        return np.array_equal(self.ids, other.ids) and np.array_equal(self.probs, other.probs)

    def __hash__(self) -> int:
        return hash((self.ids.tobytes(), self.probs.tobytes()))

    @property
    def law(self) -> NDArray[np.float64]:
        """The exact law of ``ids``: float64 [k]."""
        return self.probs.astype(np.float64) / self.probs.sum(dtype=np.float64)


def to_wire(p: NDArray[np.float64], max_support: int) -> SparseDistribution:
    """Truncate ``p`` [V] to its ``max_support`` most probable tokens and round to fp16.

    The draft must be drawn from the RESULT: then what the verifier divides by is what was sampled
    from, and no rounding touches the output law. Of tokens that tie the lower ids are kept.
    """
    return to_wire_rows(p[None], max_support)[0]


_VANISHES = 2.9e-8
"""fp16 rounds less than 3e-8 to 0. Where so little is among the most probable, all that is left out
adds up to next to nothing (of vocabularies below a million), and normalising lifts nothing over."""


def to_wire_rows(p: NDArray[np.float64], max_support: int) -> list[SparseDistribution]:
    """Convert like :func:`to_wire` each row of ``p`` [n, V], in a few operations on all of them."""
    if max_support < 1:
        raise ConfigError("must be >= 1", field="max_support")
    best = p > _VANISHES
    if max_support < p.shape[1]:
        best &= p >= np.partition(p, -max_support, axis=-1)[:, -max_support, None]
    rows, ids = best.nonzero()
    counts = np.bincount(rows)
    if counts.max() > max_support:  # ties with the last one
        for row in np.flatnonzero(counts > max_support):
            best[row] = False
            best[row, _most_probable(p[row], max_support)[:max_support]] = True
        rows, ids = best.nonzero()
    mass = p[best]
    rounded = (mass / np.bincount(rows, mass)[rows]).astype(np.float16)
    kept = rounded > 0  # fp16 ends at 6e-8
    tokens, probs = ids[kept].astype(np.int32), rounded[kept].astype(np.float32)
    ends = np.bincount(rows[kept]).cumsum().tolist()
    return [
        SparseDistribution._unchecked(tokens[start:end], probs[start:end])
        for start, end in zip([0, *ends], ends, strict=False)
    ]


def keep_nucleus(p: NDArray[np.float64], top_p: float) -> None:
    """Top-p in place: drop each token whose betters already have mass ``top_p``."""
    support = np.flatnonzero(p)  # few tokens at an exit that scores candidates only
    mass = p[support]
    for count in (1024, 16384, len(mass)):  # sorting 150,000 tokens is seldom needed
        order = _most_probable(mass, count)
        mass_above = np.cumsum(mass[order]) - mass[order]
        if mass_above[-1] >= top_p or len(order) == len(mass):
            break
    kept = order[mass_above < top_p]
    p[:] = 0.0
    p[support[kept]] = mass[kept] / mass[kept].sum()


def _most_probable(p: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Return at least ``count`` tokens of ``p`` [V].

    The most probable comes first, the lower id in a tie.
    """
    candidates = np.arange(len(p))
    if count < len(p):
        candidates = np.flatnonzero(p >= np.partition(p, -count)[-count])
    return candidates[np.argsort(-p[candidates], kind="stable")]


def _array(logits: Tensor | NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    if isinstance(logits, np.ndarray):
        return logits
    tensor = logits.detach()
    if tensor.dtype.itemsize < 4:  # numpy has no bfloat16, and computes slowly in float16
        tensor = tensor.float()
    array: NDArray[np.floating[Any]] = tensor.cpu().numpy()
    return array
