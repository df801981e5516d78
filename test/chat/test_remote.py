"""The client of OpenAI-compatible servers, against a server that misbehaves."""

from __future__ import annotations

import gzip
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from certificates import Certificates
from fake_completions import (
    Behaviour,
    FakeCompletions,
    completion,
    endless,
    raw,
    response,
    silent,
)
from hypothesis import given
from hypothesis import strategies as st
from proxies import environment_proxy
from waiting import wait_for

from collab_llm_nodes.chat.base import ChatRequest, Finish, Reply, Usage
from collab_llm_nodes.chat.completions import read_completion, whole_characters
from collab_llm_nodes.chat.remote import RemoteChat, RemoteConfig
from collab_llm_nodes.chat.retries import RetryRules, asked_pause_s
from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import (
    Busy,
    Cancelled,
    CollabError,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    ProtocolError,
    Unauthenticated,
    Unavailable,
)
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.base import Control

KEY = "sk-secret-of-the-test"
QUICK = RetryRules(backoff_initial_s=0.001, backoff_max_s=0.002)


def question(text: str = "stop?", **options: Any) -> ChatRequest:
    return ChatRequest((Turn("system", "be brief"), Turn("user", text)), **options)


def config(server: FakeCompletions, **options: Any) -> RemoteConfig:
    options.setdefault("retries", QUICK)
    return RemoteConfig(server.url, "large", token=KEY, **options)


def ask(
    script: list[Behaviour], within_s: float = 60.0, **options: Any
) -> tuple[Reply | CollabError, FakeCompletions]:
    with FakeCompletions(script) as server:
        chat = RemoteChat(config(server, **options))
        try:
            (result,) = chat.ask([question()], Control(time.monotonic() + within_s))
        finally:
            chat.close()
        return result, server


def replied(result: Reply | CollabError) -> Reply:
    assert isinstance(result, Reply), result
    return result


def test_a_request_says_what_is_asked_and_no_more() -> None:
    sampling = SamplingConfig(temperature=0.5, top_p=0.9, seed=7)
    with FakeCompletions([response(completion())]) as server:
        chat = RemoteChat(config(server))
        (result,) = chat.ask([question(sampling=sampling, max_tokens=12)], Control())
        chat.close()
    reply = replied(result)
    assert (reply.text, reply.finish, reply.usage) == ("yes", Finish.STOP, Usage(5, 4, 2))
    assert reply.attempts == 1
    (seen,) = server.seen
    told = {"host", "connection", "content-length", "content-type"}
    told |= {"accept", "accept-encoding", "user-agent", "authorization"}
    assert set(seen.headers) == told | {"x-stainless-raw-response"}
    assert seen.headers["authorization"] == f"Bearer {KEY}"
    assert seen.headers["user-agent"] == "collab_llm"
    assert seen.body == {
        "model": "large",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "stop?"},
        ],
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "max_completion_tokens": 12,
    }


def test_results_are_told_as_they_come() -> None:
    told: list[tuple[int, Reply | CollabError]] = []
    with FakeCompletions([response(completion())]) as server:
        chat = RemoteChat(config(server, parallel=1))
        try:
            asked = [question(), question(" " * 3), question()]
            results = chat.ask(
                asked, Control(time.monotonic() + 60), lambda *each: told.append(each)
            )
        finally:
            chat.close()
    assert sorted(place for place, _ in told) == [0, 1, 2]
    assert all(results[place] is result for place, result in told)


def test_the_key_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", KEY)
    with FakeCompletions([response(completion())]) as server:
        chat = RemoteChat(RemoteConfig(server.url, "large", token_variable="THE_KEY"))
        try:
            chat.ask([question()], Control(time.monotonic() + 60))
        finally:
            chat.close()
        assert server.seen[0].headers["authorization"] == f"Bearer {KEY}"
    monkeypatch.delenv("THE_KEY")
    with pytest.raises(ConfigError, match="THE_KEY"):
        RemoteChat(RemoteConfig(model="large", token_variable="THE_KEY"))
    with pytest.raises(ConfigError, match="one of the ways"):
        RemoteConfig(model="large", token=KEY, token_variable="THE_KEY")


