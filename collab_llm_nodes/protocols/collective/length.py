"""The speculation length s, adapted while the target verifies (paper 002, section 3.3).

Two rules minimise the time per token:

- ``adaptive`` (default): the least predicted cost of all lengths, s = 0 (no speculation) included:

      cost(s) = (rest(s) + drafting(s)) / tokens(s) + prompts(s)

  tokens(s) comes from :class:`Acceptance`. rest(s), the time between two verdicts without drafting,
  and drafting(s) are least-squares lines through what was measured: rest over the tokens of the
  drafts and the prompt tokens read with them, drafting over the tokens of the drafts and the
  context that the draft models had to read first. prompts(s) is the time in which draft models read
  prompts, per token of the answers; without speculation they read none. Where drafts are made
  beside the passes of the target, rest(s) is the whole time.
- ``printed``: the paper's. It fits a line to t_LLM / vl over the order of verifications, across the
  last change of s: s falls if the line rises, else s grows. The paper's vl can be 0 (always so at
  s = 0), so vl + 1 stands in its place: the tokens that a verification yields.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from collab_llm_nodes.config import check_ranges, fixed
from collab_llm_nodes.decoding.draft_length import Acceptance, Trials
from collab_llm_nodes.errors import ConfigError

ADAPTIVE, PRINTED, FIXED = "adaptive", "printed", "fixed"
LONGEST = 32

PAUSE = 4.0
"""A time counts as at most so many times the usual one: a longer one is a pause of the machine."""
_FADES = 0.97
"""Weight of a window, relative to the one after it."""
_WARM_UP = 256
"""Drafts before another length is tried: those of the first requests say little of others."""
_TRIALS = 0.005
"""Share of the time that trials of other lengths may cost."""
_EVERY = 8
"""Windows before a length is tried again, at least."""
_FROM_ZERO = 4
"""Length to try where 0 is the best one; ``initial`` if that is longer."""
_RIDGE = 1e-6 * np.diag([0.0, 1.0, 1.0])
"""Weight of a slope of 0: it counts only where nothing varies."""
_LEAST_S = 1e-9
"""No step is shorter, whatever the clock says."""
_STEP = 1
"""Tokens that the printed rule changes s by."""

_WINDOW = 8
"""Verifications per measurement window: single passes vary, and a longer window reacts late."""


@dataclass(frozen=True)
class LengthConfig:
    """The speculation length and the rule that adapts it."""

    rule: str = fixed(
        ADAPTIVE,
        "adaptive: the length with the least predicted time per token; printed: the paper's linear"
        " fit; fixed: stay at initial.",
        choices=(ADAPTIVE, PRINTED, FIXED),
    )
    initial: int = fixed(4, "Length to begin with [tokens].", low=0, high=LONGEST)
    longest: int = fixed(12, "Longest length [tokens].", low=0, high=LONGEST)

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
        asked: [batch] length s that each draft was requested with: drafts that waited in the pool
            may have an older one.
        drafted: [batch] tokens of each draft; fewer than asked at the end of an answer, or if it
            is the first one for a request.
        accepted: [batch] tokens of each draft that the target accepted.
        llm_s: t_LLM, time of the target's pass [s].
        step_s: time since the previous verdict, or since the work began [s].
        draft_s: the part of ``step_s`` in which the target waited for drafts [s]; 0.0 where they
            are made beside its passes.
        extra: tokens that passes without drafts have yielded in this time.
        read: prompt tokens that the target has read in this time.
        unread: context tokens that a draft model read before it drafted, beyond those of the last
            round, all drafts together; without drafts, those that it would have had to read. The
            mean of all draft models.
        runs: [batch] draft tokens of the request that were accepted since the last rejected one;
            None if unknown, or if the draft was cut short to one token. By default none was.
    """

    asked: Sequence[int]
    drafted: Sequence[int]
    accepted: Sequence[int]
    llm_s: float
    step_s: float
    draft_s: float = 0.0
    extra: int = 0
    read: int = 0
    unread: float = 0.0
    runs: Sequence[int | None] = ()


class LengthSelector(Protocol):
    """A rule at work for batches of about one size, since times differ between sizes."""

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
    return _Adaptive(config)


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
        # With all draft models out of service, no draft has the current length for long.
        self._costs: deque[float] = deque(maxlen=2 * _WINDOW)
        self._current = 0  # of the costs, how many are of drafts of the current length

    @property
    def best(self) -> int:
        return self.s

    def observe(self, verification: Verification) -> None:
        tokens = 1.0 + statistics.fmean(verification.accepted)
        self._costs.append(verification.llm_s / tokens)
        self._current += all(asked == self.s for asked in verification.asked)
        # Half of the samples are from before the change: the line spans the transition (Fig. 6).
        if len(self._costs) < _WINDOW or self._current < (_WINDOW + 1) // 2:
            return
        slope = float(np.polyfit(range(len(self._costs)), self._costs, 1)[0])
        step = -_STEP if slope > 0 else _STEP if slope < 0 else 0
        self.s = min(max(self.s + step, 0), self._config.longest)
        while len(self._costs) > _WINDOW // 2:
            self._costs.popleft()
        self._current = 0


