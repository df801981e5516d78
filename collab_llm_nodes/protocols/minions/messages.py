"""Actions and outcomes of the protocol machines.

A machine is a generator: it yields an action, is sent the action's reply and returns an
``Outcome``. It does no I/O and has no clock: a driver asks the models, runs the programs and throws
errors, such as a deadline, into the machine.

Only an ``AskRemote`` leaves the robot. Each of its parts has a kind, so that one place can count
what is disclosed.
"""

from __future__ import annotations

import string
from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from collab_llm_nodes.errors import CollabError, ModelError
from collab_llm_nodes.models.guide import Guide
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.minions.jobs import Job


class CannotPlan(ModelError):
    """The remote model cannot plan the question, for example one unlike its training data."""

    def __init__(self, why: str, *, remedy: str = "") -> None:
        super().__init__(
            f"the remote model cannot plan this question: {why}",
            field="question",
            remedy=remedy or "ask in other words, or use a more capable remote",
        )


class Kind(str, Enum):
    """Origin of a text that the remote reads."""

    INSTRUCTIONS = "instructions"  # this package's own sentences, codes and counts
    QUESTION = "question"  # the user's
    REMOTE = "remote"  # the remote's own words, sent back
    EXTRACT = "extract"  # kept outputs of the worker
    MESSAGE = "message"  # the local model's side of a chat
    PASSAGE = "passage"  # retrieved passages of the documents
    DOCUMENT = "document"  # whole documents


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
        """Text of the whole turn."""
        return "".join(part.text for part in self.parts)


def fill(template: str, **values: Part | Message | str) -> Message:
    """Return ``template`` as a user's message with ``values`` at its places.

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


def reply_turn(text: str) -> Message:
    """Return the remote's reply as a turn of its chat; an empty one gets a placeholder."""
    silent = Part(Kind.INSTRUCTIONS, "(no reply)")
    return Message("assistant", (Part(Kind.REMOTE, text) if text.strip() else silent,))


@dataclass(frozen=True)
class AskRemote:
    """Ask the remote model; the reply is a ``chat.base.Reply``.

    Attributes:
        stage: "message", "advice", "decompose", "synthesize" or "answer".
        round: counts from 1.
        choice_bits: information in the choices of programs since the last message
            (``choice.py``).
        guide: limit on the reply.
    """

    stage: str
    round: int
    messages: tuple[Message, ...]
    temperature: float
    max_tokens: int
    choice_bits: int = 0
    guide: Guide | None = None


@dataclass(frozen=True)
class LocalPrompt:
    """One prompt for the local model.

    Attributes:
        seed: differs between samples of one job.
        quotable: text whose lines the reply may quote; empty: unconstrained.
        guide: limit on the reply.
    """

    turns: tuple[Turn, ...]
    temperature: float
    max_tokens: int
    seed: int = 0
    quotable: str = ""
    guide: Guide | None = None


@dataclass(frozen=True)
class AskLocal:
    """Ask the local model all prompts at once; the reply is a tuple of replies or errors, in order.

    Prompts over one chunk begin with the same text and are neighbours.

    Attributes:
        stage: "execute", "repair" (the prompts of unreadable replies, extended) or "answer".
    """

    stage: str
    round: int
    prompts: tuple[LocalPrompt, ...]


@dataclass(frozen=True)
class RunProgram:
    """Run a program of the remote in the sandbox; the reply is ``ProgramJobs`` or a ``Fault``.

    Attributes:
        last_jobs: jobs of the last round with their outputs.
        chunkers, chunk_size: see ``Sandbox.run``.
    """

    round: int
    program: str
    documents: tuple[str, ...]
    last_jobs: tuple[Job, ...]
    chunkers: tuple[str, ...]
    chunk_size: int


@dataclass(frozen=True)
class Aggregate:
    """Run a program's ``transform_outputs``; the reply is its text or a ``Fault``.

    Attributes:
        jobs: kept ones without their chunks, so that it can tell the remote nothing else.
    """

    round: int
    program: str
    jobs: tuple[Job, ...]


@dataclass(frozen=True)
class Retrieve:
    """Find the ``k`` passages that fit the question best; the reply is a tuple of texts."""

    question: str
    k: int


@dataclass(frozen=True)
class Executed:
    """Report that a round's jobs are done; the reply is None."""

    round: int
    jobs: tuple[Job, ...]
    left_out: int = 0


class Mark(str, Enum):
    """Reservation about an answer."""

    FORCED = "forced"
    PARTIAL = "partial"
    UNDECIDED = "undecided"
    UNREADABLE = "unreadable"
    UNUSABLE = "unusable"

    @property
    def message(self) -> str:
        """Sentence for the user."""
        return _MARKED[self]


_MARKED = {
    Mark.FORCED: "The remote had to answer in its last round.",
    Mark.PARTIAL: "Limits left out jobs, outputs or text.",
    Mark.UNDECIDED: "The remote made no decision.",
    Mark.UNREADABLE: "The remote's reply had the wrong form, and is given as it is.",
    Mark.UNUSABLE: "Most outputs of the local model in a round could not be used.",
}
UNSURE = frozenset((Mark.FORCED, Mark.UNDECIDED, Mark.UNREADABLE))
"""Marks of answers that the remote did not decide on freely."""


@dataclass(frozen=True)
class Outcome:
    """The answer.

    Attributes:
        rounds: rounds that were started.
        jobs: jobs of the last round.
        error: error that ended it early, such as a deadline; ``answer`` is then the best so far.
    """

    answer: str
    marks: frozenset[Mark] = frozenset()
    rounds: int = 1
    explanation: str = ""
    jobs: tuple[Job, ...] = ()
    error: CollabError | None = None


Action = AskRemote | AskLocal | RunProgram | Aggregate | Retrieve | Executed
Machine = Generator[Action, Any, Outcome]
"""Yields actions, is sent their replies, returns the outcome."""
