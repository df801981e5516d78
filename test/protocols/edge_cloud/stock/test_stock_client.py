"""Sessions at a stock server over HTTP: honest, slow, restarted, overloaded and lying ones."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from fake_vllm import CONTEXT, FakeVllm, Reply
from session_links import GREEDY
from waiting import wait_for

from collab_llm_nodes.decoding.rejection import KeyedDraws
from collab_llm_nodes.decoding.sampling import SamplingConfig, distribution
from collab_llm_nodes.errors import CollabError, ConfigError, printable
from collab_llm_nodes.models.guide import Guide
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.protocols.edge_cloud.link import LinkConfig
from collab_llm_nodes.protocols.edge_cloud.messages import (
    Draft,
    Open,
    Opened,
    ServerMessage,
    Verdict,
)
from collab_llm_nodes.protocols.edge_cloud.stock.client import StockClient
from collab_llm_nodes.protocols.edge_cloud.stock.reference import Reference
from collab_llm_nodes.protocols.edge_cloud.stock.settings import TargetLinkConfig
from collab_llm_nodes.transport.heartbeat import HeartbeatConfig
from collab_llm_nodes.transport.wire import Failure

WAIT_S = 60.0
MOST = 24
PATIENT = LinkConfig(verdict_deadline_s=30.0)
TEXT = "Where is the red chair?"
CHOICE = Guide("choice", "turn left\nturn right\nforward")


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference.load("text-target")


@pytest.fixture(autouse=True)
def _read_once(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reference, "load", lambda path: reference)


@pytest.fixture
def server(reference: Reference) -> Iterator[FakeVllm]:
    with FakeVllm(reference) as serving:
        yield serving


class Session:
    """An answer whose drafts are every second time the target's own tokens."""

    def __init__(self, client: StockClient, server: FakeVllm, **opened: Any) -> None:
        asked = Open(TEXT, (), GREEDY, MOST, server.reference.vocabulary)
        self.opened = replace(asked, **opened)
        self.server = server
        self.messages: queue.SimpleQueue[ServerMessage] = queue.SimpleQueue()
        self.answer: list[int] = []
        self.round = 0
        self.handle = client.open(self.opened, self.messages.put)

    @cached_property
    def prompt(self) -> tuple[int, ...]:
        return self.server.reference.encode(Prompt(self.opened.text, raw=self.opened.raw))

    def next(self) -> ServerMessage:
        return self.messages.get(timeout=WAIT_S)

    def send(self) -> None:
        right = self.server.greedy((*self.prompt, *self.answer), 3)
        tokens = right if self.round % 2 == 0 else (*right[:1], 7)
        room = MOST - len(self.answer) - 1
        self.handle.send(Draft(self.round, len(self.answer), tokens[:room]))

    def verdict(self) -> Verdict:
        message = self.next()
        while isinstance(message, Opened):
            message = self.next()
        assert isinstance(message, Verdict), message
        self.answer += message.tokens
        self.round += 1
        return message

    def finish(self) -> tuple[int, ...]:
        finished = False
        while not finished:
            self.send()
            finished = self.verdict().finished
        return tuple(self.answer)

    def failure(self) -> Failure:
        message = self.next()
        while not isinstance(message, Failure):
            message = self.next()
        return message


@contextmanager
def connected(server: FakeVllm, **settings: Any) -> Iterator[StockClient]:
    with StockClient(server.config(**{"link": PATIENT, **settings})) as client:
        yield client


def once(fault: Callable[[str, dict[str, Any], dict[str, Any]], Any], path: str) -> Any:
    """Return a fault of the first request for ``path`` that asks for scores."""
    left = threading.Semaphore(1)

    def first(at: str, body: dict[str, Any], honest: dict[str, Any]) -> Any:
        scores = at == path and not body.get("return_token_ids") and not body.get("ignore_eos")
        return fault(at, body, honest) if scores and left.acquire(blocking=False) else None

    return first


