"""Signals to other processes, and what Linux reports of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from waiting import state, wait_for


def ignores(pid: int, number: int) -> bool:
    """Return True if the process ignores the signal."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("SigIgn"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def freeze(pid: int) -> None:
    """Stop a process until ``SIGCONT``; return when none of its threads runs any more.

    ``kill`` returns before that: on a busy machine they may run on for long.
    """
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    wait_for(lambda: all(state(thread) in "TZX" for thread in threads.iterdir()))
