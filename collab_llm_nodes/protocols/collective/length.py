"""The speculation length s, adapted while the target verifies (paper 002, section 3.3).

Each verification tells its time and how many draft tokens it accepted. The length to be found is
the one with the least time per token. Two rules look for it:

- ``printed``: the paper's. It fits a line to t_LLM / vl over the order of verifications, across the
  last change of s: s falls if the line rises, else s grows. The paper's vl can be 0 (always so at
  s = 0), so vl + 1 stands in its place: the tokens that a verification yields.
- ``direction`` (default): a slope only tells whether the last change was an improvement. After a
  step DOWN that made things worse, the printed rule steps down again. This rule keeps to a
  direction while it improves, and turns round otherwise. It minimises the time between two
  verdicts, per token: t_LLM + t_SSM in sequence, about their maximum in a pipeline (Eq. 3; the
  paper's Eq. 4 leaves t_SSM out). It may choose s = 0, no speculation, and it looks later whether
  it still should.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import ConfigError

DIRECTION, PRINTED, FIXED = "direction", "printed", "fixed"
LONGEST = 32

# What is known of a length
_KEPT = 64
"""Windows, and trials, that are remembered."""
_FADES = 0.85
"""Weight of a window, relative to the one after it."""
_DRAFTS_FADE = 0.97
"""The same for what it tells of the time of drafts, which varies more."""
_TRIAL_FADES = 0.995
"""Weight of a trial, relative to one that is a window younger."""
_NEAR = 4
"""Trials between two lengths tell of two others that differ by no more, together."""
_MEMORY = 1000
"""Draft tokens behind a run that count: those of a few requests say little of others."""
_FORGET = 1.0 - 1.0 / _MEMORY
_ALIKE = 32
"""A token that was seldom judged is much like the one before, which counts as so many."""
_RUN = 16
"""Runs of accepted tokens are told apart up to this length."""
_LONGEST_RUN = 2048
"""No run is longer."""
PAUSE = 4.0
"""A time counts as no more than so many times the usual one: else the machine has paused."""
_LEAST_S = 1e-9
"""No window is shorter, whatever the clock says."""

# When another length is tried, and when it has won
_ENOUGH = 256
"""Drafts that are judged before the search begins: those of a few requests say little of others."""
_LOOKS = 2
"""So often a length is tried before it becomes the best one."""
_FROM_ZERO = 4
"""Length to try where the best one is 0, beside 1; ``initial`` if that is longer."""
_TRIALS = 0.005
"""Share of the time that trying other lengths may cost."""
_LARGEST_LOSS = 0.4
"""Largest share of its time that a trial is charged for: one that lost more was disturbed."""
_LEAST = 0.02
"""Least cost of a trial [windows]: what it loses is not known more closely."""
_RETURN = 2.0
"""Least cost of a trial where the best length is 0 [windows]: the draft models have to read whole
contexts again. (Measured with 16 sessions of the text target: 4 for a trial of 4, 2 for one of 1.)
"""

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
        8,
        "Verifications that a length is judged by. printed: half of them are from before the last"
        " change.",
        low=2,
        high=1000,
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
        drafted: [batch] tokens of each draft; fewer than asked at the end of an answer, or if it
            is the first one for a request.
        accepted: [batch] tokens of each draft that the target accepted.
        llm_s: t_LLM, time of the target's pass [s].
        step_s: time since the verdict before, or since the work began [s]. In sequence, the time
            in which the draft models have read prompts is taken out, as far as it is known.
        draft_s: the part of ``step_s`` in which the target waited for drafts [s]; 0.0 where they
            are made beside its passes.
        first_s: the part of ``draft_s`` for the first token of each draft [s].
        extra: tokens that passes without drafts have given in this time.
        prompts_s: time in which the draft models read prompts, spread over all tokens [s]. Where
            s = 0 they need not.
        catches_up: the draft models have first read what the target had decoded without drafts.
        runs: [batch] draft tokens of the request that were accepted since the last rejected one;
            None: that is not known, or the draft was cut short to one token. By default none was.
    """

    asked: Sequence[int]
    drafted: Sequence[int]
    accepted: Sequence[int]
    llm_s: float
    step_s: float
    draft_s: float = 0.0
    first_s: float = 0.0
    extra: int = 0
    prompts_s: float = 0.0
    catches_up: bool = False
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
        # With all draft models out of service, no draft has the current length for long.
        self._costs: deque[float] = deque(maxlen=2 * config.decision_threshold)
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
        while len(self._costs) > threshold // 2:
            self._costs.popleft()
        self._current = 0


