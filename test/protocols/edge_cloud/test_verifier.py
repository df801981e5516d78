"""The verifier over real gRPC on this machine: answers, early exits, refusals, losses."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
import numpy as np
import pytest
from certificates import Certificates
from fake_models import (
    PROMPT_IDS,
    VOCAB,
    VOCABULARY,
    FakeEngine,
    VerifierProcess,
    as_engine,
    encode,
)
from folders import ROOT, environment
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_client import RawClient
from waiting import wait_for

from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.decoding.sampling import SamplingConfig, SparseDistribution, to_wire
from collab_llm_nodes.errors import (
    BY_CODE,
    CollabError,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    ProtocolError,
    Replay,
    Unauthenticated,
    Unavailable,
)
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt
from collab_llm_nodes.processes import free_port
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud import verifier_pb2 as pb
from collab_llm_nodes.protocols.edge_cloud.info import Limits
from collab_llm_nodes.protocols.edge_cloud.link import LinkConfig
from collab_llm_nodes.protocols.edge_cloud.messages import (
    ClientMessage,
    Close,
    Draft,
    EarlyExit,
    Failure,
    Open,
    Opened,
    ServerMessage,
    Verdict,
)
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.server import ExitConfig
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, load_config, start_server
from collab_llm_nodes.protocols.edge_cloud.verifier_client import (
    ClientLinkConfig,
    LinkStatus,
    SessionHandle,
    VerifierClient,
)
from collab_llm_nodes.serving.scheduler import BatchConfig
from collab_llm_nodes.transport import streams
from collab_llm_nodes.transport.background import background_loop, within
from collab_llm_nodes.transport.server import ServerHandle

WAIT_S = 30.0  # upper bound of waits for what takes milliseconds on an idle machine
PROMPT = Prompt("go to the red box")
GREEDY = SamplingConfig()
OPEN = Open(PROMPT.text, (), GREEDY, 24, VOCABULARY)
M = TypeVar("M")


class Inbox:
    """Receives a session's messages in the test's thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[ServerMessage] = queue.SimpleQueue()
        self.put = self._queue.put

    def get(self, kind: type[M]) -> M:
        """The next message, which must be of this kind."""
        message = self._queue.get(timeout=WAIT_S)
        assert isinstance(message, kind), message
        return message

    def skip_to(self, kind: type[M]) -> M:
        """The next message of this kind, whatever comes before it."""
        while not isinstance(message := self._queue.get(timeout=WAIT_S), kind):
            pass
        return message

    def empty(self) -> bool:
        return self._queue.empty()


Serve = Callable[..., ServerHandle]
Connect = Callable[..., VerifierClient]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start verifiers around fakes; they are stopped in the end."""
    running: list[ServerHandle] = []

    def start(engine: FakeEngine, **settings_: Any) -> ServerHandle:
        # The fake's passes take no time: its exits never precede the verdict by much.
        exits = ExitConfig(min_lead_s=0.0)
        config = VerifierConfig(**{"address": "127.0.0.1:0", "exits": exits, **settings_})
        running.append(start_server(config, as_engine(engine), encode))
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Make clients; they are closed in the end."""
    clients: list[VerifierClient] = []

    def make(
        port: int,
        on_state: Callable[[LinkStatus], None] = lambda status: None,
        verdict_deadline_s: float = 30.0,
        **settings_: Any,
    ) -> VerifierClient:
        link = LinkConfig(verdict_deadline_s=verdict_deadline_s)
        config = ClientLinkConfig(**{"address": f"127.0.0.1:{port}", "link": link, **settings_})
        clients.append(VerifierClient(config, on_state))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def runner(client: VerifierClient) -> RemoteRunner:
    return RemoteRunner(as_engine(FakeEngine(1, noise=0.5)), client, encode=encode)


def opened_session(client: VerifierClient, opened: Open = OPEN) -> tuple[SessionHandle, Inbox]:
    inbox = Inbox()
    session = client.open(opened, inbox.put)
    assert inbox.get(Opened).prompt_tokens == len(PROMPT_IDS) + 4
    return session, inbox


