"""For what nothing announces, such as the doings of other processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Look at ``condition`` until it is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        threading.Event().wait(0.02)
