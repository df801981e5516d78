"""Solved examples before each job, which show a small model the form of its reply."""

from __future__ import annotations

import json
from dataclasses import dataclass

from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.minions.outputs import spoken
from collab_llm_nodes.protocols.minions.prompts import NOT_FOUND, Form, Style


@dataclass(frozen=True)
class Example:
    """A job and its output; ``citation`` is empty if the text does not give the answer."""

    text: str
    task: str
    citation: str = ""
    answer: str = ""

    def reply(self, form: Form) -> str:
        """Return the worker's reply."""
        if form is Form.SENTENCE:
            return spoken(self.citation) or NOT_FOUND
        how = "The text says so." if self.citation else "None"
        fields = {
            "explanation": how,
            "citation": self.citation or "None",
            "answer": self.answer or "None",
        }
        return json.dumps(fields)


_STOVE = (
    "The stove burns beech or birch. A full load of 8 kg lasts four hours.\nEmpty the ash daily."
)
_VISIT = (
    "2025-03-04 10:12 Ada Wolf brought the parcel to the lab.\n2025-03-04 11:30 The lab was dark."
)

EXAMPLES = (
    Example(
        _STOVE,
        "How long does a full load last?",
        "A full load of 8 kg lasts four hours.",
        "four hours",
    ),
    Example(_STOVE, "What is the price of the stove?"),
    Example(
        _VISIT,
        "Who brought the parcel?",
        "2025-03-04 10:12 Ada Wolf brought the parcel to the lab.",
        "Ada Wolf",
    ),
)
"""Examples with and without an answer in turn; the last one has one, since models repeat it."""


def example_turns(style: Style, count: int) -> tuple[Turn, ...]:
    """Return the last ``count`` examples as a chat; none for forms that have no examples."""
    if style.form is Form.QUOTES or (style.form is Form.FIELDS and style.reply is None):
        return ()
    turns: list[Turn] = []
    for example in EXAMPLES[len(EXAMPLES) - count :]:
        asked = style.worker.format(chunk=example.text, task=example.task, advice="")
        turns += [Turn("user", asked), Turn("assistant", example.reply(style.form))]
    return tuple(turns)
