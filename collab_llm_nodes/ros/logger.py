"""The logger of the nodes.

It has a file of its own: rclpy tells log calls apart by file and line, for throttling and levels,
and skips this file when it looks for the caller.
"""

from __future__ import annotations

import os
from typing import Any

from rclpy.impl import rcutils_logger

from collab_llm_nodes.errors import printable

rcutils_logger._internal_callers.append(os.path.realpath(__file__))


class Logger(rcutils_logger.RcutilsLogger):  # type: ignore[misc]
    """A node's logger; the text of others cannot pass for a line of its log."""

    def log(self, message: str, severity: Any, **options: Any) -> bool:
        """Log ``message`` with its control characters escaped and its line breaks marked."""
        escaped = printable(message, lines=True).replace("\n", "\n  | ")
        return bool(super().log(escaped, severity, **options))
