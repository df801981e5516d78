"""The cost of speculation beside drafts: the draft models read the prompt of each new request.

Rounds that read a prompt last long, and say little about the speculation length. So the adaptive
length judges by the others (``length.py``), and this cost is told apart. All lengths have it but 0.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque

_PROMPTS = 32
"""Latest drafts for new requests that the median is of: times of one draft vary by a tenth."""
_USUAL = 5
"""Latest other drafts that their usual time is the median of: two pauses do not move it."""
_ANSWERS = 32
"""Latest answers that the mean length is of."""


class PromptCost:
    """The time that draft models take to read prompts, learned from drafts for new requests."""

    def __init__(self) -> None:
        # By number of requests, the times of first tokens for which no prompt was read
        self._other_s: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_USUAL))
        # Likewise, (unread, time) of those for which no such time is known yet
        self._unknown: dict[int, deque[tuple[int, float]]] = defaultdict(
            lambda: deque(maxlen=_PROMPTS)
        )
        self._prompt_s: deque[float] = deque(maxlen=_PROMPTS)
        self._answers: deque[int] = deque(maxlen=_ANSWERS)

    def on_drafted(self, requests: int, unread: int, first_s: float) -> None:
        """Learn what the first tokens of drafts for several requests have taken.

        Args:
            unread: requests for which the models had not drafted before.
            first_s: time for the first token of each draft [s].
        """
        others, unknown = self._other_s[requests], self._unknown[requests]
        if unread:
            unknown.append((unread, first_s))
        else:
            others.append(first_s)
        while others and unknown:
            prompts, whole_s = unknown.popleft()
            self._prompt_s.append(max(0.0, whole_s - statistics.median(others)) / prompts)

    def on_answer(self, tokens: int) -> None:
        """Learn how long an answer was."""
        self._answers.append(tokens)

    @property
    def prompt_s(self) -> float:
        """The time that the models take to read one prompt [s].

        0.0 while it is unknown, as where each draft is for a new request.
        """
        return statistics.median(self._prompt_s) if self._prompt_s else 0.0

    @property
    def per_token_s(self) -> float:
        """The same, spread over the tokens of an answer [s]; 0.0 before there was one."""
        return self.prompt_s / statistics.fmean(self._answers) if self._answers else 0.0
