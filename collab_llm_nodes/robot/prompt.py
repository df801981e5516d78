"""The user turn the navigator sends with every picture, the same in training and at run time."""

from __future__ import annotations

import re
from collections.abc import Sequence

DEFAULT_TEMPLATE = "{instruction}. history: {history}."
"""Template that the embedded pair was trained on. Another model must be told its answers."""

MEMORY = "{memory}"
"""Place in a template for what the robot remembers about the instruction."""

_PLACES = re.compile(r"\{(instruction|history|memory)\}")
_MOST_REMEMBERED = 300  # characters

HISTORY_LENGTH = 2
"""Actions of the past that the text mentions: what a search needs to keep its direction."""


def user_text(
    instruction: str,
    history: Sequence[str],
    template: str = DEFAULT_TEMPLATE,
    memory: str = "",
) -> str:
    """``"find the red ball. history: turn left 45 degree, move forward 75 cm."``

    Args:
        instruction: what the person said; case, spacing and a final stop do not matter.
        history: the actions carried out so far, oldest first; only the last two are told.
        template: text with ``{instruction}``, ``{history}`` and ``{memory}``; every other brace
            stays as it is.
        memory: what the robot remembers; one line of it, of 300 characters at most, is told.
    """
    wish = " ".join(instruction.lower().split()).rstrip(".!? ")
    told = ", ".join(history[-HISTORY_LENGTH:]) if history else "none"
    remembered = " ".join(memory.split())[:_MOST_REMEMBERED] or "nothing"
    values = {"instruction": wish, "history": told, "memory": remembered}
    # Not str.format: the instruction is a stranger's text and may hold braces itself.
    return _PLACES.sub(lambda place: values[place[1]], template)
