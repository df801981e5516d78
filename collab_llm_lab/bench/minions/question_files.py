"""Questions about a user's own documents, in a file of JSON lines, and the judging of answers.

The format is described in docs/benchmarks/minions.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.errors import CollabError, ConfigError, InvalidInput
from collab_llm_nodes.knowledge.documents import Document, DocumentLimits
from collab_llm_nodes.knowledge.files import Folders, read_document
from collab_llm_nodes.knowledge.words import words
from collab_llm_nodes.protocols.minions.plan import number
from collab_llm_nodes.protocols.minions.reading import as_text

EXACT, NUMBER, LLM = "exact", "number", "llm"
JUDGES = (EXACT, NUMBER, LLM)
SUM, DIFFERENCE = "sum", "difference"
_COMBINE = ("", SUM, DIFFERENCE)
_UNKNOWN = "unknown"
_LONGEST = 40
"""Longest answer that can be right, since a page contains every answer [words]."""
_LEAST_QUOTE = 4
"""Shortest part of a cited place that shows that it was found [words]."""
_TOLERANCE = 0.01
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_NUMERALS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen seventeen eighteen nineteen twenty"
)
_DIGITS = {word: str(value) for value, word in enumerate(_NUMERALS)}


@dataclass(frozen=True)
class Question:
    """One line of a file of questions.

    Attributes:
        documents: names of files in the folder of documents.
        answers: answers that are right; empty: the documents do not say, so that only "unknown" is.
        kind: group in the tables.
        cited: the places that answer it, word for word.
        tasks: tasks that the scripted remote gives to the worker; empty: the question itself.
        combine: how it puts the answers to two tasks together: sum or difference.
        development: kept for the development of prompts; not in the figures.
    """

    id: str
    documents: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    kind: str = ""
    cited: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    combine: str = ""
    development: bool = False

    def __post_init__(self) -> None:
        for name in ("id", "question", "documents"):
            if not getattr(self, name):
                raise ConfigError("is empty", field=name, remedy="give one")
        if self.combine not in _COMBINE:
            raise ConfigError(
                f"is {self.combine!r}", field="combine", remedy=f"{SUM} or {DIFFERENCE}"
            )


@dataclass(frozen=True)
class QuestionFile:
    """The usable questions of a file, their documents by name, and why others were skipped."""

    questions: tuple[Question, ...]
    documents: dict[str, Document]
    skipped: tuple[str, ...]

    def without_evidence(self) -> list[str]:
        """Return the ids of questions that cite a place which their documents do not have."""
        plain = {name: _plain(text.content) for name, text in self.documents.items()}
        return [
            question.id
            for question in self.questions
            if not all(
                any(_plain(place) in plain[name] for name in question.documents)
                for place in question.cited
            )
        ]


def read_questions(file: Path, folder: Path) -> QuestionFile:
    """Read a file of questions, and the documents in ``folder`` that they are about.

    A line that cannot be used is skipped, with its number and the reason.

    Raises:
        InvalidInput: the file cannot be read, or no line can be used.
    """
    folders, limits = Folders([folder]), DocumentLimits()
    questions: dict[str, Question] = {}
    documents: dict[str, Document] = {}
    skipped = []
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise InvalidInput(f"cannot read {file}: {error.strerror}", field="--questions") from error
    for place, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            question = _question(line)
            if question.id in questions:
                raise InvalidInput("a line before has it, too", field="id", remedy="rename it")
            for name in question.documents:
                if name not in documents:
                    documents[name] = read_document(name, folders, limits, name)
        except CollabError as error:
            skipped.append(f"{file.name}:{place}: {error}")
        else:
            questions[question.id] = question
    if not questions:
        raise InvalidInput(
            f"{file} holds no question that can be used: {'; '.join(skipped[:3]) or 'it is empty'}",
            field="--questions",
            remedy="see docs/benchmarks/minions.md",
        )
    return QuestionFile(tuple(questions.values()), documents, tuple(skipped))


def _question(line: str) -> Question:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"is no JSON: {error}", field="line") from error
    if not isinstance(found, dict):
        raise InvalidInput("is no JSON object", field="line")
    return from_mapping(Question, found)


def is_right(question: Question, answer: str, judge: str = EXACT) -> bool:
    """Judge an answer without a model.

    ``exact``: an accepted answer stands in it word for word, numerals as digits, or each of its
    parts if it has a semicolon; it has at most 40 words for each of them, and begins with "yes" or
    "no" if that is asked. ``number``: it holds one number,
    within 1 % of an accepted one. If nothing is accepted, only an abstention is right.
    """
    nothing = says_unknown(answer)
    if not question.answers or nothing:
        return nothing and not question.answers
    if judge == NUMBER:
        return any(_same_number(answer, accepted) for accepted in question.answers)
    return any(_states(answer, accepted.split(";")) for accepted in question.answers)


def says_unknown(answer: str) -> bool:
    """Return True if ``answer`` says that the text does not tell."""
    return as_text(answer) is None or _plain(answer) == _UNKNOWN


def finds(question: Question, outputs: Sequence[str]) -> bool:
    """Return True if each cited place is among the texts."""
    return all(any(stands_in(text, place) for text in outputs) for place in question.cited)


def stands_in(text: str, place: str) -> bool:
    """Return True if ``text`` holds ``place``, or a sentence of it; case and marks do not count."""
    text, place = _plain(text), _plain(place)
    return place in text or (len(text.split()) >= _LEAST_QUOTE and text in place)


def _states(answer: str, parts: Sequence[str]) -> bool:
    """Return True if ``answer`` has each of the parts, and little else."""
    said = _plain(answer).split()
    if len(said) > _LONGEST * len(parts):
        return False
    return all(_has(said, _plain(part).split()) for part in parts)


def _has(said: list[str], part: list[str]) -> bool:
    if part in (["yes"], ["no"]):
        return said[:1] == part
    return any(said[i : i + len(part)] == part for i in range(len(said) - len(part) + 1))


def _same_number(answer: str, accepted: str) -> bool:
    answer, accepted = digits(answer), digits(accepted)
    if len(set(_NUMBER.findall(answer))) != 1:
        return False
    said, right = number(answer), number(accepted)
    assert right is not None, "an accepted answer is no number"
    return said is not None and abs(said - right) <= _TOLERANCE * max(abs(right), 0.5)


def digits(text: str) -> str:
    """Return ``text`` with numerals as digits."""
    return " ".join(_DIGITS.get(word.lower(), word) for word in text.split())


def _plain(text: str) -> str:
    """Return the words of ``text`` without articles, numerals as digits."""
    found = (_DIGITS.get(word, word) for word in words(text))
    return " ".join(word for word in found if word not in ("a", "an", "the"))
