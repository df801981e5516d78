"""A question with its long answer in parts, the same for all sub-domains.

The parts give the plain answer, its outline and the text of each point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.training.text.phrases import Phrase


@dataclass(frozen=True)
class Part:
    """One part of an answer as templates: a title of 3 to 6 words and one or two sentences."""

    title: tuple[Phrase, ...]
    text: tuple[Phrase, ...]


@dataclass(frozen=True)
class Point:
    """One part of an answer as text."""

    title: str
    text: str


@dataclass(frozen=True)
class Task:
    """A prompt and its answer in parts.

    Attributes:
        turns: the prompt; the last turn is the user's question.
        points: 3 to 8 parts, in order.
        join: writes the whole answer from the texts of the points.
        mentions: names and numbers of the prompt that a right answer repeats.
    """

    turns: tuple[Turn, ...]
    points: tuple[Point, ...]
    join: Callable[[Sequence[str]], str]
    mentions: tuple[str, ...]

    @property
    def answer(self) -> str:
        """The whole answer."""
        return self.join([point.text for point in self.points])
