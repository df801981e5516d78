"""The speculation length s, adapted while the target verifies (paper 002, section 3.3).

Each verification tells its time and how many draft tokens it accepted. The length to be found is
the one with the least time per token. Two rules look for it:

- ``printed``: the paper's. It fits a line to t_LLM / vl over the order of verifications, across the
  last change of s: s falls if the line rises, else s grows. The paper's vl can be 0 (always so at
  s = 0), so vl + 1 stands in its place: the tokens that a verification yields.
- ``direction`` (default): a slope only tells whether the last change was an improvement. After a
  step DOWN that made things worse, the printed rule steps down again. This rule keeps to a
  direction while it improves, and turns round otherwise. Its time is that from one verdict to the
  next. So it includes the drafts' (Eq. 3), which the paper's Eq. 4 leaves out: t_LLM + t_SSM in
  sequence, about their maximum in a pipeline. It may choose s = 0, no speculation, and it looks
  later whether it still should.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import ConfigError

DIRECTION, PRINTED, FIXED = "direction", "printed", "fixed"
LONGEST = 32

_fixed = partial(setting, read_only=True)  # the machine is built once


@dataclass(frozen=True)
class LengthConfig:
    """The speculation length and the rule that adapts it."""

    rule: str = _fixed(
        DIRECTION,
        "direction: keep to a direction while it improves, else turn round; printed: the paper's"
        " linear fit; fixed: stay at initial.",
        choices=(DIRECTION, PRINTED, FIXED),
    )
    initial: int = _fixed(4, "Length to begin with [tokens].", low=0, high=LONGEST)
    longest: int = _fixed(12, "Longest length [tokens].", low=0, high=LONGEST)
    decision_threshold: int = _fixed(
        8, "Verifications between two changes of the length.", low=2, high=1000
    )
    reward: int = _fixed(1, "printed: growth after a fall of the line [tokens].", low=1, high=8)
    punish: int = _fixed(1, "printed: cut after a rise of the line [tokens].", low=1, high=8)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.initial > self.longest:
            raise ConfigError(
                f"{self.initial} is more than longest, {self.longest}",
                field="initial",
                remedy="raise longest",
            )


@dataclass(frozen=True)
class Verification:
    """One verification of a batch of drafts.

    Attributes:
        asked: [batch] length s that each draft was asked for: drafts that waited in the pool may
            have an older one.
        drafted: [batch] tokens of each draft; fewer than asked if it ends with an end token.
        accepted: [batch] tokens of each draft that the target accepted.
        llm_s: t_LLM, time of the target's pass [s].
        step_s: time since the verdict before, or since the work began [s].
        extra: tokens that passes without drafts have given in this time.
    """

    asked: Sequence[int]
    drafted: Sequence[int]
    accepted: Sequence[int]
    llm_s: float
    step_s: float
    extra: int = 0


class LengthSelector(Protocol):
    """A rule at work for batches of about one size: the times of others are others."""

    @property
    def s(self) -> int:
        """Tokens that the next draft should have: perhaps a trial, to learn from."""

    @property
    def best(self) -> int:
        """Tokens that it should have where nothing is learned from it."""

    def observe(self, verification: Verification) -> None:
        """Learn from a verification of a steady batch (one that does not drain)."""


def selector(config: LengthConfig) -> LengthSelector:
    """Return the rule that ``config`` names."""
    if config.rule == FIXED:
        return _Fixed(config.initial)
    if config.rule == PRINTED:
        return _Printed(config)
    return _DirectionAware(config)


@dataclass(frozen=True)
class _Fixed:
    """The same length for ever."""

    s: int

    @property
    def best(self) -> int:
        return self.s

    def observe(self, verification: Verification) -> None:
        """Learn nothing."""


class _Printed:
    """The rule as the paper prints it."""

    def __init__(self, config: LengthConfig) -> None:
        self._config = config
        self.s = config.initial
        self._costs: list[float] = []
        self._current = 0  # of the costs, how many are of drafts of the current length

    @property
    def best(self) -> int:
        return self.s

    def observe(self, verification: Verification) -> None:
        tokens = 1.0 + statistics.fmean(verification.accepted)
        self._costs.append(verification.llm_s / tokens)
        self._current += all(asked == self.s for asked in verification.asked)
        # Half of the samples are from before the change: the line spans the transition (Fig. 6).
        threshold = self._config.decision_threshold
        if len(self._costs) < threshold or self._current < (threshold + 1) // 2:
            return
        slope = float(np.polyfit(range(len(self._costs)), self._costs, 1)[0])
        step = -self._config.punish if slope > 0 else self._config.reward if slope < 0 else 0
        self.s = min(max(self.s + step, 0), self._config.longest)
        self._costs = self._costs[-(threshold // 2) :]
        self._current = 0


class _DirectionAware:
    """A search that keeps to a direction while it improves."""

    def __init__(self, config: LengthConfig) -> None:
        self._config = config
        self._acceptance = Acceptance(config.longest)
        self._window: list[float] = []  # times per request at the current length, so far
        self._extra = 0.0  # tokens per request that came without drafts meanwhile
        self._seen: deque[_Window] = deque(maxlen=_KEPT)  # the latest one first
        self._debts: dict[int, float] = {}  # what a look at a length has lost, until it is paid [s]
        self.best = config.initial
        self._search = self._climb()
        self.s = next(self._search)

    def observe(self, verification: Verification) -> None:
        for drafted, accepted in zip(verification.drafted, verification.accepted, strict=True):
            self._acceptance.add(drafted, accepted)
        if any(asked != self.s for asked in verification.asked):
            return  # the pool still holds drafts of another length: their time is that one's
        self._window.append(verification.step_s / len(verification.asked))
        self._extra += verification.extra / len(verification.asked)
        if len(self._window) == self._config.decision_threshold:
            # Rounds in which all models draft are few and long: a median would not see them. A
            # pause of the machine is not the length's.
            usual, count = statistics.median(self._window), len(self._window)
            time_s = statistics.fmean(min(time_s, PAUSE * usual) for time_s in self._window)
            spent_s = statistics.fmean(
                min(time_s, PAUSE * usual * count) for time_s in self._window
            )
            self._seen.appendleft(_Window(self.s, time_s, spent_s, self._extra / count))
            self._window.clear()
            self._extra = 0.0
            self.s = next(self._search)

    def _climb(self) -> Iterator[int]:
        """Yield the length of the next window, for ever; the window's time is known afterwards."""
        direction = 1
        yield self.best
        while True:
            for candidate in self._candidates(direction):
                if candidate in self._debts:
                    continue
                before = self.best, self._seen[0]
                yield candidate
                if self._cost(candidate) < self._cost(self.best):
                    direction = 1 if candidate > self.best else -1
                    self.best = candidate
                    self._owe(*before)
                    break
                self._owe(candidate, self._seen[0])
                yield from self._rest()  # its time may have changed meanwhile
            else:
                yield from self._rest()

    def _owe(self, s: int, window: _Window) -> None:
        """Note what ``window`` has lost to ``best``: ``s`` is not looked at until that is paid."""
        cost = self._cost(s)
        if cost:
            lost_s = window.spent_s - window.time_s * self._cost(self.best) / cost
            self._debts[s] = max(lost_s, 0.0)

    def _rest(self) -> Iterator[int]:
        """Yield ``best`` for one window, a share of whose time pays for looks at other lengths."""
        yield self.best
        share_s = _SURVEYS * self._seen[0].time_s / max(1, len(self._debts))
        left = {s: debt - share_s for s, debt in self._debts.items()}
        self._debts = {s: debt for s, debt in left.items() if debt > 0.0}

    def _candidates(self, direction: int) -> list[int]:
        """Return the lengths to compare with ``best``: none at all, onward, and the other way.

        From 0 the first step is a long one: speculation may pay only from some length on.
        """
        best = self.best
        onward = best + direction if best else self._config.initial or _FROM_ZERO
        found = [0, onward, best - direction]
        within = [s for s in found if 0 <= s <= self._config.longest and s != best]
        return list(dict.fromkeys(within))

    def _cost(self, s: int) -> float:
        """Return the time per token of all requests together at length ``s`` [s].

        Windows are short, and their times vary more than those of neighbouring lengths differ. So a
        line through those of similar lengths stands for them; without drafts it is another matter.
        """
        near = [
            (_FADES**age, window)
            for age, window in enumerate(self._seen)
            if window.s == s or (window.s and s and abs(window.s - s) <= _NEAR)
        ]
        time_s = _on_line([(w, window.s, window.time_s) for w, window in near], s)
        extra = _on_line([(w, window.s, window.extra) for w, window in near], s)
        return time_s / (1.0 + extra + self._acceptance.expected(s))


