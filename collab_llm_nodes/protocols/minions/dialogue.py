"""Parts common to all machines: input checks, retrieval, and repeated questions."""

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
    fill,
    reply_turn,
)

T = TypeVar("T")
_REPAIRS = 2
"""Repeated questions after a reply of the wrong form; a model that errs thrice does not learn."""


def check_input(question: str, documents: Sequence[str]) -> None:
    """Raise InvalidInput if the question or all documents are empty, or one is no valid Unicode."""
    if not question.strip():
        raise InvalidInput("is empty", field="question", remedy="ask something")
    if not any(document.strip() for document in documents):
        raise InvalidInput("hold no text", field="documents", remedy="give at least one with text")
    for i, text in enumerate((question, *documents)):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidInput(
                "contains a lone surrogate",
                field=f"documents[{i - 1}]" if i else "question",
                remedy="decode it with errors='replace'",
            ) from None


def retrieve_passages(question: str, k: int) -> Generator[Retrieve, Any, tuple[str, ...]]:
    """Return the ``k`` best passages for the question; raise InvalidInput without any."""
    passages: tuple[str, ...] = yield Retrieve(question, k)
    if not passages:
        raise no_passage_found()
    return passages


def no_passage_found() -> InvalidInput:
    """Return the error for a question without a matching passage."""
    return InvalidInput(
        "no passage matches the question",
        field="question",
        remedy="ask in the words of the documents, or read all of them",
    )


def reply_cut_off() -> DeadlineExceeded:
    """Return the error for a reply that was cut off by the deadline."""
    return DeadlineExceeded(
        "the model had not finished its reply",
        field="deadline_s",
        remedy="raise it, or ask for fewer rounds",
    )


def answer_in(reply: Reply, role: str) -> str:
    """Return the text of a reply.

    Args:
        role: of the model, remote or local.

    Raises:
        ModelError: the reply is empty, and not because of a deadline.
    """
    text = reply.text.strip()
    if not text and reply.finish is not Finish.DEADLINE:
        raise ModelError(
            f"the {role} model's reply holds no answer ({reply.finish.value})",
            field=f"{role}.max_tokens",
            remedy="raise it: reasoning models need more tokens",
        )
    return text


def ask_until_readable(
    ask: Callable[[], AskRemote], chat: list[Message], read: Callable[[str], T | None]
) -> Generator[AskRemote, Any, T | None]:
    """Ask the remote, and ask again while its reply has the wrong form.

    Args:
        ask: returns the action that sends ``chat``.
        chat: extended by the replies and the requests for better ones.
        read: parses a reply; returns None for a wrong form.

    Returns:
        The parsed reply; None if all had a wrong form.
    """
    for attempt in range(_REPAIRS + 1):
        if attempt:
            chat.append(fill(prompts.NOT_READABLE))
        reply: Reply = yield ask()
        chat.append(reply_turn(reply.text))
        found = read(reply.text)
        if found is not None:
            return found
    return None
