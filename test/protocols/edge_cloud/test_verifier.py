"""The verifier over gRPC: answers, refusals, and how sessions end."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import grpc
import numpy as np
import pytest
import verifier_bed
from fake_models import (
    VOCAB,
    VOCABULARY,
    FakeEngine,
    encode,
)
from raw_client import RawClient
from verifier_bed import (
    GREEDY,
    OPEN,
    PROMPT,
    WAIT_S,
    Connect,
    Gate,
    Inbox,
    Serve,
    opened_session,
    refusal,
    runner,
)
from waiting import wait_for

from collab_llm_nodes.decoding.sampling import SamplingConfig, SparseDistribution
from collab_llm_nodes.errors import (
    Unavailable,
)
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud.info import Limits
from collab_llm_nodes.protocols.edge_cloud.link import LinkConfig
from collab_llm_nodes.protocols.edge_cloud.messages import (
    ClientMessage,
    Close,
    Draft,
    EarlyExit,
    Opened,
    ServerMessage,
    Verdict,
)
from collab_llm_nodes.serving.scheduler import BatchConfig
from collab_llm_nodes.transport import settings, streams
from collab_llm_nodes.transport.background import background_loop, within
from collab_llm_nodes.transport.wire import Failure

serve, connect, raw = verifier_bed.serve, verifier_bed.connect, verifier_bed.raw  # fixtures


# --- Answers ------------------------------------------------------------------------------------


def test_the_answer_is_the_targets_alone(serve: Serve, connect: Connect) -> None:
    target = FakeEngine(1)
    run = runner(connect(serve(target).port))
    early_exits = 0
    for sampling in (GREEDY, SamplingConfig(1.0, law="coupled", seed=4)):
        for text in ("go to the red box", "find the blue ball"):
            prompt = Prompt(text)
            answer = run.generate(prompt, sampling, 24)
            assert answer.tokens == target.answer(encode(prompt), sampling, 24)
            assert answer.metrics.bytes_up > 0
            early_exits += answer.metrics.early_exits
    assert early_exits > 0  # of dozens; one that comes with its verdict is too late


def test_the_rejection_law_needs_no_luck_with_time(serve: Serve, connect: Connect) -> None:
    """Exits, cache hits and waits differ from run to run; the tokens do not."""
    sampling = SamplingConfig(1.0, seed=4)
    answers = set()
    for exits in ((1, 2, 3), ()):
        run = runner(connect(serve(FakeEngine(1, exits=exits)).port))
        answers |= {run.generate(PROMPT, sampling, 24).tokens for _ in range(3)}
    assert len(answers) == 1


def test_many_robots_at_once(serve: Serve, connect: Connect) -> None:
    target = FakeEngine(1)
    server = serve(target)
    prompts = [Prompt(f"room {i}") for i in range(6)]
    runners = [runner(connect(server.port)) for _ in range(2)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(
            pool.map(lambda i: runners[i % 2].generate(prompts[i], GREEDY, 24).tokens, range(6))
        )
    assert answers == [target.answer(encode(p), GREEDY, 24) for p in prompts]
    for _ in prompts:
        target.freed.get(timeout=WAIT_S)
    assert target.alive == 0


def test_early_exits_arrive_while_the_forward_pass_goes_on(serve: Serve, connect: Connect) -> None:
    gate = Gate(FakeEngine.num_layers)
    session, inbox = opened_session(connect(serve(FakeEngine(1, before_layer=gate)).port))
    session.send(Draft(0, 0, (5, 6, 7)))
    early = inbox.get(EarlyExit)  # the pass cannot end before this line is reached
    assert early.round == 0
    assert early.layer in (1, 2, 3)
    assert not gate.go.is_set()
    gate.go.set()
    verdict = inbox.skip_to(Verdict)
    assert verdict.compute_s > 0
    assert inbox.empty()


def test_a_draft_may_follow_open_at_once(serve: Serve, connect: Connect) -> None:
    inbox = Inbox()
    session = connect(serve(FakeEngine(1)).port).open(OPEN, inbox.put)
    session.send(Draft(0, 0, ()))
    inbox.get(Opened)
    assert len(inbox.skip_to(Verdict).tokens) == 1


def test_describe(serve: Serve, connect: Connect) -> None:
    server = serve(FakeEngine(1), limits=Limits(max_sessions=3))
    client = connect(server.port)
    opened_session(client)
    info = client.describe(WAIT_S)
    assert (info.model, info.vocabulary, info.vocab_size) == ("fake", VOCABULARY, VOCAB)
    assert info.exit_layers == (1, 2, 3)
    assert (info.sessions, info.limits) == (1, Limits(max_sessions=3))


# --- Refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "code", "field_name"),
    [
        ({"vocabulary": "another"}, "VOCABULARY_MISMATCH", "vocabulary"),
        ({"text": " \n"}, "INVALID_INPUT", "text"),
        ({"text": "x" * 101}, "INVALID_INPUT", "text"),
        ({"images": (b"x",) * 3}, "INVALID_INPUT", "images"),
        ({"images": (b"x", b"x" * 2000)}, "INVALID_INPUT", "images[1]"),
        ({"max_tokens": 0}, "INVALID_INPUT", "max_tokens"),
        ({"max_tokens": 601}, "INVALID_INPUT", "max_tokens"),  # the verifier's limit
        ({"replay": (VOCAB,)}, "INVALID_INPUT", "replay"),
    ],
)
def test_an_unusable_request_is_refused(
    serve: Serve, connect: Connect, change: dict[str, Any], code: str, field_name: str
) -> None:
    limits = Limits(max_prompt_chars=100, max_images=2, max_image_bytes=1024, max_tokens=600)
    engine = FakeEngine(1)
    server = serve(engine, limits=limits)
    failure = refusal(connect(server.port), replace(OPEN, **change))
    assert (failure.code, failure.field) == (code, field_name)


def test_a_message_beyond_the_limit_is_invalid_input(serve: Serve, connect: Connect) -> None:
    server = serve(FakeEngine(1), limits=Limits(max_message_bytes=4096))
    failure = refusal(connect(server.port), replace(OPEN, images=(b"x" * 5000,)))
    assert failure.code == "INVALID_INPUT"


def test_a_model_that_fails_is_reported_without_its_insides(
    serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(layer: int) -> None:
        raise RuntimeError("secret of the house")

    session, inbox = opened_session(connect(serve(FakeEngine(1, before_layer=explode)).port))
    session.send(Draft(0, 0, (5,)))
    failure = inbox.get(Failure)
    assert failure.code == "INTERNAL"
    assert "secret" not in f"{failure}"
    assert "secret of the house" in caplog.text


def support(*ids: int) -> SparseDistribution:
    return SparseDistribution(np.array(ids, np.int32), np.full(len(ids), 0.5, np.float32))


SAMPLED = replace(OPEN, sampling=SamplingConfig(1.0))


@pytest.mark.parametrize(
    ("messages", "code", "field_name"),
    [
        ([b"\xff\xff\xff"], "PROTOCOL_ERROR", "message"),
        ([b""], "PROTOCOL_ERROR", "message"),
        ([Draft(0, 0, (1,))], "PROTOCOL_ERROR", "message"),
        ([OPEN, OPEN], "PROTOCOL_ERROR", "message"),
        ([OPEN, Draft(3, 0, (1,))], "PROTOCOL_ERROR", "round"),
        ([OPEN, Draft(0, 9, (1,))], "PROTOCOL_ERROR", "start"),
        ([OPEN, Draft(0, 0, (VOCAB,))], "INVALID_INPUT", "tokens"),
        ([OPEN, Draft(0, 0, (1,) * 24)], "INVALID_INPUT", "tokens"),
        ([OPEN, Draft(0, 0, (1,) * 65)], "INVALID_INPUT", "tokens"),
        ([SAMPLED, Draft(0, 0, (1,))], "INVALID_INPUT", "probs"),
        (
            [SAMPLED, Draft(0, 0, (1,), (support(2),))],
            "INVALID_INPUT",
            "probs",
        ),
        (
            [SAMPLED, Draft(0, 0, (1,), (support(1, 99),))],
            "INVALID_INPUT",
            "probs.ids",
        ),
    ],
)
def test_malformed_messages_get_a_typed_failure_and_a_clean_end(
    serve: Serve,
    raw: Callable[[int], RawClient],
    messages: list[ClientMessage | bytes],
    code: str,
    field_name: str,
) -> None:
    stream = raw(serve(FakeEngine(1)).port)
    stream.send(*messages)
    reply = stream.next()
    if isinstance(reply, Opened):
        reply = stream.next()
    assert isinstance(reply, Failure), reply
    assert (reply.code, reply.field) == (code, field_name)
    assert reply.remedy
    stream.half_close()
    with pytest.raises(StopIteration):
        stream.next()
    assert stream.replies.code() is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("draft", "kind"),
    [(Draft(0, 0, (), autoregressive_rounds=23), Verdict), (Draft(7, 0, ()), Failure)],
)
def test_the_last_word_reaches_a_client_that_writes(
    serve: Serve, draft: Draft, kind: type[ServerMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that finds the stream ended by the other side has gRPC drop what is unread."""
    monkeypatch.setattr(streams, "_PARTING_S", WAIT_S)
    server = serve(FakeEngine(1))

    async def talk() -> tuple[list[ServerMessage], grpc.StatusCode]:
        async with grpc.aio.insecure_channel(f"localhost:{server.port}") as channel:
            call = channel.stream_stream(codec.SESSION)(timeout=WAIT_S)
            await call.write(codec.encode_client(OPEN))
            await call.read()  # Opened: there is a session
            await call.write(codec.encode_client(draft))
            while server.sessions:
                await asyncio.sleep(0.001)
            for round_ in range(1, 50):  # pushed ahead before the last word was known
                await call.write(codec.encode_client(Draft(round_, round_, (5,), after=(5,))))
            await call.done_writing()
            replies = []
            while (data := await call.read()) is not grpc.aio.EOF:
                replies.append(codec.decode_server(data))
            return replies, await call.code()

    talking = asyncio.run_coroutine_threadsafe(within(talk(), WAIT_S), background_loop())
    replies, code = talking.result(2 * WAIT_S)
    last = replies[-1]
    assert isinstance(last, kind)
    assert isinstance(last, Failure) or cast(Verdict, last).finished
    assert code is grpc.StatusCode.OK


