"""Prompts to collect answers to: of recorded drives, pictures, files of questions, and texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.errors import InvalidInput, translate_errors
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.replay.bag import SUFFIXES
from collab_llm_nodes.replay.recording import Step, read_recording

QUESTIONS = (
    "What is in front of you? Answer in one sentence.",
    "Which things do you see, and where in the picture is each of them?",
    "Is there a free path ahead? If not, what is in the way?",
    "You are a robot that follows a person. What do you do next, and why?",
    "Describe the room for somebody who has never seen it.",
)
"""Asked about each picture of a folder, unless the user asks otherwise."""
_PICTURES = {".jpg", ".jpeg", ".png"}
_TEXTS = {".txt", ".md"}
_SHORTEST, _LONGEST = 24, 128
"""Words of a passage whose beginning becomes a prompt, and of the longest such beginning."""


class Asked(NamedTuple):
    """A prompt that is yet to be read.

    Attributes:
        where: its source, and its place there, for people.
        read: returns it; raises InvalidInput if it cannot be used.
    """

    where: str
    read: Callable[[], Prompt]


def prompts_of(source: Path, questions: Sequence[str] = QUESTIONS) -> list[Asked]:
    """Return the prompts of a bag, a ``.jsonl`` file, a text, or a folder of pictures or texts.

    Args:
        questions: asked about each picture of a folder.

    Raises:
        InvalidInput: the source is none of these, it is empty, or it is a bag without pictures.
    """
    found = list(_found(source, questions))
    if not found:
        raise InvalidInput(
            f"{source} holds nothing to ask",
            field="SOURCE",
            remedy="give a bag, a folder of pictures or of texts (.txt, .md), or a .jsonl file",
        )
    return found


def _found(source: Path, questions: Sequence[str]) -> Iterator[Asked]:
    if not source.exists():
        raise InvalidInput(f"{source} does not exist", field="SOURCE", remedy="check its name")
    if source.suffix in SUFFIXES or (source / "metadata.yaml").is_file():
        return _of_bag(source)
    if source.suffix == ".jsonl":
        return _of_questions(source)
    if source.is_file():
        return _of_text(source) if source.suffix in _TEXTS else iter(())
    return _of_folder(source, questions)


# ------------------------------------------------------------ recorded drives


def _of_bag(bag: Path) -> Iterator[Asked]:
    """Yield what the navigator asked, each question with its picture."""
    steps = read_recording(bag).steps
    if not any(step.picture for step in steps):
        raise InvalidInput(
            f"{bag} holds {len(steps)} questions and no picture of them",
            field="SOURCE",
            remedy="record the topic observation, too",
        )
    for step in steps:
        yield Asked(f"{bag.name}, answer {step.number}", partial(_of_step, step))


def _of_step(step: Step) -> Prompt:
    if step.picture is None:
        raise InvalidInput("its picture is not in the bag", field="SOURCE")
    return Prompt(step.prompt, (step.picture,))


# ------------------------------------------------------------ questions


@dataclass(frozen=True)
class _Question:
    """A line of a file of questions; ``images`` are files, relative to it."""

    text: str
    turns: tuple[Turn, ...] = ()
    images: tuple[str, ...] = ()
    raw: bool = False


def _of_questions(file: Path) -> Iterator[Asked]:
    lines = _text_in(file).split("\n")
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield Asked(f"{file.name}, line {number}", partial(_of_line, line, file.parent))


def _of_line(line: str, folder: Path) -> Prompt:
    with translate_errors(
        InvalidInput,
        "cannot be used",
        field="line",
        remedy='such as {"text": "What is this?", "images": ["room.jpg"]}',
    ):
        question = from_mapping(_Question, json.loads(line))
        images = tuple((folder / name).read_bytes() for name in question.images)
        return Prompt(question.text, images, turns=question.turns, raw=question.raw)


# ------------------------------------------------------------ folders and texts


def _of_folder(folder: Path, questions: Sequence[str]) -> Iterator[Asked]:
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        if file.suffix.lower() in _PICTURES:
            for number, question in enumerate(questions, 1):
                yield Asked(f"{file}, question {number}", partial(_of_picture, file, question))
        elif file.suffix in _TEXTS:
            yield from _of_text(file)


def _of_picture(file: Path, question: str) -> Prompt:
    with translate_errors(
        InvalidInput, f"cannot read {file}", field="SOURCE", remedy="check the file"
    ):
        return Prompt(question, (file.read_bytes(),))


def _of_text(file: Path) -> Iterator[Asked]:
    """Yield the beginnings of a text's passages, which the target is to go on with."""
    for number, passage in enumerate(re.split(r"\n\s*\n", _text_in(file)), 1):
        words = passage.split()
        if len(words) >= _SHORTEST:
            beginning = " ".join(words[: min(len(words) // 3, _LONGEST)])
            prompt = Prompt(beginning, raw=True)
            yield Asked(f"{file}, passage {number}", partial(_as_it_is, prompt))


def _as_it_is(prompt: Prompt) -> Prompt:
    return prompt


def _text_in(file: Path) -> str:
    with translate_errors(
        InvalidInput, f"cannot read {file}", field="SOURCE", remedy="give a text in UTF-8"
    ):
        return file.read_text(encoding="utf-8")