class _Window(NamedTuple):
    """Consecutive verifications at one length.

    Attributes:
        s: the length.
        time_s: mean time per request, pauses cut short [s].
        spent_s: the same with what is done at the first verification only, when the draft models
            read what the target has made without them [s].
        extra: mean tokens per request that came without drafts.
    """

    s: int
    time_s: float
    spent_s: float
    extra: float


def _on_line(points: Sequence[tuple[float, float, float]], at: float) -> float:
    """Return the value at ``at`` of the line through (weight, x, y) by least squares.

    It is the weighted mean where all x are one.
    """
    total = sum(w for w, _, _ in points)
    x_mean = sum(w * x for w, x, _ in points) / total
    y_mean = sum(w * y for w, _, y in points) / total
    spread = sum(w * (x - x_mean) ** 2 for w, x, _ in points)
    slope = sum(w * (x - x_mean) * y for w, x, y in points) / spread if spread else 0.0
    return y_mean + slope * (at - x_mean)


_KEPT = 32
_FADES = 0.85
"""Weight of a window, relative to the one after it."""
_NEAR = 2
"""Lengths that differ by no more are on one line."""
PAUSE = 4.0
"""A time counts as no more than so many times the usual one: else the machine has paused."""
_FROM_ZERO = 4
_SURVEYS = 0.02
"""Share of the time that looking at other lengths may cost."""


class Acceptance:
    """Chance of each place in a draft to be accepted, if all places before it were.

    One estimate for all lengths, so that two lengths are compared by the same drafts: else chance
    decides, since the accepted tokens of a few drafts vary more than their means differ.
    """

    def __init__(self, longest: int) -> None:
        self._accepted = [0.0] * longest
        self._judged = [0.0] * longest

    def add(self, drafted: int, accepted: int) -> None:
        """Learn from one draft; the last ``_MEMORY`` or so count at each place."""
        for place in range(min(drafted, accepted + 1, len(self._judged))):
            self._judged[place] = _FORGET * self._judged[place] + 1.0
            self._accepted[place] = _FORGET * self._accepted[place] + (place < accepted)

    def expected(self, s: int) -> float:
        """Return the mean number of accepted tokens of a draft of ``s``: the paper's vl(s)."""
        total, chance = 0.0, 1.0
        for place in range(s):
            if not self._judged[place]:
                break
            chance *= self._accepted[place] / self._judged[place]
            total += chance
        return total


_MEMORY = 400
_FORGET = 1.0 - 1.0 / _MEMORY
