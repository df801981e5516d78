"""Priority of answers for motion at the draft model, which answers share.

While such an answer is made, all others pause between two passes. When it ends, the others may
continue for a share of its duration, even if the next one for motion starts at once: they get up to
    a
fifth of the model's time, and none of them starves.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from threading import Condition

SHARE = 0.25
"""Time for other answers after one for motion, as a share of its duration."""


class MotionPriority:
    """Decides which answers may use the draft model. All methods are thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = Condition()
        self._under_way = 0
        self._free_until = 0.0
        self._wakes: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the priority while an answer for motion is made."""
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
        """Block until :meth:`may_run`; return False if that takes longer than ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(self.may_run, timeout_s)

    def on_release(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Register ``wake`` to be called, from any thread, whenever an answer for motion ends.

        Returns a function that unregisters it.
        """
        with self._changed:
            self._wakes.append(wake)

        def unregister() -> None:
            with self._changed:
                self._wakes.remove(wake)

        return unregister
