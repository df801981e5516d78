"""What the target does while drafts are late: it waits, or it decodes without them.

In a pipeline the target may be quicker than the draft models. Then it can give the requests that
nobody drafts for one token each, by a pass without drafts. That pass may end after the drafts have
come, and they wait for it. It pays where a token of it costs the target less than a drafted one.
"""

from __future__ import annotations

_NEW = 1 / 8
"""Weight of the latest time in a mean."""
_PAUSE = 4.0
"""A time counts as no more than so many times the mean: a pause of the machine tells nothing."""


class Waits:
    """Mean times of what a pipeline does, and the decision that follows from them."""

    def __init__(self) -> None:
        self._drafting_s = 0.0
        self._verification_s = 0.0
        self._tokens = 1.0  # per request of a verification
        self._undrafted = 0.0  # time of a pass without drafts, in verifications

    def on_drafted(self, took_s: float) -> None:
        """Learn what the drafts of a batch have taken."""
        self._drafting_s = _mean(self._drafting_s, took_s)

    def on_verified(self, took_s: float, tokens: float) -> None:
        """Learn what a verification of drafts has taken, and its tokens per request."""
        self._verification_s = _mean(self._verification_s, took_s)
        self._tokens += _NEW * (tokens - self._tokens)

    def on_undrafted(self, took_s: float) -> None:
        """Learn what a pass without drafts has taken.

        It is noted in verifications, which are seen all the time: a busier machine slows both.
        """
        if self._verification_s:
            self._undrafted = _mean(self._undrafted, took_s / self._verification_s)

    def pays(self, drafting_s: float) -> bool:
        """Tell whether to decode without drafts, when others have been drafted for ``drafting_s``.

        With w, the time that the drafts still take, such a pass delays them by t - w, and gives a
        request one token; a verification takes t_v and gives it more. It pays if
        ``t - w < t_v / tokens``. The first passes find out what t is.
        """
        wait_s = max(0.0, self._drafting_s - drafting_s)
        delay_s = self._undrafted * self._verification_s - wait_s
        return delay_s < self._verification_s / self._tokens


def _mean(mean: float, value: float) -> float:
    """Return the mean with a new value; the first one is the mean."""
    return mean + _NEW * (min(value, _PAUSE * mean) - mean) if mean else value