class _DirectionAware:
    """A search that keeps to a direction while it improves."""

    def __init__(self, config: LengthConfig) -> None:
        self._config = config
        self._acceptance = Acceptance()
        self._times: list[_Times] = []  # per request, of the window that is open
        self._catch_ups: list[float] = []  # likewise, of verifications that catch up
        self._starts: deque[float] = deque(maxlen=_KEPT)  # of drafts, see ``_start``
        self._extra = 0.0  # tokens per request that came without drafts in it
        self._seen: deque[_Window] = deque(maxlen=_KEPT)  # the latest one first
        self._trials: deque[_Trial] = deque(maxlen=_KEPT)  # likewise
        self._growths: dict[tuple[int, int], float | None] = {}  # by them, between two lengths
        self._prompts_s = 0.0
        self._debts: dict[int, float] = {}  # what trying a length has cost [windows of ``best``]
        self._judged = 0  # drafts, empty ones too
        self._windows = 0
        self.best = config.initial
        self._search = self._climb()
        self.s = next(self._search)

    def observe(self, verification: Verification) -> None:
        self._prompts_s = verification.prompts_s
        count = len(verification.asked)
        runs = verification.runs or [0] * count
        for each in zip(runs, verification.asked, verification.accepted, strict=True):
            self._acceptance.add(*each)
        self._judged += count
        if any(asked != self.s for asked in verification.asked):
            return  # the pool still holds drafts of another length: their time is that one's
        time_s = verification.step_s / count
        # Where every one catches up, that is what the length takes here.
        if verification.catches_up and len(self._catch_ups) < self._config.decision_threshold:
            self._catch_ups.append(time_s)
            return
        # Part of it may have been beside the pass before.
        draft_s = min(verification.draft_s, verification.step_s - verification.llm_s)
        first_s = verification.first_s
        if self.s == max(verification.drafted) > 1 and 0.0 < first_s < draft_s:
            self._starts.append(_start(self.s, first_s / draft_s))
        self._times.append(_Times(time_s, draft_s / count))
        self._extra += verification.extra / count
        if len(self._times) == self._config.decision_threshold:
            self._seen.appendleft(_window(self.s, self._times, self._extra, self._catch_ups))
            self._windows += 1
            self._times.clear()
            self._catch_ups.clear()
            self._extra = 0.0
            self._pay()
            self.s = next(self._search)

    def _climb(self) -> Iterator[int]:
        """Yield the length of the next window, for ever; the window's time is known afterwards."""
        direction = 1
        yield self.best
        while self._judged < _ENOUGH:  # the first drafts are few, and the vote has no weights yet
            yield self.best
        while True:
            for candidate in self._candidates(direction):
                if candidate in self._debts:
                    continue
                best, window = self.best, next(w for w in self._seen if w.s == self.best)
                if (yield from self._wins(candidate)):
                    direction = 1 if candidate > best else -1
                    self.best = candidate
                    self._owe(best, window)
                    break
            else:
                yield self.best

    def _wins(self, candidate: int) -> Generator[int, None, bool]:
        """Try a length between windows of the best one; tell whether it costs less each time.

        The machine's pace drifts, so a trial is compared with the windows before and after it.
        """
        if self._seen[0].s != self.best:
            yield self.best
        for _ in range(_LOOKS):
            before = self._seen[0]
            yield candidate
            tried = self._seen[0]
            yield self.best
            after = self._seen[0]
            self._trials.appendleft(_trial(before, tried, after, self._windows))
            self._growths.clear()
            if self._cost(candidate) >= self._cost(self.best):
                self._owe(candidate, tried, tried.catch_up_s + after.catch_up_s)
                return False
        return True

    def _owe(self, s: int, window: _Window, catch_up_s: float = 0.0) -> None:
        """Note what a trial of ``s`` costs: it is tried again when that is paid.

        Args:
            window: one at length ``s``.
            catch_up_s: time per request in which the draft models read on, over a window [s].
        """
        time_s = self._time(self.best)
        # A trial of 0 saves no prompts: drafts for new requests have the best length meanwhile.
        lost = min(1.0 - self._pace(self.best) / self._pace(s), _LARGEST_LOSS)
        # A window is longer in proportion to its tokens at most: else it was disturbed.
        windows = min(window.time_s / time_s, max(1.0, (1.0 + s) / (1.0 + self.best)))
        owed = windows * lost + catch_up_s / time_s
        self._debts[s] = max(owed, _LEAST if self.best else _RETURN)

    def _pay(self) -> None:
        """Pay for trials with a share of the window that has ended."""
        near = [s for s in self._candidates(1) if s in self._debts]
        share = _TRIALS / max(1, len(near))
        left = {s: debt - share for s, debt in self._debts.items()}
        self._debts = {s: debt for s, debt in left.items() if debt > 0.0}

    def _candidates(self, direction: int) -> list[int]:
        """Return the lengths to compare with ``best``: none at all, onward, and the other way.

        From 0 one step is a long one: speculation may pay only from some length on.
        """
        best, longest = self.best, self._config.longest
        far = min(max(self._config.initial, _FROM_ZERO), longest)
        found = [0, best + direction, best - direction] if best else [far, 1]
        return list(dict.fromkeys(s for s in found if 0 <= s <= longest and s != best))

    def _cost(self, s: int) -> float:
        """Return the time per token of all requests together at length ``s``, prompts included [s].

        ``s`` is the best length, or has been tried beside it.
        """
        return self._pace(s) + (self._prompts_s if s else 0.0)

    def _pace(self, s: int) -> float:
        """Return the time per token, without that for prompts [s]."""
        extra = _mean((_FADES**age, w.extra) for age, w in enumerate(self._seen) if w.s == s)
        return self._time(s) / self._acceptance.tokens(s, extra)

    def _time(self, s: int) -> float:
        """Return the time of a verification per request at length ``s`` [s]."""
        own = ((_FADES**age, w.rest_s) for age, w in enumerate(self._seen) if w.s == self.best)
        return _mean(own) * (self._rest(s) + self._drafts(s))

    def _rest(self, s: int) -> float:
        """Return the time without drafts at length ``s``, in units of that at the best length."""
        if s == self.best:
            return 1.0
        growth = self._growth(s)
        assert growth is not None, "no trial tells of it"
        return math.exp(growth * (s - self.best))

    def _drafts(self, s: int) -> float:
        """Return the time of a draft of ``s`` tokens, in the same unit.

        A draft is made token by token, so its time grows evenly. One length tells of the others.
        """
        return self._per_token * (self._start + s) if s else 0.0

    @property
    def _start(self) -> float:
        """The time in which a draft begins, in units of that of a token."""
        return statistics.median(self._starts) if self._starts else 0.0

    @property
    def _per_token(self) -> float:
        """The time of a draft token in the same unit, by all windows with drafts."""
        drafted = {w.s for w in self._seen} - {0}
        known = {s for s in drafted if s == self.best or self._growth(s) is not None}
        unit = {s: self._rest(s) / (self._start + s) for s in known}
        return _mean(
            (_DRAFTS_FADE**age, unit[w.s] * w.draft_s / w.rest_s)
            for age, w in enumerate(self._seen)
            if w.s in known
        )

    def _growth(self, s: int) -> float | None:
        """Return the growth between ``s`` and the best length, by all trials that tell of it.

        It is None where none does. One trial tells little: it is short, and times vary more than
        those of neighbouring lengths differ. From one token on the time grows about evenly, so
        trials between similar lengths count as well.
        """
        low, high = sorted((s, self.best))
        if (low, high) not in self._growths:
            growths = []
            for trial in self._trials:
                far = abs(trial.low - low) + abs(trial.high - high)
                if not far or (low and trial.low and far <= _NEAR):
                    age = self._windows - trial.at
                    growths.append((_TRIAL_FADES**age / (1 + far), trial.growth))
            self._growths[low, high] = _mean(growths) if growths else None
        return self._growths[low, high]