def test_old_servers_are_told_max_tokens() -> None:
    _, server = ask([response(completion())], length_field="max_tokens")
    assert server.seen[0].body["max_tokens"] == 256
    assert "max_completion_tokens" not in server.seen[0].body


@pytest.mark.parametrize(
    ("content", "finish", "text"),
    [
        (completion("half an", "length"), Finish.LENGTH, "half an"),
        (completion(None, "length"), Finish.LENGTH, ""),
        (completion(None, "content_filter"), Finish.REFUSAL, ""),
        (completion(None, "stop", refusal="I cannot"), Finish.REFUSAL, "I cannot"),
        (completion("yes", None), Finish.STOP, "yes"),
    ],
)
def test_the_reason_of_an_end_is_told(content: Any, finish: Finish, text: str) -> None:
    result, _ = ask([response(content)])
    assert (replied(result).finish, replied(result).text) == (finish, text)


def test_usage_that_is_not_told_is_not_zero() -> None:
    result, _ = ask([response(completion(usage=None))])
    assert replied(result).usage is None


PASSING: dict[str, Behaviour] = {
    "429": response({"error": {"message": "slow down"}}, 429),
    "500": response(b"oops", 500),
    "503 with a pause": response(b"", 503, Retry_After="0"),
    "half an answer": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"),
    "no answer": raw(b""),
    "no HTTP": raw(b"220 smtp ready\r\n"),
    "no JSON": response(b"<html>"),
    "deep JSON": response(b"[" * 200_000),
    "no object": response([1]),
    "no choices": response({"choices": []}),
    "strange choice": response({"choices": ["yes"]}),
    "no text": response(completion(None)),
    "strange text": response(completion(message=1, text=None)),
    "strange end": response(completion(finish="tool_calls")),
    "strange usage": response(completion(usage={"prompt_tokens": -1})),
    "boundless usage": response(completion(usage={"completion_tokens": 10**30})),
    "not UTF-8": response(b'{"choices": "\xff"}'),
    "compressed": response(gzip.compress(b"0" * (1 << 24)), Content_Encoding="gzip"),
}


@pytest.mark.parametrize("fault", PASSING)
def test_what_may_pass_is_tried_again(fault: str) -> None:
    result, server = ask([PASSING[fault], PASSING[fault], response(completion())])
    assert replied(result).text == "yes"
    assert replied(result).attempts == 3
    assert len(server.seen) == 3


@pytest.mark.parametrize("fault", PASSING)
def test_attempts_are_limited(fault: str) -> None:
    rules = RetryRules(max_attempts=3, backoff_initial_s=0.001, backoff_max_s=0.001)
    result, server = ask([PASSING[fault]], retries=rules)
    assert isinstance(result, (Unavailable, ProtocolError))
    assert result.remedy
    assert len(server.seen) == result.attempts == 3


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        (response({"error": {"message": f"wrong key {KEY}"}}, 401), Unauthenticated),
        (response(b"", 403), Unauthenticated),
        (response({"error": {"message": f"no such model {KEY}"}}, 404), InvalidInput),
        (response({"error": {"message": "too long"}}, 400), InvalidInput),
        (response({"detail": [{"msg": "no such field"}]}, 422), InvalidInput),
        (response({"error": {"code": "insufficient_quota", "message": ""}}, 429), Unavailable),
        (response(b"", 307, Location="http://127.0.0.1:9/v1"), Unavailable),
        (response(b"x" * 5000), ProtocolError),
        (response(b"x" * 5000, 500), ProtocolError),
    ],
)
def test_what_will_not_pass_is_not_tried_again(
    behaviour: Behaviour, kind: type[CollabError]
) -> None:
    result, server = ask([behaviour], max_reply_bytes=4096)
    assert type(result) is kind
    assert KEY not in str(result)
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    "body", [{"error": {"message": "too long"}}, {"error": "too long"}, {"detail": "too long"}]
)
def test_the_servers_reason_is_told(body: object) -> None:
    result, _ = ask([response(body, 400)])
    assert "too long" in str(result)