class _Adaptive:
    """The length with the least predicted cost; now and then another one, to measure it."""

    def __init__(self, config: LengthConfig) -> None:
        self._config = config
        self._acceptance = Acceptance()
        self._rest = _Line()  # time without drafting, over draft tokens and prompt tokens read
        self._extra = _Line()  # tokens of passes without drafts, over the same
        self._drafting = _Line()  # time of drafting, over draft tokens and unread tokens
        self._window: list[Verification] = []
        self._judged = 0  # drafts, empty ones too
        self._prompt_tokens = self._answer_tokens = 0.0  # older windows fade
        self._trials = Trials[int](_TRIALS, _EVERY)
        self.s = self.best = config.initial

    def observe(self, verification: Verification) -> None:
        v = verification
        runs = v.runs or [0] * len(v.asked)
        for each in zip(runs, v.asked, v.accepted, strict=True):
            self._acceptance.add(*each)
        self._judged += len(v.asked)
        self._window.append(v)
        if len(self._window) < _WINDOW:
            return
        self._measure(self._window)
        self._window.clear()
        if self._judged >= _WARM_UP:
            self._choose(v.unread / len(v.asked))

    def _measure(self, window: Sequence[Verification]) -> None:
        """Fit the lines to a window; all figures are per request."""
        usual_s = statistics.median(v.step_s / len(v.asked) for v in window)
        rest, extra, drafting = [], [], []
        for v in window:
            count = len(v.asked)
            length, read, unread = sum(v.drafted) / count, v.read / count, v.unread / count
            expected_s = self._rest.at(length, read)
            if length:
                expected_s += self._drafting.at(length, unread)
            step_s = min(v.step_s / count, PAUSE * max(usual_s, expected_s))
            # Part of it may lie beside the previous pass.
            share = min(v.draft_s, v.step_s - v.llm_s) / max(v.step_s, _LEAST_S)
            rest.append((length, read, (1.0 - share) * step_s))
            extra.append((length, read, v.extra / count))
            if length:
                drafting.append((length, unread, share * step_s))
        self._rest.add(rest)
        self._extra.add(extra)
        self._drafting.add(drafting)
        prompts = sum(v.read / len(v.asked) for v in window)
        answers = sum(1.0 + (sum(v.accepted) + v.extra) / len(v.asked) for v in window)
        self._prompt_tokens = _FADES * self._prompt_tokens + prompts
        self._answer_tokens = _FADES * self._answer_tokens + answers

    def _choose(self, unread: float) -> None:
        """Set the length of the next window.

        Args:
            unread: context tokens of a request that a draft model has not read.
        """
        lengths = range(self._config.longest + 1)
        times = [self._rest.at(s) + (self._drafting.at(s) if s else 0.0) for s in lengths]
        own = self._acceptance.by_length(self._config.longest)
        tokens = [own[s] + self._extra.at(s) for s in lengths]
        token_s = self._drafting.slope_2  # for a draft model to read a token
        prompts_s = token_s * self._prompt_tokens / self._answer_tokens

        def cost(s: int) -> float:
            return times[s] / tokens[s] + (prompts_s if s else 0.0)

        def loss_s(s: int) -> float:
            # Without drafts, each verification leaves a token to be read when they come again.
            left = 0.0 if s and best else unread / _WINDOW if s else 1.0
            return times[s] + token_s * left - tokens[s] * times[best] / tokens[best]

        self.best = best = min(lengths, key=cost)
        far = min(max(self._config.initial, _FROM_ZERO), self._config.longest)
        rivals = {best // 2, 2 * best, 0} if best else {far}
        losses = [(s, loss_s(s)) for s in sorted(rivals - {best}) if s in lengths]
        self.s = self._trials.choose(best, times[best], losses)


class _Line:
    """A least-squares fit over two quantities, x_1 and x_2; older windows count less.

    Where nothing varies, slopes are 0. Negative coefficients are noise, and count as 0.
    """

    def __init__(self) -> None:
        self._xx = np.zeros((3, 3))
        self._xy = np.zeros(3)
        self._fit = np.zeros(3)

    def add(self, window: Sequence[tuple[float, float, float]]) -> None:
        """Learn from a window of (x_1, x_2, value); it may be empty."""
        if window:
            x_1, x_2, values = np.array(window).T
            x = np.stack([np.ones_like(x_1), x_1, x_2])
            self._xx = _FADES * self._xx + x @ x.T
            self._xy = _FADES * self._xy + x @ values
            self._fit = np.linalg.solve(self._xx + _RIDGE, self._xy).clip(min=0.0)

    def at(self, x_1: float, x_2: float = 0.0) -> float:
        """Return the value at ``x_1`` and ``x_2``."""
        return float(self._fit @ (1.0, x_1, x_2))

    @property
    def slope_2(self) -> float:
        """Growth of the value for each unit of x_2."""
        return float(self._fit[2])