def _start(s: int, first: float) -> float:
    """Return the time in which a draft begins, in units of that of each token.

    Args:
        s: tokens of the draft, 2 or more.
        first: share of its time that the first token took, below 1.0.
    """
    return max((s * first - 1.0) / (1.0 - first), 0.0)


class _Times(NamedTuple):
    """Times of one verification, per request [s]: all, and that for drafts."""

    all_s: float
    draft_s: float


class _Window(NamedTuple):
    """Consecutive verifications at one length.

    Attributes:
        s: the length.
        time_s: mean time per request, pauses cut short [s].
        draft_s, rest_s: the part of it for drafts, and the part without [s].
        catch_up_s: time per request in which the draft models read what the target had decoded
            without drafts, spread over the window's verifications [s].
        extra: mean tokens per request that came without drafts.
    """

    s: int
    time_s: float
    draft_s: float
    rest_s: float
    catch_up_s: float
    extra: float


def _window(s: int, times: Sequence[_Times], extra: float, catch_ups: Sequence[float]) -> _Window:
    """Sum up a window.

    Args:
        times: of each verification.
        extra: tokens per request that came without drafts.
        catch_ups: times per request of each verification that caught up: none of ``times`` [s].
    """
    # Rounds in which all models draft are few and long: a median would not see them. A pause of
    # the machine is not the length's.
    count, usual = len(times), PAUSE * statistics.median(each.all_s for each in times)
    time_s = statistics.fmean(min(each.all_s, usual) for each in times)
    draft_s = statistics.fmean(
        each.draft_s * min(1.0, usual / max(each.all_s, _LEAST_S)) for each in times
    )
    more_s = sum(max(min(each, usual * count) - time_s, 0.0) for each in catch_ups)
    rest_s = max(time_s - draft_s, _LEAST_S)
    return _Window(s, time_s, draft_s, rest_s, more_s / count, extra / count)


