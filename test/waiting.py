"""For what nothing announces, such as the doings of other processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path


def comes_true(condition: Callable[[], object], timeout_s: float) -> bool:
    """Whether ``condition`` is true, or will be within ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.02)
    return True


def wait_for(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Return when ``condition`` is true."""
    assert comes_true(condition, timeout_s), "condition not met in time"


def gone(pid: int) -> bool:
    """Whether there is no such process any more, or will be none within some seconds."""
    return comes_true(lambda: not Path(f"/proc/{pid}").exists(), 30.0)
