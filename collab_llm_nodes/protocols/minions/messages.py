"""Messages of the machines: what is asked of whom, and what comes back.

A machine is a generator. It yields an action, is sent the reply that the action names, and returns
an ``Outcome``. It does no I/O and knows no clock: a driver asks the models, runs the programs and
throws into the machine what goes wrong, such as a deadline.

Only an ``AskRemote`` leaves the robot. Each of its parts names its kind, so that one place can
count what has been disclosed.
"""

from __future__ import annotations

import string
from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from collab_llm_nodes.errors import CollabError, ModelError
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.minions.jobs import Job


class CannotPlan(ModelError):
    """The remote model has no plan for the question, such as one unlike all it was trained on.

    A remote of the package's own may raise it from ``ChatModel.ask``, or return it as a result.
    """

    def __init__(self, why: str, *, remedy: str = "") -> None:
        super().__init__(
            f"the remote model cannot plan this question: {why}",
            field="question",
            remedy=remedy or "ask in other words, or use a more capable remote",
        )


class Kind(str, Enum):
    """Origin of a part of what the remote reads."""

    INSTRUCTIONS = "instructions"  # this package's own sentences, codes and counts
    QUESTION = "question"  # the user's
    REMOTE = "remote"  # the remote's own words, sent back
    EXTRACT = "extract"  # the worker's outputs that were kept
    MESSAGE = "message"  # the local model's side of a chat
    PASSAGE = "passage"  # retrieved pieces of the documents
    DOCUMENT = "document"  # the documents


@dataclass(frozen=True)
class Part:
    """Text of one origin."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Message:
    """One turn of a chat with the remote; ``role`` as in ``Turn``."""

    role: str
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """The whole turn."""
        return "".join(part.text for part in self.parts)


def filled(template: str, **values: Part | Message | str) -> Message:
    """Return the user's message that ``template`` becomes with ``values`` at its places.

    Args:
        values: parts, and those of a message, keep their kinds; a str counts as instructions.
    """
    parts: list[Part] = []
    for literal, place, _, _ in string.Formatter().parse(template):
        parts.append(Part(Kind.INSTRUCTIONS, literal))
        match values[place] if place is not None else "":
            case Part() as part:
                parts.append(part)
            case Message(parts=more):
                parts += more
            case text:
                parts.append(Part(Kind.INSTRUCTIONS, text))
    return Message("user", tuple(part for part in parts if part.text))


def replied(text: str) -> Message:
    """Return the remote's own reply as a turn of its chat, which must not be empty."""
    silent = Part(Kind.INSTRUCTIONS, "(no reply)")
    return Message("assistant", (Part(Kind.REMOTE, text) if text.strip() else silent,))


@dataclass(frozen=True)
class AskRemote:
    """Ask the remote model; the reply is a ``chat.base.Reply``.

    Attributes:
        stage: "message", "decompose", "synthesize" or "answer".
        round: counts from 1.
        choice_bits: what it tells, beside its texts, by what a program has chosen since the message
            before (``choice.py``).
    """

    stage: str
    round: int
    messages: tuple[Message, ...]
    temperature: float
    max_tokens: int
    choice_bits: int = 0


@dataclass(frozen=True)
class LocalPrompt:
    """One prompt for the local model.

    Attributes:
        seed: differs between samples of one job.
        quotable: text with the lines that the reply may quote; empty: it is not held to any.
    """

    turns: tuple[Turn, ...]
    temperature: float
    max_tokens: int
    seed: int = 0
    quotable: str = ""


@dataclass(frozen=True)
class AskLocal:
    """Ask the local model, all prompts at once; the reply is a tuple of their replies, in order.

    A prompt that could not be answered has its ``CollabError`` in place of it. Prompts
    over one chunk begin with the same text and stand next to each other.
    """

    stage: str
    round: int
    prompts: tuple[LocalPrompt, ...]


@dataclass(frozen=True)
class RunProgram:
    """Run a program of the remote in the sandbox; the reply is ``ProgramJobs`` or a ``Fault``.

    Attributes:
        last_jobs: all jobs of the last round, with their outputs.
        chunkers, chunk_size: see ``Sandbox.run``.
    """

    round: int
    program: str
    documents: tuple[str, ...]
    last_jobs: tuple[Job, ...]
    chunkers: tuple[str, ...]
    chunk_size: int


@dataclass(frozen=True)
class Retrieve:
    """Find the ``k`` passages that fit the question best; the reply is a tuple of texts."""

    question: str
    k: int


@dataclass(frozen=True)
class Executed:
    """Tell that a round's jobs are done; the reply is None.

    Attributes:
        cut: jobs left out because they exceeded a limit.
    """

    round: int
    jobs: tuple[Job, ...]
    cut: int = 0


class Mark(str, Enum):
    """Reservation about an answer."""

    FORCED = "forced"  # the remote had to answer: no rounds were left
    PARTIAL = "partial"  # limits left jobs or outputs out
    UNDECIDED = "undecided"  # the remote never said that it was sure
    UNREADABLE = "unreadable"  # the remote's reply had not the form asked for


@dataclass(frozen=True)
class Outcome:
    """The answer.

    Attributes:
        rounds: rounds that were begun.
        jobs: those of the last round.
        error: what has ended it early, such as a deadline; ``answer`` is then the best there is.
    """

    answer: str
    marks: frozenset[Mark] = frozenset()
    rounds: int = 1
    explanation: str = ""
    jobs: tuple[Job, ...] = ()
    error: CollabError | None = None


Action = AskRemote | AskLocal | RunProgram | Retrieve | Executed
Machine = Generator[Action, Any, Outcome]
"""Yields actions, is sent their replies, returns the outcome."""
