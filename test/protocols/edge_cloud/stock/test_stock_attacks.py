"""A stock server that attacks the robot: each attack ends typed, in bounded time and memory."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import MODEL, FakeVllm, Reply, Write, events
from waiting import wait_for

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.base import Answer, Control, Request, Resources
from collab_llm_nodes.protocols.edge_cloud.carrier import VerifierCarrier
from collab_llm_nodes.protocols.edge_cloud.client import EdgeClientConfig
from collab_llm_nodes.protocols.edge_cloud.link import LinkConfig
from collab_llm_nodes.protocols.edge_cloud.link_loss import LinkLossConfig
from collab_llm_nodes.protocols.edge_cloud.running import EdgeCloud, EdgeCloudConfig
from collab_llm_nodes.protocols.edge_cloud.stock.client import StockClient
from collab_llm_nodes.protocols.edge_cloud.stock.reference import Reference

DEADLINE_S = 1.5
ENDS_S = 30.0
"""An attack that is not ended takes for ever; a busy machine takes a few seconds."""
QUESTION, MOST = "Where is the red chair?", 24
MAX_BYTES = 1 << 20
IN_FLIGHT = sum(
    int(Path(f"/proc/sys/net/ipv4/tcp_{side}mem").read_text().split()[2]) for side in "rw"
)
"""Bytes that the kernel may hold beyond those that are read: its largest buffers at both ends."""
BOMB = gzip.compress(b" " * (8 << 20))
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
LOST = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED"})
LIED = frozenset({"PROTOCOL_ERROR"})


@pytest.fixture(scope="module")
def draft() -> Engine:
    return Engine(load(ModelConfig(path="text-worker")))


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference.load(MODEL)


@pytest.fixture
def server(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVllm]:
    monkeypatch.setattr(Reference, "load", lambda path: reference)
    with FakeVllm(reference) as serving:
        yield serving


def ask(draft: Engine, client: StockClient, policy: str = "hold", gamma: int = 3) -> Answer:
    """Return a robot's answer under a policy for link loss."""
    loss = LinkLossConfig(policy=policy, after_s=DEADLINE_S, max_unverified=256)
    config = EdgeCloudConfig(client=EdgeClientConfig(gamma, MOST), link_loss=loss)
    edge = EdgeCloud(draft, config, Resources(VerifierCarrier(client)))
    request = Request("a", config, turns=(Turn("user", QUESTION),))
    control = Control(time.monotonic() + 2 * ENDS_S)
    return edge.run(request, lambda progress: None, control)


def attack(
    draft: Engine, server: FakeVllm, fault: Any, *, token_file: str = "", **how: Any
) -> tuple[Answer, float]:
    """Return an answer whose server makes ``fault`` in place of scores, and its time [s]."""

    def on_scores(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Any:
        scores = path == "/v1/completions" and not body.get("ignore_eos")
        return fault(path, body, honest) if scores and not is_prompt(body) else None

    config = server.config(
        method="probes",
        max_message_bytes=MAX_BYTES,
        link=LinkConfig(verdict_deadline_s=DEADLINE_S),
        token_file=token_file,
    )
    with StockClient(config) as client:
        wait_for(lambda: client.status.state == "UP")
        server.fault = on_scores
        begun = time.monotonic()
        return ask(draft, client, **how), time.monotonic() - begun


def is_prompt(body: dict[str, Any]) -> bool:
    """Return True if ``body`` has a prompt read, and nothing scored."""
    return bool(body.get("return_token_ids")) and not body.get("stream")


def always(write: Write) -> Callable[..., Write]:
    return lambda path, body, honest: write


class Endless:
    """Writes ``begin``, then ``part`` again and again until the client leaves.

    Attributes:
        sent: bytes.
        gone: set when the client has left.
    """

    def __init__(self, begin: bytes, part: bytes, pause_s: float = 0.0) -> None:
        self._begin, self._part, self._pause_s = begin, part, pause_s
        self.sent, self.gone = 0, threading.Event()

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        try:
            handler.wfile.write(self._begin)
            while not self.gone.wait(self._pause_s):
                handler.wfile.write(self._part)
                self.sent += len(self._part)
        finally:
            self.gone.set()


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNK = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
ENDLESS = {
    "body": (HEAD + b"\r\n", b" " * 65536, LIED),
    "chunks": (CHUNKED, CHUNK, LIED),
    "header": (HEAD + b"X-A: ", b"a" * 65536, LOST),
    "headers": (HEAD, b"X-A: a\r\n" * 8192, LOST),
    "interim responses": (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 2048, LOST),
}


@pytest.mark.parametrize(("begin", "part", "codes"), ENDLESS.values(), ids=ENDLESS)
def test_an_endless_response_is_cut_off(
    draft: Engine, server: FakeVllm, begin: bytes, part: bytes, codes: frozenset[str]
) -> None:
    endless = Endless(begin, part)
    answer, took_s = attack(draft, server, always(endless))
    assert answer.error is not None
    assert answer.error.code in codes
    assert took_s < ENDS_S
    assert endless.gone.wait(ENDS_S)
    if part[:4] != b"HTTP":  # interim responses are bounded by time alone
        assert endless.sent < MAX_BYTES + IN_FLIGHT


SLOW = {
    "body": (HEAD + b"Content-Length: 100000\r\n\r\n", b" "),
    "header": (HEAD + b"X-A: ", b"a"),
    "status": (b"H", b""),
    "events": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"2\r\n:\n\r\n"),
}


