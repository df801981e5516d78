"""One direction of an emulated link: the times at which things leave it. No I/O, no clock.

``Lane`` decides; ``Wire`` keeps what is under way and hands it out when it is due.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import selectors
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from collab_llm_nodes.config import check_ranges, setting

T = TypeVar("T")

_START_S = 10.0  # for the loop's thread to do what it does at once


@dataclass(frozen=True)
class LinkProfile:
    """Properties of a link, the same in both directions."""

    delay_s: float = setting(0.0, "Delay in each direction [s].", low=0.0, high=60.0)
    jitter_s: float = setting(
        0.0,
        "Evenly distributed around the delay, at most this far from it [s].",
        low=0.0,
        high=60.0,
    )
    rate_bps: float = setting(0.0, "Capacity of a direction [bit/s]; 0 = unlimited.", low=0.0)
    queue_s: float = setting(
        1.0,
        "Longest queue in front of that capacity [s]; more must wait, or is lost as a packet.",
        low=0.001,
        high=60.0,
    )
    loss: float = setting(0.0, "Share of packets lost; only of a PacketLink.", low=0.0, high=1.0)
    reorder: float = setting(
        0.0, "Share of packets that overtake others; only of a PacketLink.", low=0.0, high=1.0
    )
    seed: int = setting(0, "Key of everything random.", low=0)

    def __post_init__(self) -> None:
        check_ranges(self)


class Lane:
    """One direction of a link: computes when the things that enter it leave it.

    Attributes:
        lost, reordered: how many things were dropped, and how many left early.
    """

    def __init__(self, profile: LinkProfile, name: str) -> None:
        self.profile = profile
        self.lost = self.reordered = 0
        self._random = random.Random(f"{profile.seed} {name}")
        self._free = self._last = 0.0  # when the capacity is free again; when the last thing leaves

    def hold(self, until: float) -> None:
        """Nothing leaves before ``until``."""
        self._last = max(self._last, until)

    def backlog(self, now: float) -> float:
        """Return how long a thing that enters now waits for the capacity [s]."""
        return max(0.0, self._free - now)

    def leaves(self, now: float, size: int, *, packet: bool = False) -> float | None:
        """Return when ``size`` bytes that enter at ``now`` leave; None if they are lost.

        Things leave in the order they entered, but for packets that are chosen to overtake: those
        skip delay and queue. Only packets are lost or overtake.
        """
        p = self.profile
        if packet and (self._random.random() < p.loss or self.backlog(now) > p.queue_s):
            self.lost += 1
            return None
        if p.rate_bps:
            self._free = max(now, self._free) + 8.0 * size / p.rate_bps
        if packet and self._random.random() < p.reorder:
            self.reordered += 1
            return now
        sent = max(now, self._free) if p.rate_bps else now
        due = sent + max(0.0, p.delay_s + p.jitter_s * self._random.uniform(-1.0, 1.0))
        self._last = max(self._last, due)
        return self._last


class Wire(Generic[T]):
    """Things in transit in one direction; ``deliver`` gets each when it is due.

    Equal times keep their order.
    """

    def __init__(self, deliver: Callable[[T], None]) -> None:
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._under_way: list[tuple[float, int, T]] = []
        self._count = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> float:
        """The loop's time [s]."""
        return self._loop.time()

    def push(self, thing: T, due: float) -> None:
        """Deliver ``thing`` at ``due`` (the loop's time), at once if that is past."""
        if not self._under_way and due <= self._loop.time():
            self._deliver(thing)
            return
        heapq.heappush(self._under_way, (due, next(self._count), thing))
        if self._under_way[0][2] is thing:
            self._rearm()

    def clear(self) -> None:
        """Drop everything that is under way."""
        self._under_way.clear()
        self._rearm()

    def _rearm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        head = self._under_way[0][0] if self._under_way else None
        self._timer = None if head is None else self._loop.call_at(head, self._flush)

    def _flush(self) -> None:
        while self._under_way and self._under_way[0][0] <= self._loop.time():
            self._deliver(heapq.heappop(self._under_way)[2])
        self._rearm()


class LoopThread:
    """An event loop in a thread of its own, for emulators that are driven by ordinary code.

    Its timers are good to some microseconds: ``select`` takes them, whereas ``epoll`` rounds up to
    a millisecond. The price: no file descriptor beyond 1023.

    Args:
        enter: called first thing in the thread.
    """

    def __init__(self, name: str, enter: Callable[[], None] = lambda: None) -> None:
        self.loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        self._enter = enter
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Returns when the loop runs; raises what ``enter`` raised."""
        self._failure: BaseException | None = None
        self._ready = threading.Event()
        self._thread.start()
        self._ready.wait(_START_S)
        if self._failure is not None:
            raise self._failure

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """``function(*args)``, run in the loop's thread."""

        async def run() -> T:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(_START_S)

    def stop(self) -> None:
        """End loop and thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_START_S)

    def _run(self) -> None:
        try:
            self._enter()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits in start()
            self._failure = error
            self._ready.set()
            return
        self.loop.call_soon(self._ready.set)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()
