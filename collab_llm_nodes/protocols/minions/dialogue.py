"""Parts common to all machines: checks of the input, and questions asked until they are clear."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from collab_llm_nodes.chat.base import Finish, Reply
from collab_llm_nodes.errors import DeadlineExceeded, InvalidInput, ModelError
from collab_llm_nodes.protocols.minions import prompts
from collab_llm_nodes.protocols.minions.messages import (
    AskRemote,
    Message,
    Retrieve,
    filled,
    replied,
)

T = TypeVar("T")


def check(question: str, documents: Sequence[str]) -> None:
    """Raise InvalidInput if there is no question, no text to answer it from, or no proper text."""
    if not question.strip():
        raise InvalidInput("is empty", field="question", remedy="ask something")
    if not any(document.strip() for document in documents):
        raise InvalidInput("hold no text", field="documents", remedy="give at least one with text")
    for i, text in enumerate((question, *documents)):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidInput(
                "holds half of a surrogate pair, which is no character",
                field=f"documents[{i - 1}]" if i else "question",
                remedy="decode it with errors='replace'",
            ) from None


def retrieved(question: str, k: int) -> Generator[Retrieve, Any, tuple[str, ...]]:
    """Return the ``k`` passages that fit the question best; InvalidInput if there are none."""
    passages: tuple[str, ...] = yield Retrieve(question, k)
    if not passages:
        raise nothing_fits()
    return passages


def nothing_fits() -> InvalidInput:
    """Return the error for a question to which no passage was found."""
    return InvalidInput(
        "no passage has to do with the question",
        field="question",
        remedy="ask in the words of the documents, or read all of them",
    )


def too_late() -> DeadlineExceeded:
    """Return the error for a model that had not ended its reply at the deadline."""
    return DeadlineExceeded(
        "the model had not ended its reply by then",
        field="deadline_s",
        remedy="raise it, or ask for fewer rounds",
    )


def answer_in(reply: Reply, role: str) -> str:
    """Return a reply as an answer.

    Args:
        role: of the model, remote or local.

    Raises:
        ModelError: there is no answer in it.
    """
    text = reply.text.strip()
    if not text and reply.finish is not Finish.DEADLINE:
        raise ModelError(
            f"the {role} model's reply holds no answer ({reply.finish.value})",
            field=f"{role}.max_tokens",
            remedy="raise it: models that think first need more tokens",
        )
    return text


def asked(
    ask: Callable[[], AskRemote], talk: list[Message], read: Callable[[str], T | None], repairs: int
) -> Generator[AskRemote, Any, T | None]:
    """Ask the remote, and ask again while its reply cannot be read.

    Args:
        ask: returns the action that sends ``talk``.
        talk: gets the replies, and the requests for better ones.
        read: returns what a reply says; None if it has not the form asked for.
        repairs: times to ask again.

    Returns:
        what ``read`` has returned; None if no reply could be read. The last one ends ``talk``.
    """
    for attempt in range(repairs + 1):
        if attempt:
            talk.append(filled(prompts.NOT_READABLE))
        reply: Reply = yield ask()
        talk.append(replied(reply.text))
        found = read(reply.text)
        if found is not None:
            return found
    return None
