"""The choice between the two methods of scoring by vLLM."""

from __future__ import annotations

from collab_llm_nodes.decoding.draft_length import Trials
from collab_llm_nodes.protocols.means import Mean

PROBES, ONE_REQUEST = "probes", "one_request"
_TRIAL_SHARE, _TRIAL_EVERY = 0.02, 16  # of the cost, and rounds, for the method that seems worse


class MethodChoice:
    """The cheaper of the two methods, and now and then the other, to see.

    Args:
        byte_s: price of a byte on the link, beyond the time that it takes [s].
    """

    def __init__(self, method: str, byte_s: float = 0.0) -> None:
        self.only = method if method != "auto" else ""
        self._byte_s = byte_s
        self._costs = {PROBES: Mean(), ONE_REQUEST: Mean()}
        self._trials = Trials[str](_TRIAL_SHARE, _TRIAL_EVERY)

    def next(self) -> str:
        """Return the method of the next round."""
        if self.only:
            return self.only
        unknown = [name for name, mean in self._costs.items() if mean.count < 2]
        if unknown:
            return unknown[0]
        best, other = sorted(self._costs, key=lambda name: self._costs[name].value)
        best_s, other_s = self._costs[best].value, self._costs[other].value
        return self._trials.choose(best, best_s, [(other, other_s - best_s)])

    def learn(self, method: str, seconds: float, size: int) -> None:
        """Take in what a round by ``method`` has taken: its time, and ``size`` bytes both ways."""
        self._costs[method].add(seconds + size * self._byte_s)
