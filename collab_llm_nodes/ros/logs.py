"""Log lines of a process: Python's, passed to the logger of a node, and a limit on repeats."""

from __future__ import annotations

import logging
from collections import deque

from rclpy.impl.rcutils_logger import RcutilsLogger

from collab_llm_nodes.transport.logs import Text


class Repeats:
    """Lines logged within the last second: none twice, and no more than ``most``.

    rclpy's own throttle goes by the line of code. Callers write part of some lines, so the number
    of different ones needs a limit as well.
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


class RosHandler(logging.Handler):
    """Passes Python's log lines to the logger of a node, with their level.

    Without it, Python writes warnings to standard error, without a level.
    """

    def __init__(self, logger: RcutilsLogger) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(Text("%(message)s"))
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        """Log one record."""
        try:
            text = self.format(record)
            # ROS remembers one level for each line of code that logs.
            if record.levelno >= logging.ERROR:
                self._logger.error(text)
            else:
                self._logger.warning(text)
        except Exception:  # noqa: BLE001 - as in logging's own handlers: work goes on
            self.handleError(record)


def pass_on_logging(logger: RcutilsLogger) -> None:
    """Pass Python's log lines and warnings, from ``WARNING`` up, to ``logger``."""
    logging.captureWarnings(True)
    logging.getLogger().addHandler(RosHandler(logger))
