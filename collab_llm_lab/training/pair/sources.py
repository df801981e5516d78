"""Prompts to collect answers to: of recorded drives, pictures, files of questions, and texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.errors import InvalidInput, translate_errors
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.replay.log import looks_like_a_bag
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
    """Return the prompts of a ``.jsonl`` file, or of the bags, pictures and texts in a folder.

    Args:
        questions: asked about each picture of a folder.

    Raises:
        InvalidInput: the source holds none of these, or a bag without pictures.
    """
    found = list(_found(source, questions))
    if not found:
        raise InvalidInput(
            f"{source} holds nothing to ask",
            field="SOURCE",
            remedy="give bags, pictures (.jpg, .png), texts (.txt, .md), or a .jsonl file",
        )
    return found


def _found(source: Path, questions: Sequence[str]) -> Iterator[Asked]:
    if not source.exists():
        raise InvalidInput(f"{source} does not exist", field="SOURCE", remedy="check its name")
    if source.suffix == ".jsonl":
        yield from _of_questions(source)
    else:
        yield from _of_entry(source, questions)


def _of_entry(entry: Path, questions: Sequence[str]) -> Iterator[Asked]:
    """Yield the prompts of a file or a folder; files of other kinds have none."""
    if looks_like_a_bag(entry) or (entry / "metadata.yaml").is_file():
        yield from _of_bag(entry)
    elif entry.is_dir():
        for each in sorted(entry.iterdir()):
            yield from _of_entry(each, questions)
    elif entry.suffix.lower() in _PICTURES:
        for number, question in enumerate(questions, 1):
            yield Asked(f"{entry}, question {number}", partial(_of_picture, entry, question))
    elif entry.suffix in _TEXTS:
        yield from _of_text(entry)


# ------------------------------------------------------------ recorded drives


def _of_bag(bag: Path) -> Iterator[Asked]:
    """Yield what the navigator asked, each question with its picture."""
    steps = _drive(bag)
    if not any(step.picture for step in steps):
        raise InvalidInput(
            f"{bag} holds {len(steps)} questions and no picture of them",
            field="SOURCE",
            remedy="record the topic observation, too",
        )
    for place, step in enumerate(steps):
        yield Asked(f"{bag.name}, answer {step.number}", partial(_of_step, bag, place))


@lru_cache(maxsize=1)
def _drive(bag: Path) -> tuple[Step, ...]:
    """Read a bag; prompts are read in turn, so the pictures of one drive are held at a time."""
    return read_recording(bag).steps


def _of_step(bag: Path, place: int) -> Prompt:
    step = _drive(bag)[place]
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


# ------------------------------------------------------------ pictures and texts


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
