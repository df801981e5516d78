"""Detection of unusable time stamps of a topic: old, ahead, or frozen."""

from __future__ import annotations

import math

_FROZEN_S = 0.2
"""A stamp repeated for longer than this, robot's time, is not that of a measurement."""


class Stamps:
    """Check of the stamps of one topic, message by message."""

    def __init__(self) -> None:
        self._stamp = -math.inf
        self._since = 0.0

    def trouble(self, stamp: float, now: float, limit: float) -> str:
        """Return why a message stamped ``stamp`` cannot be used at ``now``; "" if it can.

        Both times are the robot's [s]. ``limit``: greatest age, and lead [s].
        """
        if stamp != self._stamp:
            self._stamp, self._since = stamp, now
        age = now - stamp
        if stamp == 0.0 and age > limit:
            return "not stamped: its driver must do so"
        if now - self._since > _FROZEN_S:
            return f"stamped alike for {now - self._since:.1f} s: its driver must stamp each anew"
        if age > limit:
            return f"stamped {age:.1f} s ago: do the clocks agree, and is the network fast enough?"
        if age < -limit:
            return f"stamped {-age:.1f} s ahead: do the clocks agree?"
        return ""
