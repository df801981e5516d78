"""The loggers of the nodes. What strangers wrote cannot pass for a line of the log."""

from __future__ import annotations

import os
from typing import Any

from rclpy.impl import rcutils_logger

from collab_llm_nodes.errors import printable

# rclpy tells calls apart, for throttling, by their place in the code, which is not that below.
rcutils_logger._internal_callers.append(os.path.realpath(__file__))


class Logger(rcutils_logger.RcutilsLogger):  # type: ignore[misc]
    """A node's logger; a line break within a message is marked."""

    def log(self, message: str, severity: Any, **options: Any) -> bool:
        """Log ``message`` with its control characters escaped."""
        told = printable(message, lines=True).replace("\n", "\n  | ")
        return bool(super().log(told, severity, **options))
