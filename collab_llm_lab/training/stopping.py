"""Ctrl-C during a training: it stops after the current step and saves its state."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_NOTICE = b"\nstopping after this step; Ctrl-C again ends at once, without saving\n"


class StopRequest:
    """Turns SIGINT and SIGTERM into a flag that a training reads before each step.

    Use as a context, in the main thread. The first signal sets the flag; a second one has the
    effect that it has outside the context.

    Attributes:
        number: the signal received; 0: none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._handlers: dict[int, Any] = {}

    def __call__(self) -> bool:
        """Return True once a signal has been received."""
        return self.number != 0

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # in the background of a script
                self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def end(self) -> None:
        """Exit with the status of a program that the signal ended, if one was received."""
        if self.number:
            sys.exit(128 + self.number)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.number = number
        self._restore()
        os.write(2, _NOTICE)  # the signal may have interrupted a print

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


@contextmanager
def processes_ignoring_sigint() -> Iterator[None]:
    """Make processes that are started within the context ignore SIGINT from the beginning.

    Ctrl-C reaches every process of a terminal. The training process ends the others itself;
    otherwise each of them would fail with a traceback.
    """
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
