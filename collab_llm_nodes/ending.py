"""Ending a process on SIGINT or SIGTERM, also while its threads are busy.

Python runs signal handlers in the main thread only, but the kernel may hand a signal to any thread.
A main thread that waits for a lock then sleeps on, and its handler never runs. Python's wake-up
descriptor helps: the thread that gets the signal writes to it at once.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

log = logging.getLogger(__name__)


class EndRequest:
    """A request to end by SIGINT, SIGTERM or :meth:`ask`; make and await it in the main thread.

    Args:
        on_signal: called with each signal, even while the main thread is held up in a system call.

    Attributes:
        asked: the end was requested.
    """

    def __init__(self, on_signal: Callable[[], None] = lambda: None) -> None:
        self.asked = False
        self._then = on_signal
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def ask(self) -> None:
        """Request the end; for any thread."""
        self.asked = True
        with contextlib.suppress(BlockingIOError):  # full: it wakes as well
            os.write(self._writer, b"\0")

    def fileno(self) -> int:
        """Return the descriptor to wait for; call :meth:`noticed` whenever it is readable."""
        return self._reader

    def noticed(self) -> bool:
        """Empty the descriptor; return True if the end was requested."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)
        return self.asked

    def wait(self) -> None:
        """Block until the end is requested."""
        while not self.noticed():
            select.select([self], [], [])

    def _on_signal(self, *_: object) -> None:
        self.asked = True
        self._then()


@contextlib.contextmanager
def ended_at_once() -> Iterator[None]:
    """Let SIGINT and SIGTERM end this process at once while it imports and loads.

    Code in other languages may swallow the exception that a signal handler raises, as torch does
    while it imports numpy; the process would then start in spite of the signal.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    taken = {n: handler for n, handler in handlers.items() if handler is not signal.SIG_IGN}
    for number in taken:  # ignored ones stay so: in the background of a script
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)


def end_within(seconds: float, status: int) -> None:
    """End this process with ``status`` after ``seconds``, unless it has ended before."""
    timer = threading.Timer(seconds, end_now, (status,))
    timer.daemon = True
    timer.start()


def end_now(status: int) -> NoReturn:
    """End this process with ``status`` without waiting for its threads.

    A thread within C code cannot be interrupted, and the interpreter's exit waits for it.
    """
    busy = [thread.name for thread in threading.enumerate() if thread.name.startswith("verifier")]
    _leave(status, 0.2, f"ended while threads were busy: {', '.join(busy) or 'others'}")


def end_program(status: int) -> int:
    """Return ``status`` for ``sys.exit``, unless daemon threads make that a risk: then end at once.

    Up to 3.13 the interpreter's exit unwinds the stack of a daemon thread that comes back from C++
    (torch, gRPC, OpenCV), which aborts the process (status -6) or crashes it (-11).
    """
    if any(thread.daemon for thread in threading.enumerate()):
        atexit._run_exitfuncs()
        _leave(status, 10.0)
    return status


def _leave(status: int, patience_s: float, message: str = "") -> NoReturn:
    """End this process, after at most ``patience_s`` for its last output, which may block."""

    def say() -> None:
        if message:
            log.warning(message)
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()

    saying = threading.Thread(target=say, daemon=True)
    saying.start()
    saying.join(patience_s)
    os._exit(status)
