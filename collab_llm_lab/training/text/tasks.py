"""A question with its long answer in parts, the same for all sub-domains.

The parts give the plain answer, its outline and the text of each point.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from collab_llm_lab.phrasebook import Section
from collab_llm_lab.phrases import (
    Grammar,
    Phrase,
    Voice,
    literal_words,
    say,
    words,
)
from collab_llm_nodes.models.turns import Turn


@dataclass(frozen=True)
class Part:
    """One part of an answer as templates.

    Attributes:
        title: wordings of its line in an outline, a few words each, without alternatives.
        text: wordings of one or two sentences.
        ending: wordings of a sentence that follows the text.
    """

    title: tuple[Phrase, ...]
    text: tuple[Phrase, ...]
    ending: tuple[Phrase, ...] = ()

    def say(self, voice: Voice, fields: Mapping[str, str]) -> Point:
        """Return this part as text."""
        text = say(self.text, voice, fields)
        if self.ending:
            text += " " + say(self.ending, voice, fields)
        return Point(self, fields, say(self.title, voice, fields), text)

    @cached_property
    def words(self) -> frozenset[str]:
        """All words of the text's templates."""
        return frozenset(literal_words(*(phrase.text for phrase in (*self.text, *self.ending))))


def parts_of(book: Section, grammar: Grammar) -> tuple[Part, ...]:
    """Return the parts that a section lists: the titles in each heading, the texts beneath it."""
    return tuple(
        Part(part.heading.phrases(grammar, *titles.strip("[]").split(" / ")), part.phrases(grammar))
        for titles, part in book.sections.items()
    )


@dataclass(frozen=True)
class Point:
    """One part of an answer as text."""

    part: Part
    fields: Mapping[str, str]
    title: str
    text: str

    @property
    def titles(self) -> tuple[str, ...]:
        """All wordings of the title."""
        voice = Voice(random.Random(0))
        return tuple(say((title,), voice, self.fields) for title in self.part.title)

    @property
    def words(self) -> frozenset[str]:
        """All words that any wording of the text may have."""
        return self.part.words.union(*(words(value) for value in self.fields.values()))


@dataclass(frozen=True)
class Task:
    """A prompt and its answer in parts.

    Attributes:
        turns: the prompt; the last turn is the user's question.
        points: 3 to 8 parts, in order.
        join: writes the whole answer from the texts of the points.
        mentions: names and numbers of the prompt that a right answer repeats.
        possible: all points that a right answer may have, in order, including `points`.
        least: the least number of points of a right answer.
    """

    turns: tuple[Turn, ...]
    points: tuple[Point, ...]
    join: Callable[[Sequence[str]], str]
    mentions: tuple[str, ...]
    possible: tuple[Point, ...]
    least: int

    @property
    def answer(self) -> str:
        """The whole answer."""
        return self.join([point.text for point in self.points])
