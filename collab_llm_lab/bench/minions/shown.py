"""Few-shot examples before each request, for a worker that was not trained for the protocol.

A base model, which follows neither chats nor instructions, reads them as one text: a passage, a
question, "Answer:" and the reply, on one line. Its own reply ends with its line, after which it
would continue with the next passage.

Each role has its own examples: jobs of MinionS, talks of Minion, and questions about a text.
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
    OnResult,
    Reply,
    ignore_result,
)
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.minions import prompts
from collab_llm_nodes.protocols.minions.embedded.queries import FACTS

JOB, TALK, DIRECT = "job", "talk", "direct"
EXAMPLES = 4
"""Examples of each role."""
PLAIN_CHAT = (
    "{{ bos_token or '' }}{% for turn in messages %}"
    "{% if turn.role == 'user' %}{{ turn.content }}\nAnswer:"
    "{% elif turn.role == 'assistant' %} {{ turn.content }}\n\n"
    "{% else %}{{ turn.content }}\n\n{% endif %}{% endfor %}"
)
"""Chat template of a base model, which has none of its own."""
_LINES = 6
"""Lines of the log of an example."""
_LONGER_LINES = ("seen", "where")
"""Facts whose lines contain more than the answer: an example shows what to leave out."""


class ShownExamples:
    """``chat.base.ChatModel`` with solved examples before each request.

    Args:
        model: answers; closed with this.
        shown: chats of examples, by role.
        plain: rewrite prompts for a base model, and its replies to jobs as JSON.
    """

    def __init__(
        self, model: ChatModel, shown: Mapping[str, Sequence[Turn]], *, plain: bool = False
    ) -> None:
        self._model, self._examples, self._plain = model, shown, plain

    @property
    def name(self) -> str:
        return self._model.name

    def ask(
        self,
        requests: Sequence[ChatRequest],
        control: Control,
        on_result: OnResult = ignore_result,
    ) -> list[Reply | CollabError]:
        """Answer ``requests``; see ``chat.base.ChatModel``."""
        results = self._model.ask([self._shown(each) for each in requests], control)
        if self._plain:
            results = [_in_form(*both) for both in zip(requests, results, strict=True)]
        for index, result in enumerate(results):
            on_result(index, result)
        return results

    def close(self) -> None:
        """Close the model."""
        self._model.close()

    def _shown(self, request: ChatRequest) -> ChatRequest:
        """Return ``request`` after the examples of its role."""
        role = _role(request.turns)
        turns = (*self._examples[role], *request.turns)
        if not self._plain:
            return replace(request, turns=turns)
        return replace(request, turns=_PLAIN[role](turns))


def _role(turns: Sequence[Turn]) -> str:
    """Return the role of a prompt."""
    if turns[0].role == "system":
        return TALK
    return DIRECT if prompts.read_back(prompts.DIRECT, turns[-1].content, "context") else JOB


def _values(template: str, turn: Turn, longest: str) -> dict[str, str]:
    values = prompts.read_back(template, turn.content, longest)
    assert values is not None, "the prompt is not of this template"
    return values


def _plain_jobs(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return prompts as questions about a text, and replies as a quote followed by the answer.

    Nothing must be closed after the answer, since a base model would repeat the last key of an
    object until its reply is cut off. The mark of the quote is that of ``chat.quoting``.
    """
    found = []
    for turn in turns:
        if turn.role == "user":
            values = _values(prompts.WORKER_BRIEF, turn, "chunk")
            content = _question(values["chunk"], f'Which line begins with "{values["task"]}"?')
        else:
            reply = json.loads(turn.content)
            content = _FOUND.format(**reply) if reply["answer"] is not None else _ABSENT
        found.append(replace(turn, content=content))
    return tuple(found)


def _plain_talks(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return each text with the last message about it as one question."""
    found: list[Turn] = []
    for turn in turns:
        if turn.role == "system":
            text = _values(prompts.CHAT_LOCAL, turn, "context")["context"]
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
            values = _values(prompts.DIRECT, turn, "context")
            turn = replace(turn, content=_question(values["context"], values["question"]))
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
    """Give a base model a chat template and end its replies with their line.

    Call it before the engine's first session. Returns False for a chat model, which is unchanged.
    """
    tokenizer = engine.loaded.tokenizer
    if tokenizer.chat_template:
        return False
    tokenizer.chat_template = PLAIN_CHAT
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    engine.eos |= {token for token, text in enumerate(texts) if "\n" in text}
    return True


def examples(role: str, count: int, seed: str) -> tuple[Turn, ...]:
    """Return chats of ``role``, of which one in four finds nothing.

    That one is not the last, which a base model tends to repeat. The first asks about one of
    ``_LONGER_LINES``.
    """
    rng = random.Random(seed)
    others = [fact for fact in FACTS if fact not in _LONGER_LINES]
    turns: list[Turn] = []
    for number in range(count):
        fact = rng.choice(others if number else _LONGER_LINES)
        turns += _example(rng, role, fact, finds=number % 4 != 2)
    return tuple(turns)


def _example(rng: random.Random, role: str, fact: str, *, finds: bool) -> tuple[Turn, ...]:
    """Return a chat of ``role`` that asks about ``fact``, with or without a finding."""
    while True:
        group = worker_group(rng, _LINES, 4, role=role)
        for chat, sources, asked in zip(group.chats, group.sources, group.facts, strict=True):
            if asked == fact and bool(sources) == finds:
                return chat


def shown_examples(model: ChatModel, seed: int, *, plain: bool) -> ShownExamples:
    """Return ``model`` with examples from a seed; see ShownExamples."""
    shown = {role: examples(role, EXAMPLES, f"{role} {seed}") for role in (JOB, TALK, DIRECT)}
    return ShownExamples(model, shown, plain=plain)
