"""The distribution that is sampled, made from logits, and its compact form for the wire.

A distribution is kept as the few tokens that are possible, so that later work (draws, verdicts,
predictions) costs nothing for a vocabulary of 150,000. The one pass over a whole row is made where
the logits are: by torch on an accelerator, by numpy on a CPU, where it is several times as fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import ConfigError, InvalidInput, ModelError

if TYPE_CHECKING:  # the ROS nodes and the codec import this module without torch
    from torch import Tensor

    Logits = Tensor | NDArray[np.floating[Any]]


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


@dataclass(frozen=True, eq=False)
class Distribution:
    """A distribution over a vocabulary: the possible tokens and their probabilities.

    Attributes:
        ids: [k], ascending.
        probs: float64 [k], each > 0.
        size: of the vocabulary.
    """

    ids: NDArray[np.integer[Any]]
    probs: NDArray[np.float64]
    size: int

    @classmethod
    def from_dense(cls, p: NDArray[np.float64]) -> Distribution:
        """Return the distribution with the probabilities ``p`` [V]."""
        ids = np.flatnonzero(p)
        return cls(ids, p[ids], len(p))

    def __getitem__(self, token: int) -> float:
        """Return the probability of ``token``."""
        place = int(self.ids.searchsorted(token))
        possible = place < len(self.ids) and self.ids[place] == token
        return float(self.probs[place]) if possible else 0.0

    @property
    def likeliest(self) -> int:
        """The most probable token, the lowest id in a tie."""
        return int(self.ids[self.probs.argmax()])


def distribution(logits: Logits, config: SamplingConfig) -> Distribution:
    """Return the distribution that ``config`` samples from, for one row of ``logits`` [V].

    Raises:
        ModelError: as :func:`distributions`.
    """
    return distributions(logits[None], config)[0]


def distributions(logits: Logits, config: SamplingConfig) -> list[Distribution]:
    """Return the distributions that ``config`` samples from, for each row of ``logits`` [n, V].

    A greedy one is certain of its token. The order temperature, top-k, top-p and the treatment of
    ties are those of ``transformers``.

    Raises:
        ModelError: a logit is NaN or +inf, or a row has no finite one (-inf alone means "never").
    """
    (found,) = distributions_of([logits], [config])
    if isinstance(found, ModelError):
        raise found
    return found


def distributions_of(
    parts: Sequence[Logits], configs: Sequence[SamplingConfig]
) -> list[list[Distribution] | ModelError]:
    """Return the :func:`distributions` of each of ``parts`` by its config, or their error.

    Logits on an accelerator are reduced there, and the likeliest tokens of all parts are downloaded
    in one copy. Only rows of which more tokens are kept than those need a second one.
    """
    if _on_host(parts):
        rows = [_of_rows(_array(part), config) for part, config in zip(parts, configs, strict=True)]
    else:
        rows = [found for found, _ in of_device(cast("Sequence[Tensor]", parts), configs)]
    return [_sound(part) for part in rows]


def previews_of(
    parts: Sequence[Tensor], configs: Sequence[SamplingConfig]
) -> list[tuple[list[Distribution] | ModelError, list[float]]]:
    """Return :func:`distributions_of`, and of each row its largest probability by softmax.

    For the confidence of early exits. Both come in one download.
    """
    import torch

    if not _on_host(parts):
        return [(_sound(found), sure) for found, sure in of_device(parts, configs)]
    rows = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    sure = iter(rows.float().softmax(dim=-1).amax(dim=-1).tolist())
    laws = distributions_of(parts, configs)
    return [(law, list(islice(sure, len(part)))) for law, part in zip(laws, parts, strict=True)]


def _on_host(parts: Sequence[Logits]) -> bool:
    return all(isinstance(part, np.ndarray) or part.device.type == "cpu" for part in parts)


def _sound(rows: Sequence[Distribution | None]) -> list[Distribution] | ModelError:
    """Return the rows, or the error if one is missing."""
    sound = [row for row in rows if row is not None]
    return sound if len(sound) == len(rows) else _not_finite()


def masked(logits: Tensor, allowed: NDArray[np.bool_]) -> Tensor:
    """Return ``logits`` [n, V] over the tokens ``allowed`` [n, V], one at least in each row.

    A token that is the only one of its row gets a finite logit, whatever the model says.
    """
    only = np.count_nonzero(allowed, axis=-1, keepdims=True) == 1
    import torch

    kept = torch.from_numpy(np.where(only, 2, 1).astype(np.int8) * allowed).to(logits.device)
    return logits.masked_fill(kept == 2, 0.0).masked_fill(kept == 0, -torch.inf)


_FIRST = 256
"""Number of likeliest tokens to try first: they mostly hold the nucleus."""


def _of_rows(x: NDArray[np.floating[Any]], config: SamplingConfig) -> list[Distribution | None]:
    """Return the distributions of logits [n, V] in the host's memory; None: they are not finite."""
    size = x.shape[-1]
    if config.greedy or _cuts(config, size):
        return [_of_row(row, config) for row in x]
    weights = x.astype(np.float64)  # all rows at once: a small model has many
    with np.errstate(invalid="ignore"):  # inf - inf
        weights -= x.max(axis=-1, keepdims=True)
    weights /= _divisor(config)
    np.exp(weights, out=weights)
    if not weights.all() or np.isnan(weights).any():  # not all tokens are possible
        return [_of_row(row, config) for row in x]
    weights /= weights.sum(axis=-1, keepdims=True)
    return [Distribution(_all_ids(size), row, size) for row in weights]


