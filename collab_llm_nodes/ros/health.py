"""The health of a node, as records without clock or I/O; ``ManagedNode`` publishes them.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.metrics import GenerationMetrics

_RATE_WINDOW_S = 5.0
_ANSWERS = 20  # over which figures are averaged


class Level(bytes, Enum):
    """The severity of a status: constants of ``diagnostic_msgs/DiagnosticStatus``, in bytes."""

    OK = b"\0"
    WARN = b"\1"  # it works, but not as it should
    ERROR = b"\2"  # it does not work
    STALE = b"\3"  # nothing has been heard yet, so nothing is known


@dataclass(frozen=True)
class Status:
    """One entry of ``/diagnostics``; ``name`` is that of a part, without the node's."""

    name: str
    level: Level
    message: str
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DiagnosticsConfig:
    """Parameters of every node's diagnostics."""

    period: float = setting(
        1.0, "A report at least this often, machine's time [s].", low=0.05, high=60.0
    )
    recent: float = setting(
        10.0, "Time for which an error that does not recur is reported [s].", low=0.0, high=3600
    )
    hardware_id: str = setting("", "Of the robot, in every report; empty: the host's name.")
    memory_warn: float = setting(
        0.1, "A smaller free share of the machine's memory is a warning.", low=0.0, high=1.0
    )
    memory_error: float = setting(
        0.03, "A smaller free share of the machine's memory is an error.", low=0.0, high=1.0
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class TopicLimits:
    """Limits of a topic that should never be silent."""

    min_rate: float = setting(
        0.0, "Fewer messages per second are a warning; 0 = any [1/s].", low=0.0, high=1e4
    )
    max_age: float = setting(
        0.0, "Messages older than this, from their stamp, are a warning; 0 = any [s].", low=0.0
    )
    silent_after: float = setting(
        0.0, "No message for this long is an error; 0 = any [s].", low=0.0, high=3600.0
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass
class _Mark:
    """The counters of a topic at an earlier report."""

    at: float
    count: int
    oldest: float  # age of the oldest message since the mark before


class Traffic:
    """The messages of one topic at one node.

    Attributes:
        topic: as the node names it.
        count: messages so far.
    """

    def __init__(self, topic: str, now: float) -> None:
        self.topic = topic
        self.count = 0
        self.restart(now)

    def restart(self, now: float) -> None:
        """Expect messages from now on."""
        self._since = now
        self._last: float | None = None
        self._age = self._oldest = 0.0
        self._stamped = False
        self._marks = deque([_Mark(now, self.count, 0.0)])

    def on_message(self, now: float, age: float | None) -> None:
        """Count a message, ``age`` seconds after its stamp (None: it has none)."""
        self.count += 1
        self._last = now
        if age is not None:
            self._age, self._stamped = age, True
            self._oldest = max(self._oldest, age)

    def rate(self, now: float) -> float:
        """Return the messages per second since the oldest report in the window."""
        mark = self._marks[0]
        return (self.count - mark.count) / max(now - mark.at, 1e-3)

    def status(self, limits: TopicLimits, now: float) -> Status:
        """Return the topic's state at a report; the last seconds are judged."""
        rate, silent = self.rate(now), now - (self._last or self._since)
        oldest = max(self._oldest, *(m.oldest for m in self._marks))
        level, message = Level.OK, f"{rate:.1f} messages per second"
        if self._last is None:
            level, message = Level.STALE, f"no message yet, for {silent:.1f} s"
        elif limits.silent_after and silent > limits.silent_after:
            level, message = Level.ERROR, f"no message for {silent:.1f} s"
        elif limits.min_rate and rate < limits.min_rate and now - self._since > 1.0:
            level = Level.WARN
            message = f"{rate:.1f} messages per second, {limits.min_rate:g} expected"
        elif limits.max_age and oldest > limits.max_age:
            level = Level.WARN
            message = f"messages up to {oldest:.2f} s old, {limits.max_age:g} allowed"
        values: dict[str, Any] = {"messages": self.count, "rate_hz": f"{rate:.2f}"}
        if self._last is not None:
            values["silent_s"] = f"{silent:.2f}"
        if self._stamped:
            values |= {"age_s": f"{self._age:.3f}", "oldest_s": f"{oldest:.3f}"}
        self._mark(now)
        return Status(self.topic, level, message, values)

    def summary(self, now: float) -> str:
        """Return the state of a topic of which nothing is expected."""
        age = f", {self._age:.2f} s old" if self._stamped else ""
        summary = f"{self.count} ({self.rate(now):.1f}/s{age})"
        self._mark(now)
        return summary

    def _mark(self, now: float) -> None:
        """Remember this report; reports on a change may follow one another closely."""
        if now - self._marks[-1].at < 0.5:
            return
        self._marks.append(_Mark(now, self.count, self._oldest))
        self._oldest = 0.0
        while len(self._marks) > 1 and now - self._marks[1].at >= _RATE_WINDOW_S:
            self._marks.popleft()


class Faults:
    """Errors by their code, their number since the last success, and the last message."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.in_a_row = 0
        self.last = ""
        self._at = float("-inf")

    def add(self, code: str, message: str, now: float) -> None:
        """Count an error."""
        self.counts[code] += 1
        self.in_a_row += 1
        self.last, self._at = message or code, now

    def success(self) -> None:
        """Count a success."""
        self.in_a_row = 0

    def recent(self, now: float, within_s: float) -> str:
        """Return the last error's message if it is recent, else ""."""
        return self.last if now - self._at < within_s else ""


@dataclass(frozen=True)
class AnswerLimits:
    """Limits of the answers of a language model."""

    min_tau: float = setting(
        1.2, "Fewer tokens per verification, where drafts are sent, are a warning.", low=0.0
    )
    max_total: float = setting(
        0.0, "Answers that take longer on average are a warning; 0 = any [s].", low=0.0
    )
    failures: int = setting(3, "So many failed answers in a row are an error.", low=1, high=1000)

    def __post_init__(self) -> None:
        check_ranges(self)


class Answers:
    """The last answers of a language model: acceptance, speed, failures."""

    def __init__(self) -> None:
        self.faults = Faults()
        self._last: deque[GenerationMetrics] = deque(maxlen=_ANSWERS)
        self._alone = False

    def on_answer(self, metrics: GenerationMetrics) -> None:
        """Count a complete answer."""
        self._last.append(metrics)
        self._alone = metrics.unverified > 0
        self.faults.success()

    def status(self, name: str, limits: AnswerLimits, now: float, recent_s: float) -> Status:
        """Return the state of the answers; ``recent_s``: for how long a failure counts."""
        answers = len(self._last)
        total = type(self._last[-1])() if answers else GenerationMetrics()
        for metrics in self._last:
            total.add(metrics)
        figures = total.figures()
        tau = figures.get("tau", 0.0)
        mean_s = total.total_s / max(answers, 1)
        level, message = Level.OK, f"{answers} answers" if answers else "no answer yet"
        if "tau" in figures:
            message = f"tau {tau:.2f}"
        if self.faults.in_a_row >= limits.failures:
            level = Level.ERROR
            message = f"{self.faults.in_a_row} answers in a row failed: {self.faults.last}"
        elif failed := self.faults.recent(now, recent_s):
            level, message = Level.WARN, f"an answer failed: {failed}"
        elif self._alone:
            level, message = Level.WARN, "the draft model answers alone: unverified"
        elif figures.get("drafted") and tau < limits.min_tau:
            level = Level.WARN
            message = f"tau {tau:.2f}: drafts are hardly accepted; do the models match?"
        elif limits.max_total and mean_s > limits.max_total:
            level, message = Level.WARN, f"an answer takes {mean_s:.2f} s"
        values: dict[str, Any] = {
            **{
                name: f"{value / answers if name.endswith('_s') else value:.3f}"
                for name, value in figures.items()
            },
            "answer_s": f"{mean_s:.3f}",
            "first_token_s": f"{total.time_to_first_token_s / max(answers, 1):.3f}",
            "tokens_per_s": f"{total.tokens / max(total.total_s, 1e-9):.1f}",
            "unverified_tokens": total.unverified,
            **{f"failed.{code}": count for code, count in self.faults.counts.items()},
        }
        return Status(name, level, message, values)


@dataclass(frozen=True)
class LinkLimits:
    """Limits of the link to the verifier."""

    max_rtt: float = setting(0.5, "A longer round trip is a warning; 0 = any [s].", low=0.0)
    down_after: float = setting(
        2.0, "Not up for this long is an error, a warning before [s].", low=0.0, high=3600.0
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class ActionLimits:
    """Limits of the actions that are read from the model's text."""

    refusals: int = setting(
        3, "So many texts in a row without an action are a warning.", low=1, high=1000
    )
    max_age: float = setting(
        0.0, "Actions about older frames are a warning, from capture; 0 = any [s].", low=0.0
    )

    def __post_init__(self) -> None:
        check_ranges(self)


class Actions:
    """The actions read from the model's text, by code, and the age of their frames."""

    def __init__(self) -> None:
        self.codes: Counter[str] = Counter()
        self._refused = Faults()
        self._ages: deque[float] = deque(maxlen=_ANSWERS)

    def on_action(self, code: str, reason: str, age_s: float, now: float) -> None:
        """Count an action.

        ``code``: a name of NavigationAction.msg; ``age_s``: since the capture of its frame.
        """
        self.codes[code] += 1
        if code == "OK":
            self._refused.success()
            self._ages.append(age_s)
        else:
            self._refused.add(code, reason, now)

    def status(self, limits: ActionLimits) -> Status:
        """Return the state of the actions."""
        mean = sum(self._ages) / max(len(self._ages), 1)
        level, message = Level.OK, f"{sum(self.codes.values())} texts read"
        if self._refused.in_a_row >= limits.refusals:
            level = Level.WARN
            message = f"{self._refused.in_a_row} texts without an action: {self._refused.last}"
        elif limits.max_age and mean > limits.max_age:
            level, message = Level.WARN, f"actions about frames {mean:.2f} s old"
        values: dict[str, Any] = dict(self.codes)
        if self._ages:
            values |= {"age_s": f"{mean:.3f}", "oldest_s": f"{max(self._ages):.3f}"}
        return Status("actions", level, message, values)


class LinkHealth:
    """The link to the verifier: the time for which it is not up, and its errors."""

    def __init__(self, now: float) -> None:
        self.faults = Faults()
        self._up_at = now

    def on_state(self, state: str, now: float) -> None:
        """Take the link's state, at every change."""
        if state == "UP":
            self._up_at = now

    def status(
        self,
        state: str,
        rtt_s: float,
        error: str,
        limits: LinkLimits,
        now: float,
        recent_s: float,
    ) -> Status:
        """``state``: a name of LinkState.msg; ``error``: why it is not UP; ``rtt_s``: 0 unknown."""
        self.on_state(state, now)
        level, message = Level.OK, f"UP, round trip {1e3 * rtt_s:.1f} ms"
        if state != "UP":
            away_s = now - self._up_at
            level = Level.ERROR if away_s >= limits.down_after else Level.WARN
            message = f"{state} for {away_s:.1f} s" + (f": {error}" if error else "")
        elif failed := self.faults.recent(now, recent_s):
            level, message = Level.WARN, f"a session failed: {failed}"
        elif limits.max_rtt and rtt_s > limits.max_rtt:
            level, message = Level.WARN, f"round trip {rtt_s:.2f} s, {limits.max_rtt:g} allowed"
        values: dict[str, Any] = {
            "state": state,
            "rtt_s": f"{rtt_s:.4f}",
            **{f"errors.{code}": count for code, count in self.faults.counts.items()},
        }
        return Status("link", level, message, values)


@dataclass(frozen=True)
class Memory:
    """Memory of this process and this machine [byte]."""

    resident: int
    available: int
    total: int

    def judge(self, config: DiagnosticsConfig) -> tuple[Level, str]:
        """Return the level of the machine's free memory, in words unless OK."""
        share = self.available / self.total
        words = f"{100 * share:.0f} % of the machine's memory is free"
        if share < config.memory_error:
            return Level.ERROR, words
        return (Level.WARN, words) if share < config.memory_warn else (Level.OK, "")


def read_memory(proc: Path = Path("/proc")) -> Memory | None:
    """Read Linux's ``/proc``; return None elsewhere."""
    try:
        pages = int((proc / "self/statm").read_text().split()[1])
        lines = (line.split() for line in (proc / "meminfo").read_text().splitlines()[:3])
        kib = {words[0]: int(words[1]) for words in lines}
        resident = pages * os.sysconf("SC_PAGE_SIZE")
        return Memory(resident, kib["MemAvailable:"] * 1024, kib["MemTotal:"] * 1024)
    except (OSError, KeyError, ValueError, IndexError):
        return None
