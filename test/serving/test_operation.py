"""A verifier in operation: what operators see, how it fails, and how it treats slow clients."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import passes_bed
import pytest
import torch
from fake_models import PROMPT_IDS, FakeEngine, FakeSession, as_engine, encode
from folders import environment
from grpc_health.v1 import health_pb2
from passes_bed import (
    GREEDY,
    OPEN,
    WAIT_S,
    Join,
    Passes,
    Posted,
    Serve,
    Wire,
    client_of,
    compute_of,
    share_a_pass,
    target_of,
)
from torch import Tensor

from collab_llm_lab.bench.verifier import LOADS, Recording, Tally, drive_robots
from collab_llm_nodes.engine.session import Feed
from collab_llm_nodes.errors import (
    CollabError,
    ConfigError,
    ModelError,
    ProtocolError,
    Unavailable,
)
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud.info import Limits
from collab_llm_nodes.protocols.edge_cloud.messages import (
    Draft,
    EarlyExit,
    Opened,
    ServerMessage,
    Verdict,
)
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig
from collab_llm_nodes.protocols.edge_cloud.verifier import Verifier
from collab_llm_nodes.serving.scheduler import (
    BatchConfig,
)
from collab_llm_nodes.transport import streams
from collab_llm_nodes.transport.logs import set_up_logging
from collab_llm_nodes.transport.wire import Failure

serve, join = passes_bed.serve, passes_bed.join  # fixtures


# --- Without gRPC -------------------------------------------------------------------------------


def test_another_front_end_can_carry_the_conversation() -> None:
    engine = FakeEngine(1)

    async def talk() -> tuple[int, ...]:
        verifier = Verifier(VerifierConfig(), as_engine(engine), encode)
        verifier.start()
        wire = Wire(OPEN, Draft(0, 0, (), autoregressive_rounds=23))
        conversation = asyncio.ensure_future(verifier.accept(wire))
        assert isinstance(await wire.next(), Opened)
        tokens: tuple[int, ...] = ()
        while not isinstance(said := await wire.next(), Verdict) or not said.finished:
            tokens += said.tokens if isinstance(said, Verdict) else ()
        wire.end()
        await conversation
        await verifier.stop()
        return tokens + said.tokens

    tokens = asyncio.run(asyncio.wait_for(talk(), WAIT_S))
    assert tokens == engine.answer(encode(Prompt(OPEN.text)), GREEDY, 24)
    assert engine.alive == 0


@pytest.mark.parametrize("why", ["draining", "full"])
def test_nobody_waits_for_who_is_refused_and_stays(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_PARTING_S", 10 * WAIT_S)

    async def run() -> None:
        config = VerifierConfig(limits=Limits(max_streams=1 if why == "full" else 9))
        verifier = Verifier(config, as_engine(FakeEngine(1)), encode)
        verifier.start()
        welcome, refused = Wire(OPEN), Wire(OPEN)
        conversation = asyncio.ensure_future(verifier.accept(welcome))
        assert isinstance(await welcome.next(), Opened)
        other = verifier.drain(10 * WAIT_S) if why == "draining" else asyncio.sleep(0)
        meanwhile = asyncio.ensure_future(other)
        await asyncio.sleep(0)  # it has begun
        await verifier.accept(refused)
        assert isinstance(await refused.next(), Failure)
        welcome.end()
        await conversation
        await meanwhile
        await verifier.stop()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


# --- What operators see -------------------------------------------------------------------------


def health(port: int, service: str = "") -> int:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)
        return int(answer.status)


def test_health_needs_no_token_and_knows_the_service(serve: Serve) -> None:
    server = serve(FakeEngine(1), token="s3cret")
    assert health(server.port) == health_pb2.HealthCheckResponse.SERVING
    assert health(server.port, codec.SERVICE) == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        health(server.port, "another")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_verifier_that_drains_says_so_and_lets_answers_finish(serve: Serve, join: Join) -> None:
    server = serve(FakeEngine(1))
    robot = join(server)
    robot.send(OPEN)
    robot.skip_to(Opened)
    stopping = threading.Thread(target=server.stop, args=(WAIT_S,))
    stopping.start()
    deadline = time.monotonic() + WAIT_S
    while health(server.port) != health_pb2.HealthCheckResponse.NOT_SERVING:
        assert time.monotonic() < deadline
    late = join(server)
    assert late.skip_to(Failure).code == "UNAVAILABLE"
    robot.send(Draft(0, 0, (), autoregressive_rounds=23))
    while not robot.skip_to(Verdict).finished:
        pass
    stopping.join(WAIT_S)
    assert not stopping.is_alive()


def test_metrics_tell_what_was_done(serve: Serve, join: Join) -> None:
    server = serve(FakeEngine(1), metrics_address="127.0.0.1:0")
    robot = join(server)
    robot.send(OPEN, Draft(0, 0, ()), Draft(0, 0, ()))
    robot.skip_to(Verdict)
    robot.send(Draft(1, 1, (99,)))
    robot.skip_to(Failure)
    with pytest.raises(StopIteration):
        robot.next()
    url = f"http://127.0.0.1:{server.metrics_port}/metrics"
    text = urllib.request.urlopen(url, timeout=WAIT_S).read().decode()
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    name = "collab_llm_verifier"
    assert float(figures[f"{name}_tokens_total"]) == 1
    assert float(figures[f'{name}_failures_total{{code="INVALID_INPUT"}}']) == 1
    assert float(figures[f"{name}_batch_count"]) == 1
    assert float(figures[f"{name}_queue_seconds_count"]) == 1
    assert float(figures[f"{name}_prompt_tokens_total"]) == len(PROMPT_IDS) + 4 - 1
    with pytest.raises(ConfigError, match="metrics_address"):
        serve(FakeEngine(1), metrics_address=f"127.0.0.1:{server.metrics_port}")


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:], root.level = handlers, level


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_log_line_for_each_session_without_its_whole_name(
    serve: Serve,
    join: Join,
    root_logger: logging.Logger,
    capsys: pytest.CaptureFixture[str],
    log_format: str,
) -> None:
    set_up_logging(log_format)
    server = serve(FakeEngine(1), token="s3cret")
    robot = client_of(server)
    robot.send(OPEN)
    with pytest.raises(grpc.RpcError):
        robot.next()
    robot.close()
    server = serve(FakeEngine(1))
    robot = join(server)
    robot.send(OPEN, Draft(0, 0, (), autoregressive_rounds=23))
    name = robot.skip_to(Opened).session_id
    while not robot.skip_to(Verdict).finished:
        pass
    with pytest.raises(StopIteration):
        robot.next()
    server.stop()
    lines = capsys.readouterr().err.splitlines()
    (ended,) = (line for line in lines if "session ended" in line)
    assert name[:8] in ended
    assert not any(name in line or "s3cret" in line for line in lines)
    if log_format == "json":
        for line in lines:
            json.loads(line)
        assert json.loads(ended)["failures"] == 0
    else:
        assert f"session={name[:8]}" in ended


def test_session_names_are_the_servers_own_and_128_bits(serve: Serve, join: Join) -> None:
    server = serve(FakeEngine(1))
    names = set()
    for _ in range(5):
        robot = join(server)
        robot.send(OPEN)
        names.add(robot.skip_to(Opened).session_id)
    assert len(names) == 5
    assert all(len(bytes.fromhex(name)) == 16 for name in names)


def test_a_failing_pass_fails_its_sessions_and_no_more(serve: Serve, join: Join) -> None:
    class NoMemory(FakeEngine):
        broken = False

        def run(self, feeds: Sequence[Feed], **exits: Any) -> list[Tensor | Exception]:
            if self.broken:
                self.broken = False
                raise MemoryError
            return super().run(feeds, **exits)

    engine = NoMemory(1)
    server = serve(engine)
    unlucky, other = join(server), join(server)
    for robot in (unlucky, other):
        robot.send(OPEN)
        robot.skip_to(Opened)
    engine.broken = True
    unlucky.send(Draft(0, 0, ()))
    assert unlucky.skip_to(Failure).code == CollabError.code
    other.send(Draft(0, 0, ()))
    assert other.skip_to(Verdict).round == 0


def test_logits_that_are_not_finite_fail_their_session_only(serve: Serve, join: Join) -> None:
    class Sick(Passes):
        def run(self, feeds: Sequence[Feed], **exits: Any) -> list[Tensor | Exception]:
            results = super().run(feeds, **exits)
            for i, feed in enumerate(feeds):
                if tuple(feed.ids[1:]) == (6,):
                    results[i] = torch.full((2, self.vocab_size), math.nan)
            return results

    engine = Sick()
    server = serve(engine)
    robots = other, sick, healthy = [join(server) for _ in range(3)]
    for robot in robots:
        robot.send(OPEN)
        robot.skip_to(Opened)
    share_a_pass(engine, server, other, [(sick, Draft(0, 0, (6,))), (healthy, Draft(0, 0, (5,)))])
    assert sick.skip_to(Failure).code == ModelError.code
    assert healthy.skip_to(Verdict).round == 0
    assert engine.sizes[-1] == (2, 2)


class StuckCaches(FakeEngine):
    """An engine whose caches cannot be freed, as after a CUDA error."""

    def open(self, prompt: EncodedPrompt, expected: int = 0) -> FakeSession:
        session = super().open(prompt)
        session.close = self._fail  # type: ignore[method-assign]
        return session

    def _fail(self) -> None:
        raise RuntimeError("CUDA error")


def test_when_nothing_can_be_computed_any_more_everybody_is_told(serve: Serve, join: Join) -> None:
    server = serve(StuckCaches(1))
    leaving, waiting = join(server), join(server)
    for robot in (leaving, waiting):
        robot.send(OPEN)
        robot.skip_to(Opened)
    leaving.close()
    assert waiting.skip_to(Failure).code == "UNAVAILABLE"
    assert health(server.port) == health_pb2.HealthCheckResponse.NOT_SERVING
    late = join(server)
    assert late.skip_to(Failure).code == "UNAVAILABLE"


def test_a_session_whose_end_fails_is_told_and_so_is_who_comes_behind_it() -> None:
    failed = threading.Event()
    compute = compute_of(StuckCaches(1), on_failure=failed.set)
    first, behind = Posted(), Posted()
    target = target_of(FakeEngine(1))
    compute.open(first, target)
    assert isinstance(first.next(), Opened)
    target._kv.close = StuckCaches(1)._fail  # type: ignore[method-assign]
    compute.submit(first, Draft(5, 0, ()))  # of a round that is not due: the session ends
    assert isinstance(first.next(), ProtocolError)
    assert failed.wait(WAIT_S)
    compute.open(behind, target_of(FakeEngine(1)))
    assert isinstance(behind.next(), Unavailable)
    compute.leave(behind)
    assert compute.stop(WAIT_S)


def test_a_verifier_that_failed_ends_with_an_error_status() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILING],
        env=environment(Path(__file__).parent),
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == "UNAVAILABLE\n"
    assert "CollabError: the verifier failed" in done.stderr


FAILING = """
import asyncio, threading
from test_operation import *
from collab_llm_nodes.protocols.edge_cloud.verifier import Verifier
from collab_llm_nodes.transport.server import Server, run_until_signal