@pytest.mark.parametrize("method", ["probes", "one_request", "auto"])
def test_the_answer_is_the_servers_own(server: FakeVllm, method: str) -> None:
    with connected(server, method=method) as client:
        session = Session(client, server)
        opened = session.next()
        assert isinstance(opened, Opened)
        assert opened.prompt_tokens == len(session.prompt)
        assert session.finish() == server.greedy(session.prompt, MOST)
        assert session.handle.bytes_up > 0
        assert session.handle.bytes_down > 0


def test_a_server_that_decodes_alone_streams_in_one_request(server: FakeVllm) -> None:
    with connected(server) as client:
        session = Session(client, server)
        session.handle.send(Draft(0, 0, (), autoregressive_rounds=MOST - 1))
        while not session.verdict().finished:
            pass
        assert tuple(session.answer) == server.greedy(session.prompt, MOST)
        assert sum(bool(body.get("stream")) for _, body in server.requests) == 1


@pytest.mark.parametrize("method", ["probes", "one_request"])
def test_coupled_sampling_within_top_k_gives_the_laws_own_tokens(
    server: FakeVllm, method: str
) -> None:
    sampling = SamplingConfig(0.8, top_k=5, seed=3, law="coupled")
    with connected(server, method=method) as client:
        session = Session(client, server, sampling=sampling)
        answer = session.finish()
    draws = KeyedDraws(sampling.seed)
    for n, token in enumerate(answer):
        law = distribution(server.logits((*session.prompt, *answer[:n])), sampling)
        assert token == draws.pick(law, n, "gumbel")


def test_a_draft_ahead_is_scored_before_its_round(server: FakeVllm) -> None:
    with connected(server, method="probes") as client:
        session = Session(client, server)
        right = server.greedy(session.prompt, 6)
        session.handle.send(Draft(1, 3, right[3:5], after=right[:3]))
        session.handle.send(Draft(0, 0, right[:2]))
        assert session.verdict().tokens == right[:3]
        assert session.verdict().tokens == right[3:6]


@pytest.mark.parametrize("method", ["probes", "one_request"])
def test_a_guide_limits_the_answer_to_what_the_model_prefers_of_it(
    server: FakeVllm, method: str
) -> None:
    with connected(server, method=method) as client:
        session = Session(client, server, guide=CHOICE)
        opened = session.next()
        assert isinstance(opened, Opened)
        assert opened.guided
        answer = session.finish()
    guide, right = server.reference.guides.open(CHOICE), list[int]()
    while not (right and right[-1] in server.reference.eos):
        logits = server.logits((*session.prompt, *right))
        right.append(int(np.where(guide.allowed(right), logits, -np.inf).argmax()))
    assert answer == tuple(right)
    assert any("allowed_token_ids" in body for _, body in server.requests)  # none was likely


def refused(server: FakeVllm, **opened: Any) -> Failure:
    with connected(server) as client:
        session = Session(client, server, **opened)
        session.handle.send(Draft(0, 0, ()))
        return session.failure()


def test_what_a_stock_server_cannot_do_is_refused_with_a_remedy(server: FakeVllm) -> None:
    law = refused(server, sampling=SamplingConfig(1.0, law="coupled"))
    assert (law.code, law.field) == ("INVALID_INPUT", "top_k")
    guide = refused(server, guide=CHOICE, sampling=SamplingConfig(1.0, top_k=5, law="coupled"))
    assert guide.field == "answer.guide"
    vocabulary = refused(server, vocabulary="another")
    assert vocabulary.code == "VOCABULARY_MISMATCH"
    images = refused(server, images=(b"picture",))
    assert images.field == "images"
    control = refused(server, text="<|im_end|> forward")
    assert control.field == "text"


@pytest.mark.parametrize("method", ["probes", "one_request"])
def test_more_likely_tokens_than_the_server_lists_are_refused_at_top_k(
    server: FakeVllm, method: str
) -> None:
    words = b'{"error": {"message": "Requested sample logprobs of 21, greater than max: 20"}}'
    server.fault = lambda path, body, honest: (
        Reply(400, words) if (body.get("logprobs") or 0) > 20 else None
    )
    with connected(server, method=method) as client:
        session = Session(client, server, sampling=SamplingConfig(1.0, top_k=21, law="coupled"))
        session.handle.send(Draft(0, 0, (5,)))
        failure = session.failure()
    assert (failure.code, failure.field) == ("INVALID_INPUT", "top_k")


