"""The user turn the navigator sends with every picture, the same in training and at run time."""

from __future__ import annotations

import re
from collections.abc import Sequence

DEFAULT_TEMPLATE = "{instruction}. history: {history}."
"""Template without the search. Models that are not trained on it need to be told the answers."""

SEARCH_TEMPLATE = "{instruction}. history: {history}. search: {search}."
"""Template that the embedded pair is trained on: it searches with the robot's help."""

MEMORY = "{memory}"
"""Placeholder in a template for the robot's memory about the instruction."""

SEARCH = "{search}"
"""Placeholder in a template for the memory of this task's search (``robot/search.py``)."""

_PLACES = re.compile(r"\{(instruction|history|memory|search)\}")
_MOST_REMEMBERED = 300  # characters

HISTORY_LENGTH = 2
"""Past actions in the prompt: a search needs them to keep its direction."""


def user_text(
    instruction: str,
    history: Sequence[str],
    template: str = DEFAULT_TEMPLATE,
    memory: str = "",
    search: str = "",
) -> str:
    """Return the question to the model about one picture.

    Such as ``"find the red ball. history: turn left 45 degree, move forward 75 cm."``

    Args:
        instruction: as given; case, spacing and a final stop do not matter.
        history: phrases of the actions executed so far, oldest first; the last two are used.
        template: text with ``{instruction}``, ``{history}``, ``{memory}`` and ``{search}``; every
            other brace stays as it is.
        memory: the memory's answer; 300 characters of it are used, on one line.
        search: text of the ``SearchMemory``.
    """
    goal = " ".join(instruction.lower().split()).rstrip(".!? ")
    past = ", ".join(history[-HISTORY_LENGTH:]) if history else "none"
    remembered = " ".join(memory.split())[:_MOST_REMEMBERED] or "nothing"
    values = {
        "instruction": goal,
        "history": past,
        "memory": remembered,
        "search": search or "none",
    }
    # Not str.format: an instruction may hold braces itself.
    return _PLACES.sub(lambda place: values[place[1]], template)