@pytest.mark.parametrize("gamma", [3, 0], ids=["speculation", "alone"])
@pytest.mark.parametrize(("begin", "part"), SLOW.values(), ids=SLOW)
def test_a_response_in_drops_ends_at_the_deadline(
    draft: Engine, server: FakeVllm, begin: bytes, part: bytes, gamma: int
) -> None:
    drops = Endless(begin, part, 0.02)
    answer, took_s = attack(draft, server, always(drops), gamma=gamma)
    drops.gone.set()
    assert answer.error is not None
    assert answer.error.code in LOST
    assert DEADLINE_S <= took_s < ENDS_S


def compressed(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Reply:
    return Reply(body=BOMB, Content_Encoding="gzip")


def test_a_compressed_response_is_refused_unread(draft: Engine, server: FakeVllm) -> None:
    answer, _ = attack(draft, server, compressed)
    assert answer.error is not None
    assert answer.error.code == "PROTOCOL_ERROR"
    assert "compress" in str(answer.error)
    assert all(headers["Accept-Encoding"] == "identity" for headers in server.headers)


def event(token: object) -> bytes:
    return f"data: {json.dumps({'choices': [{'index': 0, 'token_ids': token}]})}\n\n".encode()


STREAMS = {
    "tokens": (event([5]) * 64, frozenset()),
    "many tokens at once": (event([5] * 10_000), frozenset()),
    "a line": (b"data: " + b"x" * 65536, LIED),
    "comments": (b": ping\n" * 8192, LIED),
    "empty events": (event([]) * 512, LIED),
    "no tokens": (event(["left"]), LIED),
    "ids beyond the vocabulary": (event([99_999]), LIED),
    "no numbers": (event([True]), LIED),
}


@pytest.mark.parametrize(("part", "codes"), STREAMS.values(), ids=STREAMS)
def test_an_endless_stream_is_read_as_far_as_it_was_asked_for(
    draft: Engine, server: FakeVllm, part: bytes, codes: frozenset[str]
) -> None:
    endless = Endless(HEAD + b"\r\n", part)
    answer, took_s = attack(draft, server, always(endless), gamma=0)
    if codes:
        assert answer.error is not None
        assert answer.error.code in codes
    else:
        assert answer.error is None
        assert answer.tokens == (5,) * MOST
    assert took_s < ENDS_S
    assert endless.gone.wait(ENDS_S)
    assert endless.sent < MAX_BYTES + IN_FLIGHT


def test_a_stream_that_breaks_off_goes_on_where_it_was(draft: Engine, server: FakeVllm) -> None:
    left = threading.Semaphore(1)

    def break_off(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Any:
        if not body.get("stream") or not left.acquire(blocking=False):
            return None
        return Reply(body=b"".join(events(honest)), cut=True)

    server.fault = break_off
    with StockClient(server.config()) as client:
        answer = ask(draft, client, gamma=0)
    assert answer.error is None
    assert answer.verified
    assert answer.tokens == server.greedy(server.reference.encode(Prompt(QUESTION)), MOST)
    assert not left.acquire(blocking=False)


def nested(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Reply:
    return Reply(body=b'{"choices":' + b"[" * 400_000)


def long_number(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Reply:
    return Reply(body=b'{"choices": 1' + b"0" * 400_000 + b"}")


def no_text(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Reply:
    return Reply(body=b"\xff\xfe\x00" * 1000)


def empty(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Reply:
    return Reply(body=b"")


def no_content(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Reply:
    return Reply(204, b"")


def huge_log_probs(path: str, body: dict[str, Any], honest: dict[str, Any]) -> dict[str, Any]:
    return with_log_probs(honest, 1e308)


def infinite_log_probs(path: str, body: dict[str, Any], honest: dict[str, Any]) -> dict[str, Any]:
    return with_log_probs(honest, float("inf"))


def impossible_log_probs(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Any:
    return with_log_probs(honest, float("-inf"))


def with_log_probs(honest: dict[str, Any], value: float) -> dict[str, Any]:
    """Return the honest answer with ``value`` as each log-probability."""
    choices = [
        {
            **choice,
            "logprobs": {
                **choice["logprobs"],
                "top_logprobs": [
                    dict.fromkeys(row, value) for row in choice["logprobs"]["top_logprobs"]
                ],
            },
        }
        for choice in honest["choices"]
    ]
    return {**honest, "choices": choices}


@pytest.mark.parametrize("fault", [nested, long_number, no_text, empty, no_content])
def test_a_response_that_is_no_answer_is_refused(
    draft: Engine, server: FakeVllm, fault: Any
) -> None:
    answer, _ = attack(draft, server, fault)
    assert answer.error is not None
    assert answer.error.code == "PROTOCOL_ERROR"
    assert not answer.tokens


def test_the_key_does_not_follow_a_redirection(
    draft: Engine, server: FakeVllm, tmp_path: Any
) -> None:
    key = tmp_path / "key"
    key.write_text("s3cret-key")
    key.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"http://127.0.0.1:{other.getsockname()[1]}/v1/completions"
        redirected = lambda path, body, honest: Reply(308, Location=address)  # noqa: E731
        answer, _ = attack(draft, server, redirected, token_file=str(key))
        other.settimeout(0.2)
        with pytest.raises(TimeoutError):
            other.accept()
    assert answer.error is not None
    assert answer.error.code == "PROTOCOL_ERROR"
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer s3cret-key"}


@pytest.mark.parametrize("pause", ["31536000", "1e300", "Fri, 01 Jan 2100 00:00:00 GMT"])
def test_a_pause_of_a_year_holds_the_answer_no_longer_than_its_deadline(
    draft: Engine, server: FakeVllm, pause: str
) -> None:
    busy = lambda path, body, honest: Reply(429, Retry_After=pause)  # noqa: E731
    answer, took_s = attack(draft, server, busy)
    assert answer.error is not None
    assert answer.error.code in LOST
    assert took_s < ENDS_S


def test_cookies_are_not_kept(draft: Engine, server: FakeVllm) -> None:
    server.fault = lambda path, body, honest: Reply(
        body=json.dumps(honest).encode(), Set_Cookie=f"c{len(server.requests)}=1; Path=/"
    )
    with StockClient(server.config()) as client:
        assert ask(draft, client).error is None
    assert len(server.headers) > 5
    assert not any("Cookie" in headers for headers in server.headers)


def busy(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Reply:
    return Reply(503, b'{"error": {"message": "no KV blocks are left", "code": 503}}')


def aborted(path: str, body: dict[str, Any], honest: dict[str, Any]) -> dict[str, Any]:
    empty: dict[str, list[Any]] = {"tokens": [], "top_logprobs": []}
    choices = [
        {**c, "finish_reason": "abort", "token_ids": [], "logprobs": empty}
        for c in honest["choices"]
    ]
    return {**honest, "choices": choices}


def error_with_200(path: str, body: dict[str, Any], honest: dict[str, Any]) -> dict[str, Any]:
    return {"error": {"message": "EngineDeadError", "code": 500}}


def truncated(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Reply:
    return Reply(body=json.dumps(honest).encode(), cut=True)


def drops(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Write:
    return Endless(HEAD + b"Content-Length: 100000\r\n\r\n", b" ", 0.02)


@pytest.mark.parametrize("fault", [busy, error_with_200, truncated, drops])
def test_a_server_that_fails_is_a_lost_link_to_the_robot(
    draft: Engine, server: FakeVllm, fault: Any
) -> None:
    held, _ = attack(draft, server, fault)
    assert held.error is not None
    assert held.error.code in LOST
    assert not held.verified
    server.fault = None
    alone, took_s = attack(draft, server, fault, policy="draft_only")
    assert alone.error is None
    assert not alone.verified
    assert alone.tokens
    assert took_s < ENDS_S


@pytest.mark.parametrize("fault", [nested, aborted, compressed])
def test_a_server_that_lies_ends_the_answer_under_either_policy(
    draft: Engine, server: FakeVllm, fault: Any
) -> None:
    for policy in ("hold", "draft_only"):
        server.fault = None
        answer, _ = attack(draft, server, fault, policy=policy)
        assert answer.error is not None
        assert answer.error.code == "PROTOCOL_ERROR"
        assert not answer.verified