class Gate:
    """Holds a forward pass at a layer until the test lets it go."""

    def __init__(self, layer: int, passes: int = 0) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()
        self._layer = layer
        self._passes_before = passes

    def __call__(self, layer: int) -> None:
        if layer != self._layer:
            return
        if self._passes_before:
            self._passes_before -= 1
            return
        self.reached.set()
        assert self.go.wait(WAIT_S)


# --- The codec ----------------------------------------------------------------------------------

IDS = st.integers(0, 2**31 - 1)
COUNTS = st.integers(0, 2**32 - 1)
TEXT = st.text(max_size=20)
FIGURES = st.floats(0, 1e6)


@st.composite
def distributions(draw: st.DrawFn) -> SparseDistribution:
    raw = draw(st.lists(st.floats(1e-3, 1), min_size=1, max_size=40))
    p = np.array(raw) / sum(raw)
    q = to_wire(p, 32)
    shift = draw(st.integers(0, 2**31 - 100))
    return SparseDistribution((q.ids + shift).astype(np.int32), q.probs)


LAWS = st.builds(
    SamplingConfig,
    st.floats(0, 10),
    st.integers(0, 1000),
    st.floats(0.001, 1),
    st.integers(0, 2**64 - 1),
    st.sampled_from(["rejection", "coupled"]),
)
OPENS = st.builds(
    Open,
    TEXT,
    st.lists(st.binary(max_size=20), max_size=3).map(tuple),
    LAWS,
    COUNTS,
    TEXT,
    st.lists(IDS, max_size=5).map(tuple),
    st.integers(0, codec.MAX_ANSWER),
)
DRAFTS = st.builds(
    Draft,
    COUNTS,
    COUNTS,
    st.lists(IDS, max_size=8).map(tuple),
    st.none() | st.lists(distributions(), max_size=4).map(tuple),
    st.booleans(),
    st.none() | st.lists(IDS, max_size=8).map(tuple),
    COUNTS,
)
OUTCOMES = st.lists(IDS, min_size=2, max_size=9).map(tuple)
EXITS = OUTCOMES.flatmap(
    lambda tokens: st.builds(
        EarlyExit,
        COUNTS,
        COUNTS,
        st.just(tokens),
        st.just(len(tokens) - 1),
        st.booleans(),
        st.floats(0, 1),
    )
)
CODES = st.sampled_from([*BY_CODE, Replay.code])
VERDICTS = OUTCOMES.flatmap(
    lambda tokens: st.builds(
        Verdict,
        COUNTS,
        st.just(tokens),
        st.sampled_from([len(tokens) - 1, len(tokens)]),
        st.booleans(),
        FIGURES,
        FIGURES,
    )
)


@settings(max_examples=150, deadline=None)
@given(OPENS | DRAFTS | st.just(Close()))
def test_client_messages_cross_the_wire_unchanged(message: ClientMessage) -> None:
    assert codec.decode_client(codec.encode(message)) == message


@settings(max_examples=150, deadline=None)
@given(
    EXITS | VERDICTS | st.builds(Opened, TEXT, COUNTS) | st.builds(Failure, CODES, TEXT, TEXT, TEXT)
)
def test_server_messages_cross_the_wire_unchanged(message: ServerMessage) -> None:
    assert codec.decode_server(codec.encode(message)) == message


def test_what_is_sampled_from_is_what_arrives_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(5000, 0.01))
    q = to_wire(p, 64)
    sent = Draft(0, 0, (int(q.ids[0]),), (q,))
    arrived = codec.decode_client(codec.encode(sent))
    assert isinstance(arrived, Draft)
    assert arrived.probs is not None
    assert arrived.probs[0].ids.tobytes() == q.ids.tobytes()
    assert arrived.probs[0].law.tobytes() == q.law.tobytes()
    assert len(codec.encode(sent)) < 6 * 64  # about 4 bytes an entry


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_no_bytes_cause_anything_but_a_typed_error(data: bytes) -> None:
    for decode in (codec.decode_client, codec.decode_server, codec.decode_info):
        with contextlib.suppress(CollabError):
            decode(data)


