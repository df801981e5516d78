"""Asking for a JSON object, and asking again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from collab_llm_nodes.chat.asking import ask_for_object
from collab_llm_nodes.chat.base import ChatRequest, Control, Finish, Reply, Told, tell_nobody
from collab_llm_nodes.errors import CollabError, Unavailable
from collab_llm_nodes.models.turns import Turn, check_texts
from collab_llm_nodes.protocols import base

QUESTION = ChatRequest((Turn("system", "be brief"), Turn("user", "enough?")))
KEYS = ("decision", "message")
OBJECT = '{"decision": "yes"}'


class Scripted:
    """A chat model that says what it is told; the last line stays."""

    name = "scripted"

    def __init__(self, *script: Reply | CollabError) -> None:
        self._script = list(script)
        self.asked: list[ChatRequest] = []

    def ask(
        self, requests: Sequence[ChatRequest], control: Control, told: Told = tell_nobody
    ) -> list[Reply | CollabError]:
        control.check()
        for request in requests:
            check_texts(
                request.turns[-1].content,
                request.turns[:-1],
                raw=False,
                max_characters=10_000,
                max_turns=20,
            )
        self.asked += requests
        return [self._script.pop(0) if len(self._script) > 1 else self._script[0]]

    def close(self) -> None: ...


def said(text: str, finish: Finish = Finish.STOP) -> Reply:
    return Reply(text, finish)


def test_the_first_object_with_a_key_is_taken() -> None:
    model = Scripted(said(f"well: {OBJECT}"))
    asked = ask_for_object(model, QUESTION, KEYS, base.Control())
    assert asked.found is not None
    assert asked.found.content == {"decision": "yes"}
    assert model.asked == [QUESTION]
    assert len(asked.results) == 1


def test_a_reply_without_it_is_shown_with_a_reminder() -> None:
    model = Scripted(said('{"other": 1}'), said(""), said(OBJECT))
    asked = ask_for_object(model, QUESTION, KEYS, base.Control())
    assert asked.found is not None
    assert len(asked.results) == 3
    first, second, third = model.asked
    assert second.turns[:3] == (*first.turns, Turn("assistant", '{"other": 1}'))
    assert '"decision" or "message"' in second.turns[3].content
    assert third.turns == second.turns  # nothing was said that could be shown
    assert len({request.sampling.seed for request in model.asked}) == 3


def test_attempts_are_limited() -> None:
    model = Scripted(said("I forgot"))
    asked = ask_for_object(model, QUESTION, KEYS, base.Control(), attempts=4)
    assert asked.found is None
    assert len(asked.results) == len(model.asked) == 4


@pytest.mark.parametrize(
    "end", [said("no", Finish.REFUSAL), said("cut", Finish.DEADLINE), Unavailable("gone")]
)
def test_what_asking_again_does_not_mend(end: Reply | CollabError) -> None:
    model = Scripted(end, said(OBJECT))
    asked = ask_for_object(model, QUESTION, KEYS, base.Control())
    assert asked.found is None
    assert asked.results == (end,)


def test_a_cut_off_reply_may_hold_the_object() -> None:
    model = Scripted(said('{"decision": "yes", "answer": "4', Finish.LENGTH))
    asked = ask_for_object(model, QUESTION, KEYS, base.Control())
    assert asked.found is not None
    assert asked.found.mended
