"""The client of OpenAI-compatible servers, against a server that misbehaves."""

from __future__ import annotations

import gzip
import json
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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

from collab_llm_nodes.chat import remote, retries
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
from collab_llm_nodes.models.guide import Guide
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.base import Control

KEY = "sk-secret-of-the-test"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "BACKOFF_S", 0.001)
    monkeypatch.setattr(retries, "BACKOFF_MAX_S", 0.002)


def question(text: str = "stop?", **options: Any) -> ChatRequest:
    return ChatRequest((Turn("system", "be brief"), Turn("user", text)), **options)


def config(server: FakeCompletions, **options: Any) -> RemoteConfig:
    return RemoteConfig(server.url, "large", **{"token": KEY, **options})


@contextmanager
def chatting(
    script: list[Behaviour], **options: Any
) -> Iterator[tuple[RemoteChat, FakeCompletions]]:
    """Yield a client and its server, which behaves as ``script`` says."""
    with FakeCompletions(script) as server:
        chat = RemoteChat(config(server, **options))
        try:
            yield chat, server
        finally:
            chat.close()


def ask(
    script: list[Behaviour],
    within_s: float = 60.0,
    request: ChatRequest | None = None,
    **options: Any,
) -> tuple[Reply | CollabError, FakeCompletions]:
    with chatting(script, **options) as (chat, server):
        (result,) = chat.ask([request or question()], Control(time.monotonic() + within_s))
    return result, server


def replied(result: Reply | CollabError) -> Reply:
    assert isinstance(result, Reply), result
    return result


def test_a_request_says_what_is_asked_and_no_more() -> None:
    sampling = SamplingConfig(temperature=0.5, top_p=0.9, seed=7)
    request = question(sampling=sampling, max_tokens=12)
    result, server = ask([response(completion())], request=request)
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


def test_results_are_reported_as_they_arrive() -> None:
    told: list[tuple[int, Reply | CollabError]] = []
    with chatting([response(completion())], parallel=1) as (chat, _):
        results = chat.ask(
            [question(), question(" " * 3), question()],
            Control(time.monotonic() + 60),
            lambda *each: told.append(each),
        )
    assert sorted(place for place, _ in told) == [0, 1, 2]
    assert all(results[place] is result for place, result in told)


def test_the_key_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", KEY)
    _, server = ask([response(completion())], token="", token_variable="THE_KEY")
    assert server.seen[0].headers["authorization"] == f"Bearer {KEY}"
    monkeypatch.delenv("THE_KEY")
    with pytest.raises(ConfigError, match="THE_KEY"):
        RemoteChat(RemoteConfig(model="large", token_variable="THE_KEY"))
    with pytest.raises(ConfigError, match="given twice"):
        RemoteConfig(model="large", token=KEY, token_variable="THE_KEY")


def test_old_servers_get_max_tokens() -> None:
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
def test_the_finish_is_read(content: Any, finish: Finish, text: str) -> None:
    result, _ = ask([response(content)])
    assert (replied(result).finish, replied(result).text) == (finish, text)


def test_unreported_usage_is_not_zero() -> None:
    result, _ = ask([response(completion(usage=None))])
    assert replied(result).usage is None


