"""Heartbeat: detects a lost server within a bounded time. No I/O, no clock.

A cut link sends no error, and gRPC's keepalive is too slow for a moving robot, because it must not
close a connection at the first hiccup. So a silent server is sent health checks (``Check``)
periodically, without waiting for the previous answer, so that answers keep coming however long a
round trip takes. Any other message of the server counts as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import ConfigError

CHECK = "/grpc.health.v1.Health/Check"


@dataclass(frozen=True)
class HeartbeatConfig:
    """Times after which a silent link is checked, and counts as lost."""

    interval_s: float = setting(
        0.1,
        "Period of health checks while the server is silent [s].",
        low=0.02,
        high=0.2,
        read_only=True,
    )
    timeout_s: float = setting(
        0.35,
        "Silence after which the link counts as lost, until the server is heard again [s].",
        low=0.05,
        high=0.45,
        read_only=True,
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.timeout_s < 2 * self.interval_s:
            raise ConfigError(
                "one lost packet would be a lost link", field="timeout_s", remedy=">= 2 interval_s"
            )


class Heartbeat:
    """The time since a server was last heard. Times are seconds of one monotonic clock.

    Attributes:
        lost: nothing was heard for ``timeout_s``.
    """

    def __init__(self, config: HeartbeatConfig) -> None:
        self.config = config
        self.lost = False
        self._heard_at = self._asked_at = -math.inf

    def on_heard(self, now: float) -> bool:
        """Record that the server was heard; return True if ``lost`` has changed."""
        self._heard_at = max(self._heard_at, now)
        return self._judge(now)

    def on_time(self, now: float) -> tuple[bool, bool]:
        """Return whether a health check is due, and whether ``lost`` has changed.

        Call it at ``next_time``.
        """
        ask = now >= self._next_check()
        if ask:
            self._asked_at = now
        return ask, self._judge(now)

    def silent(self, now: float) -> bool:
        """Return True if the link counts as lost ``now``, even without a call of ``on_time``."""
        return now >= self._heard_at + self.config.timeout_s

    @property
    def next_time(self) -> float:
        """Time at which ``on_time`` must be called next."""
        check = self._next_check()
        return check if self.lost else min(check, self._heard_at + self.config.timeout_s)

    def _next_check(self) -> float:
        return max(self._heard_at, self._asked_at) + self.config.interval_s

    def _judge(self, now: float) -> bool:
        before = self.lost
        self.lost = self.silent(now)
        return self.lost != before
