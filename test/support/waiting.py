"""Waits for what nothing announces, such as the doings of other processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path


def comes_true(condition: Callable[[], object], timeout_s: float) -> bool:
    """Return True if ``condition`` is true, or becomes true within ``timeout_s``."""
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
    """Return True if the process has ended, or ends within some seconds.

    One that nobody has waited for yet counts: an orphan's new parent may take its time.
    """

    return comes_true(lambda: state(Path(f"/proc/{pid}")) in "ZX", 30.0)


def state(task: Path) -> str:
    """Return the letter of the state of a process or thread, a folder of ``/proc``; X: none."""
    try:
        stat = (task / "stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    return stat.rpartition(")")[2].split()[0]
