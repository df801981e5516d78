"""The client of OpenAI-compatible servers against a real one: ``transformers serve``."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from tiny_models import tiny_folder, tiny_model
from waiting import comes_true

from collab_llm_nodes.chat.base import ChatModel, ChatRequest, Finish, Reply
from collab_llm_nodes.chat.in_process import InProcessChat
from collab_llm_nodes.chat.remote import RemoteChat, RemoteConfig
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import CollabError, InvalidInput
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.base import Control

pytestmark = pytest.mark.slow  # the server's start imports torch and transformers

SERVE = "from transformers.cli.transformers import main; main()"
START_S = 110.0


@dataclass(frozen=True)
class Served:
    """A server, and the model that it serves."""

    url: str
    model: str


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    model, log, port = folder / "model", folder / "log", free_port()
    shutil.copytree(tiny_folder("llama"), model)
    generation = model / "generation_config.json"
    samples = {**json.loads(generation.read_text()), "do_sample": True}  # else it never samples
    generation.write_text(json.dumps(samples))
    place = ("--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVE, "serve", str(model), *place],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        assert comes_true(lambda: healthy(port) or server.poll() is not None, START_S)
        assert server.poll() is None, log.read_text(errors="replace")[-3000:]
        yield Served(f"http://127.0.0.1:{port}/v1", str(model))
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(20)


def healthy(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


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
        assert there.text == here.text
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