def _of_row(x: NDArray[np.floating[Any]], config: SamplingConfig) -> Distribution | None:
    """Return the distribution of the logits ``x`` [V]; None if they are not finite."""
    size = len(x)
    if config.greedy:
        likeliest = int(x.argmax())  # of NaN, where there is one
        return certain(likeliest, size) if math.isfinite(x[likeliest]) else None
    if 0 < config.top_k < size:
        counts = [config.top_k]
    elif config.top_p < 1:
        counts = [_FIRST << shift for shift in (0, 2, 4, 6) if _FIRST << shift < size] + [size]
    else:
        counts = [size]
    total = None
    for count in counts:
        ids = at_least(x, count)
        if not len(ids):
            return None
        every = len(ids) < count or count == size
        kept = x if len(ids) == size else x[ids]
        top = float(kept.max())
        found = _of_likeliest(ids, kept, top, size, config, total, every=every)
        if found is not None:
            return found
        if total is None:
            weights = x - x.dtype.type(top)
            weights /= x.dtype.type(_divisor(config))
            total = float(np.exp(weights, out=weights).sum())
    raise AssertionError("all tokens are enough")


def _of_likeliest(
    ids: NDArray[np.integer[Any]],
    x: NDArray[np.floating[Any]],
    top: float,
    size: int,
    config: SamplingConfig,
    total: float | None = None,
    *,
    every: bool,
) -> Distribution | None:
    """Return the distribution of a row from its likeliest tokens; None if they are not enough.

    Args:
        ids: ascending. All other tokens are less likely than each of them.
        x: their logits.
        top: the highest logit.
        size: of the vocabulary.
        total: sum of exp((logit - top) / temperature) over the vocabulary, if that is known. The
            nucleus mostly is the same whether the other tokens have no mass, or each has what the
            least of ``ids`` has.
        every: no other token is possible.
    """
    if 0 < config.top_k < size:
        if len(ids) < config.top_k and not every:
            return None
        if len(ids) > config.top_k:
            possible = x >= np.partition(x, -config.top_k)[-config.top_k]
            ids, x = ids[possible], x[possible]
        every = True
    weights = x.astype(np.float64)
    weights -= top
    weights /= _divisor(config)
    np.exp(weights, out=weights)
    if config.top_p < 1:
        falling = np.sort(weights)[::-1]
        mass = falling.cumsum()
        if every:
            total = float(mass[-1])
        bounds = (mass[-1], mass[-1] + size * falling[-1]) if total is None else (total, total)
        kept, at_most = mass.searchsorted(config.top_p * np.array(bounds)) + 1
        if kept < at_most or at_most > len(mass):
            return None
        possible = _first(weights, falling[kept - 1], kept)
        ids, weights = ids[possible], weights[possible]
    if not weights.min() > 0:  # by a temperature near 0
        ids, weights = ids[weights > 0], weights[weights > 0]
    weights /= weights.sum()
    return Distribution(ids, weights, size)


def _first(x: NDArray[np.float64], bound: float, count: int) -> NDArray[np.bool_]:
    """Mark the ``count`` largest entries, the last of which is ``bound``; the first in a tie."""
    found = x >= bound
    ties = np.count_nonzero(found) - count
    if ties:
        found[(x == bound).nonzero()[0][-ties:]] = False
    return found


def at_least(x: NDArray[np.floating[Any]], count: int) -> NDArray[np.integer[Any]]:
    """Return the ids, ascending, of the ``count`` largest of ``x`` [V] and of some that follow.

    All that ties with one of them is among them; -inf is not. None are returned if one is NaN or
    +inf. A bound is found by the maxima of groups: of the ``count`` highest, each stands for one
    entry at least. So no more than some thousand entries are partitioned, where that would take a
    millisecond for a large vocabulary.
    """
    size, bound, maxima = len(x), -np.inf, x
    groups = max(4 * count, 1024)
    width = size // groups
    if width > 1:
        maxima = x[: groups * width].reshape(width, groups).max(axis=0)
        last = x[groups * width :]  # no row of its own
        np.maximum(maxima[: len(last)], last, out=maxima[: len(last)])
    if not maxima.max() < np.inf:  # false for NaN
        return _all_ids(0)
    if count < size:
        bound = np.partition(maxima, -count)[-count]
    elif x.min() > bound:
        return _all_ids(size)
    return (x >= bound if bound > -np.inf else x > bound).nonzero()[0]


@lru_cache(maxsize=4)
def _all_ids(size: int) -> NDArray[np.integer[Any]]:
    ids = np.arange(size)
    ids.flags.writeable = False
    return ids


