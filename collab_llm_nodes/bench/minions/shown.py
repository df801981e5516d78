"""Solved examples before each request, for a worker that was never trained for the protocol.

A base model, which knows no chat, reads them as one text: after each prompt "Reply:" and the reply,
on one line. Its own reply ends with its line, since it would go on with the next prompt.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from collab_llm_nodes.chat.base import (
    ChatModel,
    ChatRequest,
    Control,
    Reply,
    Told,
    tell_nobody,
)
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.minions.embedded.windows import OPENING
from collab_llm_nodes.training.minions.chats import worker_group

EXAMPLES = 4
PLAIN_CHAT = (
    "{{ bos_token or '' }}{% for turn in messages %}"
    "{% if turn.role == 'user' %}{{ turn.content }}\nReply:"
    "{% else %} {{ turn.content }}\n\n{% endif %}{% endfor %}"
)
"""Chat template of a base model, which has none of its own."""
_LINES = 6
"""Lines of the log of an example."""


class ShownExamples:
    """A ``chat.base.ChatModel`` that has solved examples before each request.

    Args:
        model: closed with this.
        jobs, questions: chats of examples: jobs of MinionS, and questions about a text.
    """

    def __init__(self, model: ChatModel, jobs: Sequence[Turn], questions: Sequence[Turn]) -> None:
        self._model, self._jobs, self._questions = model, tuple(jobs), tuple(questions)

    @property
    def name(self) -> str:
        return self._model.name

    def ask(
        self, requests: Sequence[ChatRequest], control: Control, told: Told = tell_nobody
    ) -> list[Reply | CollabError]:
        """Answer ``requests``; see ``chat.base.ChatModel``."""
        shown = [
            replace(
                each,
                turns=(
                    *(self._questions if OPENING in each.turns[-1].content else self._jobs),
                    *each.turns,
                ),
            )
            for each in requests
        ]
        return self._model.ask(shown, control, told)

    def close(self) -> None:
        """Close the model."""
        self._model.close()


def teach_plain_chat(engine: Engine) -> None:
    """Have a base model take chats, and end its replies with their line; leave others as they are.

    Call it before the engine's first session.
    """
    tokenizer = engine.loaded.tokenizer
    if tokenizer.chat_template:
        return
    tokenizer.chat_template = PLAIN_CHAT
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    engine.eos |= {token for token, text in enumerate(texts) if "\n" in text}


def examples(role: str, count: int, seed: str) -> tuple[Turn, ...]:
    """Return chats of ``role`` ("job" or "direct") one after the other; the last finds nothing."""
    turns: list[Turn] = []
    found = 0
    rng = random.Random(seed)
    while found < count:
        group = worker_group(rng, _LINES, 4, role=role)
        for chat, sources in zip(group.chats, group.sources, strict=True):
            if bool(sources) != (found == count - 1):
                turns += chat
                found += 1
                break
    return tuple(turns)


def shown_examples(model: ChatModel, seed: int) -> ShownExamples:
    """Return ``model`` with examples of jobs and of questions from a seed."""
    jobs, questions = (examples(role, EXAMPLES, f"{role} {seed}") for role in ("job", "direct"))
    return ShownExamples(model, jobs, questions)