def half(*values: float) -> bytes:
    return np.array(values, dtype="<f2").tobytes()


@pytest.mark.parametrize(
    ("sizes", "gaps", "probs"),
    [
        ([2], [1, 0], half(0.5, 0.5)),  # an id twice
        ([2], [1, 1], half(0.5, math.nan)),
        ([2], [1, 1], half(0.5, -0.5)),
        ([2], [1, 1], half(1.0, 0.0)),
        ([2], [1, 1], half(0.5, math.inf)),
        ([2], [1, 1], half(0.5)),  # fewer probabilities than promised
        ([2], [1, 1], half(0.5, 0.5) + b"x"),
        ([3], [1, 1], half(0.5, 0.5)),
        ([0], [], b""),
        ([2], [2**31, 1], half(0.5, 0.5)),
        ([5000], [1] * 5000, half(*[0.5] * 5000)),
        ([1] * 65, [1] * 65, half(*[1.0] * 65)),
    ],
)
def test_malformed_distributions_are_refused(
    sizes: list[int], gaps: list[int], probs: bytes
) -> None:
    draft = pb.Draft(tokens=[1], probs=pb.Distributions(sizes=sizes, gaps=gaps, probs=probs))
    with pytest.raises(InvalidInput, match="probs"):
        codec.decode_client(pb.ClientMessage(draft=draft).SerializeToString())


@pytest.mark.parametrize(
    "law",
    [
        pb.Sampling(temperature=math.nan, top_p=1, law="rejection"),
        pb.Sampling(temperature=-1, top_p=1, law="rejection"),
        pb.Sampling(top_p=0, law="rejection"),
        pb.Sampling(top_p=1, law="greedy"),
    ],
)
def test_malformed_laws_are_refused(law: pb.Sampling) -> None:
    data = pb.ClientMessage(open=pb.Open(text="go", sampling=law)).SerializeToString()
    with pytest.raises(InvalidInput, match="sampling"):
        codec.decode_client(data)


@pytest.mark.parametrize(
    "message",
    [
        pb.ServerMessage(),
        pb.ServerMessage(verdict=pb.Verdict(tokens=[], accepted=0)),
        pb.ServerMessage(verdict=pb.Verdict(tokens=[1], accepted=2)),
        pb.ServerMessage(verdict=pb.Verdict(tokens=[1, 2, 3], accepted=1)),
        pb.ServerMessage(verdict=pb.Verdict(tokens=[1], compute_s=math.nan)),
        pb.ServerMessage(early_exit=pb.EarlyExit(tokens=[1], confidence=math.nan)),
    ],
)
def test_answers_that_make_no_sense_are_protocol_errors(message: pb.ServerMessage) -> None:
    with pytest.raises(ProtocolError):
        codec.decode_server(message.SerializeToString())


@pytest.mark.parametrize(
    "message",
    [
        Draft(0, 0, (-1,)),
        Draft(-1, 0, ()),
        replace(OPEN, text="\ud800"),
        Draft(
            0,
            0,
            (1,),
            (SparseDistribution(np.array([1], np.int32), np.array([1 / 3], np.float32)),),
        ),
    ],
)
def test_what_cannot_be_sent_is_invalid_input(message: ClientMessage) -> None:
    with pytest.raises(InvalidInput, match="cannot be sent"):
        codec.encode(message)


