"""Asks a chat model for a JSON object, and asks again where it forgets to give one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from collab_llm_nodes.chat.base import ChatModel, ChatRequest, Control, Finish, Reply
from collab_llm_nodes.chat.structured import Found, last_object
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.models.turns import Turn

REMINDER = "Your reply has no JSON object with {keys}. Give it again, with that object at its end."


@dataclass(frozen=True)
class Asked:
    """The object that a model gave, and all its replies on the way.

    Attributes:
        found: None if it gave none.
        results: of each attempt, for the ledger; the last one is that with the object.
    """

    found: Found | None
    results: tuple[Reply | CollabError, ...]


def ask_for_object(
    model: ChatModel,
    request: ChatRequest,
    keys: Collection[str],
    control: Control,
    attempts: int = 3,
) -> Asked:
    """Ask until a reply holds a JSON object with one of ``keys``, so many times at most.

    A reply without it is shown to the model again, with a reminder. After an error, a refusal or at
    the deadline nothing is asked again.

    Raises:
        Busy, Cancelled, DeadlineExceeded, Unavailable: as ``ChatModel.ask``.
    """
    results: list[Reply | CollabError] = []
    for _ in range(attempts):
        (result,) = model.ask([request], control)
        results.append(result)
        if isinstance(result, CollabError) or result.finish in (Finish.REFUSAL, Finish.DEADLINE):
            break
        found = last_object(result.text, keys)
        if found is not None:
            return Asked(found, tuple(results))
        request = _again(request, result.text, keys)
    return Asked(None, tuple(results))


def _again(request: ChatRequest, text: str, keys: Collection[str]) -> ChatRequest:
    """Return ``request`` with the reply and a reminder behind it, and another seed."""
    turns = request.turns
    if text.strip():  # templates and servers refuse empty turns
        names = " or ".join(f'"{key}"' for key in keys)
        reminder = Turn("user", REMINDER.format(keys=names))
        turns = (*turns, Turn("assistant", text), reminder)
    sampling = replace(request.sampling, seed=request.sampling.seed + 1)
    return replace(request, turns=turns, sampling=sampling)