def test_the_servers_pause_is_kept() -> None:
    result, _ = ask([response(b"", 429, Retry_After="0.3"), response(completion())])
    assert replied(result).seconds >= 0.3


@pytest.mark.parametrize("pause", ["600", "1e9"])
def test_a_pause_beyond_the_deadline_is_not_waited_for(pause: str) -> None:
    begun = time.monotonic()
    result, server = ask([response(b"", 429, Retry_After=pause)], within_s=300.0)
    assert isinstance(result, Unavailable)
    assert "pause" in str(result)
    assert len(server.seen) == 1
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("part", [b" ", b""], ids=["drops", "headers only"])
def test_an_endless_answer_ends_at_the_deadline(part: bytes) -> None:
    gone = threading.Event()
    result, _ = ask([endless(part, 0.01, gone)], within_s=0.5)
    assert replied(result).finish is Finish.DEADLINE
    assert replied(result).usage is None
    if part:
        assert gone.wait(60)


def test_a_request_that_was_never_sent_has_no_attempts() -> None:
    cancelled, late = Control(), Control(due=time.monotonic())
    cancelled.cancel()
    refused: list[CollabError] = []
    with FakeCompletions([response(completion())]) as server:
        chat = RemoteChat(config(server, max_jobs=1))
        for requests, control in (
            ([question()], cancelled),
            ([question()], late),
            ([question()] * 2, Control()),
        ):
            with pytest.raises(CollabError) as raised:
                chat.ask(requests, control)
            refused.append(raised.value)
        (result,) = chat.ask([question(sampling=SamplingConfig(0.5, top_k=3))], Control())
        assert isinstance(result, InvalidInput)
        chat.close()
        assert not server.seen
    assert [type(error) for error in refused] == [Cancelled, DeadlineExceeded, Busy]
    assert [error.attempts for error in (*refused, result)] == [0] * 4


def test_an_attempt_has_a_deadline_of_its_own() -> None:
    gone = threading.Event()
    result, _ = ask([silent(gone), response(completion())], attempt_s=0.3)
    assert replied(result).attempts >= 2
    assert gone.wait(60)


def test_a_boundless_answer_is_cut_off() -> None:
    gone = threading.Event()
    result, _ = ask([endless(b"x" * 65536, 0.0, gone)])
    assert isinstance(result, ProtocolError)
    assert "max_reply_bytes" in str(result)
    assert gone.wait(60)


def test_cancelling_closes_the_connections() -> None:
    gone = threading.Event()
    control = Control()
    with FakeCompletions([silent(gone)]) as server, ThreadPoolExecutor(1) as caller:
        chat = RemoteChat(config(server))
        call = caller.submit(chat.ask, [question()], control)
        wait_for(lambda: server.seen)
        control.cancel()
        with pytest.raises(Cancelled):
            call.result(60)
        assert gone.wait(60)
        chat.close()


def test_closing_ends_the_calls_under_way() -> None:
    with FakeCompletions([silent(threading.Event())]) as server, ThreadPoolExecutor(1) as caller:
        chat = RemoteChat(config(server))
        call = caller.submit(chat.ask, [question()], Control())
        wait_for(lambda: server.seen)
        chat.close()
        with pytest.raises(Unavailable, match="closed"):
            call.result(60)
        chat.close()
        with pytest.raises(Unavailable, match="closed"):
            chat.ask([question()], Control())


def test_many_requests_share_a_few_connections() -> None:
    together = threading.Barrier(3)

    def answer(connection: Any) -> None:
        together.wait(60)
        response(completion())(connection)

    with FakeCompletions([answer]) as server:
        chat = RemoteChat(config(server, parallel=3))
        results = chat.ask([question(f"go {i}") for i in range(12)], Control())
        chat.close()
    assert [replied(result).text for result in results] == ["yes"] * 12
    assert server.most == 3


