"""Signs of life: a silent server is known to be lost within a bound. No I/O, no clock.

A cut link sends nothing, not even an error, and gRPC's keepalive is too patient for a robot that
moves: it may not close a connection at the first hiccup. So a silent server is asked for a sign
of life (the health service's ``Check``) again and again, without waiting for the last answer:
signs keep coming however long a round trip takes. Whatever it says else counts as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import ConfigError

CHECK = "/grpc.health.v1.Health/Check"


@dataclass(frozen=True)
class HeartbeatConfig:
    """How soon a link that fell silent is known to be lost."""

    interval_s: float = setting(
        0.1,
        "A silent server is asked for a sign of life this often [s].",
        low=0.02,
        high=0.2,
        read_only=True,
    )
    timeout_s: float = setting(
        0.35,
        "After this silence the link counts as lost, until something is heard again [s].",
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
    """See the module docstring. Times are seconds of one monotonic clock.

    Attributes:
        lost: nothing was heard for ``timeout_s``.
    """

    def __init__(self, config: HeartbeatConfig) -> None:
        self.config = config
        self.lost = False
        self._heard_at = self._asked_at = -math.inf

    def on_heard(self, now: float) -> bool:
        """Note that the server said something; True: ``lost`` changed."""
        self._heard_at = max(self._heard_at, now)
        return self._judge(now)

    def on_time(self, now: float) -> tuple[bool, bool]:
        """Return, at ``next_time``, if the server is to be asked now, and if ``lost`` changed."""
        ask = now >= self._next_question()
        if ask:
            self._asked_at = now
        return ask, self._judge(now)

    def silent(self, now: float) -> bool:
        """Return True if the link counts as lost ``now``, even if nobody has called ``on_time``."""
        return now >= self._heard_at + self.config.timeout_s

    @property
    def next_time(self) -> float:
        """Time at which ``on_time`` has something to do."""
        question = self._next_question()
        return question if self.lost else min(question, self._heard_at + self.config.timeout_s)

    def _next_question(self) -> float:
        return max(self._heard_at, self._asked_at) + self.config.interval_s

    def _judge(self, now: float) -> bool:
        before = self.lost
        self.lost = self.silent(now)
        return self.lost != before
