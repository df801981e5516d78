"""Answers for motion go first at the draft model, which answers share.

While one of them is under way, all others rest between two passes. When it ends, the others may go
on for a share of the time that it took, even if motion asks again at once: they take up to a fifth
of the model's time, and none of them starves.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from threading import Condition

SHARE = 0.25
"""Time that others may use after an answer for motion, as a part of what it took."""


class MotionPriority:
    """See the module docstring. All methods are thread-safe.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = Condition()
        self._under_way = 0
        self._free_until = 0.0
        self._wakes: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the right of way while an answer for motion is made."""
        begun = self._clock()
        with self._changed:
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                now = self._clock()
                self._free_until = now + SHARE * (now - begun)
                wakes = [*self._wakes]
                self._changed.notify_all()
            for wake in wakes:
                wake()

    def may_run(self) -> bool:
        """Return True if another answer may make a pass now."""
        return not self._under_way or self._clock() < self._free_until

    def wait(self, timeout_s: float) -> bool:
        """Block until :meth:`may_run`; False if that takes longer than ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(self.may_run, timeout_s)

    def on_free(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Have ``wake`` called, from any thread, whenever an answer for motion ends.

        Returns a function that takes this back.
        """
        with self._changed:
            self._wakes.append(wake)

        def forget() -> None:
            with self._changed:
                self._wakes.remove(wake)

        return forget
