"""Solved examples before each request, for a worker that was never trained for the protocol.

A base model, which knows no chat and follows no instruction, reads them as one text: a passage, a
question, "Answer:" and the reply, on one line. Its own reply ends with its line, since it would go
on with the next passage.

Each role has examples of its own: jobs of MinionS, talks of Minion, and questions about a text.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from collab_llm_lab.training.minions.chats import worker_group
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
from collab_llm_nodes.protocols.minions.embedded.queries import FACTS
from collab_llm_nodes.protocols.minions.embedded.windows import CLOSING, OPENING

JOB, TALK, DIRECT = "job", "talk", "direct"
EXAMPLES = 4
"""Number of examples of each role."""
PLAIN_CHAT = (
    "{{ bos_token or '' }}{% for turn in messages %}"
    "{% if turn.role == 'user' %}{{ turn.content }}\nAnswer:"
    "{% elif turn.role == 'assistant' %} {{ turn.content }}\n\n"
    "{% else %}{{ turn.content }}\n\n{% endif %}{% endfor %}"
)
"""Chat template of a base model, which has none of its own."""
_LINES = 6
"""Lines of the log of an example."""
_TELLING = ("seen", "where")
"""Facts whose lines hold more than the answer: an example shows what to leave out."""


class ShownExamples:
    """A ``chat.base.ChatModel`` that has solved examples before each request.

    Args:
        model: closed with this.
        shown: chats of examples, by role.
        plain: put prompts as a base model understands them, and its replies to jobs as JSON.
    """

    def __init__(
        self, model: ChatModel, shown: Mapping[str, Sequence[Turn]], *, plain: bool = False
    ) -> None:
        self._model, self._examples, self._plain = model, shown, plain

    @property
    def name(self) -> str:
        return self._model.name

    def ask(
        self, requests: Sequence[ChatRequest], control: Control, told: Told = tell_nobody
    ) -> list[Reply | CollabError]:
        """Answer ``requests``; see ``chat.base.ChatModel``."""
        results = self._model.ask([self._shown(each) for each in requests], control)
        if self._plain:
            results = [_in_form(*both) for both in zip(requests, results, strict=True)]
        for place, result in enumerate(results):
            told(place, result)
        return results

    def close(self) -> None:
        """Close the model."""
        self._model.close()

    def _shown(self, request: ChatRequest) -> ChatRequest:
        """Return ``request`` with the examples of its role before it."""
        role = _role(request.turns)
        turns = (*self._examples[role], *request.turns)
        if not self._plain:
            return replace(request, turns=turns)
        return replace(request, turns=_PLAIN[role](turns))


def _role(turns: Sequence[Turn]) -> str:
    """Return the role that a prompt asks for."""
    if turns[0].role == "system":
        return TALK
    return DIRECT if OPENING in turns[-1].content else JOB


def _plain_jobs(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return prompts as questions about a text, and replies as a quote with the answer behind it.

    Nothing has to be closed behind the answer: a base model rather repeats the last key of an
    object, until its reply is cut off. The mark of the quote is that of ``chat.quoting``.
    """
    found = []
    for turn in turns:
        if turn.role == "user":
            chunk, task = turn.content.split("## Text\n", 1)[1].rsplit("\n\n## Task\n", 1)
            content = _question(chunk, f'Which line begins with "{task}"?')
        else:
            reply = json.loads(turn.content)
            content = _FOUND.format(**reply) if reply["answer"] is not None else _ABSENT
        found.append(replace(turn, content=content))
    return tuple(found)


def _plain_talks(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return each text, with the last message about it, as one question."""
    found: list[Turn] = []
    for turn in turns:
        if turn.role == "system":
            text = turn.content.split(OPENING, 1)[1].rsplit(CLOSING, 1)[0]
            continue
        if turn.role == "user":
            turn = replace(turn, content=_question(text, f'What follows "{turn.content}"?'))
        found.append(turn)
    return tuple(found)


def _plain_questions(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return questions about a text without the instruction around them."""
    found = []
    for turn in turns:
        if turn.role == "user":
            text, rest = turn.content.split(OPENING, 1)[1].rsplit(CLOSING, 1)
            turn = replace(turn, content=_question(text, rest.split("\n\n", 1)[0]))
        found.append(turn)
    return tuple(found)


_FOUND, _ABSENT = '"citation": "{citation}", answer: {answer}', '"citation": none'
_SAID = re.compile(r'"citation": "(.+)", answer: (.+)')


def _in_form(request: ChatRequest, result: Reply | CollabError) -> Reply | CollabError:
    """Return a reply to a plain job in the worker's form; other replies as they are."""
    if isinstance(result, CollabError) or _role(request.turns) != JOB:
        return result
    text = result.text.strip()
    match = _SAID.fullmatch(text)
    if match is not None:
        return replace(result, text=json.dumps({"citation": match[1], "answer": match[2]}))
    return replace(result, text=json.dumps({"answer": None})) if text == _ABSENT else result


def _question(text: str, question: str) -> str:
    return f"Text:\n{text}\n\nQuestion: {question}"


_PLAIN = {JOB: _plain_jobs, TALK: _plain_talks, DIRECT: _plain_questions}


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
    """Return chats of ``role`` one after the other; one in four finds nothing, and is not the last.

    A base model likes to repeat what it was shown last. The first asks about one of ``_TELLING``.
    """
    rng = random.Random(seed)
    others = [fact for fact in FACTS if fact not in _TELLING]
    turns: list[Turn] = []
    for number in range(count):
        fact = rng.choice(others if number else _TELLING)
        turns += _example(rng, role, fact, finds=number % 4 != 2)
    return tuple(turns)


def _example(rng: random.Random, role: str, fact: str, *, finds: bool) -> tuple[Turn, ...]:
    """Return a chat of ``role`` that asks about ``fact``, and finds something or nothing."""
    while True:
        group = worker_group(rng, _LINES, 4, role=role)
        for chat, sources, asked in zip(group.chats, group.sources, group.facts, strict=True):
            if asked == fact and bool(sources) == finds:
                return chat


def shown_examples(model: ChatModel, seed: int, *, plain: bool) -> ShownExamples:
    """Return ``model`` with examples from a seed; see ShownExamples."""
    shown = {role: examples(role, EXAMPLES, f"{role} {seed}") for role in (JOB, TALK, DIRECT)}
    return ShownExamples(model, shown, plain=plain)
