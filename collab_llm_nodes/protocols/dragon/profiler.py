"""Estimates of delays and acceptance rates for the scheduler (paper 001, section 5.2)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from collab_llm_nodes.decoding.aggregation import Pair, Party
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.protocols.dragon.side import SideDecoder
from collab_llm_nodes.protocols.means import Mean

_ZETA = 0.1
"""Weight of the newest pass in the slope of the decoding delay (zeta of paper 001)."""
_ACCEPTANCE_WEIGHT = 0.05
"""Weight of the newest token in the acceptance rates: the last twenty count most."""
_LINK_WEIGHT = 0.2
"""Weight of the newest round trip in latency and bandwidth: radio links change quickly."""


_LEAST_LENGTHS = 3
_RISES = 0.8
"""Least correlation of time and length of a line that rises."""


@dataclass
class DecodeModel:
    """Time of one pass as a line over the tokens read: c(t) = k_a / k_b t + k_c.

    Attributes:
        k_a, k_b: averages of t (c - k_c) [token s] and of t^2 [token^2]. Averages, not sums: so
            zeta weighs a new pass against the average old one.
        k_c: time of a pass at t = 0 [s]; stays as it was measured offline.
    """

    k_a: float = 0.0
    k_b: float = 1.0
    k_c: float = 0.0

    @classmethod
    def fitted(cls, tokens: ArrayLike, seconds: ArrayLike) -> DecodeModel:
        """Return the least squares line through measured passes (the offline stage).

        No pass takes less than no time, and none gets shorter with more to read: where noise says
        so, the line is level, or begins at zero.

        Raises:
            InvalidInput: fewer than two passes, or all of one length.
        """
        t, c = np.asarray(tokens, np.float64), np.asarray(seconds, np.float64)
        if len(t) < 2 or t.shape != c.shape or np.ptp(t) == 0:
            raise InvalidInput(
                f"{len(t)} passes of one length fit no line",
                field="tokens",
                remedy="measure passes of at least two lengths",
            )
        slope = float(((t - t.mean()) * (c - c.mean())).sum() / ((t - t.mean()) ** 2).sum())
        slope = max(0.0, slope)
        intercept = float(c.mean() - slope * t.mean())
        k_b = float((t**2).mean())
        if intercept < 0:
            return cls(float((t * c).mean()), k_b, 0.0)
        return cls(slope * k_b, k_b, intercept)

    @property
    def line(self) -> tuple[float, float, float]:
        """The three numbers, for the other side."""
        return self.k_a, self.k_b, self.k_c

    def at(self, tokens: float) -> float:
        """Return the expected time of a pass [s]."""
        return max(0.0, self.k_a / self.k_b * tokens + self.k_c)

    def observe(self, tokens: float, seconds: float, zeta: float) -> None:
        """Move the slope towards a pass that took ``seconds`` (the runtime stage)."""
        t = max(1.0, tokens)
        self.k_a = (1.0 - zeta) * self.k_a + zeta * (seconds - self.k_c) * t
        self.k_b = (1.0 - zeta) * self.k_b + zeta * t**2


def measure_passes(
    decoder: SideDecoder,
    lengths: Sequence[int],
    vocab_size: int,
    runs: int = 5,
    budget_s: float = float("inf"),
    seed: int = 0,
) -> DecodeModel:
    """Return the line of a side's passes after answers of ``lengths`` random tokens.

    The offline stage (section 5.2): the answer is dummy text and grows until the context is full,
    the documents are those of ``decoder``, so that the batch is that of the runtime. ``t`` counts
    the answer's tokens. Only passes of one token are timed, not those that fill the context.

    Times that do not rise with the length are noise, of a busy machine: the line is level then.

    Args:
        lengths: ascending.
        budget_s: time after which no further length is begun; three are measured in any case.

    Raises:
        InvalidInput: fewer than two lengths.
    """
    chance = np.random.default_rng(seed)
    due = time.perf_counter() + budget_s
    decoder.next()
    held, times = 0, list[float]()
    for length in lengths:
        if len(times) >= _LEAST_LENGTHS and time.perf_counter() > due:
            break
        for _ in range(length - held):
            decoder.push(int(chance.integers(vocab_size)))
        decoder.next()
        held = length
        seconds = []
        for _ in range(runs):
            decoder.rollback(length - 1)
            decoder.push(int(chance.integers(vocab_size)))
            begun = time.perf_counter()
            decoder.next()
            seconds.append(time.perf_counter() - begun)
        times.append(min(seconds))  # what a pass takes when nothing disturbs it
    measured = lengths[: len(times)]
    if len(times) >= _LEAST_LENGTHS and not np.corrcoef(measured, times)[0, 1] > _RISES:
        times = [float(np.median(times))] * len(times)
    return DecodeModel.fitted(measured, times)


UNKNOWN = (0.5, 0.5)
"""Acceptance before any measurement."""
_SURE = 4
"""Weight of the initial acceptance [tokens], so that one rejection does not dominate."""


class LinkModel:
    """The round trip as c(g) = L + g / B, by recursive least squares with forgetting.

    The data are those that the protocol sends anyway. Where all messages have one size, nothing
    can be said about B, and L is the mean.
    """

    def __init__(self, weight: float) -> None:
        self._means = [Mean(weight=1.0 / weight) for _ in range(4)]  # g, c, g^2, g c
        self._known = False

    def observe(self, size: int, seconds: float) -> None:
        """Add a round trip in which ``size`` bytes came back after ``seconds``."""
        self._known = True
        values = (size, seconds, size * size, size * seconds)
        for mean, value in zip(self._means, values, strict=True):
            mean.add(float(value))

    @property
    def known(self) -> bool:
        """True once a round trip has been measured."""
        return self._known

    @property
    def seconds_per_byte(self) -> float:
        """1 / B [s/byte]; 0 while unknown."""
        g, c, gg, gc = (mean.value for mean in self._means)
        spread = gg - g * g
        return max(0.0, (gc - g * c) / spread) if spread > 1e-3 * g * g else 0.0

    @property
    def latency_s(self) -> float:
        """L, the round trip of an empty message [s]."""
        g, c = self._means[0].value, self._means[1].value
        return max(0.0, c - self.seconds_per_byte * g)

    @property
    def rtt_s(self) -> float:
        """The round trip of a message of the usual size [s]."""
        return self._means[1].value


@dataclass(frozen=True)
class Estimates:
    """The estimates that the scheduler uses.

    Attributes:
        decode_s: time of a pass on device, on cloud [s].
        rtt_s: time from sending a target to having the draft that it caused, without its pass [s].
        acceptance: share of drafts of device, of cloud, that are accepted.
    """

    decode_s: Pair
    rtt_s: float
    acceptance: Pair


class Profiler:
    """One side's estimates; both sides see the same messages, so theirs are similar.

    Args:
        prompt_tokens: tokens that a pass reads before the answer.
        rtt_s: of the link as it was measured before; 0: unknown.
        acceptance: of device and cloud in earlier answers; nothing is known of them by default.
    """

    def __init__(
        self,
        prompt_tokens: int = 0,
        rtt_s: float = 0.0,
        acceptance: Pair = UNKNOWN,
    ) -> None:
        self._decode: list[DecodeModel | None] = [None, None]  # until a side's first pass or line
        self._prompt_tokens = prompt_tokens
        self._told_rtt_s = rtt_s
        kept = 1.0 / _ACCEPTANCE_WEIGHT
        self._acceptance = [Mean(share, _SURE, kept) for share in acceptance]
        self.link = LinkModel(_LINK_WEIGHT)

    def on_line(self, party: Party, line: tuple[float, float, float] | None) -> None:
        """Set the line that ``party`` has measured offline, if it has."""
        if line is not None:
            self._decode[party] = DecodeModel(*line)

    def on_pass(self, party: Party, position: int, seconds: float) -> None:
        """Add the time of a pass of ``party`` for the token at ``position``."""
        model = self._decode[party]
        if model is None:
            self._decode[party] = DecodeModel(k_c=seconds)
        elif seconds > 0:
            model.observe(self._prompt_tokens + position, seconds, _ZETA)

    def on_judged(self, expected: Pair) -> None:
        """Add the expected acceptance of both sides' drafts at one position (Eq. 5)."""
        for mean, value in zip(self._acceptance, expected, strict=True):
            mean.add(value)

    def on_round_trip(self, size: int, seconds: float) -> None:
        """Add a round trip that this side has measured."""
        self.link.observe(size, max(0.0, seconds))

    def on_told_rtt(self, seconds: float) -> None:
        """Set the round trip that the other side has measured."""
        if seconds > 0:
            self._told_rtt_s = seconds

    @property
    def acceptance(self) -> Pair:
        """The share of drafts of device and of cloud that are accepted."""
        return self._acceptance[0].value, self._acceptance[1].value

    @property
    def rtt_s(self) -> float:
        """The round trip [s], measured here or by the other side; 0: unknown."""
        return self.link.rtt_s if self.link.known else self._told_rtt_s

    def decode_s(self, party: Party, position: int) -> float:
        """Return the expected time of a pass of ``party`` [s]; 0 while unknown."""
        model = self._decode[party]
        return model.at(self._prompt_tokens + position) if model is not None else 0.0

    def estimates(self, position: int) -> Estimates | None:
        """Return the estimates for one token.

        None until both sides have decoded, and where a line says that a pass takes no time: from
        such figures nothing can be planned.
        """
        device, cloud = (self.decode_s(party, position) for party in Party)
        if not (0 < device < math.inf and 0 < cloud < math.inf):
            return None
        return Estimates((device, cloud), self.rtt_s, self.acceptance)
