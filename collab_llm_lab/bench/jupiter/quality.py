"""Quality of answers in sequence and along outlines, by kind of question (paper 004, Table VII).

The paper lets another model judge. Here the grammar of the text domain judges, which knows what a
right answer says. It has neither programs nor mathematics; those two categories are represented by
answers with the same property: each of their tokens follows from tokens before it.

| category | question | an outline |
| --- | --- | --- |
| generic | a talk with the robot of the house | suits |
| knowledge | how to do something; the model knows the steps | suits |
| counterfactual | the same, supposed against the facts | suits |
| coding | repeat codes, tables or sentences exactly | does not suit |
| math | report figures with running sums and totals | does not suit |
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from collab_llm_lab.bench.harness import Log
from collab_llm_lab.bench.jupiter.decoding import OUTLINE_TOKENS, POINT_TOKENS
from collab_llm_lab.bench.jupiter.local_workers import local_workers
from collab_llm_lab.bench.jupiter.material import Ids, Questions
from collab_llm_lab.bench.jupiter.real import control, pipeline
from collab_llm_lab.phrases import says, words
from collab_llm_lab.training.text.checker import check, unknown_word
from collab_llm_lab.training.text.samples import Sample, make_sample
from collab_llm_lab.training.text.skills import DOMAINS, plain_facts
from collab_llm_lab.training.text.tasks import Point, Task
from collab_llm_lab.training.text.world import World
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.models.partial import read_facts
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.jupiter.generation import answer, answer_in_points
from collab_llm_nodes.protocols.jupiter.lane import DecodeConfig
from collab_llm_nodes.protocols.jupiter.outline import MOST_POINTS, join_points, read_point
from collab_llm_nodes.protocols.jupiter.pipeline import Pipeline
from collab_llm_nodes.protocols.jupiter.route import route

ANSWER_TOKENS = 400
"""Tokens of an answer in sequence at most."""
MARGIN = 0.05
"""The router errs if the other mode scores better by more than this."""
_SAYING = 3  # words of a sentence that can show which point it belongs to

_NUMBER = re.compile(r"^\s*\d{1,2}[.)] ", re.MULTILINE)
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")


@dataclass(frozen=True)
class Question:
    """A question, and what its judge needs.

    Attributes:
        sample: with the right answer as its last turn.
        points: parts of the right answer; none if it has no parts.
        mentions: names and numbers that it has.
    """

    category: str
    sample: Sample
    points: tuple[Point, ...] = ()
    mentions: tuple[str, ...] = ()

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns before the answer."""
        return self.sample.turns[:-1]

    @property
    def right(self) -> str:
        """The right answer."""
        return self.sample.turns[-1].content


def _planned(style: str, suppose: bool = False) -> Callable[[str, World], Question]:
    """Return a maker of questions whose answers have points."""

    def make(category: str, world: World) -> Question:
        task: Task = DOMAINS[style].draw(world)
        turns = task.turns
        if suppose:
            asked, what = turns[-1], task.mentions[0]
            said = f"There is no {what} here. But suppose there were one. {asked.content}"
            turns = (*turns[:-1], Turn(asked.role, said))
        whole = (*turns, Turn("assistant", task.answer))
        sample = Sample(style, "plain", whole, plain_facts(task))
        return Question(category, sample, task.points, task.mentions)

    return make


def _exact(category: str, world: World) -> Question:
    """Make a request to repeat something exactly."""
    styles = tuple(DOMAINS)
    sample = make_sample(world.rng, world.any(styles), "copy", held_out=True)
    return Question(category, sample)


_MAKE: Mapping[str, Callable[[str, World], Question]] = {
    "generic": _planned("conversation"),
    "knowledge": _planned("instructions"),
    "counterfactual": _planned("instructions", suppose=True),
    "coding": _exact,
    "math": _planned("reports"),
}
CATEGORIES = tuple(_MAKE)


def questions(category: str, count: int, seed: int) -> list[Question]:
    """Return questions of a category, with names and wordings that no training has shown."""
    return [
        _MAKE[category](category, World(random.Random(f"{seed} {category} {i}"), held_out=True))
        for i in range(count)
    ]


@dataclass(frozen=True)
class Score:
    """Judgement of one answer.

    Attributes:
        right: the grammar's checker finds nothing wrong, its form included.
        grammar: share of its sentences whose words the grammar or the question has.
        coverage: share of what the right answer says that this one says: points, names and
            numbers; of an exact text, its words in their order.
        words: length.
    """

    right: bool
    grammar: float
    coverage: float
    words: int

    @property
    def value(self) -> float:
        """One number for both: content that is there, in sound sentences."""
        return self.grammar * self.coverage


