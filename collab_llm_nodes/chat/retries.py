"""Pauses between attempts, computed without clock or I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from collab_llm_nodes.config import check_ranges, setting

BACKOFF_S = 0.5
"""Longest pause after the first failure; doubles with each. Rate limits are counted in seconds."""
BACKOFF_MAX_S = 20.0
"""Longest pause, unless the server asks for a longer one: a bound for many attempts."""


@dataclass(frozen=True)
class RetryRules:
    """Number of attempts, and the pauses between them."""

    max_attempts: int = setting(
        5,
        "Attempts per request at most. Raise it for a server that is often overloaded.",
        low=1,
        high=100,
    )

    def __post_init__(self) -> None:
        check_ranges(self)

    def pause_s(self, failures: int, chance: float, asked_s: float) -> float | None:
        """Return the pause after this many ``failures`` [s]; None if no attempt is left.

        The pause is drawn from the whole range ("full jitter"), so that clients that failed
        together do not return together.

        Args:
            failures: >= 1.
            chance: uniform in [0, 1).
            asked_s: pause that the server asked for, a minimum [s].
        """
        if failures >= self.max_attempts:
            return None
        longest = min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(failures - 1, 60))
        return asked_s + chance * longest


def asked_pause_s(headers: Mapping[str, str], now: float) -> float:
    """Return the pause that a response asks for by Retry-After or retry-after-ms [s].

    Args:
        headers: of the response, found in any case.
        now: time of day, seconds since 1970.

    Returns:
        0 if it asks for none, or in an unreadable form.
    """
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name, "")[:100].strip()
        if not value:
            continue
        try:
            seconds = float(value) * unit
        except ValueError:
            try:
                seconds = parsedate_to_datetime(value).timestamp() - now
            except (ValueError, TypeError, OverflowError):
                continue
        if math.isfinite(seconds):
            return max(0.0, seconds)
    return 0.0
