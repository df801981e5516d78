"""The choice of the target while drafts are late: to wait, or to decode without them.

In a pipeline the target may be quicker than the draft models. A pass without drafts then gives one
token to each request that is not being drafted for. It may end after the drafts are ready, and they
wait for it. It pays where one of its tokens costs the target less time than a drafted one.
"""

from __future__ import annotations

from collab_llm_nodes.protocols.collective.length import PAUSE
from collab_llm_nodes.protocols.means import Mean

_WEIGHT = 8
"""Latest times that a mean is of."""


class Waits:
    """Mean times of drafting and verification, and the decision that follows from them."""

    def __init__(self) -> None:
        self._drafting_s = Mean(weight=_WEIGHT)
        self._verification_s = Mean(weight=_WEIGHT)
        self._tokens = Mean(1.0, weight=_WEIGHT)  # per request of a verification
        self._undrafted = Mean(weight=_WEIGHT)  # time of a pass without drafts, in verifications

    def on_drafted(self, took_s: float) -> None:
        """Learn the time of drafting for a batch."""
        _add(self._drafting_s, took_s)

    def on_verified(self, took_s: float, tokens: float) -> None:
        """Learn the time of a verification of drafts, and its tokens per request."""
        _add(self._verification_s, took_s)
        self._tokens.add(tokens)

    def on_undrafted(self, took_s: float) -> None:
        """Learn the time of a pass without drafts.

        It is kept in units of a verification, which is measured all the time: load slows both.
        """
        if self._verification_s.value:
            _add(self._undrafted, took_s / self._verification_s.value)

    def pays(self, drafting_s: float) -> bool:
        """Return True if a pass without drafts pays, ``drafting_s`` after drafting began.

        With w, the time that the drafts still take, such a pass delays them by t - w and yields one
        token per request; a verification takes t_v and yields more. It pays if
        ``t - w < t_v / tokens``. The first passes measure t.
        """
        wait_s = max(0.0, self._drafting_s.value - drafting_s)
        delay_s = self._undrafted.value * self._verification_s.value - wait_s
        return delay_s < self._verification_s.value / self._tokens.value


def _add(mean: Mean, value: float) -> None:
    """Add a time, limited to ``PAUSE`` times the mean: the machine may have paused."""
    mean.add(min(value, PAUSE * mean.value) if mean.count else value)