def test_a_client_that_is_told_to_try_again_ends_its_stream_before(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_PARTING_S", 10 * WAIT_S)
    none_left = BatchConfig(evict_idle_s=60.0, slot_wait_s=0.0)
    server = serve(FakeEngine(1), limits=Limits(max_sessions=1), batch=none_left)
    opened_session(connect(server.port))
    monkeypatch.setattr(settings, "BACKOFF_S", 60.0)
    once = LinkConfig(verdict_deadline_s=600.0, backoff_max_s=60.0)
    connect(server.port, link=once).open(OPEN, Inbox().put)
    verifier = server._server.service
    failures, code = "collab_llm_verifier_failures_total", {"code": Unavailable.code}
    wait_for(lambda: verifier.metrics.registry.get_sample_value(failures, code) == 1)
    wait_for(lambda: len(verifier._clients) == 1)


def test_who_does_not_end_a_stream_has_it_ended(
    serve: Serve, raw: Callable[[int], RawClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_PARTING_S", 0.1)
    stream = raw(serve(FakeEngine(1)).port)
    stream.send(OPEN, Draft(0, 0, (), autoregressive_rounds=23))
    last = [codec.decode_server(reply) for reply in stream.replies][-1]
    assert isinstance(last, Verdict)
    assert last.finished


def test_stale_drafts_are_ignored(serve: Serve, raw: Callable[[int], RawClient]) -> None:
    stream = raw(serve(FakeEngine(1, exits=())).port)
    first = Draft(0, 0, ())
    stream.send(OPEN, first)
    opened, verdict = stream.next(), stream.next()
    assert isinstance(opened, Opened)
    assert isinstance(verdict, Verdict)
    assert len(opened.session_id) == 32  # 128 bits
    stream.send(first, Draft(1, 1, ()))
    second = stream.next()
    assert isinstance(second, Verdict)
    assert second.round == 1


@pytest.mark.parametrize("end", ["close", "half-close", "cancel"])
def test_the_cache_is_freed_however_a_client_leaves(
    serve: Serve, raw: Callable[[int], RawClient], end: str
) -> None:
    engine = FakeEngine(1)
    server = serve(engine)
    stream = raw(server.port)
    stream.send(OPEN)
    stream.next()
    assert (server.sessions, engine.alive) == (1, 1)
    if end == "close":
        stream.send(Close())
    elif end == "half-close":
        stream.half_close()
    else:
        stream.replies.cancel()
    engine.freed.get(timeout=WAIT_S)
    assert engine.alive == 0


def test_a_client_that_vanishes_during_a_verification_stops_it(
    serve: Serve, raw: Callable[[int], RawClient], caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(2)
    layers: list[int] = []

    def before_layer(layer: int) -> None:
        gate(layer)
        layers.append(layer)

    engine = FakeEngine(1, before_layer=before_layer)
    server = serve(engine)
    stream = raw(server.port)
    stream.send(OPEN, Draft(0, 0, (5, 6)))
    assert gate.reached.wait(WAIT_S)
    (session,) = server._server.service._clients
    stream.replies.cancel()
    assert session.gone.wait(WAIT_S)
    gate.go.set()
    engine.freed.get(timeout=WAIT_S)
    assert engine.alive == 0
    assert layers == [1, 2], "the pass went on for nobody"
    server.stop()
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_full_verifier_says_so_and_takes_a_waiting_client_when_it_can(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience = BatchConfig(evict_idle_s=60.0, slot_wait_s=0.2)
    server = serve(FakeEngine(1), limits=Limits(max_sessions=1), batch=patience)
    holder, _ = opened_session(connect(server.port))
    once = LinkConfig(verdict_deadline_s=2.0, backoff_max_s=60.0)
    with monkeypatch.context() as patched:
        patched.setattr(settings, "BACKOFF_S", 60.0)
        impatient = refusal(connect(server.port, link=once), OPEN)
    assert impatient.code == "UNAVAILABLE"
    assert "sessions are taken" in impatient.message
    inbox = Inbox()
    connect(server.port).open(OPEN, inbox.put)
    holder.close()
    inbox.get(Opened)


def test_a_silent_session_ends_and_the_next_draft_brings_it_back(
    serve: Serve, connect: Connect
) -> None:
    engine = FakeEngine(1)
    server = serve(engine, limits=Limits(idle_s=0.1))
    session, inbox = opened_session(connect(server.port))
    session.send(Draft(0, 0, ()))
    first = inbox.skip_to(Verdict)
    engine.freed.get(timeout=WAIT_S)
    session.send(Draft(1, 1, ()))
    inbox.get(Opened)
    second = inbox.skip_to(Verdict)
    assert first.tokens + second.tokens == engine.answer(encode(PROMPT), GREEDY, 2)
