"""A limit on log lines by what they say, where rclpy's own throttle goes by the line of code."""

from __future__ import annotations

from collections import deque


class Repeats:
    """Lines logged within the last second: none twice, and no more than ``most``.

    Callers write part of some lines, so the number of different ones needs a limit as well.
    """

    def __init__(self, most: int = 10) -> None:
        self._most = most
        self._logged: deque[tuple[float, str]] = deque()

    def admit(self, line: str, now: float) -> bool:
        """Return True if ``line`` may be logged at ``now`` (monotonic) [s]; it then counts."""
        while self._logged and now - self._logged[0][0] >= 1.0:
            self._logged.popleft()
        if len(self._logged) >= self._most or any(line == each for _, each in self._logged):
            return False
        self._logged.append((now, line))
        return True
