"""The user turn the navigator sends with every picture, the same in training and at run time."""

from __future__ import annotations

from collections.abc import Sequence

HISTORY_LENGTH = 2
"""Actions of the past that the text mentions: what a search needs to keep its direction."""


def user_text(instruction: str, history: Sequence[str]) -> str:
    """``"find the red ball. history: turn left 45 degree, move forward 75 cm."``

    Args:
        instruction: what the person said; case, spacing and a final stop do not matter.
        history: the actions carried out so far, oldest first; only the last two are told.
    """
    wish = " ".join(instruction.lower().split()).rstrip(".!? ")
    told = ", ".join(history[-HISTORY_LENGTH:]) if history else "none"
    return f"{wish}. history: {told}."
