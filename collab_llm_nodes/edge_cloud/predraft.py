"""The client's priority queue of early exits and its pre-draft cache (paper 003, Algorithm 1).

Lines 9-14 (pop the most confident outcome, pre-draft for it), 16-17 (look the verdict up) and 24
(reset) of the algorithm, as a state machine: the caller does the drafting. Everything is keyed by
the round, so an answer that comes late is recognised and dropped instead of racing with a reset.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.edge_cloud.messages import EarlyExit

Outcome = tuple[int, ...]  # the tokens by which a verdict extends the answer


@dataclass(frozen=True)
class PreDraftConfig:
    """Knobs of the pre-draft cache."""

    max_predrafts: int = setting(
        6,
        "Outcomes pre-drafted per round at most (paper 003, Table 5: early-exit threads);"
        " 0 is plain speculative decoding.",
        low=0,
        high=256,
    )
    queue: str = setting(
        "priority",
        "Order in which outcomes are pre-drafted (paper 003, Table 7).",
        choices=("priority", "fifo", "random"),
    )

    def __post_init__(self) -> None:
        check_ranges(self)


class HasRound(Protocol):
    """What the cache needs to know of a draft (the dataclass, or the ROS message carrying it)."""

    @property
    def round(self) -> int: ...


D = TypeVar("D", bound=HasRound)


class PreDraftCache(Generic[D]):
    """Queue Q_p and cache C of one session."""

    def __init__(self, config: PreDraftConfig) -> None:
        self._config = config
        self._shuffle = random.Random(0)  # only the order of work depends on it, never the output
        self.round = -1
        self._queue: list[tuple[float, int, Outcome]] = []
        self._seen: set[Outcome] = set()
        self._popped = 0
        self._cache: dict[Outcome, D] = {}

    def begin(self, round_: int) -> None:
        """A draft of ``round_`` is on its way: forget the previous round (line 24)."""
        self.round = round_
        self._queue.clear()
        self._seen.clear()
        self._popped = 0
        self._cache.clear()

    def push(self, exit_: EarlyExit) -> None:
        """Queue an early exit's outcome unless it is stale, known, or ends the answer."""
        if exit_.round != self.round or exit_.tokens in self._seen or exit_.finished:
            return
        self._seen.add(exit_.tokens)
        arrival = len(self._seen)
        key = {
            "priority": -exit_.confidence,
            "fifo": float(arrival),
            "random": self._shuffle.random(),
        }[self._config.queue]
        heapq.heappush(self._queue, (key, arrival, exit_.tokens))

    def pop(self) -> Outcome | None:
        """The next outcome to pre-draft for; None when the queue or the round's budget is empty."""
        if not self._queue or self._popped >= self._config.max_predrafts:
            return None
        self._popped += 1
        return heapq.heappop(self._queue)[2]

    def store(self, outcome: Outcome, draft: D) -> None:
        """Keep a pre-draft made for ``outcome``; dropped when its round is over."""
        if draft.round == self.round + 1:
            self._cache[outcome] = draft

    def lookup(self, round_: int, outcome: Outcome) -> D | None:
        """The draft to send after ``round_`` ended in ``outcome``, if made already (16-17)."""
        return self._cache.get(outcome) if round_ == self.round else None
