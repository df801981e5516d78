"""The user turn the navigator sends with every picture, the same in training and at run time."""

from __future__ import annotations

from collections.abc import Sequence

DEFAULT_TEMPLATE = "{instruction}. history: {history}."
"""Template that the embedded pair was trained on. Another model must be told its answers."""

HISTORY_LENGTH = 2
"""Actions of the past that the text mentions: what a search needs to keep its direction."""


def user_text(instruction: str, history: Sequence[str], template: str = DEFAULT_TEMPLATE) -> str:
    """``"find the red ball. history: turn left 45 degree, move forward 75 cm."``

    Args:
        instruction: what the person said; case, spacing and a final stop do not matter.
        history: the actions carried out so far, oldest first; only the last two are told.
        template: text with ``{instruction}`` and ``{history}``; every other brace stays as it is.
    """
    wish = " ".join(instruction.lower().split()).rstrip(".!? ")
    told = ", ".join(history[-HISTORY_LENGTH:]) if history else "none"
    # Not str.format: the instruction is a stranger's text and may hold braces itself.
    before, _, after = template.partition("{instruction}")
    return before.replace("{history}", told) + wish + after.replace("{history}", told)
