"""Solved examples before each request, for a worker that was never trained for the protocol.

A base model, which knows no chat and follows no instruction, reads them as one text: a passage, a
question, "Reply:" and the reply, on one line. Its own reply ends with its line, since it would go
on with the next passage.
"""

from __future__ import annotations

import json
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
        plain: put jobs as a base model understands them.
    """

    def __init__(
        self,
        model: ChatModel,
        jobs: Sequence[Turn],
        questions: Sequence[Turn],
        *,
        plain: bool = False,
    ) -> None:
        self._model, self._jobs, self._questions = model, tuple(jobs), tuple(questions)
        self._plain = plain

    @property
    def name(self) -> str:
        return self._model.name

    def ask(
        self, requests: Sequence[ChatRequest], control: Control, told: Told = tell_nobody
    ) -> list[Reply | CollabError]:
        """Answer ``requests``; see ``chat.base.ChatModel``."""
        return self._model.ask([self._shown(each) for each in requests], control, told)

    def close(self) -> None:
        """Close the model."""
        self._model.close()

    def _shown(self, request: ChatRequest) -> ChatRequest:
        """Return ``request`` with the examples before it."""
        if OPENING in request.turns[-1].content:
            return replace(request, turns=(*self._questions, *request.turns))
        turns = (*self._jobs, *request.turns)
        return replace(request, turns=tuple(map(_plain_job, turns)) if self._plain else turns)


def _plain_job(turn: Turn) -> Turn:
    """Return a job's prompt as a question about a text, and a reply as little more than a quote."""
    if turn.role == "user":
        chunk, task = turn.content.split("## Text\n", 1)[1].rsplit("\n\n## Task\n", 1)
        question = f'Text:\n{chunk}\n\nWhich line of the text begins with "{task}"?'
        return replace(turn, content=question)
    reply = json.loads(turn.content)
    reply.pop("explanation", None)
    return replace(turn, content=json.dumps(reply, ensure_ascii=False))


def teach_plain_chat(engine: Engine) -> bool:
    """Have a base model take chats, and end its replies with their line; leave others as they are.

    Call it before the engine's first session. Return True for a base model.
    """
    tokenizer = engine.loaded.tokenizer
    if tokenizer.chat_template:
        return False
    tokenizer.chat_template = PLAIN_CHAT
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    engine.eos |= {token for token, text in enumerate(texts) if "\n" in text}
    return True


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


def shown_examples(model: ChatModel, seed: int, *, plain: bool) -> ShownExamples:
    """Return ``model`` with examples of jobs and of questions from a seed; see ShownExamples."""
    jobs, questions = (examples(role, EXAMPLES, f"{role} {seed}") for role in ("job", "direct"))
    return ShownExamples(model, jobs, questions, plain=plain)
