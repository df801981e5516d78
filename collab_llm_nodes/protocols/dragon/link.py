"""The device's deadlines for the cloud, as a state machine without I/O or clock.

    opening ── Opened ──▶ up ── lost, or silent ──▶ pause ──▶ opening ...
       └────── nothing came for patience_s ──────────▶ alone

The stream is opened again with the answer so far. Whatever happens, the answer goes on without the
cloud once it was needed, and brought nothing, for ``patience_s``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from collab_llm_nodes.config import ANY, check_ranges, setting

_PAUSE_S = 0.05
"""Pause before a lost stream is opened again: a refused connection must not be tried in a loop."""


@dataclass(frozen=True)
class PatienceConfig:
    """Deadlines of the device's wait for the cloud."""

    patience_s: float = setting(
        8.0,
        "The answer goes on without the cloud once it was needed and brought nothing for this long,"
        " at the beginning as well; longer than its retrieval and first pass take [s].",
        low=0.01,
        high=600.0,
        read_only=True,
    )
    absent_s: float = setting(
        2.0,
        "patience_s of an answer after one without the cloud, until it takes part again [s].",
        low=0.01,
        high=600.0,
        read_only=True,
    )
    silence_s: float = setting(
        5.0,
        "A stream on which the cloud owes a message for this long is opened again [s]. Raise it"
        " for a cloud whose passes take seconds.",
        low=0.01,
        high=600.0,
        read_only=True,
    )
    without_cloud: str = setting(
        "alone",
        "alone: finish from the device's documents only, and mark these tokens as unverified; fail:"
        " end the answer with an error.",
        choices=("alone", "fail"),
        per_request=ANY,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


class Step(Enum):
    """Actions for the caller to carry out."""

    OPEN = "open"
    """Open a stream; drop the old one."""
    GIVE_UP = "give up"
    """Drop the stream and go on without the cloud."""


class DeviceLink:
    """See the module's text. All times are of one clock of the caller's.

    Args:
        now: the stream is being opened.
        absent: the answer before went on without the cloud.

    Attributes:
        up: the cloud takes part.
        given_up: it will not any more.
        reopened: times the stream was opened again.
    """

    def __init__(self, config: PatienceConfig, now: float, *, absent: bool = False) -> None:
        self._config = config
        self._patience_s = min(config.absent_s, config.patience_s) if absent else config.patience_s
        self._missed_since = now  # the cloud is needed and silent since then
        self._opened_at = now
        self._reopen_at = math.inf
        self.up = False
        self.given_up = False
        self.reopened = 0

    def on_opened(self, now: float) -> None:
        """Note that the cloud takes part; only its messages show that it makes progress."""
        self.up = True
        self._patience_s = self._config.patience_s
        self._opened_at = now
        self._reopen_at = math.inf

    def on_lost(self, now: float) -> None:
        """Note that the stream has ended."""
        self.up = False
        self._missed_since = min(self._missed_since, now)
        self._reopen_at = now + _PAUSE_S

    def on_refused(self) -> None:
        """Note that the cloud refuses for good: do not try again."""
        self.given_up, self.up = True, False

    def on_heard(self) -> None:
        """Note that the cloud has sent a draft or a target."""
        self._missed_since = math.inf

    def on_wait(self, waits: bool, now: float) -> None:
        """Note whether only the cloud can bring the answer forward now."""
        if self.up:
            self._missed_since = min(self._missed_since, now) if waits else math.inf

    def on_time(self, now: float) -> Step | None:
        """Return the action that is due, if any."""
        if self.given_up:
            return None
        if now >= self._missed_since + self._patience_s:
            self.given_up, self.up = True, False
            return Step.GIVE_UP
        if now >= self._silent_at or now >= self._reopen_at:
            self.up, self._reopen_at = False, math.inf
            self.reopened += 1
            return Step.OPEN
        return None

    @property
    def next_time(self) -> float:
        """The next time at which :meth:`on_time` may return an action."""
        if self.given_up:
            return math.inf
        patience_over = self._missed_since + self._patience_s
        return min(patience_over, self._silent_at, self._reopen_at)

    @property
    def _silent_at(self) -> float:
        """The time at which a stream is given up, if nothing comes on it."""
        since = max(self._missed_since, self._opened_at)
        return since + self._config.silence_s if self.up else math.inf
