"""The client of OpenAI-compatible servers against a real one: ``transformers serve``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import tiny_model
from transformers_server import Served, transformers_server

from collab_llm_nodes.chat.base import ChatModel, ChatRequest, Finish, Reply
from collab_llm_nodes.chat.in_process import InProcessChat
from collab_llm_nodes.chat.remote import RemoteChat, RemoteConfig
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import CollabError, InvalidInput
from collab_llm_nodes.models.detokenising import REPLACEMENT
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.base import Control

pytestmark = pytest.mark.slow  # the server's start imports torch and transformers


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with transformers_server(tmp_path_factory.mktemp("serve")) as server:
        yield server


def ask(chat: ChatModel, requests: list[ChatRequest]) -> list[Reply | CollabError]:
    try:
        return chat.ask(requests, Control(time.monotonic() + 60))
    finally:
        chat.close()


@pytest.mark.timeout(200)
def test_a_real_server_answers_as_the_model_in_process(served: Served) -> None:
    requests = [
        ChatRequest((Turn("user", "turn left at the lamp"),), max_tokens=6),
        ChatRequest((Turn("system", "be brief"), Turn("user", "where is the ball?")), max_tokens=9),
    ]
    near = ask(InProcessChat(Engine(tiny_model("llama"))), requests)
    far = ask(RemoteChat(RemoteConfig(served.url, served.model)), requests)
    for here, there in zip(near, far, strict=True):
        assert isinstance(here, Reply)
        assert isinstance(there, Reply), there
        # The server also tells of half a character at the end.
        assert there.text.rstrip(REPLACEMENT) == here.text
        assert there.finish is here.finish is Finish.LENGTH
        assert there.usage == here.usage


@pytest.mark.timeout(200)
def test_a_real_server_samples_with_our_seed(served: Served) -> None:
    warm = [
        ChatRequest((Turn("user", "go on"),), SamplingConfig(1.0, top_p=0.9, seed=seed), 12)
        for seed in (1, 1, 2)
    ]
    once = RemoteConfig(served.url, served.model, parallel=1)
    first, again, other = ask(RemoteChat(once), warm)
    assert isinstance(first, Reply)
    assert isinstance(again, Reply)
    assert isinstance(other, Reply)
    assert first.text == again.text != other.text


@pytest.mark.timeout(200)
def test_a_real_server_refuses_a_model_that_it_does_not_serve(served: Served) -> None:
    wrong = RemoteConfig(served.url, str(Path(served.model).parent / "another"))
    (result,) = ask(RemoteChat(wrong), [ChatRequest((Turn("user", "go"),))])
    assert isinstance(result, InvalidInput)
    assert "Server is pinned to" in str(result)