TRANSIENT: dict[str, Behaviour] = {
    "429": response({"error": {"message": "slow down"}}, 429),
    "500": response(b"oops", 500),
    "503 with a pause": response(b"", 503, Retry_After="0"),
    "half an answer": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"),
    "no answer": raw(b""),
    "no HTTP": raw(b"220 smtp ready\r\n"),
    "half of the JSON": response(b'{"choices": [{"message": {"content": "ye'),
    "no JSON yet": response(b"\n\n"),
    "broken off": response(completion("", "abort")),
    "error report with a status": response({"error": {"message": "try later", "code": 502}}),
    "error report of a kind": response({"error": {"message": "m", "type": "overloaded_error"}}),
    "error report as text": response({"message": "slow down", "code": "rate_limit_exceeded"}),
    "error report in the choice": response(
        {"choices": [{"error": {"message": "m", "code": "503"}, "message": {"content": ""}}]}
    ),
}
"""Failures that a further attempt may not meet."""
PERMANENT: dict[str, Behaviour] = {
    "no JSON": response(b"<html>"),
    "events": response(b'data: {"choices": []}\n\ndata: [DONE]\n\n'),
    "deep JSON": response(b"[" * 200_000 + b"]" * 200_000),
    "no object": response([1]),
    "no choices": response({"choices": []}),
    "null choices": response({"choices": None}),
    "strange choice": response({"choices": ["yes"]}),
    "no message": response({"choices": [{"delta": {"content": "yes"}}]}),
    "strange text": response({"choices": [{"message": {"content": 7}}]}),
    "strange parts": response({"choices": [{"message": {"content": [7]}}]}),
    "not UTF-8": response(b'{"choices": "\xff"}'),
    "compressed": response(gzip.compress(b"0" * (1 << 24)), Content_Encoding="gzip"),
    "501": response({"error": {"message": "no such method"}}, 501),
    "402": response({"error": {"message": "top up"}}, 402),
    "error report": response({"error": {"message": "no such model"}}),
    "error report of the request": response({"error": {"message": "too long", "code": 400}}),
    "error report of the key": response({"error": {"message": "wrong key", "code": 401}}),
    "deep error report": response({"error": {"error": {"error": {"detail": [["why"]]}}}}),
}
"""Failures that would repeat, while each attempt may be billed."""


@pytest.mark.parametrize("fault", TRANSIENT)
def test_transient_failures_are_retried(fault: str) -> None:
    result, server = ask([TRANSIENT[fault], TRANSIENT[fault], response(completion())])
    assert replied(result).text == "yes"
    assert replied(result).attempts == 3
    assert len(server.seen) == 3


@pytest.mark.parametrize("fault", TRANSIENT)
def test_attempts_are_limited(fault: str) -> None:
    result, server = ask([TRANSIENT[fault]], retries=RetryRules(max_attempts=3))
    assert isinstance(result, (Unavailable, ProtocolError))
    assert result.remedy
    assert len(server.seen) == result.attempts == 3


@pytest.mark.parametrize("fault", PERMANENT)
def test_permanent_failures_are_not_retried(fault: str) -> None:
    result, server = ask([PERMANENT[fault], response(completion())])
    assert isinstance(result, CollabError)
    assert result.remedy
    assert len(server.seen) == result.attempts == 1


PARTS = [{"type": "thinking", "thinking": [{"type": "text", "text": "no"}]},
         {"type": "text", "text": "ye"}, "s"]  # fmt: skip


@pytest.mark.parametrize(
    "answer",
    [
        *(completion("yes", finish) for finish in ("eos", "eos_token", "STOP", "end_turn", "")),
        *(completion("yes", finish) for finish in ("tool_calls", "stop_sequence", "novel")),
        {"choices": [{"message": {"content": "yes"}}]},
        {"choices": [{"message": {"content": "yes"}, "finish_reason": {"type": "stop"}}]},
        completion("yes", refusal=None, reasoning_content='{"answer": "no"}', tool_calls=None),
        completion("yes", refusal=False, reasoning="no", audio=None, annotations=[]),
        completion("<think>no</think>yes"),
        completion(PARTS),  # type: ignore[arg-type]
        completion({"type": "text", "text": "yes"}),  # type: ignore[arg-type]
        {**completion("yes"), "error": None},
        {**completion("yes"), "error": {}},
        {**completion("yes"), "error": {"message": "a warning"}, "object": 7, "id": None},
        {"choices": [{"finish_reason": None}, *completion("yes")["choices"]]},
    ],
)
def test_no_field_beside_it_loses_an_answer(answer: Any) -> None:
    result, server = ask([response(answer)])
    assert (replied(result).text, replied(result).finish) == ("yes", Finish.STOP)
    assert len(server.seen) == 1


NO_COUNTS: list[Any] = [-1, None, "many", 10**30, 1.5, float("nan"), [], {}]
NO_USAGE: list[Any] = [None, {}, [], "9", 9, {"total_tokens": 12}]


