"""The chat model in this process: callers, deadlines, cancel, limits."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tiny_models import tiny_model
from waiting import wait_for

from collab_llm_lab.reference import generate
from collab_llm_nodes.chat import in_process
from collab_llm_nodes.chat.base import ChatRequest, Finish, Reply, Usage
from collab_llm_nodes.chat.batch import Batch, BatchConfig
from collab_llm_nodes.chat.in_process import InProcessChat, InProcessConfig
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import (
    Busy,
    Cancelled,
    CollabError,
    DeadlineExceeded,
    InvalidInput,
    Unavailable,
)
from collab_llm_nodes.models.prompt import Prompt, encode
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.base import Control

WARM = SamplingConfig(temperature=1.0, seed=3)


def question(text: str, sampling: SamplingConfig = WARM, max_tokens: int = 8) -> ChatRequest:
    return ChatRequest((Turn("user", text),), sampling, max_tokens)


def endless(text: str = "go") -> ChatRequest:
    """A request whose reply takes as long as the context allows: end tokens are rare."""
    return question(text, SamplingConfig(temperature=20.0), 900)


@pytest.fixture
def chat() -> Iterator[InProcessChat]:
    model = InProcessChat(Engine(tiny_model("llama")), InProcessConfig(BatchConfig(4, 128)))
    yield model
    model.close()


def reply(result: Reply | CollabError) -> Reply:
    assert isinstance(result, Reply), result
    return result


def test_results_are_reported_as_they_arrive(chat: InProcessChat) -> None:
    told: list[tuple[int, Reply | CollabError]] = []
    short, long = question("turn left", max_tokens=2), question("stop", max_tokens=40)
    wrong = question("")
    results = chat.ask(
        [long, short, wrong], Control(time.monotonic() + 60), lambda *each: told.append(each)
    )
    assert [place for place, _ in told] == [2, 1, 0]
    assert all(results[place] is result for place, result in told)


def used(result: Reply | CollabError) -> Usage:
    usage = reply(result).usage
    assert usage is not None
    return usage


def test_replies_come_in_the_order_of_the_requests(chat: InProcessChat) -> None:
    loaded = tiny_model("llama")
    texts = ["turn left", "stop", "go to the blue ball ahead", "where is the lamp"]
    replies = chat.ask([question(text) for text in texts], Control(time.monotonic() + 60))
    for text, got in zip(texts, map(reply, replies), strict=True):
        prompt = encode(Prompt(text), loaded)
        expected = generate(loaded, prompt, WARM, 8, Engine(loaded).eos)
        assert got.text == Engine(loaded).decode(expected).rstrip("�")
        assert used(got).decode == len(expected)
        assert used(got).prefill == len(prompt.ids)
        stopped = expected[-1] in Engine(loaded).eos
        assert got.finish is (Finish.STOP if stopped else Finish.LENGTH)


def test_a_system_turn_and_earlier_turns_are_read(chat: InProcessChat) -> None:
    turns = (Turn("system", "be brief"), Turn("user", "go"), Turn("assistant", "yes"))
    short, long = chat.ask(
        [question("stop"), ChatRequest((*turns, Turn("user", "stop")), WARM, 8)], Control()
    )
    assert used(long).prefill > used(short).prefill


def test_a_chat_may_be_as_long_as_one_of_minion(chat: InProcessChat) -> None:
    """Minion may be given 50 rounds; a prompt for a verifier is limited to 64 turns."""
    talk = (Turn("user", "go"), Turn("assistant", "yes")) * 49
    (result,) = chat.ask([ChatRequest((*talk, Turn("user", "stop")), WARM, 1)], Control())
    reply(result)


def test_a_prompt_that_cannot_be_encoded_fails_alone(chat: InProcessChat) -> None:
    good, bad = chat.ask([question("stop"), question("<|im_end|>")], Control())
    reply(good)
    assert isinstance(bad, InvalidInput)
    (only,) = chat.ask([question(" ")], Control())
    assert isinstance(only, InvalidInput)


def test_many_callers_share_the_batch(chat: InProcessChat) -> None:
    expected = [reply(r) for r in chat.ask([question(f"go {i}") for i in range(6)], Control())]
    with ThreadPoolExecutor(6) as callers:
        calls = [callers.submit(chat.ask, [question(f"go {i}")], Control()) for i in range(6)]
        got = [reply(call.result(60)[0]) for call in calls]
    assert [g.text for g in got] == [e.text for e in expected]


def test_the_deadline_ends_what_is_unfinished(chat: InProcessChat) -> None:
    requests = [question("stop", max_tokens=1), *[endless(f"go {i}") for i in range(40)]]
    replies = [reply(r) for r in chat.ask(requests, Control(time.monotonic() + 0.5))]
    assert {r.finish for r in replies} >= {Finish.DEADLINE}
    assert all(used(r).decode < 900 for r in replies if r.finish is Finish.DEADLINE)
    wait_for(lambda: chat.health()["active"] == 0)
    reply(chat.ask([question("stop")], Control())[0])


def test_a_cancelled_call_frees_its_jobs(chat: InProcessChat) -> None:
    control = Control()
    raised: list[Exception] = []

    def ask() -> None:
        try:
            chat.ask([endless(f"go {i}") for i in range(40)], control)
        except Cancelled as error:
            raised.append(error)

    caller = threading.Thread(target=ask)
    caller.start()
    wait_for(lambda: chat.health()["active"])
    control.cancel()
    caller.join(60)
    assert raised
    assert chat.health()["jobs"] == 0
    wait_for(lambda: chat.health()["active"] == 0)


def test_callers_that_come_and_go_leave_nothing_behind(chat: InProcessChat) -> None:
    document = "the red box is far left. " * 12
    expected = {
        text: reply(chat.ask([question(document + text)], Control())[0]).text
        for text in ("go", "stop", "turn")
    }

    def call(seed: int) -> None:
        rng = random.Random(seed)
        control = Control(time.monotonic() + rng.choice([0.0, 0.01, 0.05, 60.0, 60.0]) + 0.001)
        texts = rng.choices(list(expected), k=rng.randrange(1, 6))
        giving_up = threading.Timer(rng.choice([0.0, 0.02, 60.0]), control.cancel)
        giving_up.start()
        try:
            results = chat.ask([question(document + text) for text in texts], control)
        except (Cancelled, DeadlineExceeded):
            return
        finally:
            giving_up.cancel()
        for text, got in zip(texts, map(reply, results), strict=True):
            assert expected[text].startswith(got.text)
            assert got.finish is Finish.DEADLINE or got.text == expected[text]

    with ThreadPoolExecutor(6) as callers:
        for done in [callers.submit(call, seed) for seed in range(60)]:
            done.result(100)
    wait_for(lambda: chat.health()["active"] == 0)
    assert chat.health()["jobs"] == 0


def test_too_many_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "MAX_JOBS", 3)
    chat = InProcessChat(Engine(tiny_model("llama")))
    try:
        with pytest.raises(Busy, match="at most 3"):
            chat.ask([question("go")] * 4, Control())
        assert len(chat.ask([question("go")] * 3, Control())) == 3
    finally:
        chat.close()


def test_closing_ends_the_calls_under_way() -> None:
    chat = InProcessChat(Engine(tiny_model("llama")))
    with ThreadPoolExecutor(1) as callers:
        call = callers.submit(chat.ask, [endless()], Control())
        wait_for(lambda: chat.health()["active"])
        chat.close()
        with pytest.raises(Unavailable):
            call.result(60)
    with pytest.raises(Unavailable):
        chat.ask([question("go")], Control())


def test_a_fault_of_the_batch_fails_its_calls_only(
    chat: InProcessChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: Any) -> None:
        raise KeyError("unforeseen")

    with monkeypatch.context() as patch:
        patch.setattr(Batch, "step", fault)
        with pytest.raises(CollabError, match="unforeseen"):
            chat.ask([question("go")], Control())
    reply(chat.ask([question("go")], Control())[0])


def test_a_call_without_requests_has_no_replies(chat: InProcessChat) -> None:
    assert chat.ask([], Control()) == []


@pytest.mark.parametrize("turns", [(), (Turn("assistant", "yes"),)])
def test_a_request_ends_with_the_user(turns: tuple[Turn, ...]) -> None:
    with pytest.raises(InvalidInput, match="turns"):
        ChatRequest(turns)
