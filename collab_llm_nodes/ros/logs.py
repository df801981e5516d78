"""Python's log lines in a ROS process: the protocols know no ROS, and ROS no Python logging.

Without this, Python writes warnings to standard error, bare and without a level.
"""

from __future__ import annotations

import logging

from rclpy.impl.rcutils_logger import RcutilsLogger

from collab_llm_nodes.transport.logs import Text


class RosHandler(logging.Handler):
    """Passes log lines to ROS's logger, with their level.

    Args:
        logger: of the node that the process runs for.
    """

    def __init__(self, logger: RcutilsLogger) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(Text("%(message)s"))
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        """Log one record."""
        try:
            text = self.format(record)
            # ROS remembers the level of each line of code that logs, so there is one for each.
            if record.levelno >= logging.ERROR:
                self._logger.error(text)
            else:
                self._logger.warning(text)
        except Exception:  # noqa: BLE001 - as in logging's own handlers: work goes on
            self.handleError(record)


def pass_on_logging(logger: RcutilsLogger) -> None:
    """Pass what Python's loggers and warnings say, from ``WARNING`` up, to ``logger``."""
    logging.captureWarnings(True)
    logging.getLogger().addHandler(RosHandler(logger))