@pytest.mark.parametrize(
    ("told", "usage"),
    [
        ({"prompt_tokens": 9.0, "completion_tokens": "3"}, Usage(9, 0, 3)),
        (
            {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": None},
            Usage(9, 0, 3),
        ),
        (
            {"prompt_tokens": 9, "completion_tokens": 3,
             "prompt_tokens_details": {"cached_tokens": 99}},
            Usage(0, 9, 3),
        ),
        (
            {"prompt_tokens": 9, "completion_tokens": 3,
             "prompt_tokens_details": {"cached_tokens": "x"}},
            Usage(9, 0, 3),
        ),
        *(({"prompt_tokens": 9, "completion_tokens": count}, None) for count in NO_COUNTS),
        *((told, None) for told in NO_USAGE),
    ],
)  # fmt: skip
def test_usage_is_read_or_unknown(told: Any, usage: Usage | None) -> None:
    result, server = ask([response(completion(usage=told))])
    assert replied(result).usage == usage
    assert len(server.seen) == 1


@pytest.mark.parametrize("finish", ["max_tokens", "model_length", "MAX_TOKENS", "abort", "error"])
def test_an_answer_that_was_cut_off_is_known_as_one(finish: str) -> None:
    result, _ = ask([response(completion("half an", finish))])
    assert (replied(result).text, replied(result).finish) == ("half an", Finish.LENGTH)


@pytest.mark.parametrize("finish", ["SAFETY", "content-filter", "refusal"])
def test_a_filter_is_known_by_any_name(finish: str) -> None:
    assert replied(ask([response(completion(None, finish))])[0]).finish is Finish.REFUSAL


@pytest.mark.parametrize(
    "message",
    [
        {"content": None, "reasoning_content": '{"answer": "no"}'},
        {"content": "", "reasoning": '{"answer": "no"}'},
        {"reasoning_content": '{"answer": "no"}'},
        {"content": '<think>{"answer": "no"}'},
        {"content": [{"type": "thinking", "thinking": '{"answer": "no"}'}]},
    ],
)
def test_a_reply_of_thoughts_alone_has_no_text(message: object) -> None:
    choice = {"message": message, "finish_reason": "stop"}
    result, server = ask([response({"choices": [choice]})])
    assert (replied(result).text, replied(result).finish) == ("", Finish.STOP)
    assert len(server.seen) == 1


def refuse(why: object, status: int = 400) -> Behaviour:
    return response(why, status)


def named(field: str, why: str, code: str = "unsupported_value") -> Behaviour:
    error = {"message": why, "type": "invalid_request_error", "param": field, "code": code}
    return refuse({"error": error})


NOT_TAKEN = {
    "OpenAI, value": ("temperature", named("temperature", "Unsupported value: 'temperature' does"
                      " not support 0.5 with this model. Only the default (1) is supported.")),
    "OpenAI, field": ("top_p", named("top_p", "Unsupported parameter: 'top_p' is not supported.")),
    "FastAPI": ("seed", refuse({"detail": [{"type": "extra_forbidden", "loc": ["body", "seed"],
                "msg": "Extra inputs are not permitted"}]}, 422)),
    "words": ("seed", refuse({"error": "Unknown field `seed` in the request."})),
    "report with status 200": ("top_p", refuse({"error": {"code": 400, "message":
                               "`top_p` is deprecated for this model."}}, 200)),
    "list": ("temperature", refuse([{"error": {"code": 400, "status": "INVALID_ARGUMENT",
             "message": "temperature is not supported by this model"}}])),
}  # fmt: skip


@pytest.mark.parametrize(("field", "refusal"), NOT_TAKEN.values(), ids=NOT_TAKEN)
def test_what_a_server_refuses_by_name_is_left_out(field: str, refusal: Behaviour) -> None:
    sampling = SamplingConfig(temperature=0.5, top_p=0.9, seed=7)
    once = RetryRules(max_attempts=1)
    with chatting([refusal, response(completion())], retries=once) as (chat, server):
        for _ in range(2):
            (result,) = chat.ask([question(sampling=sampling)], Control(time.monotonic() + 60))
            assert replied(result).text == "yes"
    first, second, third = (seen.body for seen in server.seen)
    assert field in first
    assert second == third == {name: first[name] for name in first if name != field}


@pytest.mark.parametrize(
    ("why", "field", "remedy"),
    [
        ("Unrecognized request argument: max_completion_tokens", "url", "length_field"),
        ("max_completion_tokens is too large: 9000", "url", "length_field"),
        ("This model's maximum context length is 2048 tokens", "turns", "shorten"),
        ("the request exceeds the available context size", "turns", "shorten"),
        ("prompt is too long: 3000 tokens", "turns", "shorten"),
    ],
)
def test_only_a_prompt_that_is_too_long_is_to_be_shortened(
    why: str, field: str, remedy: str
) -> None:
    result, _ = ask([refuse({"error": why})] * 3, retries=RetryRules(max_attempts=1))
    assert isinstance(result, InvalidInput)
    assert result.field == field
    assert remedy in result.remedy


SCHEMA = {"type": "object", "properties": {"answer": {"type": "string"}}}


@pytest.mark.parametrize(
    "refusal",
    [
        named("response_format", "Invalid parameter: 'response_format' of type 'json_schema' is"
              " not supported with this model."),
        refuse({"detail": "grammar backend is not installed"}),
        refuse({"error": {"message": "json_schema: unknown type"}}, 422),
    ],
)  # fmt: skip
def test_a_json_schema_is_asked_for_until_the_server_refuses_it(refusal: Behaviour) -> None:
    guided = question(guide=Guide("json", json.dumps(SCHEMA)))
    once = RetryRules(max_attempts=1)
    script = [response(completion()), refusal, response(completion())]
    with chatting(script, retries=once) as (chat, server):
        for _ in range(3):
            (result,) = chat.ask([guided], Control(time.monotonic() + 60))
            assert replied(result).text == "yes"
    first, second, *after = (seen.body for seen in server.seen)
    form = {"type": "json_schema", "json_schema": {"name": "reply", "schema": SCHEMA}}
    assert first["response_format"] == second["response_format"] == form
    assert len(after) == 2
    assert all("response_format" not in body for body in after)


def test_a_guide_that_servers_do_not_know_is_not_sent() -> None:
    _, server = ask([response(completion())], request=question(guide=Guide("choice", "yes")))
    assert "response_format" not in server.seen[0].body


def test_everything_that_is_refused_is_left_out_one_after_the_other() -> None:
    script = [named(field, f"'{field}' is not supported") for field in ("seed", "top_p")]
    request = question(sampling=SamplingConfig(temperature=0.5, top_p=0.9))
    once = RetryRules(max_attempts=1)
    result, server = ask([*script, response(completion())], request=request, retries=once)
    assert replied(result).attempts == 3
    assert set(server.seen[2].body) == {
        "model", "messages", "temperature", "max_completion_tokens"
    }  # fmt: skip


def test_the_other_name_of_the_length_limit_is_tried() -> None:
    names = ("max_tokens", "max_completion_tokens")
    for sent, known in (names, names[::-1]):
        refusal = named(sent, f"Unsupported parameter: '{sent}'. Use '{known}' instead.")
        result, server = ask([refusal, response(completion())], length_field=sent)
        assert replied(result).text == "yes"
        assert known in server.seen[1].body
        assert sent not in server.seen[1].body
        result, server = ask([refusal, named(known, f"unknown field {known}")],
                             length_field=sent)  # fmt: skip
        assert isinstance(result, InvalidInput), "a reply without any limit is not asked for"


@pytest.mark.parametrize(
    "refusal",
    [
        refuse({"error": {"message": "System role not supported"}}),
        refuse({"error": "Conversation roles must alternate user/assistant/user/assistant/..."}),
        refuse({"error": {"message": "Only user and assistant roles are supported!"}}, 500),
        refuse({"error": {"message": "Jinja Exception: System role not supported"}}, 500),
        refuse({"error": {"message": "Developer instruction is not enabled for models/gemma"}}),
        named("messages[0].role", "'messages[0].role' does not support 'system' with this model."),
        refuse({"error": {"message": 'messages: Unexpected role "system".'}}),
    ],
)
def test_a_server_without_system_turns_is_asked_without(refusal: Behaviour) -> None:
    result, server = ask([refusal, response(completion())], retries=RetryRules(max_attempts=1))
    assert replied(result).text == "yes"
    assert server.seen[1].body["messages"] == [{"role": "user", "content": "be brief\n\nstop?"}]


@pytest.mark.parametrize(
    "refusal",
    [
        named("temperature", "temperature: 1.5 is more than 1", "decimal_above_max_value"),
        named("messages", "This model's context is 4096 tokens; 'messages' is too long"),
        refuse({"error": {"message": "no model of that name"}}, 404),
    ],
)
def test_a_refused_value_is_not_left_out(refusal: Behaviour) -> None:
    result, server = ask([refusal, response(completion())])
    assert isinstance(result, InvalidInput)
    assert len(server.seen) == 1


def test_parts_can_be_left_out_from_the_start() -> None:
    omit = ("temperature", "top_p", "seed", "system", "length")
    request = question(sampling=SamplingConfig(temperature=0.5, top_p=0.9))
    _, server = ask([response(completion())], request=request, omit=omit)
    assert server.seen[0].body == {
        "model": "large",
        "messages": [{"role": "user", "content": "be brief\n\nstop?"}],
    }
    with pytest.raises(ConfigError, match="'stop' cannot be left out"):
        RemoteConfig(model="large", omit=("stop",))


def test_a_server_without_either_limit_is_asked_without() -> None:
    refusals = [named(name, "unknown") for name in ("max_completion_tokens", "max_tokens")]
    result, server = ask([*refusals, response(completion())], retries=RetryRules(max_attempts=1))
    assert replied(result).text == "yes"
    limits = [{*seen.body} & {"max_completion_tokens", "max_tokens"} for seen in server.seen]
    assert limits == [{"max_completion_tokens"}, {"max_tokens"}, set()]


def test_further_fields_are_sent_with_each_request() -> None:
    further = {"chat_template_kwargs": {"enable_thinking": False}}
    _, server = ask([response(completion())], extra_body=json.dumps(further))
    assert server.seen[0].body["chat_template_kwargs"] == {"enable_thinking": False}
    for wrong in ("[1]", "{", "3"):
        with pytest.raises(ConfigError, match="is no JSON object"):
            RemoteConfig(model="large", extra_body=wrong)


@pytest.mark.parametrize(("characters", "warned"), [(9_000, False), (90_000, True)])
def test_a_prompt_that_the_server_has_cut_is_reported(
    caplog: pytest.LogCaptureFixture, characters: int, warned: bool
) -> None:
    """Ollama shortens a prompt to its context without an error."""
    usage = {"prompt_tokens": 4096, "completion_tokens": 1}
    ask([response(completion(usage=usage))], request=question("word " * (characters // 5)))
    assert ("its context is too short" in caplog.text) == warned


@pytest.mark.parametrize("seed", [0, 7, -1, 2**31, 3_000_000_000, 2**62])
def test_seeds_have_31_bits(seed: int) -> None:
    request = question(sampling=SamplingConfig(temperature=0.5, seed=seed))
    _, server = ask([response(completion())], request=request)
    assert 0 <= server.seen[0].body["seed"] < 2**31
    assert "top_p" not in server.seen[0].body, "1 is the API's own"


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
def test_refusals_are_not_retried(
    behaviour: Behaviour, kind: type[CollabError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_MAX_REPLY_BYTES", 4096)
    result, server = ask([behaviour])
    assert type(result) is kind
    assert KEY not in str(result)
    assert len(server.seen) == 1


@pytest.mark.parametrize("status", [200, 400, 401, 404, 429, 500])
@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "too long"}},
        {"error": "too long"},
        {"detail": "too long"},
        {"detail": [{"loc": ["body", "messages"], "msg": "too long"}]},
        {"message": "too long"},
        [{"error": {"message": "too long"}}],
        {"error": {"message": "Provider returned error", "metadata": {"raw": "too long"}}},
        b"too long",
    ],
)
def test_the_servers_message_is_in_the_error(body: object, status: int) -> None:
    result, _ = ask([response(body, status)])
    assert isinstance(result, CollabError)
    assert "too long" in str(result)


def test_the_servers_words_are_bounded_and_harmless() -> None:
    words = f"{KEY} \x1b]52;c;x\x07 first\nERROR second \ud800" + "z" * 100_000
    for status in (200, 400, 500):
        result, _ = ask([response({"error": {"message": words}}, status)])
        page, _ = ask([response(f"<html>{KEY} {words}".encode(errors="replace"))])
        assert KEY not in str(page)
        assert str(page).isprintable()
        assert str(result).isprintable()
        assert "first ERROR second" in str(result)
        assert KEY not in str(result)
        assert len(str(result)) < 1000


@pytest.mark.parametrize("key", ["ollama", "choices", "e", '"', "content"])
def test_an_answer_may_have_the_words_of_the_key(key: str) -> None:
    said = 'Run `ollama serve` and "see" the choices of content'
    result, _ = ask([response(completion(said))], token=key)
    assert replied(result).text == said


def test_a_refused_field_is_found_where_the_key_has_its_name() -> None:
    refused = response({"error": {"message": "temperature is not supported"}}, 400)
    result, server = ask([refused, response(completion())], token="temperature")
    assert replied(result).text == "yes"
    assert "temperature" not in server.seen[1].body


@pytest.mark.parametrize("before", [386, 390, 394, 398])
@pytest.mark.parametrize(
    "form",
    ["{}", '{{"choices": [{{"message": "{}', '"{}"', '{{"error": "{}"}}'],
    ids=["no JSON", "broken off", "no object", "an error"],
)
def test_an_error_repeats_no_part_of_the_key(form: str, before: int) -> None:
    result, _ = ask([response(form.format("y" * before + f" {KEY}").encode())])
    assert isinstance(result, CollabError)
    assert "y" * 300 in str(result)
    assert KEY[:4] not in str(result)


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


def test_a_request_that_was_never_sent_has_no_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_JOBS", 1)
    cancelled, late = Control(), Control(due=time.monotonic())
    cancelled.cancel()
    refused: list[CollabError] = []
    with chatting([response(completion())]) as (chat, server):
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
    assert "more than 1048576 bytes" in str(result)
    assert gone.wait(60)


def test_cancelling_closes_the_connections() -> None:
    gone = threading.Event()
    control = Control()
    with chatting([silent(gone)]) as (chat, server), ThreadPoolExecutor(1) as caller:
        call = caller.submit(chat.ask, [question()], control)
        wait_for(lambda: server.seen)
        control.cancel()
        with pytest.raises(Cancelled):
            call.result(60)
        assert gone.wait(60)


def test_closing_ends_the_calls_under_way() -> None:
    never = silent(threading.Event())
    with chatting([never]) as (chat, server), ThreadPoolExecutor(1) as caller:
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

    with chatting([answer], parallel=3) as (chat, server):
        results = chat.ask([question(f"go {i}") for i in range(12)], Control())
    assert [replied(result).text for result in results] == ["yes"] * 12
    assert server.most == 3


def test_requests_fail_alone() -> None:
    with chatting([response(b"", 400), response(completion())], parallel=1) as (chat, server):
        first, second, third = chat.ask([question(), question(" "), question()], Control())
    assert isinstance(first, InvalidInput)
    assert isinstance(second, InvalidInput)
    assert "text" in str(second)
    replied(third)
    assert len(server.seen) == 2


def test_too_many_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_JOBS", 2)
    with chatting([response(completion())]) as (chat, _):
        with pytest.raises(Busy, match="at most 2"):
            chat.ask([question()] * 3, Control())
        assert len(chat.ask([question()] * 2, Control())) == 2


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
        chat = RemoteChat(RemoteConfig(far, "large", token=KEY, unencrypted=True))
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
        ({"retries": {"max_attempts": 0}}, "retries.max_attempts"),
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
    _, server = ask([response(completion())], token="", token_file=str(file))
    assert server.seen[0].headers["authorization"] == f"Bearer {KEY}"


def test_top_k_is_not_silently_dropped() -> None:
    request = question(sampling=SamplingConfig(1.0, top_k=5))
    result, _ = ask([response(completion())], request=request)
    assert isinstance(result, InvalidInput)
    assert result.field == "top_k"


@given(st.integers(1, 40), st.floats(0, 1, exclude_max=True), st.floats(0, 1e6))
def test_pauses_grow_up_to_a_limit(failures: int, chance: float, asked: float) -> None:
    pause = RetryRules(max_attempts=30).pause_s(failures, chance, asked)
    if failures >= 30:
        assert pause is None
    else:
        assert pause is not None
        assert asked <= pause <= asked + min(0.002, 0.001 * 2 ** (failures - 1))


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