def judge(question: Question, text: str) -> Score:
    """Return the grammar's judgement of ``text`` as an answer."""
    sentences = [part for part in _SENTENCE.split(_NUMBER.sub("", text)) if part.strip()]
    sound = sum(not unknown_word(question.sample, part) for part in sentences)
    return Score(
        not check(question.sample, text),
        sound / len(sentences) if sentences else 0.0,
        _coverage(question, text, sentences),
        len(text.split()),
    )


def _coverage(question: Question, text: str, sentences: Sequence[str]) -> float:
    wanted = len(question.points) + len(question.mentions)
    if not wanted:
        right, said = question.right.split(), text.split()
        same = SequenceMatcher(None, right, said, autojunk=False).get_matching_blocks()
        return sum(block.size for block in same) / len(right)
    found = sum(says(text, mention) for mention in question.mentions)
    missing = list(question.points)
    for sentence in sentences:  # each speaks for one point at most
        own = set(words(sentence))
        point = next((p for p in missing if len(own) >= _SAYING and own <= p.words), None)
        if point is not None:
            missing.remove(point)
    return (found + len(question.points) - len(missing)) / wanted


@dataclass(frozen=True)
class Answered:
    """Both answers to a question.

    Attributes:
        usable: the outline had enough points; else the answer along it is the one in sequence.
    """

    question: Question
    naive: str
    outline: str
    usable: bool


class Asker:
    """Asks a model over a pipeline in both modes, greedily.

    Args:
        reader: of the model's tokenizer.
    """

    def __init__(self, made: Pipeline, reader: Questions) -> None:
        self._made, self._reader = made, reader

    def ask(self, question: Question) -> Answered:
        """Return both answers."""
        plain, directed = self._reader.both(question.turns)
        naive = self._text(answer(self._made, plain, DecodeConfig(ANSWER_TOKENS), control()).tokens)
        _, lanes = answer_in_points(
            self._made,
            directed,
            DecodeConfig(OUTLINE_TOKENS),
            self._reader.prompts.requests,
            DecodeConfig(POINT_TOKENS),
            control(),
            most=MOST_POINTS,
        )
        if not lanes:
            return Answered(question, naive, naive, usable=False)
        texts = [read_point(self._text(lane.tokens))[0] for lane in lanes]
        return Answered(question, naive, join_points(texts), usable=True)

    def _text(self, ids: Ids) -> str:
        return str(self._reader.tokenizer.decode(list(ids), skip_special_tokens=True))


def figures(answers: Sequence[Answered]) -> dict[str, Any]:
    """Return the figures of one category.

    Returns:
        ``naive`` and ``outline`` with the means of :class:`Score`'s figures; ``router`` with
        ``declined``, ``errors`` (questions that it sends to the mode whose answer scores less) and
        ``score`` (the mean of the modes that it chooses); ``unusable`` outlines; ``questions``.
    """
    scores = [(judge(a.question, a.naive), judge(a.question, a.outline)) for a in answers]
    accepted = [route(a.question.turns[-1].content).outline for a in answers]
    chosen = [pair[outline].value for pair, outline in zip(scores, accepted, strict=True)]
    others = [pair[not outline].value for pair, outline in zip(scores, accepted, strict=True)]
    return {
        "naive": _means([naive for naive, _ in scores]),
        "outline": _means([outline for _, outline in scores]),
        "router": {
            "declined": accepted.count(False),
            "errors": sum(b > a + MARGIN for a, b in zip(chosen, others, strict=True)),
            "score": sum(chosen) / len(chosen),
        },
        "unusable": sum(not a.usable for a in answers),
        "questions": len(answers),
    }


def _means(scores: Sequence[Score]) -> dict[str, float]:
    return {
        name: sum(getattr(score, attribute) for score in scores) / len(scores)
        for name, attribute in (
            ("score", "value"),
            ("right", "right"),
            ("grammar", "grammar"),
            ("coverage", "coverage"),
            ("words", "words"),
        )
    }


def run_quality(model: str, count: int, seed: int, log: Log) -> dict[str, Any]:
    """Ask ``count`` questions of each category in both modes.

    Args:
        model: of the text domain, with a chat template.

    Returns:
        ``quality.<category>`` as :func:`figures` returns it, and ``quality_router_error``: the
        share of the router's errors, the mean over categories.
    """
    reader = Questions(read_facts(ModelConfig(model)).tokenizer)
    found: dict[str, Any] = {}
    with local_workers(1, model) as running, pipeline(running, lanes=1 + MOST_POINTS) as made:
        asker = Asker(made, reader)
        for category in CATEGORIES:
            log(f"quality: {category} ...")
            found[category] = figures([asker.ask(q) for q in questions(category, count, seed)])
    errors = [row["router"]["errors"] / row["questions"] for row in found.values()]
    return {"quality": found, "quality_router_error": sum(errors) / len(errors)}
