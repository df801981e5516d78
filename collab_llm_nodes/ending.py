"""The end of a process, asked for by SIGINT or SIGTERM.

Python runs signal handlers in the main thread only, but the kernel may hand a signal to any thread.
A main thread that waits for a lock then sleeps on, and its handler never runs. Python's wake-up
descriptor helps: the thread that gets the signal writes to it at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal


class EndRequest:
    """SIGINT, SIGTERM, or a call of :meth:`ask`. Made, and waited for, in the main thread.

    Attributes:
        asked: the process is to end.
    """

    def __init__(self) -> None:
        self.asked = False
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def ask(self) -> None:
        """Have the process end; for any thread."""
        self.asked = True
        with contextlib.suppress(BlockingIOError):  # full: it wakes as well
            os.write(self._writer, b"\0")

    def fileno(self) -> int:
        """Return the descriptor to wait for; call :meth:`noticed` whenever it is readable."""
        return self._reader

    def noticed(self) -> bool:
        """Empty the descriptor; return True once the process is to end."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)
        return self.asked

    def wait(self) -> None:
        """Return once the process is to end."""
        while not self.noticed():
            select.select([self], [], [])

    def _on_signal(self, *_: object) -> None:
        self.asked = True