def test_a_server_with_another_tokenizer_is_refused(server: FakeVllm) -> None:
    server.fault = lambda path, body, honest: {"tokens": [1, 2]} if path == "/tokenize" else None
    with connected(server, link=LinkConfig(verdict_deadline_s=10.0)) as client:
        failure = Session(client, server).failure()
        assert failure.code == "VOCABULARY_MISMATCH"
        wait_for(lambda: client.status.state == "DOWN")
        assert "tokenizer" in client.status.error_msg


def test_a_server_whose_check_cannot_be_read_is_asked_again(server: FakeVllm) -> None:
    broken = threading.Event()
    broken.set()

    def nonsense(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Any:
        mixed = {"choices": [{"index": 0}, {"index": "a"}]}
        return mixed if broken.is_set() and path == "/v1/completions" else None

    server.fault = nonsense
    with connected(server) as client:
        assert Session(client, server).failure().code == "PROTOCOL_ERROR"
        broken.clear()
        wait_for(lambda: client.status.state == "UP")


def test_a_server_that_does_not_list_the_model_is_refused(server: FakeVllm) -> None:
    with connected(server, model="another") as client:
        assert Session(client, server).failure().code == "NOT_FOUND"


def lie_about_ids(path: str, body: dict[str, Any], honest: dict[str, Any]) -> dict[str, Any]:
    return {**honest, "usage": {"prompt_tokens": honest["usage"]["prompt_tokens"] - 1}}


def drop_a_choice(path: str, body: dict[str, Any], honest: dict[str, Any]) -> dict[str, Any]:
    return {**honest, "choices": honest["choices"][1:]}


def drop_log_probs(path: str, body: dict[str, Any], honest: dict[str, Any]) -> dict[str, Any]:
    return {**honest, "choices": [{**c, "logprobs": None} for c in honest["choices"]]}


def forget_ids(path: str, body: dict[str, Any], honest: dict[str, Any]) -> dict[str, Any]:
    named = [{**c, "logprobs": {"tokens": ["left"]}} for c in honest["choices"]]
    return {**honest, "choices": named}


def beyond_the_vocabulary(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Any:
    named = [{**c, "logprobs": {"tokens": ["token_id:99999"]}} for c in honest["choices"]]
    return {**honest, "choices": named}


def mixed_indices(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Any:
    return {**honest, "choices": [{**honest["choices"][0], "index": "a"}, *honest["choices"][1:]]}


def a_web_page(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Reply:
    return Reply(body=b"<html>Welcome</html>")


def a_list(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Reply:
    return Reply(body=b"[1, 2]")


def a_redirection(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Reply:
    return Reply(307, Location="http://192.0.2.1/v1/completions")


@pytest.mark.parametrize(
    "fault",
    [
        lie_about_ids,
        drop_a_choice,
        drop_log_probs,
        forget_ids,
        beyond_the_vocabulary,
        mixed_indices,
        a_web_page,
        a_list,
        a_redirection,
    ],
)
def test_an_answer_that_does_not_fit_ends_the_session(server: FakeVllm, fault: Any) -> None:
    server.fault = once(fault, "/v1/completions")
    with connected(server, method="probes") as client:
        session = Session(client, server)
        session.send()
        assert session.failure().code == "PROTOCOL_ERROR"
        assert Session(client, server).finish() == server.greedy(session.prompt, MOST)


def test_scores_of_other_tokens_are_refused(server: FakeVllm) -> None:
    def other_tokens(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Any:
        (choice,) = honest["choices"]
        turned = [{str(7): {"logprob": -1.0, "rank": 1}} for _ in choice["prompt_logprobs"]]
        return {**honest, "choices": [{**choice, "prompt_logprobs": turned}]}

    server.fault = once(other_tokens, "/v1/completions")
    with connected(server, method="one_request") as client:
        session = Session(client, server)
        session.send()
        assert "other tokens" in session.failure().message


def test_a_prompt_that_the_server_reads_otherwise_is_refused(server: FakeVllm) -> None:
    def other_prompt(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Any:
        if not body.get("return_token_ids"):
            return None
        return {**honest, "choices": [{**honest["choices"][0], "prompt_token_ids": [5]}]}

    server.fault = other_prompt
    with connected(server) as client:
        session = Session(client, server)
        session.send()
        assert "other tokens" in session.failure().message


def error_report(status: int, **headers: Any) -> Callable[..., Reply]:
    body = json.dumps({"error": {"message": "engine is busy", "code": status}}).encode()
    return lambda path, sent, honest: Reply(status, body, **headers)


def error_with_200(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Any:
    return {"error": {"message": "EngineDeadError", "code": 500}}


def half_an_answer(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Reply:
    return Reply(body=json.dumps(honest).encode(), cut=True)


@pytest.mark.parametrize(
    "fault",
    [
        error_report(429),
        error_report(429, Retry_After="0.05"),
        error_report(500),
        error_report(503),
        error_with_200,
        half_an_answer,
    ],
)
def test_after_a_passing_fault_the_answer_goes_on_and_is_the_same(
    server: FakeVllm, fault: Any
) -> None:
    with connected(server) as client:
        session = Session(client, server)
        session.send()
        session.verdict()
        server.fault = once(fault, "/v1/completions")
        assert session.finish() == server.greedy(session.prompt, MOST)
        assert session.handle.reconnects == 1


def test_a_pause_that_the_server_asks_for_is_made(server: FakeVllm) -> None:
    with connected(server) as client:
        session = Session(client, server)
        session.send()
        session.verdict()
        server.fault = once(error_report(429, Retry_After="0.7"), "/v1/completions")
        begun = time.monotonic()
        session.send()
        session.verdict()
        assert time.monotonic() - begun > 0.7


def test_a_pause_asked_for_during_the_check_delays_the_next_one(server: FakeVllm) -> None:
    asked: list[float] = []

    def busy_once(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Any:
        if path != "/tokenize":
            return None
        asked.append(time.monotonic())
        return Reply(429, Retry_After="0.7") if len(asked) == 1 else None

    server.fault = busy_once
    with connected(server) as client:
        wait_for(lambda: client.status.state == "UP")
    assert asked[1] - asked[0] > 0.7


def test_a_refused_key_ends_the_session_and_is_not_repeated(
    server: FakeVllm, tmp_path: Any
) -> None:
    key = tmp_path / "key"
    key.write_text("s3cret-key")
    key.chmod(0o600)
    body = json.dumps({"error": {"message": "bad key s3cret-key"}}).encode()
    server.fault = lambda path, sent, honest: Reply(401, body)
    with connected(server, token_file=str(key)) as client:
        failure = Session(client, server).failure()
    assert failure.code == "UNAUTHENTICATED"
    assert "s3cret" not in failure.message


def test_after_a_restart_the_prefix_is_sent_again(server: FakeVllm, reference: Reference) -> None:
    with connected(server) as client:
        session = Session(client, server)
        session.send()
        session.verdict()
        server.__exit__()
        session.send()
        wait_for(lambda: client.status.state != "UP")
        again = FakeVllm(reference)
        again.port = server.port
        with again:
            verdict = session.verdict()
            assert not verdict.finished
            assert session.finish() == again.greedy(session.prompt, MOST)
        server.__enter__()


def test_another_model_under_the_same_name_does_not_go_on_with_an_answer(
    server: FakeVllm, reference: Reference
) -> None:
    with connected(server) as client:
        session = Session(client, server)
        session.send()
        session.verdict()
        server.__exit__()
        session.send()
        wait_for(lambda: client.status.state != "UP")
        other = FakeVllm(reference, weights=1)
        other.port = server.port
        with other:
            failure = session.failure()
            assert (failure.code, failure.field) == ("MODEL_ERROR", "model")
            assert Session(client, other).finish() == other.greedy(session.prompt, MOST)
        server.__enter__()


def test_a_silent_server_is_given_up_at_the_deadline(server: FakeVllm) -> None:
    release = threading.Event()

    def silent(path: str, body: dict[str, Any], honest: dict[str, Any]) -> None:
        release.wait(WAIT_S)

    with connected(server, link=LinkConfig(verdict_deadline_s=2.0)) as client:
        session = Session(client, server)
        session.send()
        session.verdict()
        server.fault = once(silent, "/v1/completions")
        session.send()
        failure = session.failure()
        release.set()
    assert failure.code in ("DEADLINE_EXCEEDED", "UNAVAILABLE")


def test_a_server_that_becomes_slow_gives_the_same_answer(server: FakeVllm) -> None:
    never = threading.Event()

    def slow(path: str, body: dict[str, Any], honest: dict[str, Any]) -> None:
        never.wait(0.1)

    with connected(server) as client:
        session = Session(client, server)
        session.send()
        session.verdict()
        server.fault = slow
        assert session.finish() == server.greedy(session.prompt, MOST)
        assert session.handle.reconnects == 0


def test_proxies_of_the_environment_are_ignored(
    server: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with connected(server) as client:
        session = Session(client, server)
        assert session.finish() == server.greedy(session.prompt, MOST)


def test_silence_shows_in_the_state_of_the_link(server: FakeVllm) -> None:
    stopped, release = threading.Event(), threading.Event()

    def freeze(path: str, body: dict[str, Any], honest: dict[str, Any]) -> None:
        if stopped.is_set():
            release.wait(WAIT_S)

    server.fault = freeze
    config = server.config(link=PATIENT)
    with StockClient(config, heartbeat=HeartbeatConfig()) as client:
        wait_for(lambda: client.status.state == "UP")
        stopped.set()
        wait_for(lambda: client.status.state == "CONNECTING")
        stopped.clear()
        release.set()
        wait_for(lambda: client.status.state == "UP")


def test_an_answer_ends_where_the_context_does(server: FakeVllm) -> None:
    def small(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Any:
        if path != "/v1/models":
            return None
        length = len(server.reference.encode(Prompt(TEXT)))
        return {"data": [{"id": "text-target", "max_model_len": length + 2}]}

    server.fault = small
    with connected(server) as client:
        assert len(Session(client, server).finish()) <= 2 < CONTEXT


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"url": "http://me:secret@127.0.0.1:8000"}, "url"),
        ({"url": "http://example.com:8000"}, "url"),
        ({"url": "ftp://127.0.0.1"}, "url"),
        ({"url": ""}, "url"),
        ({"url": "http://127.0.0.1:abc"}, "url"),
        ({"url": "http://127.0.0.1:99999"}, "url"),
        ({"url": "http://127.0.0.1:0"}, "url"),
        ({"url": "http://127.0.0.1:1/#part"}, "url"),
        ({"url": "https://[::1"}, "url"),
        ({"url": "https://me:secret@[::1"}, "url"),
        ({"url": "https://two words"}, "url"),
        ({"model": ""}, "model"),
        ({"tokenizer": ""}, "tokenizer"),
        ({"proxy": "socks5://host:1"}, "proxy"),
        ({"kind": "tgi"}, "kind"),
    ],
)
def test_wrong_settings_name_their_field_and_no_secret(
    settings: dict[str, Any], field: str
) -> None:
    known = {"kind": "vllm", "url": "http://127.0.0.1:8000", "model": "m", "tokenizer": "t"}
    with pytest.raises(ConfigError) as caught:
        TargetLinkConfig(**{**known, **settings})
    assert caught.value.field == field
    assert "secret" not in printable(str(caught.value))


def test_a_remote_host_needs_leave_to_be_asked_without_encryption() -> None:
    known: dict[str, Any] = {"kind": "vllm", "model": "m", "tokenizer": "t"}
    assert TargetLinkConfig(**known, url="http://example.com:8000", unencrypted=True).url
    assert (
        TargetLinkConfig(**known, url="https://example.com/v1/").base_url == "https://example.com"
    )


def test_no_session_is_opened_on_a_closed_client(server: FakeVllm) -> None:
    client = StockClient(server.config())
    client.close()
    with pytest.raises(CollabError):
        Session(client, server)
