"""The choice of the target while drafts are late: to wait, or to decode without them.

In a pipeline the target may be quicker than the draft models. Then it can give the requests that
nobody drafts for one token each, by a pass without drafts. That pass may end after the drafts have
come, and they wait for it. It pays where a token of it costs the target less than a drafted one.
"""

from __future__ import annotations

from collab_llm_nodes.protocols.collective.length import PAUSE
from collab_llm_nodes.protocols.means import Mean

_WEIGHT = 8
"""Latest times that a mean is of."""


class Waits:
    """Mean times of what a pipeline does, and the decision that follows from them."""

    def __init__(self) -> None:
        self._drafting_s = Mean(weight=_WEIGHT)
        self._verification_s = Mean(weight=_WEIGHT)
        self._tokens = Mean(1.0, weight=_WEIGHT)  # per request of a verification
        self._undrafted = Mean(weight=_WEIGHT)  # time of a pass without drafts, in verifications

    def on_drafted(self, took_s: float) -> None:
        """Learn what the drafts of a batch have taken."""
        _add(self._drafting_s, took_s)

    def on_verified(self, took_s: float, tokens: float) -> None:
        """Learn what a verification of drafts has taken, and its tokens per request."""
        _add(self._verification_s, took_s)
        self._tokens.add(tokens)

    def on_undrafted(self, took_s: float) -> None:
        """Learn what a pass without drafts has taken.

        It is noted in verifications, which are seen all the time: a busier machine slows both.
        """
        if self._verification_s.value:
            _add(self._undrafted, took_s / self._verification_s.value)

    def pays(self, drafting_s: float) -> bool:
        """Tell whether to decode without drafts, when others have been drafted for ``drafting_s``.

        With w, the time that the drafts still take, such a pass delays them by t - w, and gives a
        request one token; a verification takes t_v and gives it more. It pays if
        ``t - w < t_v / tokens``. The first passes find out what t is.
        """
        wait_s = max(0.0, self._drafting_s.value - drafting_s)
        delay_s = self._undrafted.value * self._verification_s.value - wait_s
        return delay_s < self._verification_s.value / self._tokens.value


def _add(mean: Mean, value: float) -> None:
    """Take a time in; one that a pause of the machine has made long counts less."""
    mean.add(min(value, PAUSE * mean.value) if mean.count else value)
