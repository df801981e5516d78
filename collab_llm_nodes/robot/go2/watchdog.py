"""The decision to stop a Go2 whose driver fell silent during a motion. No I/O, no clock.

The Go2 holds a velocity for one second, and a killed driver cannot stop it. A driver sends a
velocity at least ten times a second; when these cease without a stop, the watchdog sends StopMove.
All times are seconds of the machine's monotonic clock.
"""

from __future__ import annotations

import json
import math
from collections import deque

from collab_llm_nodes.robot.go2.sport import Api, Call, Requests

SILENCE_S = 0.4
"""Longest pause between two velocities of a driver."""
_REPEAT_S = 0.1
_LASTS_S = 2.0
"""StopMove is repeated for so long, beyond the second for which the robot holds a velocity."""


class Watchdog:
    """Stops the robot when the requests for motion break off; sends nothing but StopMove."""

    def __init__(self) -> None:
        self._requests = Requests(math.inf)
        self._own: deque[int] = deque(maxlen=100)  # ids of our requests, which we receive as well
        self._due = math.inf  # when the last velocity must have been followed by another
        self._stopped_at = -math.inf

    @property
    def watches(self) -> bool:
        """Return True while a motion is under way, or being stopped: call ``tick`` often."""
        return self._due < math.inf

    def on_request(self, api: tuple[str, int], number: int, parameter: str, now: float) -> None:
        """Take a request to the robot: service and function, its id and parameter."""
        if number in self._own:
            return
        if api == Api.STOP_MOVE.value:
            self._due = math.inf
        elif api in (Api.MOVE.value, Api.AVOID_MOVE.value):
            self._due = now + SILENCE_S if _moves(parameter) else math.inf

    def on_end(self, now: float) -> list[Call]:
        """Return the stop that is due because the watchdog itself ends."""
        if self.watches:
            self._due = min(self._due, now)
        return self.tick(now)

    def tick(self, now: float) -> list[Call]:
        """Return the stop that is due now."""
        if now >= self._due + _LASTS_S:
            self._due = math.inf
        if now < self._due or now - self._stopped_at < _REPEAT_S:
            return []
        self._stopped_at = now
        call = self._requests.make(Api.STOP_MOVE, {}, now, reply=False)
        self._own.append(call.id)
        return [call]


def _moves(parameter: str) -> bool:
    """Return True for a velocity other than zero, and for a parameter that cannot be read.

    Silence after an increment of the obstacle avoidance (``mode`` 1) means nothing: it is one
    request for the whole distance.
    """
    try:
        values = json.loads(parameter)
        if values.get("mode", 0) != 0:
            return False
        return any(float(value) != 0.0 for value in values.values())
    except (ValueError, TypeError, AttributeError):
        return True