def test_requests_fail_alone() -> None:
    with FakeCompletions([response(b"", 400), response(completion())]) as server:
        chat = RemoteChat(config(server, parallel=1))
        first, second, third = chat.ask([question(), question(" "), question()], Control())
        chat.close()
    assert isinstance(first, InvalidInput)
    assert isinstance(second, InvalidInput)
    assert "text" in str(second)
    replied(third)
    assert len(server.seen) == 2


def test_too_many_requests_are_refused() -> None:
    with FakeCompletions([response(completion())]) as server:
        chat = RemoteChat(config(server, max_jobs=2))
        with pytest.raises(Busy, match="at most 2"):
            chat.ask([question()] * 3, Control())
        assert len(chat.ask([question()] * 2, Control())) == 2
        chat.close()


def test_a_server_that_is_not_there() -> None:
    with FakeCompletions([response(completion())]) as server:
        nowhere = config(server)
    chat = RemoteChat(nowhere)
    (result,) = chat.ask([question()], Control())
    chat.close()
    assert isinstance(result, Unavailable)
    assert nowhere.url in str(result)


def test_neither_key_nor_text_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "the revenue was 5 million"
    with FakeCompletions([response(b"", 500), response(completion("mine too"))]) as server:
        settings = config(server)
        chat = RemoteChat(settings)
        chat.ask([question(secret)], Control())
        chat.close()
    assert server.seen[0].body["messages"][1]["content"] == secret
    assert caplog.records, "nothing was logged at all: the test looks at the wrong place"
    logged = "\n".join(record.getMessage() for record in caplog.records)
    for hidden in (KEY, secret, "mine too"):
        assert hidden not in logged
    assert KEY not in repr(settings)


def test_the_environment_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "org-of-the-user")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "project-of-the-user")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9")
    _, server = ask([response(completion())])
    assert "of-the-user" not in str(server.seen[0].headers)


@pytest.mark.parametrize("form", ["http://{}", "{}", "socks5://{}", "socks://{}"])
def test_a_proxy_of_the_environment_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """It would read the request and the API key in clear."""
    with environment_proxy(monkeypatch, form) as proxy:
        result, server = ask([response(completion())])
        far = "http://model.invalid/v1"  # a name that only a proxy could reach
        chat = RemoteChat(RemoteConfig(far, "large", token=KEY, unencrypted=True, retries=QUICK))
        (elsewhere,) = chat.ask([question()], Control())
        chat.close()
    assert replied(result).text == "yes"
    assert len(server.seen) == 1
    assert isinstance(elsewhere, Unavailable)
    assert proxy.seen == []


def test_a_proxy_that_is_set_is_used_for_other_machines_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with environment_proxy(monkeypatch) as proxy:
        through = f"http://{proxy.host_and_port}"
        result, _ = ask([response(completion())], proxy=through)
        assert replied(result).text == "yes"
        assert proxy.seen == []
        once = RetryRules(max_attempts=1)
        far = "https://model.invalid/v1"
        chat = RemoteChat(RemoteConfig(far, "large", token=KEY, proxy=through, retries=once))
        (refused,) = chat.ask([question()], Control())
        chat.close()
    assert isinstance(refused, Unavailable)
    (seen,) = proxy.seen
    assert seen.startswith(b"CONNECT model.invalid:443")
    assert KEY.encode() not in seen


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"), "authority")