def robots(port):
    server = type("Server", (), {"port": port})
    waiting, leaving = client_of(server), client_of(server)
    for robot in (waiting, leaving):
        robot.send(OPEN)
        robot.skip_to(Opened)
    leaving.close()
    print(waiting.skip_to(Failure).code)
    waiting.close()

def listening(port):
    threading.Thread(target=robots, args=(port,)).start()

config = VerifierConfig(address="127.0.0.1:0")
server = Server(Verifier(config, as_engine(StuckCaches(1)), encode))
asyncio.run(run_until_signal(server, 20.0, listening))
"""


# --- Silence ------------------------------------------------------------------------------------


def test_who_waits_for_the_verifier_is_not_silent(serve: Serve, join: Join) -> None:
    engine = Passes()
    server = serve(engine, limits=Limits(idle_s=0.2))
    robot = join(server)
    robot.send(OPEN)
    robot.skip_to(Opened)
    with engine.held(lambda: robot.send(Draft(0, 0, ()))):
        inbox = server._server.service._compute._inbox
        deadline = time.monotonic() + WAIT_S
        while len(inbox) < 2 and robot.replies.is_active():  # asked twice whether it is silent
            assert time.monotonic() < deadline
    assert isinstance(robot.next_but(EarlyExit), Verdict)


def test_who_waits_for_a_cache_is_not_silent() -> None:
    compute = compute_of(FakeEngine(1), batch=BatchConfig(slot_wait_s=3600, evict_idle_s=3600))
    holder, newcomer, silent = Posted(), Posted(), Unavailable("silent")
    compute.open(holder, target_of(FakeEngine(1)))
    assert isinstance(holder.next(), Opened)
    compute.open(newcomer, target_of(FakeEngine(1)))
    compute.end_if_idle(newcomer, silent)
    compute.end_if_idle(holder, silent)
    assert holder.next() is silent
    assert isinstance(newcomer.next(), Opened)
    assert compute.stop(WAIT_S)


def test_a_client_that_does_not_even_take_its_farewell_is_let_go() -> None:
    class Deaf(Wire):
        async def write(self, data: bytes) -> None:
            await super().write(data)
            if isinstance(codec.decode_server(data), Failure):
                await asyncio.get_running_loop().create_future()  # its window is full

    async def talk() -> list[ServerMessage]:
        config = VerifierConfig(limits=Limits(idle_s=0.1))
        verifier = Verifier(config, as_engine(FakeEngine(1)), encode)
        verifier.start()
        wire = Deaf(OPEN)
        conversation = asyncio.ensure_future(verifier.accept(wire))
        done, _ = await asyncio.wait([conversation], timeout=WAIT_S)
        assert done, "the stream is held"
        await verifier.stop()
        return [await wire.next(), await wire.next()]

    sent = asyncio.run(asyncio.wait_for(talk(), 2 * WAIT_S))
    assert [type(message) for message in sent] == [Opened, Failure]


# --- The benchmark ------------------------------------------------------------------------------


def recording(engine: FakeEngine, text: str) -> Recording:
    """One token per round, no drafts."""
    opened = replace(OPEN, text=text, max_tokens=6)
    tokens = engine.answer(encode(Prompt(text)), GREEDY, opened.max_tokens)
    drafts = tuple((codec.encode_client(Draft(i, i, ())), 0) for i in range(len(tokens)))
    pauses = (0.001,) * len(drafts)
    return Recording(codec.encode_client(opened), drafts, pauses, tuple((t,) for t in tokens))


@pytest.mark.parametrize("load", LOADS)
def test_the_benchmark_counts_tokens_and_notices_a_wrong_one(serve: Serve, load: str) -> None:
    engine = FakeEngine(1)
    server = serve(engine, limits=Limits(max_sessions=16))
    right = [recording(engine, f"room {i}") for i in range(4)]

    def drive(recordings: Sequence[Recording]) -> Tally:
        job = drive_robots(
            f"127.0.0.1:{server.port}", recordings, 3, 0.05, LOADS[load], warm_up_s=0.0
        )
        return asyncio.run(asyncio.wait_for(job, WAIT_S))

    tally = drive(right)
    timed = tally.rounds_s if LOADS[load].waves else tally.rounds_s + tally.first_s
    assert tally.tokens == len(timed) > 0
    assert (tally.mismatches, tally.seconds >= 0.05) == (0, True)
    first = right[0]
    wrong = replace(first, verdicts=((first.verdicts[0][0] + 1,), *first.verdicts[1:]))
    assert drive([wrong]).mismatches > 0


def test_the_robots_of_the_benchmark_take_their_time(serve: Serve) -> None:
    """Every round is preceded by the time that the recorded drafts took."""
    engine, pause_s = FakeEngine(1), 0.02
    server = serve(engine, limits=Limits(max_sessions=16))
    own = recording(engine, "room")
    slow = replace(own, drafting_s=(pause_s,) * len(own.drafts))
    job = drive_robots(f"127.0.0.1:{server.port}", [slow], 2, 0.1, LOADS["clients"], warm_up_s=0.0)
    tally = asyncio.run(asyncio.wait_for(job, WAIT_S))
    assert tally.seconds >= pause_s * len(tally.rounds_s) / 2