class _Trial(NamedTuple):
    """A window of one length between two of another.

    Attributes:
        low, high: the two lengths.
        growth: of the logarithm of the time without drafts, from the one to the other, per token.
        at: number of windows before it ended.
    """

    low: int
    high: int
    growth: float
    at: int


def _trial(before: _Window, tried: _Window, after: _Window, at: int) -> _Trial:
    """Compare a window with its neighbours; what changes evenly meanwhile cancels out."""
    low, high = sorted((tried.s, after.s))
    beside = (_log(before.rest_s) + _log(after.rest_s)) / 2
    return _Trial(low, high, (_log(tried.rest_s) - beside) / (tried.s - after.s), at)


def _log(time_s: float) -> float:
    return math.log(max(time_s, _LEAST_S))


def _mean(points: Iterable[tuple[float, float]]) -> float:
    """Return the mean of (weight, value), of which there is at least one."""
    weighted = [*points]
    return sum(w * value for w, value in weighted) / sum(w for w, _ in weighted)


class Acceptance:
    """The tokens that drafts bring, by the chance of a draft token to be accepted.

    One estimate for all lengths, so that two lengths are compared by the same drafts: else chance
    decides, since the accepted tokens of a few drafts vary more than their means differ.

    Texts have easy and hard passages, and requests differ: the more draft tokens have been accepted
    since the last rejected one, the likelier is the next. This *run* goes on from draft to draft,
    and how long it lasts hardly depends on the length of the drafts.
    """

    def __init__(self) -> None:
        # By the length of the run before: draft tokens that were judged, and accepted
        self._judged = [0.0] * _RUN
        self._accepted = [0.0] * _RUN

    def add(self, run: int | None, s: int, accepted: int) -> None:
        """Learn from one draft; about the last ``_MEMORY`` tokens behind a run count.

        Args:
            run: draft tokens accepted since the last rejected one; None: that is not known.
            s: length that was asked for [tokens]: what an end cuts off is not accepted.
        """
        if run is None:
            return
        for place in range(min(s, accepted + 1)):
            before = min(run + place, _RUN - 1)
            self._judged[before] = _FORGET * self._judged[before] + 1.0
            self._accepted[before] = _FORGET * self._accepted[before] + (place < accepted)

    def tokens(self, s: int, extra: float = 0.0) -> float:
        """Return the mean tokens of a verification per request: vl(s) + 1.

        Args:
            s: tokens of a draft.
            extra: tokens that come beside.
        """
        if not s or not sum(self._judged):
            return 1.0 + extra
        # A run needs one draft, and another one behind each s of its tokens.
        lasts = self._lasts()
        return float(1.0 + extra + lasts.sum() / (1.0 + lasts[s - 1 :: s].sum()))

    def _lasts(self) -> np.ndarray:
        """Return the chance of a run to have 1, 2, ... tokens or more.

        A token that seldom was judged is much like the one before it, the first one like all.
        """
        chance, found = sum(self._accepted) / sum(self._judged), []
        for judged, accepted in zip(self._judged, self._accepted, strict=True):
            chance = (accepted + _ALIKE * chance) / (judged + _ALIKE)
            found.append(chance)
        return np.concatenate([found, np.full(_LONGEST_RUN - _RUN, chance)]).cumprod()
