"""The client's priority queue of likely answers and its pre-draft cache (paper 003, Algorithm 1).

Lines 9-14 (pop the most confident outcome, pre-draft for it), 16-17 (look the verdict up) and 24
(reset) of the algorithm, as a state machine: the caller does the drafting. Everything is keyed by
the answer as it would then be, so what a verdict has not made void stays, over several rounds, and
an entry that comes late can never be taken for another.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from typing import Generic, TypeVar

from collab_llm_nodes.config import check_ranges, setting

Answer = tuple[int, ...]  # all generated tokens up to some round


@dataclass(frozen=True)
class PreDraftConfig:
    """Knobs of the queue."""

    max_predrafts: int = setting(
        48,
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


D = TypeVar("D")


class PreDraftCache(Generic[D]):
    """Queue Q_p and cache C of one session."""

    def __init__(self, config: PreDraftConfig) -> None:
        self._config = config
        self._shuffle = random.Random(0)  # only the order of work depends on it, never the output
        self._answer: Answer = ()
        self._arrivals = 0
        self._popped = 0
        self._queue: list[tuple[float, int, Answer]] = []  # with stale entries of raised answers
        self._waiting: dict[Answer, float] = {}  # probability of what is queued
        self._known: set[Answer] = set()  # that was ever queued and may come
        self._cache: dict[Answer, D] = {}

    def advance(self, answer: Answer, probability: float = 1.0) -> None:
        """A verdict has made the answer ``answer``: forget what it has made void (line 24).

        ``probability`` is what it had: what was expected after it is likelier by so much now.
        """
        self._answer = answer
        self._popped = 0
        self._known = {a for a in self._known if self._may_come(a)}
        self._cache = {a: d for a, d in self._cache.items() if a == answer or self._may_come(a)}
        waiting, self._waiting, self._queue = self._waiting, {}, []
        for a, p in waiting.items():
            if self._may_come(a):
                self._enqueue(a, min(1.0, p / probability))

    def push(self, answer: Answer, probability: float) -> None:
        """Queue an answer that may come, or raise it if it waits there with less confidence."""
        known = answer in self._known
        if not self._may_come(answer) or (known and probability <= self._waiting.get(answer, 1.0)):
            return
        self._known.add(answer)
        self._enqueue(answer, probability)

    def pop(self) -> Answer | None:
        """The next answer to continue; None when the queue or the round's budget is empty."""
        if not self.best:
            return None
        self._popped += 1
        answer = heapq.heappop(self._queue)[2]
        del self._waiting[answer]
        return answer

    @property
    def best(self) -> float:
        """Probability of what ``pop`` would give; 0 when that is None."""
        while self._queue and self._queue[0][2] not in self._waiting:
            heapq.heappop(self._queue)
        if not self._queue or self._popped >= self._config.max_predrafts:
            return 0.0
        return max(self._waiting[self._queue[0][2]], 1e-300)

    def store(self, answer: Answer, draft: D) -> None:
        """Keep a pre-draft made for ``answer``; dropped when it is void by now."""
        if answer == self._answer or self._may_come(answer):
            self._cache[answer] = draft

    def lookup(self, answer: Answer) -> D | None:
        """The draft to send when the answer is ``answer``, if made already (16-17)."""
        return self._cache.get(answer)

    def _may_come(self, answer: Answer) -> bool:
        known = len(self._answer)
        return len(answer) > known and answer[:known] == self._answer

    def _enqueue(self, answer: Answer, probability: float) -> None:
        raised = answer in self._waiting
        self._waiting[answer] = probability
        self._arrivals += 1
        key = {
            "priority": -probability,
            "fifo": float(self._arrivals),
            "random": self._shuffle.random(),
        }[self._config.queue]
        if not raised or self._config.queue == "priority":
            heapq.heappush(self._queue, (key, self._arrivals, answer))
