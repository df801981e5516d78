"""Ctrl-C during a training: it stops after its step and saves what it has."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_TOLD = b"\nstopping after this step; Ctrl-C again ends at once, without saving\n"


class StopRequest:
    """SIGINT or SIGTERM, as a question that a training asks before each step.

    Use as a context, in the main thread. The first signal is remembered; a second one does what it
    would have done without this.

    Attributes:
        number: the signal that came; 0: none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._handlers: dict[int, Any] = {}

    def __call__(self) -> bool:
        """Return True once a signal has come."""
        return self.number != 0

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # in the background of a script
                self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def end(self) -> None:
        """Exit with the status of a program that the signal ended, if one has come."""
        if self.number:
            sys.exit(128 + self.number)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.number = number
        self._restore()
        os.write(2, _TOLD)  # print may be what the signal has interrupted

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


@contextmanager
def deaf_processes() -> Iterator[None]:
    """Have the processes that are started within ignore SIGINT from their first instruction.

    Ctrl-C reaches every process of a terminal. The one that trains ends the others itself; on
    their own they would fail, each with a traceback.
    """
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
