"""Questions with known answers, one JSON object in a line.

{"question": "Which port does VNC use?", "answers": ["5900", "port 590x"]}
{"question": "What is the boiling point of ethanol?", "answers": []}     written nowhere
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.errors import CollabError, InvalidInput, translate_errors
from collab_llm_nodes.knowledge.words import words

DEVELOPMENT = Path(__file__).with_name("development.jsonl")
HANDBOOK = Path(__file__).with_name("handbook.jsonl")


@dataclass(frozen=True)
class Question:
    """A question about some documents.

    Attributes:
        answers: a right answer contains one of them, word by word; empty: the documents do not say.
    """

    question: str
    answers: tuple[str, ...]

    def is_right(self, said: str) -> bool:
        """Return True if ``said`` contains one of the answers."""
        read = _plain(said)
        return any(_plain(answer) in read for answer in self.answers)


def read_questions(file: Path) -> tuple[list[Question], list[str]]:
    """Return the questions of a file, and why lines were skipped.

    Raises:
        InvalidInput: the file cannot be read, or no line can be used.
    """
    with translate_errors(InvalidInput, f"cannot read {file}", field="questions", remedy="UTF-8"):
        lines = file.read_text(encoding="utf-8").splitlines()
    questions, skipped = [], []
    for number, line in enumerate(lines, 1):
        try:
            questions.append(_question(line))
        except CollabError as error:
            skipped.append(f"line {number}: {error}")
    if not questions:
        raise InvalidInput(
            f"{file} holds no question", field="questions", remedy="see docs/benchmarks"
        )
    return questions, skipped


def _question(line: str) -> Question:
    with translate_errors(InvalidInput, "no JSON object", field="question", remedy="see docs"):
        question = from_mapping(Question, dict(json.loads(line)))
    if not question.question.strip() or not all(map(_plain, question.answers)):
        raise InvalidInput("blank", field="question", remedy="leave the line out")
    return question


def _plain(text: str) -> str:
    found = " ".join(words(text))
    return f" {found} " if found else ""
