"""What speculation costs beside drafts: the draft models read the prompt of each new request.

Verifications that read a prompt are few and long, so the adaptive length leaves them out
(``length.py``). Without this figure it would leave out their cost, too, which is the same for all
lengths but 0.
"""

from __future__ import annotations

import statistics
from collections import deque

_PROMPTS = 15
"""Latest drafts for new requests that the median is of: a pause of the machine moves it little."""
_ANSWERS = 32
"""Latest answers that the mean length is of."""


class PromptCost:
    """The time that draft models take to read prompts, spread over the tokens of the answers."""

    def __init__(self) -> None:
        # By length and number of requests, the last time of a draft for which no prompt was read
        self._usual_s: dict[tuple[int, int], float] = {}
        self._unknown: deque[tuple[int, int, int, float]] = deque(maxlen=_PROMPTS)
        self._prompt_s: deque[float] = deque(maxlen=_PROMPTS)
        self._answers: deque[int] = deque(maxlen=_ANSWERS)

    def on_drafted(self, s: int, requests: int, unread: int, took_s: float) -> None:
        """Learn what a draft of ``s`` tokens for each of ``requests`` has taken.

        Args:
            unread: requests for which the models had not drafted before.
            took_s: [s].
        """
        if unread:
            self._unknown.append((s, requests, unread, took_s))
        else:
            self._usual_s[s, requests] = took_s
        for each in list(self._unknown):
            s, requests, unread, took_s = each
            usual_s = self._usual_s.get((s, requests))
            if usual_s is not None:
                self._unknown.remove(each)
                self._prompt_s.append(max(0.0, took_s - usual_s) / unread)

    def on_answer(self, tokens: int) -> None:
        """Learn how long an answer was."""
        self._answers.append(tokens)

    @property
    def per_token_s(self) -> float:
        """The time that speculation takes for prompts, per token of the answers [s]."""
        if not self._prompt_s or not self._answers:
            return 0.0
        return statistics.median(self._prompt_s) / statistics.fmean(self._answers)
