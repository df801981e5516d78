"""The edge client's queue of likely answers and its cache of drafts for them (paper 003).

Lines 9-14 (take the most confident outcome, pre-draft for it), 16-17 (look the verdict up) and 24
(reset) of Algorithm 1; the caller does the drafting. Everything is keyed by the resulting answer,
so an entry that no verdict has made void stays for several rounds, and a late entry cannot be
confused with another.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from threading import Lock

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.protocols.edge_cloud.messages import Draft, Verdict

Answer = tuple[int, ...]  # all generated tokens up to some round


@dataclass(frozen=True)
class PreDraftConfig:
    """Settings of the queue."""

    max_predrafts: int = setting(
        48,
        "Outcomes pre-drafted per round at most (paper 003, Table 5: early-exit threads);"
        " 0 is plain speculative decoding.",
        low=0,
        high=256,
    )
    queue: str = setting(
        "priority",
        "Order in which outcomes are pre-drafted (paper 003, Table 7)."
        " fifo and random are for comparison.",
        choices=("priority", "fifo", "random"),
    )

    def __post_init__(self) -> None:
        check_ranges(self)


class OutcomeQueue:
    """Queue Q_p: likely answers without a draft in progress, the most probable first."""

    def __init__(self, config: PreDraftConfig) -> None:
        self._config = config
        self._shuffle = random.Random(0)  # only the order of work depends on it, never the output
        self._answer: Answer = ()
        self._arrivals = 0
        self._popped = 0
        self._queue: list[tuple[float, int, Answer]] = []  # with stale entries of raised answers
        self._waiting: dict[Answer, float] = {}  # probability of each queued answer
        self._known: set[Answer] = set()  # answers that were ever queued and may still come

    def advance(self, answer: Answer, probability: float = 1.0) -> None:
        """Drop all that is void now that a verdict has made the answer ``answer`` (line 24).

        Args:
            probability: of ``answer`` before the verdict; continuations are rescaled by 1/p.
        """
        self._answer = answer
        self._popped = 0
        self._known = {a for a in self._known if _continues(a, answer)}
        waiting, self._waiting, self._queue = self._waiting, {}, []
        for a, p in waiting.items():
            if _continues(a, answer):
                self._enqueue(a, min(1.0, p / probability))

    def push(self, answer: Answer, probability: float) -> None:
        """Queue a likely answer, or raise its probability if it waits with a lower one."""
        known = answer in self._known
        raised = not known or probability > self._waiting.get(answer, 1.0)
        if raised and _continues(answer, self._answer):
            self._known.add(answer)
            self._enqueue(answer, probability)

    def pop(self) -> Answer | None:
        """Return the next answer to continue; None if the queue or the round's budget is empty."""
        if not self.best:
            return None
        self._popped += 1
        answer = heapq.heappop(self._queue)[2]
        del self._waiting[answer]
        return answer

    @property
    def best(self) -> float:
        """Probability of the answer that ``pop`` would return; 0 if it would return None."""
        while self._queue and self._queue[0][2] not in self._waiting:
            heapq.heappop(self._queue)
        if not self._queue or self._popped >= self._config.max_predrafts:
            return 0.0
        return max(self._waiting[self._queue[0][2]], 1e-300)

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


class ReadyDrafts:
    """Cache C: complete drafts for the answer so far and for possible answers.

    The decoding loop fills it and looks drafts up. The thread that receives a verdict gets the
    draft to send from :meth:`on_verdict`, so that a ready draft is sent while the loop is still in
    a forward pass. The two threads share nothing else, and the lock guards it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._drafts: dict[Answer, Draft] = {}
        self._answer: Answer = ()  # the answer after the verdicts that were received,
        self._round = 0  # and their number; the loop may not have handled all of them

    def on_verdict(self, verdict: Verdict) -> Draft | None:
        """Return the draft to send upon ``verdict``; None if there is none, or it has been sent."""
        with self._lock:
            if verdict.round != self._round:
                return None  # a repetition
            self._round += 1
            self._answer += verdict.tokens
            draft = None if verdict.finished else self._drafts.get(self._answer)
        return draft if draft is not None and draft.after is None else None

    def store(self, answer: Answer, draft: Draft) -> None:
        """Keep a draft that continues ``answer``."""
        with self._lock:
            self._drafts[answer] = draft

    def lookup(self, answer: Answer) -> Draft | None:
        """Return the draft that continues ``answer``, if it is complete (lines 16-17)."""
        with self._lock:
            return self._drafts.get(answer)

    def advance(self, answer: Answer) -> None:
        """Drop the drafts that are void now that the loop has made the answer ``answer``."""
        with self._lock:
            kept = {a: d for a, d in self._drafts.items() if a == answer or _continues(a, answer)}
            self._drafts = kept

    def close(self) -> None:
        """Drop all drafts, since the answer is over and nothing more may be sent."""
        with self._lock:
            self._drafts.clear()


def _continues(longer: Answer, answer: Answer) -> bool:
    return len(longer) > len(answer) and longer[: len(answer)] == answer
