"""Log lines of the nodes: the loggers of ROS and Python, and a limit on repeats."""

from __future__ import annotations

import logging
import os
from collections import deque
from typing import Any

from rclpy.impl import rcutils_logger
from rclpy.impl.rcutils_logger import RcutilsLogger

from collab_llm_nodes.errors import printable
from collab_llm_nodes.transport.logs import Text

# rclpy throttles by the line of code that logs; the lines below are not those.
rcutils_logger._internal_callers.append(os.path.realpath(__file__))


class Logger(RcutilsLogger):  # type: ignore[misc]
    """A node's logger; the text of others cannot pass for a line of its log."""

    def log(self, message: str, severity: Any, **options: Any) -> bool:
        """Log ``message`` with its control characters escaped and its line breaks marked."""
        escaped = printable(message, lines=True).replace("\n", "\n  | ")
        return bool(super().log(escaped, severity, **options))


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
