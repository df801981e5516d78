"""The text of a prompt: a chat of several turns, or raw text, and its limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.models.thoughts import answer_of

ROLES = ("system", "user", "assistant")
MAX_TURNS = 1024
"""No limit on the number of turns is larger."""


@dataclass(frozen=True)
class Turn:
    """One turn before the question: ``role`` is one of ``ROLES``.

    An assistant's turn is its answer without thoughts, as chat templates want earlier answers.
    """

    role: str
    content: str

    def __post_init__(self) -> None:
        if self.role == "assistant":
            object.__setattr__(self, "content", answer_of(self.content))


def fold_system(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return ``turns`` with the system turn, if any, put before the first user turn's text.

    Some models know no system turns.
    """
    if len(turns) < 2 or turns[0].role != "system":
        return tuple(turns)
    system, first, *others = turns
    return (Turn(first.role, f"{system.content}\n\n{first.content}"), *others)


def texts(text: str, turns: Sequence[Turn], field: str = "text") -> Iterator[tuple[str, str]]:
    """Yield each text of a prompt with the name of its field: the turns, then the question."""
    for i, turn in enumerate(turns):
        yield f"turns[{i}].content", turn.content
    yield field, text


def check_texts(
    text: str,
    turns: Sequence[Turn],
    *,
    raw: bool,
    max_characters: int,
    max_turns: int,
    field: str = "text",
) -> None:
    """Check all that can be checked of a prompt's text without a model.

    Chat templates know one order: at most one system turn, first; then user and assistant
    alternately. ``text`` is the last user turn, so ``turns`` ends with an assistant's answer.

    Args:
        raw: ``text`` goes to the model as it is; then there are no turns.
        field: name of ``text`` in errors.

    Raises:
        InvalidInput: an empty text, too many characters in all, too many turns, or turns in
            another order. ``field`` is its name, ``turns``, ``turns[i].role`` or
            ``turns[i].content``.
    """
    if len(turns) > max_turns:
        raise InvalidInput(
            f"{len(turns)} turns", field="turns", remedy=f"send at most {max_turns} before the last"
        )
    if raw and turns:
        raise InvalidInput(
            "raw text has no turns", field="turns", remedy="leave them out, or do not ask for raw"
        )
    _check_order(turns)
    for name, content in texts(text, turns, field):
        if not content.strip():
            raise InvalidInput("is empty", field=name, remedy="say what is wanted")
    length = len(text) + sum(len(turn.content) for turn in turns)
    if length > max_characters:
        raise InvalidInput(
            f"{length} characters" + (" in all turns" if turns else ""),
            field="turns" if turns and len(text) <= max_characters else field,
            remedy=f"send at most {max_characters}",
        )


def _check_order(turns: Sequence[Turn]) -> None:
    first = int(bool(turns) and turns[0].role == "system")
    for i, turn in enumerate(turns[first:], first):
        expected = ("user", "assistant")[(i - first) % 2]
        if turn.role != expected:
            raise InvalidInput(
                f"is {turn.role[:20]!r} where {expected!r} must be",
                field=f"turns[{i}].role",
                remedy="at most one system turn, first; then user and assistant alternately",
            )
    if (len(turns) - first) % 2:
        raise InvalidInput(
            "the user's turn has no answer",
            field=f"turns[{len(turns) - 1}].role",
            remedy="end with an assistant's turn; the last user turn is the prompt itself",
        )
