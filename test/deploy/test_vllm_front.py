"""HAProxy before vLLM with the shipped configuration: what reaches the server."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from certificates import Certificates
from fake_vllm import MODEL, FakeVllm
from folders import ROOT
from waiting import wait_for

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.processes import free_port
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.stock.client import StockClient
from collab_llm_nodes.protocols.edge_cloud.stock.reference import Reference
from collab_llm_nodes.protocols.edge_cloud.stock.settings import TargetLinkConfig

HAPROXY = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = pytest.mark.skipif(
    HAPROXY is None, reason="HAProxy is not installed: apt-get install haproxy"
)
TOKEN = "only-robots-with-this"


class Front:
    """HAProxy on ``port`` with TLS by the authority ``ca``, before a vLLM."""

    def __init__(self, folder: Path, certificates: Certificates, server: FakeVllm) -> None:
        self.port, self.ca = free_port(), certificates.ca
        own, tokens = folder / "own.pem", folder / "tokens"
        own.write_text("".join(Path(file).read_text() for file in certificates.issue("front")))
        tokens.write_text(f"Bearer {TOKEN}\n")
        environment = {
            "VLLM_LISTEN": f":{self.port}",
            "VLLM_CERT": str(own),
            "VLLM_TOKENS": str(tokens),
            "VLLM_ADDRESS": f"127.0.0.1:{server.port}",
        }
        command = [str(HAPROXY), "-db", "-f", str(ROOT / "deploy" / "haproxy_vllm.cfg")]
        self._process = subprocess.Popen(command, env=environment)
        wait_for(self._listens)

    def ask(self, method: str, path: str, token: str = TOKEN, body: Any = None) -> int:
        """Return the status of a request."""
        context = httpx2.create_ssl_context()
        context.load_verify_locations(self.ca)
        with httpx2.Client(verify=context, trust_env=False, timeout=60.0) as client:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            url = f"https://localhost:{self.port}{path}"
            return client.request(method, url, headers=headers, content=body).status_code

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)

    def _listens(self) -> bool:
        assert self._process.poll() is None, "HAProxy has ended"
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    with FakeVllm(Reference.load(MODEL)) as serving:
        yield serving


@pytest.fixture
def front(
    tmp_path: Path, certificates: tuple[Certificates, Certificates], server: FakeVllm
) -> Iterator[Front]:
    with closing(Front(tmp_path, certificates[0], server)) as running:
        yield running


def test_a_robot_gets_its_answers_over_tls(front: Front, server: FakeVllm) -> None:
    config = TargetLinkConfig(
        kind="vllm",
        url=f"https://localhost:{front.port}",
        model=MODEL,
        tokenizer=MODEL,
        token=TOKEN,
        tls=True,
        tls_ca=front.ca,
    )
    prompt = Prompt("Where is the red chair?")
    with StockClient(config) as client:
        runner = RemoteRunner(Engine(load(ModelConfig(path="text-worker"))), client)
        answer = runner.generate(prompt, max_tokens=16)
    assert answer.tokens == server.greedy(server.reference.encode(prompt), 16)


def test_nothing_reaches_vllm_without_the_token(front: Front, server: FakeVllm) -> None:
    """Of vLLM's own --api-key /tokenize and /health are free."""
    for method, path in (("GET", "/health"), ("POST", "/tokenize"), ("POST", "/v1/completions")):
        for token in ("", "wrong"):
            assert front.ask(method, path, token) == 401
    assert not server.requests


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/metrics", 404),
        ("POST", "/v1/load_lora_adapter", 404),
        ("POST", "/reset_prefix_cache", 404),
        ("POST", "/v1/completions/../../metrics", 404),
        ("POST", "/health", 405),
        ("GET", "/v1/completions", 405),
    ],
)
def test_paths_that_robots_do_not_use_are_closed(
    front: Front, server: FakeVllm, method: str, path: str, status: int
) -> None:
    assert front.ask(method, path) == status
    assert not server.requests


def test_a_request_that_is_too_long_is_refused(front: Front, server: FakeVllm) -> None:
    assert front.ask("POST", "/v1/completions", body=b"x" * (8 << 20) + b"x") == 413
    assert not server.requests
