"""The choice between the two methods of scoring by vLLM."""

from __future__ import annotations

from collab_llm_nodes.decoding.draft_length import Trials
from collab_llm_nodes.protocols.means import Mean

PROBES, ONE_REQUEST = "probes", "one_request"
_TRIAL_SHARE, _TRIAL_EVERY = 0.02, 16  # of the time, and rounds, for the method that seems slower


class MethodChoice:
    """The faster of the two methods, and now and then the other, to see."""

    def __init__(self, method: str) -> None:
        self.only = method if method != "auto" else ""
        self._seconds = {PROBES: Mean(), ONE_REQUEST: Mean()}
        self._trials = Trials[str](_TRIAL_SHARE, _TRIAL_EVERY)

    def next(self) -> str:
        """Return the method of the next round."""
        if self.only:
            return self.only
        unknown = [name for name, mean in self._seconds.items() if mean.count < 2]
        if unknown:
            return unknown[0]
        best, other = sorted(self._seconds, key=lambda name: self._seconds[name].value)
        best_s, other_s = self._seconds[best].value, self._seconds[other].value
        return self._trials.choose(best, best_s, [(other, other_s - best_s)])

    def learn(self, method: str, seconds: float) -> None:
        """Take in the time that a round has taken by ``method``."""
        self._seconds[method].add(seconds)
