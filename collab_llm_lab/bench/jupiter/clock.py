"""A virtual clock: processes that compute, send and wait, in time that nobody has to wait for.

A process is a generator. It yields a number of seconds to be busy for, or a ``Mailbox`` to wait for
a message. Nothing here knows a formula for how long anything takes together: only what each step
takes alone, and who waits for whom.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Process: TypeAlias = "Generator[float | Mailbox, Any, None]"


class Clock:
    """Runs processes until nothing is due.

    Attributes:
        now: seconds since the start.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0  # events of one instant happen in the order in which they were set

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call ``call`` in ``seconds``."""
        self._number += 1
        heapq.heappush(self._due, (self.now + seconds, self._number, call))

    def start(self, process: Process) -> None:
        """Let ``process`` run from now on."""
        self.after(0.0, lambda: self._go_on(process, None))

    def run(self) -> float:
        """Run all that is due; return the time of the last event."""
        while self._due:
            self.now, _, call = heapq.heappop(self._due)
            call()
        return self.now

    def _go_on(self, process: Process, message: object) -> None:
        try:
            wanted = process.send(message)
        except StopIteration:
            return
        if isinstance(wanted, Mailbox):
            wanted.read(lambda got: self.after(0.0, lambda: self._go_on(process, got)))
        else:
            self.after(wanted, lambda: self._go_on(process, None))


@dataclass
class Mailbox:
    """Messages in the order in which they came; one process reads it."""

    _messages: deque[object] = field(default_factory=deque)
    _reader: Callable[[object], None] | None = None

    def put(self, message: object) -> None:
        """Give ``message`` to the reader, now or when it comes."""
        if self._reader is None:
            self._messages.append(message)
        else:
            reader, self._reader = self._reader, None
            reader(message)

    def read(self, reader: Callable[[object], None]) -> None:
        """Pass the next message to ``reader`` once."""
        if self._messages:
            reader(self._messages.popleft())
        else:
            self._reader = reader


class Line:
    """A link in one direction: it sends one message at a time, which arrives after a delay.

    Attributes:
        arrived: messages at the other end.
        bytes: sent so far.
    """

    def __init__(self, clock: Clock, bytes_per_s: float, latency_s: float) -> None:
        self.arrived = Mailbox()
        self.bytes = 0
        self._clock = clock
        self._rate = bytes_per_s
        self._latency_s = latency_s
        self._outgoing = Mailbox()
        clock.start(self._send())

    def put(self, message: object, size: int) -> None:
        """Send a message of ``size`` bytes after those before it."""
        self._outgoing.put((message, size))

    def _send(self) -> Process:
        while True:
            message, size = yield self._outgoing
            yield size / self._rate
            self.bytes += size
            self._clock.after(self._latency_s, lambda m=message: self.arrived.put(m))  # type: ignore[misc]