def test_the_committed_code_is_generated_from_the_proto(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    out = tmp_path / "descriptor"
    proto = "collab_llm_nodes/protocols/edge_cloud/verifier.proto"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--descriptor_set_out={out}"]
    subprocess.run([*command, proto], cwd=ROOT, check=True, timeout=60)
    from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

    fresh = FileDescriptorSet.FromString(out.read_bytes()).file[0]
    committed = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(committed)
    for file in (fresh, committed):
        for message in file.message_type:
            for f in message.field:
                f.ClearField("json_name")
    assert committed == fresh


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


def refusal(client: VerifierClient, opened: Open) -> Failure:
    inbox = Inbox()
    client.open(opened, inbox.put)
    failure = inbox.get(Failure)
    assert failure.remedy, failure
    return failure


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
        ({"max_tokens": 510}, "INVALID_INPUT", "max_tokens"),  # the model's context
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


@pytest.fixture
def raw() -> Iterator[Callable[[int], RawClient]]:
    streams: list[RawClient] = []

    def make(port: int) -> RawClient:
        streams.append(RawClient(grpc.insecure_channel(f"localhost:{port}")))
        return streams[-1]

    yield make
    for stream in streams:
        stream.close()


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
    ("draft", "kind"), [(Draft(0, 0, (), solo=23), Verdict), (Draft(7, 0, ()), Failure)]
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
            await call.write(codec.encode(OPEN))
            await call.read()  # Opened: there is a session
            await call.write(codec.encode(draft))
            while server.sessions:
                await asyncio.sleep(0.001)
            for round_ in range(1, 50):  # pushed ahead before the last word was known
                await call.write(codec.encode(Draft(round_, round_, (5,), after=(5,))))
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
    once = LinkConfig(verdict_deadline_s=600.0, backoff_initial_s=60.0, backoff_max_s=60.0)
    connect(server.port, link=once).open(OPEN, Inbox().put)
    verifier = server._server.service
    failures, code = "collab_llm_verifier_failures_total", {"code": Unavailable.code}
    wait_for(lambda: verifier.telemetry.registry.get_sample_value(failures, code) == 1)
    wait_for(lambda: len(verifier._clients) == 1)


def test_who_does_not_end_a_stream_has_it_ended(
    serve: Serve, raw: Callable[[int], RawClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_PARTING_S", 0.1)
    stream = raw(serve(FakeEngine(1)).port)
    stream.send(OPEN, Draft(0, 0, (), solo=23))
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


def test_a_client_that_vanishes_in_mid_verification_stops_it(
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
    (seat,) = server._server.service._clients
    stream.replies.cancel()
    assert seat.gone.wait(WAIT_S)
    gate.go.set()
    engine.freed.get(timeout=WAIT_S)
    assert engine.alive == 0
    assert layers == [1, 2], "the pass went on for nobody"
    server.stop()
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_full_verifier_says_so_and_takes_a_waiting_client_when_it_can(
    serve: Serve, connect: Connect
) -> None:
    patience = BatchConfig(evict_idle_s=60.0, slot_wait_s=0.2)
    server = serve(FakeEngine(1), limits=Limits(max_sessions=1), batch=patience)
    holder, _ = opened_session(connect(server.port))
    once = LinkConfig(verdict_deadline_s=2.0, backoff_initial_s=60.0, backoff_max_s=60.0)
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


# --- Losses -------------------------------------------------------------------------------------


def test_an_absent_verifier_is_unavailable_within_the_deadline(connect: Connect) -> None:
    client = connect(free_port(), verdict_deadline_s=0.5)
    started = time.monotonic()
    with pytest.raises(Unavailable, match="connect") as caught:
        runner(client).generate(PROMPT, deadline_s=2 * WAIT_S)
    assert time.monotonic() - started < WAIT_S / 2
    assert caught.value.remedy
    with pytest.raises(Unavailable, match="connect"):
        client.describe(0.3)


def test_a_hanging_model_ends_in_deadline_exceeded(serve: Serve, connect: Connect) -> None:
    gate = Gate(1)
    client = connect(serve(FakeEngine(1, before_layer=gate)).port, verdict_deadline_s=0.5)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="no verdict"):
        runner(client).generate(PROMPT, deadline_s=2 * WAIT_S)
    assert time.monotonic() - started < WAIT_S / 2
    gate.go.set()


def test_an_answer_leaves_nothing_to_the_garbage_collector(serve: Serve, connect: Connect) -> None:
    """Which comes late: until then pictures and caches of many answers would stand."""
    client = connect(serve(FakeEngine(1)).port)
    followed: list[weakref.ref[EncodedPrompt]] = []
    freed: queue.SimpleQueue[object] = queue.SimpleQueue()

    def follow(prompt: Prompt) -> EncodedPrompt:
        encoded = encode(prompt)
        followed.append(weakref.ref(encoded, freed.put))
        return encoded

    noisy = as_engine(FakeEngine(1, noise=0.5))
    gc.disable()
    try:
        for _ in range(3):
            RemoteRunner(noisy, client, encode=follow).generate(PROMPT, GREEDY, 24)
            freed.get(timeout=WAIT_S)
    finally:
        gc.enable()
    assert len(followed) == 3


def test_the_answer_survives_a_restart_between_rounds(serve: Serve, connect: Connect) -> None:
    target = FakeEngine(1)
    port = free_port()
    address = f"127.0.0.1:{port}"
    servers = [serve(target, address=address)]
    client = connect(port)
    rounds: list[int] = []

    def restart(tokens: tuple[int, ...]) -> None:
        rounds.append(len(tokens))
        if len(rounds) in (2, 4):
            servers[-1].stop()
            servers.append(serve(target, address=address))

    answer = runner(client).generate(PROMPT, GREEDY, 24, on_tokens=restart)
    assert answer.tokens == target.answer(encode(PROMPT), GREEDY, 24)
    assert len(servers) == 3
    assert client.status.reconnects >= 2


@pytest.mark.parametrize("sampling", [GREEDY, SamplingConfig(1.0, seed=4)])
def test_the_answer_survives_a_kill_in_mid_verification(
    serve: Serve, connect: Connect, sampling: SamplingConfig
) -> None:
    calm = runner(connect(serve(FakeEngine(1)).port)).generate(PROMPT, sampling, 24)
    gate = Gate(2, passes=1)
    port = free_port()
    address = f"127.0.0.1:{port}"
    doomed = serve(FakeEngine(1, before_layer=gate), address=address)
    client = connect(port)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(runner(client).generate, PROMPT, sampling, 24)
        assert gate.reached.wait(WAIT_S)
        doomed.stop()  # its compute thread still hangs
        serve(FakeEngine(1), address=address)
        assert answer.result(WAIT_S).tokens == calm.tokens
    gate.go.set()
    assert client.status.reconnects >= 1


def test_the_link_status_follows_the_verifier(serve: Serve, connect: Connect) -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    states: queue.SimpleQueue[LinkStatus] = queue.SimpleQueue()

    def status_when(state: str) -> LinkStatus:
        while (status := states.get(timeout=WAIT_S)).state != state:
            pass
        return status

    connect(port, on_state=states.put)
    down = status_when("DOWN")
    assert down.error_code == "UNAVAILABLE"
    assert down.error_msg
    server = serve(FakeEngine(1), address=address)
    up = status_when("UP")
    assert (up.model, up.vocabulary, up.error_code) == ("fake", VOCABULARY, "")
    assert 0 < up.rtt_s < 1
    server.stop()
    status_when("DOWN")
    serve(FakeEngine(1), address=address)
    status_when("UP")


def test_closing_the_client_ends_its_sessions(serve: Serve, connect: Connect) -> None:
    engine = FakeEngine(1)
    client = connect(serve(engine).port)
    _, inbox = opened_session(client)
    client.close()
    assert inbox.get(Failure).code == "CANCELLED"
    engine.freed.get(timeout=WAIT_S)
    with pytest.raises(Unavailable, match="closed"):
        client.open(OPEN, inbox.put)
    with pytest.raises(Unavailable, match="closed"):
        client.describe(1.0)


def test_a_second_verifier_on_one_port_is_an_error(serve: Serve) -> None:
    server = serve(FakeEngine(1))
    with pytest.raises(ConfigError, match="cannot listen"):
        serve(FakeEngine(1), address=f"127.0.0.1:{server.port}")


@pytest.fixture
def processes() -> Iterator[tuple[VerifierProcess, VerifierProcess, int]]:
    """Two verifiers as processes of their own, not listening yet, for one port."""
    port = free_port()
    pair = VerifierProcess(f"127.0.0.1:{port}"), VerifierProcess(f"127.0.0.1:{port}")
    yield (*pair, port)
    for process in pair:
        process.end()


def test_sigkill_costs_no_token_and_sigterm_drains(
    processes: tuple[VerifierProcess, VerifierProcess, int], connect: Connect
) -> None:
    first, second, port = processes
    first.listen()
    client = connect(port)
    expected = FakeEngine(1).answer(encode(PROMPT), GREEDY, 24)
    rounds: list[int] = []

    def kill(tokens: tuple[int, ...]) -> None:
        rounds.append(len(tokens))
        if len(rounds) == 2:
            first.end()
            second.listen()

    assert runner(client).generate(PROMPT, GREEDY, 24, on_tokens=kill).tokens == expected
    assert client.status.reconnects >= 1
    rounds.clear()

    def terminate(tokens: tuple[int, ...]) -> None:
        rounds.append(len(tokens))
        if len(rounds) == 1:
            second.terminate()

    assert runner(client).generate(PROMPT, GREEDY, 24, on_tokens=terminate).tokens == expected
    assert len(rounds) > 1
    assert second.exit_code() == 0


# --- Token and TLS ------------------------------------------------------------------------------


def test_the_token_must_be_right(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("s3cret\n")
    server = serve(FakeEngine(1), token_file=str(secret))
    assert connect(server.port, token="s3cret").describe(WAIT_S).model == "fake"
    opened_session(connect(server.port, token_file=str(secret)))
    for wrong in ("", "s3cre", "s3cret2"):
        states: queue.SimpleQueue[LinkStatus] = queue.SimpleQueue()
        client = connect(server.port, on_state=states.put, token=wrong)
        assert refusal(client, OPEN).code == "UNAUTHENTICATED"
        with pytest.raises(Unauthenticated, match="token"):
            client.describe(WAIT_S)
        while states.get(timeout=WAIT_S).error_code != "UNAUTHENTICATED":
            pass


@pytest.mark.parametrize(
    ("address", "tls", "warns"),
    [
        ("cloud:50551", False, True),
        ("10.0.0.7:50551", False, True),
        ("[fd00::7]:50551", False, True),
        ("cloud:50551", True, False),
        ("127.0.0.1:50551", False, False),
        ("[::1]:50551", False, False),
        ("localhost:50551", False, False),
        ("unix:/run/verifier.sock", False, False),
    ],
)
def test_a_token_that_travels_in_the_clear_is_warned_of(
    address: str, tls: bool, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with VerifierClient(ClientLinkConfig(address=address, tls=tls, token="s3cret")):
        pass
    assert ("unencrypted" in caplog.text) == warns
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_token_file_that_others_can_read_is_warned_of(
    mode: int, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = tmp_path / "token"
    secret.write_text("s3cret\n")
    secret.chmod(mode)
    with VerifierClient(ClientLinkConfig(token_file=str(secret))):
        pass
    assert ("chmod 600" in caplog.text) == warns


def test_the_token_is_not_in_the_logs(
    serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    config = VerifierConfig(token="s3cret")
    assert "s3cret" not in f"{config}{ClientLinkConfig(token='s3cret')}"
    caplog.set_level("DEBUG")
    server = serve(FakeEngine(1), token="s3cret")
    refusal(connect(server.port, token="wrong"), OPEN)
    assert "s3cret" not in caplog.text


def test_tls(
    serve: Serve, connect: Connect, certificates: tuple[Certificates, Certificates]
) -> None:
    ours, theirs = certificates
    cert, key = ours.issue("verifier")
    target = FakeEngine(1)
    port = serve(target, tls_cert=cert, tls_key=key).port
    answer = runner(connect(port, tls=True, tls_ca=ours.ca)).generate(PROMPT, GREEDY, 24)
    assert answer.tokens == target.answer(encode(PROMPT), GREEDY, 24)
    stranger = connect(port, verdict_deadline_s=2.0, tls=True, tls_ca=theirs.ca)
    failure = refusal(stranger, OPEN)
    assert failure.code == "UNAVAILABLE"
    assert "handshake" in failure.message.lower() or "certificate" in failure.message.lower()
    in_clear = refusal(connect(port, verdict_deadline_s=0.5), OPEN)
    assert in_clear.code == "UNAVAILABLE"
    assert "it may ask for TLS" in in_clear.message


def test_mutual_tls(
    serve: Serve, connect: Connect, certificates: tuple[Certificates, Certificates]
) -> None:
    ours, theirs = certificates
    cert, key = ours.issue("verifier")
    port = serve(FakeEngine(1), tls_cert=cert, tls_key=key, tls_client_ca=ours.ca).port
    robot_cert, robot_key = ours.issue("robot")
    known = {"tls": True, "tls_ca": ours.ca}
    opened_session(connect(port, **known, tls_cert=robot_cert, tls_key=robot_key))
    other_cert, other_key = theirs.issue("other")
    for extra in ({}, {"tls_cert": other_cert, "tls_key": other_key}):
        started = time.monotonic()
        client = connect(port, verdict_deadline_s=0.5, **known, **extra)
        failure = refusal(client, OPEN)
        assert time.monotonic() - started < WAIT_S / 2
        assert failure.code == "UNAVAILABLE"
        assert "another client certificate" in failure.message


def test_certificates_that_cannot_be_used_are_named(
    serve: Serve, certificates: tuple[Certificates, Certificates], tmp_path: Path
) -> None:
    ours, _ = certificates
    cert, key = ours.issue("one")
    _, other_key = ours.issue("another")
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    for own, its_key in ((str(junk), key), (cert, str(junk)), (cert, other_key)):
        with pytest.raises(ConfigError, match=r"^tls_cert: .* is no certificate with the key"):
            serve(FakeEngine(1), tls_cert=own, tls_key=its_key)
        with pytest.raises(ConfigError, match=r"^tls_cert: "):
            VerifierClient(ClientLinkConfig(tls=True, tls_cert=own, tls_key=its_key))
    with pytest.raises(ConfigError, match=r"^tls_client_ca: .* holds no certificate"):
        serve(FakeEngine(1), tls_cert=cert, tls_key=key, tls_client_ca=str(junk))
    with pytest.raises(ConfigError, match=r"^tls_ca: .* holds no certificate"):
        VerifierClient(ClientLinkConfig(tls=True, tls_ca=str(junk)))


@pytest.mark.parametrize(
    ("options", "open_to_all", "readable"),
    [
        ({}, True, True),
        ({"token": "s3cret"}, False, True),
        ({"tls_cert": "", "tls_key": ""}, True, False),
        ({"tls_cert": "", "tls_key": "", "tls_client_ca": ""}, False, False),
    ],
)
def test_who_listens_to_all_the_world_is_told_what_is_missing(
    serve: Serve,
    certificates: tuple[Certificates, Certificates],
    caplog: pytest.LogCaptureFixture,
    options: dict[str, str],
    open_to_all: bool,
    readable: bool,
) -> None:
    ours, _ = certificates
    cert, key = ours.issue("verifier")
    files = {"tls_cert": cert, "tls_key": key, "tls_client_ca": ours.ca}
    given = {name: value or files[name] for name, value in options.items()}
    serve(FakeEngine(1), address="0.0.0.0:0", **given)
    assert ("anyone may use it" in caplog.text) == open_to_all
    assert ("without TLS" in caplog.text) == readable


# --- Configuration ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "field_name"),
    [
        (lambda: VerifierConfig(tls_cert="a"), "tls_cert"),
        (lambda: VerifierConfig(tls_client_ca="a"), "tls_client_ca"),
        (lambda: VerifierConfig(token="a", token_file="b"), "token"),
        (lambda: VerifierConfig(drain_s=-1), "drain_s"),
        (lambda: Limits(max_sessions=0), "max_sessions"),
        (lambda: ClientLinkConfig(tls_ca="a"), "tls"),
        (lambda: ClientLinkConfig(tls=True, tls_key="a"), "tls_cert"),
        (lambda: VerifierClient(ClientLinkConfig(token_file="/nowhere")), "token_file"),
        (lambda: VerifierClient(ClientLinkConfig(tls=True, tls_ca="/nowhere")), "tls_ca"),
        (lambda: VerifierClient(ClientLinkConfig(token="zwei\nZeilen")), "token"),
        (lambda: load_config(), "model.path"),
        (lambda: VerifierConfig(address=""), "address"),
        (lambda: ClientLinkConfig(address="nowhere"), "address"),
        (lambda: ClientLinkConfig(address="127.0.0.1:99999"), "address"),
        (lambda: from_mapping(VerifierConfig, {"drain_s": -1}), "drain_s"),
        (lambda: from_mapping(VerifierConfig, {"exits": {"queue": "lifo"}}), "exits.queue"),
        (lambda: from_mapping(VerifierConfig, {"exits": None}), "exits"),
        (lambda: from_mapping(VerifierConfig, {"model": {"exit_layers": 2}}), "model.exit_layers"),
        (
            lambda: from_mapping(VerifierConfig, {"model": {"exit_layers": "2"}}),
            "model.exit_layers",
        ),
    ],
)
def test_settings_that_cannot_work_are_errors(build: Callable[[], object], field_name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.field == field_name


def test_the_configuration_is_read_from_yaml(tmp_path: Path) -> None:
    file = tmp_path / "verifier.yaml"
    file.write_text(
        "model: {path: models/target, dtype: bfloat16}\nlimits: {max_sessions: 2}\n"
        "exits: {confidence: max}\n"
    )
    config = load_config(file, address="0.0.0.0:1")
    assert (config.model.path, config.model.dtype) == ("models/target", "bfloat16")
    assert (config.limits.max_sessions, config.exits.confidence) == (2, "max")
    assert config.address == "0.0.0.0:1"
    file.write_text("limits: {max_robots: 2}\n")
    with pytest.raises(ConfigError, match=r"limits\.max_robots"):
        load_config(file)


def test_a_shipped_configuration_goes_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("verifier_embedded.yaml").model.exits == "beside"
    (tmp_path / "verifier_embedded.yaml").write_text("model: {path: mine}\n")
    assert load_config("verifier_embedded.yaml").model.path == "mine"
    with pytest.raises(ConfigError, match=r"'verifier_none\.yaml'"):
        load_config("verifier_none.yaml")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "verifier_none.yaml")


def test_signals_while_it_drains_are_ignored() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED_TWICE],
        env=environment(Path(__file__).parent),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


SIGNALLED_TWICE = """
import asyncio, os, signal
from collab_llm_nodes.transport.server import run_until_signal

class Server:
    port, sessions, failed = 1, 1, asyncio.Event()

    async def start(self):
        pass

    async def stop(self, grace_s):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)
        return True

first = lambda port: os.kill(os.getpid(), signal.SIGINT)
asyncio.run(run_until_signal(Server(), 1.0, first))
os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize("address", ["foo", "127.0.0.1", "127.0.0.1:999999", ":50551", "host:ftp"])
def test_an_address_without_a_port_is_refused_before_grpc_guesses_one(address: str) -> None:
    with pytest.raises(ConfigError, match=r"host:port"):
        load_config("verifier_embedded.yaml", model="nav-target", address=address)
