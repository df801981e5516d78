"""Drafts that are sent ahead of the verdicts they depend on, and the rule for their rounds.

Edge client, link and verifier each keep :class:`PushedDrafts`. They see the same verdicts, so they
agree on the draft of every round without further messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.protocols.edge_cloud.messages import Draft


@dataclass(frozen=True)
class AheadConfig:
    """Settings of prediction and push-ahead during a verification."""

    batch: int = setting(
        16, "Outcomes that are continued side by side in one forward pass.", low=1, high=64
    )
    predictions: int = setting(
        16,
        "Outcomes per draft that the draft model itself predicts; 0: early exits only, as in the"
        " paper.",
        low=0,
        high=64,
    )
    min_probability: float = setting(
        0.01,
        "Least probability of a predicted outcome to draft for."
        " Raise it to save energy on the robot.",
        low=0.0,
        high=1.0,
    )
    push_window: int = setting(
        48,
        "Drafts sent ahead of the verdicts they depend on, at a time; 0: each waits for its"
        " verdict.",
        low=0,
        high=64,
    )
    push_depth: int = setting(
        3,
        "Rounds that drafts may be ahead of the one under verification."
        " Raise it for a slow link, lower it to save bytes.",
        low=1,
        high=8,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


MAX_AHEAD = 64
"""Drafts of one session that are kept for rounds to come."""
MAX_AHEAD_ENTRIES = 1 << 18
"""Entries of their distributions."""


class PushedDrafts:
    """Drafts for later rounds, in order of arrival."""

    def __init__(self) -> None:
        self._drafts: list[Draft] = []

    def __len__(self) -> int:
        return len(self._drafts)

    @property
    def entries(self) -> int:
        """Number of probabilities in all drafts."""
        return sum(_entries(draft) for draft in self._drafts)

    def has_room_for(self, draft: Draft) -> bool:
        """Return True if the verifier, and so its client, may keep ``draft`` too."""
        return len(self._drafts) < MAX_AHEAD and self.entries + _entries(draft) <= MAX_AHEAD_ENTRIES

    def __iter__(self) -> Iterator[Draft]:
        return iter(self._drafts)

    def add(self, draft: Draft) -> None:
        """Keep ``draft``, which ``may_come`` has admitted, for its round."""
        self._drafts.append(draft)

    def next(self, verified: Draft, round_: int, generated: Sequence[int]) -> Draft | None:
        """Return the draft of ``round_``, the round after that of ``verified``; drop void drafts.

        Args:
            generated: the answer so far, the verdict on ``verified`` included.
        """
        self._drafts = [d for d in self._drafts if may_come(d, round_, generated)]
        if verified.autoregressive_rounds:
            probs = None if verified.probs is None else ()
            return Draft(
                round_,
                len(generated),
                (),
                probs,
                autoregressive_rounds=verified.autoregressive_rounds - 1,
            )
        due = next((d for d in self._drafts if d.round == round_), None)
        self._drafts = [d for d in self._drafts if d.round > round_]
        return due


def _entries(draft: Draft) -> int:
    return sum(len(q.ids) for q in draft.probs or ())


def may_come(draft: Draft, round_: int, generated: Sequence[int]) -> bool:
    """Return True if ``draft`` may follow, when the answer is ``generated`` before ``round_``.

    Each round adds at least one token, so a later round means a longer answer.
    """
    missing = draft.start - len(generated)
    if missing < 0 or (missing == 0) != (draft.round == round_):
        return False
    if draft.after is None:
        return missing == 0
    seen = generated[draft.start - len(draft.after) :]
    return draft.after[: len(seen)] == tuple(seen)