def test_tls(certificates: Certificates) -> None:
    with FakeCompletions([response(completion())], tls=certificates.issue("server")) as server:
        chat = RemoteChat(config(server, tls_ca=certificates.ca))
        (result,) = chat.ask([question()], Control())
        chat.close()
        assert replied(result).text == "yes"
        rules = RetryRules(max_attempts=1)
        stranger = RemoteChat(config(server, retries=rules))  # does not know the authority
        (refused,) = stranger.ask([question()], Control())
        stranger.close()
    assert isinstance(refused, Unavailable)
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"url": "ftp://localhost/v1"}, "url"),
        ({"url": "localhost:8000"}, "url"),
        ({"url": "http://user:word@localhost/v1"}, "url"),
        ({"url": "http://example.org/v1"}, "url"),
        ({"url": "http://10.0.0.1:8000/v1"}, "url"),
        ({"tls_ca": "ca.pem"}, "tls_ca"),
        ({"proxy": "socks5://localhost:1080"}, "proxy"),
        ({"proxy": "localhost:3128"}, "proxy"),
        ({"proxy": "http://user:word@localhost:3128"}, "proxy"),
        ({"proxy": "http://localhost:port"}, "proxy"),
        ({"token": "a", "token_file": "b"}, "token"),
        ({"parallel": 0}, "parallel"),
        ({"unknown": 1}, "unknown"),
        ({"retries": {"backoff_initial_s": 2.0, "backoff_max_s": 1.0}}, "retries.backoff_max_s"),
    ],
)
def test_wrong_settings_are_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_mapping(RemoteConfig, {"model": "large", **options})
    assert raised.value.field == field


@pytest.mark.parametrize(
    "url", ["https://example.org/v1", "http://localhost:1/v1", "http://[::1]:1/v1"]
)
def test_encrypted_or_local_urls_are_taken(url: str) -> None:
    RemoteConfig(url, "large")
    RemoteConfig("http://example.org/v1", "large", unencrypted=True)


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model"):
        RemoteChat(RemoteConfig())
    with pytest.raises(ConfigError, match="token_file"):
        RemoteChat(RemoteConfig(model="large", token_file=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="tls_ca"):
        RemoteChat(RemoteConfig("https://localhost/v1", "large", tls_ca=str(tmp_path / "none")))


def test_the_key_may_lie_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    file.chmod(0o600)
    with FakeCompletions([response(completion())]) as server:
        chat = RemoteChat(RemoteConfig(server.url, "large", token_file=str(file)))
        chat.ask([question()], Control())
        chat.close()
    assert server.seen[0].headers["authorization"] == f"Bearer {KEY}"


def test_top_k_is_not_silently_dropped() -> None:
    with FakeCompletions([response(completion())]) as server:
        chat = RemoteChat(config(server))
        (result,) = chat.ask([question(sampling=SamplingConfig(1.0, top_k=5))], Control())
        chat.close()
    assert isinstance(result, InvalidInput)
    assert result.field == "top_k"


@given(st.integers(1, 40), st.floats(0, 1, exclude_max=True), st.floats(0, 1e6))
def test_pauses_grow_up_to_a_limit(failures: int, chance: float, asked: float) -> None:
    rules = RetryRules(max_attempts=30, backoff_initial_s=0.5, backoff_max_s=20.0)
    pause = rules.pause_s(failures, chance, asked)
    if failures >= 30:
        assert pause is None
    else:
        assert pause is not None
        assert asked <= pause <= asked + min(20.0, 0.5 * 2 ** (failures - 1))


NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 0.0),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "-7"}, 0.0),
        ({"retry-after": "nan"}, 0.0),
        ({"retry-after": "inf"}, 0.0),
        ({"retry-after": "soon"}, 0.0),
        ({"retry-after": formatdate(NOW + 30, usegmt=True)}, 30.0),
        ({"retry-after": formatdate(NOW - 30, usegmt=True)}, 0.0),
        ({"retry-after": "Mon, 99 Foo 99999 99:99:99 GMT"}, 0.0),
        ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
        ({"retry-after-ms": "x", "retry-after": "7"}, 7.0),
    ],
)
def test_pauses_that_servers_ask_for(headers: dict[str, str], seconds: float) -> None:
    assert asked_pause_s(headers, NOW) == pytest.approx(seconds)


@given(st.binary(max_size=200))
def test_any_response_is_read_or_refused(content: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_completion(content)


def test_characters_are_whole() -> None:
    assert whole_characters("\ud83d\ude00 \ud83d") == "\U0001f600 �"
    text, _, _ = read_completion(b'{"choices":[{"message":{"content":"\\ud800"}}]}')
    text.encode()
