"""The end of a process that has been told to end, whatever its threads are at."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from typing import NoReturn

log = logging.getLogger(__name__)


def end_within(seconds: float, status: int) -> None:
    """Have this process end after ``seconds``, with ``status``, if it is still there then."""
    timer = threading.Timer(seconds, end_now, (status,))
    timer.daemon = True
    timer.start()


def end_now(status: int) -> NoReturn:
    """End this process with ``status`` without waiting for its threads.

    A thread within C code cannot be interrupted, and the interpreter's exit waits for it.
    """
    busy = [thread.name for thread in threading.enumerate() if thread.name.startswith("verifier")]
    log.warning("ended while threads were busy: %s", ", ".join(busy) or "others")
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