@lru_cache(maxsize=4096)
def certain(token: int, size: int) -> Distribution:
    """Return the distribution of a ``token`` that is the only possible one."""
    return Distribution(np.array([token]), np.ones(1), size)


def of_device(
    parts: Sequence[Tensor], configs: Sequence[SamplingConfig]
) -> list[tuple[list[Distribution | None], list[float]]]:
    """Return the distributions of each of ``parts`` [n, V], which lie on one accelerator.

    None stands for a row that is not finite. Beside them each row's largest probability by softmax.
    """
    import torch

    size, lengths = parts[0].shape[-1], [len(part) for part in parts]
    rules = [c for part, c in zip(parts, configs, strict=True) for _ in range(len(part))]
    logits = torch.cat(list(parts)).float()
    top, likeliest = logits.max(dim=-1, keepdim=True)  # the first in a tie; NaN, where there is one
    below = logits - top
    fields = [top, likeliest.int(), below.exp().sum(dim=-1, keepdim=True).reciprocal_()]
    if any(_cuts(c, size) for c in configs):
        values, ids = logits.topk(min(4 * _FIRST, size))
        for own, config in zip(below.split(lengths), configs, strict=True):
            own.div_(_divisor(config))
        fields += [below.exp_().sum(dim=-1, keepdim=True), values, ids.int()]
    packed = torch.cat([field.view(torch.int32) for field in fields], dim=-1).cpu().numpy()
    found = [_of_packed(row, rule, size) for row, rule in zip(packed, rules, strict=True)]
    finite = np.isfinite(packed[:, 0].view(np.float32))
    missing = [i for i, row in enumerate(found) if row is None and finite[i]]
    if missing:
        whole = logits[missing] if len(missing) < len(found) else logits
        for i, row in zip(missing, whole.cpu().numpy(), strict=True):
            found[i] = _of_row(row, rules[i])
    rows, sure = iter(found), iter(packed[:, 2].view(np.float32).tolist())
    return [(list(islice(rows, n)), list(islice(sure, n))) for n in lengths]


def _divisor(config: SamplingConfig) -> float:
    """Return the temperature; so near 0 that float32 cannot hold it, it leaves one token anyway."""
    return max(config.temperature, 1e-30)


def _cuts(config: SamplingConfig, size: int) -> bool:
    """Return True where few of ``size`` tokens may be left."""
    return not config.greedy and (0 < config.top_k < size or config.top_p < 1)


def _of_packed(row: NDArray[np.int32], config: SamplingConfig, size: int) -> Distribution | None:
    """Return the distribution of one row as :func:`of_device` packs it; None: it is not there."""
    top = float(row[:1].view(np.float32)[0])
    if not math.isfinite(top):
        return None
    if config.greedy:
        return certain(int(row[1]), size)
    if not _cuts(config, size):
        return None
    total, (values, ids) = float(row[3:4].view(np.float32)[0]), np.split(row[4:], 2)
    x = values.view(np.float32)
    every = len(x) == size or x[-1] == -np.inf
    known = x > (-np.inf if every else x[-1])  # ties with the last may be missing
    order = np.argsort(ids[known])
    ids, x = ids[known][order], x[known][order]
    return _of_likeliest(ids, x, top, size, config, total, every=every)


def most_likely(logits: Tensor) -> list[int]:
    """Return the tokens [rows] of greedy sampling from ``logits`` [rows, V], the first in a tie.

    Raises:
        ModelError: as :func:`distributions`.
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
        raise _not_finite()


def _not_finite() -> ModelError:
    return ModelError("the logits are not finite", remedy="use float32 or bfloat16")


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


def to_wire(p: Distribution, max_support: int) -> SparseDistribution:
    """Truncate ``p`` to its ``max_support`` most probable tokens and round to fp16.

    The draft must be drawn from the RESULT: then the verifier divides by the probabilities of the
    draw, and no rounding touches the output law. Of tokens that tie the lower ids are kept.
    """
    if max_support < 1:
        raise ConfigError("must be >= 1", field="max_support")
    ids, probs = p.ids, p.probs
    if len(ids) > 16 * max_support:
        likely = at_least(probs, max_support)
        ids, probs = ids[likely], probs[likely]
    if len(ids) > max_support:
        best = _first(probs, np.partition(probs, -max_support)[-max_support], max_support)
        ids, probs = ids[best], probs[best]
    rounded = (probs / probs.sum()).astype(np.float16)
    kept = rounded > 0  # fp16 ends at 6e-8
    return SparseDistribution._unchecked(
        ids[kept].astype(np.int32), rounded[kept].astype(np.float32)
    )


def _array(logits: Tensor | NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    if isinstance(logits, np.ndarray):
        return logits
    tensor = logits.detach()
    if tensor.dtype.itemsize < 4:  # numpy has no bfloat16, and computes slowly in float16
        tensor = tensor.float()
    array: NDArray[np.floating[Any]] = tensor.cpu().numpy()
    return array
