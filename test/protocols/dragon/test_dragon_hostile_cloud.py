"""A device beside a cloud that says anything: it goes on alone, soon, and says why."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import grpc
import numpy as np
import pytest
from dragon_sides import INFO, VOCAB, Ask, Tables, TableSide, ask, connect
from waiting import wait_for

from collab_llm_nodes.decoding.aggregation import (
    MOST_LOG_WEIGHT,
    AggregationConfig,
    AggregationLaw,
    Party,
    SideDraft,
)
from collab_llm_nodes.decoding.sampling import SparseDistribution
from collab_llm_nodes.errors import (
    Busy,
    CollabError,
    ConfigError,
    InvalidInput,
    ModelError,
    Unavailable,
)
from collab_llm_nodes.knowledge.retrieval import RetrievalConfig
from collab_llm_nodes.protocols.base import Control
from collab_llm_nodes.protocols.dragon import codec
from collab_llm_nodes.protocols.dragon import dragon_pb2 as pb
from collab_llm_nodes.protocols.dragon.client import DragonClient
from collab_llm_nodes.protocols.dragon.device import Rules
from collab_llm_nodes.protocols.dragon.link import PatienceConfig
from collab_llm_nodes.protocols.dragon.messages import Draft, Opened, Target
from collab_llm_nodes.protocols.dragon.relevance import most_log_weight
from collab_llm_nodes.protocols.dragon.scheduler import ScheduleConfig
from collab_llm_nodes.protocols.dragon.side_settings import SideConfig
from collab_llm_nodes.transport.wire_pb2 import Failure

__all__ = ["ask", "connect"]  # fixtures
CALL_S = 100.0
Connect = Callable[..., DragonClient]
Script = Callable[[Iterator[bytes]], Iterator[bytes]]


@contextmanager
def cloud(script: Script) -> Iterator[str]:
    """Run a cloud that answers each stream by ``script``; yields its address."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
            if details.method != codec.ANSWER:
                return None
            return grpc.stream_stream_rpc_method_handler(lambda asked, context: script(asked))

    server = grpc.server(ThreadPoolExecutor(8), handlers=[Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def saying(*messages: bytes | object, repeated: int = 1) -> Script:
    """Return a cloud that says these messages, then hears what comes."""
    data = [m if isinstance(m, bytes) else codec.encode_cloud(m) for m in messages]  # type: ignore

    def script(asked: Iterator[bytes]) -> Iterator[bytes]:
        next(asked)
        for _ in range(repeated):
            yield from data
        for _ in asked:
            pass

    return script


OPENED = codec.encode_cloud(Opened("tables"))
KEPT = SparseDistribution(np.array([1, 2]), np.array([0.5, 0.5], np.float32))
WIRE = pb.Draft(position=0, index=0, gaps=[1, 1], probs=np.array([0.5, 0.5], "<f2").tobytes())


def draft(position: int = 0, epoch: int = 0, **changed: object) -> Draft:
    told = SideDraft(1, KEPT, 0.0)
    return replace(Draft(position, epoch, told, 0.01, 0, 0.0), **changed)  # type: ignore[arg-type]


def wire(**changed: object) -> bytes:
    """Return a draft as bytes that no encoder of ours makes."""
    made = pb.Draft()
    made.CopyFrom(WIRE)
    for name, value in changed.items():
        if name == "gaps":
            del made.gaps[:]
            made.gaps.extend(value)  # type: ignore[arg-type]
        else:
            setattr(made, name, value)
    return pb.CloudMessage(draft=made).SerializeToString()  # type: ignore[no-any-return]


def halves(*values: float) -> bytes:
    return np.array(values, "<f2").tobytes()


def target(position: int = 0, token: int = 3, **changed: object) -> Target:
    told = Target(position, token, (False, True), Party.CLOUD, False, (1.0, 1.0), 0.01, 0.1)
    return replace(told, **changed)  # type: ignore[arg-type]


LIES: dict[str, Sequence[bytes | object]] = {
    "a draft before Opened": [draft()],
    "a target before Opened": [target()],
    "drafts before Opened, and Opened": [draft(), OPENED],
    "Opened twice": [OPENED, OPENED],
    "Opened behind a draft": [OPENED, draft(), OPENED],
    "garbage": [b"\xff\xff\xff"],
    "garbage behind Opened": [OPENED, b"\xff\xff\xff"],
    "nothing": [b""],
    "nothing behind Opened": [OPENED, b""],
    "half a message": [OPENED, codec.encode_cloud(draft())[:-2]],
    "a line that is none": [
        pb.CloudMessage(opened=pb.Opened(decode=[math.nan, 1.0, 1.0])).SerializeToString()
    ],
    "a line of ages": [
        pb.CloudMessage(opened=pb.Opened(decode=[1e300, 1e-300, 1e300])).SerializeToString()
    ],
    "a target that only the device may judge": [OPENED, target()],
    "a draft of a later position": [OPENED, draft(5)],
    "a draft of a later epoch": [OPENED, draft(0, 5)],
    "a draft twice": [OPENED, draft(), draft()],
    "more drafts than may wait": [OPENED, *(draft(i) for i in range(70))],
    "ids outside the vocabulary": [OPENED, wire(gaps=[1, 10_000])],
    "ids outside 32 bits": [OPENED, wire(gaps=[2**32 - 1, 2**32 - 1])],
    "ids that repeat": [OPENED, wire(gaps=[1, 0])],
    "a larger vocabulary": [OPENED, wire(gaps=[1] * (2 * VOCAB), probs=halves(*[0.04] * 24))],
    "no ids": [OPENED, wire(gaps=[], probs=b"")],
    "more ids than probabilities": [OPENED, wire(gaps=[1, 1, 1])],
    "a token that is none of them": [OPENED, wire(index=7)],
    "probabilities that are no numbers": [OPENED, wire(probs=halves(math.nan, 0.5))],
    "infinite probabilities": [OPENED, wire(probs=halves(math.inf, 0.5))],
    "negative probabilities": [OPENED, wire(probs=halves(-0.5, 0.5))],
    "probabilities of zero": [OPENED, wire(probs=halves(0.0, 1.0))],
    "a weight that is no number": [OPENED, wire(log_weight=math.nan)],
    "an infinite weight": [OPENED, wire(log_weight=math.inf)],
    "a weight of 3e38": [OPENED, wire(log_weight=3e38)],
    "a weight that no document has": [OPENED, wire(log_weight=2 * MOST_LOG_WEIGHT)],
    "an internal error": [CollabError("oops")],
    "a model's error behind Opened": [OPENED, ModelError("oops")],
    "a refusal behind Opened": [OPENED, InvalidInput("oops", field="query")],
    "an unknown error": [
        pb.CloudMessage(failure=Failure(code="WHO_KNOWS", message="x")).SerializeToString()
    ],
    "more than a message may have": [OPENED, b"x" * (80 << 20)],
}


def rules(**patience: float) -> Rules:
    given = {"patience_s": CALL_S / 2, "silence_s": CALL_S / 2, **patience}
    return Rules(schedule=ScheduleConfig("device"), patience=PatienceConfig(**given))  # type: ignore[arg-type]


def alone(ask: Ask) -> tuple[int, ...]:
    return ask(TableSide(Party.DEVICE, Tables()), None).tokens


@pytest.mark.parametrize("lie", LIES)
def test_a_cloud_that_lies_is_left_at_once(
    lie: str, connect: Connect, ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    """Patience is longer than the test waits."""
    side = TableSide(Party.DEVICE, Tables())
    with cloud(saying(*LIES[lie])) as address:
        client = connect(address)
        if lie == "more drafts than may wait":  # as long as none is taken out of the line
            side.before_pass = lambda pushed: wait_for(lambda: client.left)
        begun = time.monotonic()
        told = ask(side, client, rules(), control=Control(begun + CALL_S))
    if not told.metrics.rounds:  # else a draft that was in order has been judged before
        assert told.tokens == alone(ask)
    assert 0 < told.metrics.unverified == len(told.tokens) - told.metrics.rounds
    assert time.monotonic() - begun < CALL_S / 2
    assert "without the cloud" in caplog.text
    assert isinstance(client.left, CollabError)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    "messages",
    [
        [OPENED, target(accepted=(True, True))],
        [OPENED, target(token=VOCAB)],
        [OPENED, target(token=2**31)],
        [OPENED, target(position=3)],
        [OPENED, target(), target()],
        [OPENED, target(finished=True)],
    ],
)
def test_targets_that_cannot_be_are_no_better(
    messages: list[bytes | object], connect: Connect, ask: Ask
) -> None:
    """The cloud judges, and has been sent a draft."""

    def script(asked: Iterator[bytes]) -> Iterator[bytes]:
        next(asked)
        yield OPENED
        next(asked)  # a draft of the device
        for message in messages[1:]:
            yield codec.encode_cloud(message)  # type: ignore[arg-type]
        for _ in asked:
            pass

    pinned = replace(rules(), schedule=ScheduleConfig("cloud"))
    with cloud(script) as address:
        begun = time.monotonic()
        told = ask(TableSide(Party.DEVICE, Tables()), connect(address), pinned)
    assert told.metrics.unverified > 0
    assert time.monotonic() - begun < CALL_S / 2


@pytest.mark.parametrize("error", [ConfigError("other scorer"), InvalidInput("too long")])
def test_what_a_cloud_refuses_is_told(error: CollabError, connect: Connect, ask: Ask) -> None:
    with cloud(saying(error)) as address, pytest.raises(type(error)):
        ask(TableSide(Party.DEVICE, Tables()), connect(address), rules())


def test_a_coin_is_not_tossed_for_a_token_that_cannot_have_been_drawn(
    connect: Connect, ask: Ask
) -> None:
    unlikely = wire(gaps=[1, 1], probs=halves(6e-8, 1.0))
    cold = replace(rules(), aggregation=AggregationConfig(law="coin"))
    with cloud(saying(OPENED, unlikely)) as address:
        device = TableSide(Party.DEVICE, Tables())
        told = ask(device, connect(address), cold, temperature=0.01)
    assert told.metrics.unverified == len(told.tokens)


@pytest.mark.parametrize(
    "flood",
    [
        saying(OPENED, *[draft(0, 0)] * 10, repeated=1_000_000),
        saying(OPENED, repeated=1_000_000),
        saying(target(), repeated=1_000_000),
    ],
)
def test_a_flood_ends_with_the_stream(flood: Script, connect: Connect, ask: Ask) -> None:
    with cloud(flood) as address:
        told = ask(TableSide(Party.DEVICE, Tables()), connect(address), rules())
    assert 0 < told.metrics.unverified == len(told.tokens) - told.metrics.rounds


@pytest.mark.parametrize("error", [Busy("full"), Unavailable("away")])
def test_a_cloud_that_opens_and_leaves_for_ever_is_given_up(
    error: CollabError, connect: Connect, ask: Ask
) -> None:
    with cloud(saying(OPENED, error)) as address:
        device = TableSide(Party.DEVICE, Tables())
        told = ask(device, connect(address), rules(patience_s=0.5))
    assert told.metrics.unverified == len(told.tokens)


def test_void_drafts_do_not_keep_a_device_waiting(connect: Connect, ask: Ask) -> None:
    """The cloud has been told that its draft was rejected, and goes on with what follows it."""
    ended = threading.Event()

    def script(asked: Iterator[bytes]) -> Iterator[bytes]:
        next(asked)
        yield OPENED
        wrong = SideDraft(11, SparseDistribution(np.array([11]), np.ones(1, np.float32)), -50.0)
        yield codec.encode_cloud(draft(draft=wrong))
        next(asked)  # the target, which is another token
        for position in range(1, 60):
            yield codec.encode_cloud(draft(position, draft=wrong))
            if ended.wait(0.1):
                return
        for _ in asked:
            pass

    with cloud(script) as address:
        begun = time.monotonic()
        device = TableSide(Party.DEVICE, Tables())
        told = ask(device, connect(address), rules(patience_s=0.5))
        ended.set()
    assert told.metrics.unverified > 0
    assert time.monotonic() - begun < CALL_S / 2


def test_the_bound_of_a_weight_is_that_of_its_scorer() -> None:
    config = SideConfig(retrieval=RetrievalConfig(method="dense", chunks=2, temperature=0.1))
    bound = most_log_weight(config)
    assert 1 / 0.1 + math.log(2) < bound < 25.0
    law = AggregationLaw(AggregationConfig(), VOCAB, most_log_weight=bound)
    law.check(SideDraft(1, KEPT, 10.7))
    law.check(SideDraft(1, KEPT, 10 + math.log(10_000)))  # a cloud may retrieve more than this side
    law.check(SideDraft(1, KEPT, -math.inf))
    law.check(SideDraft(1, KEPT, -1e30))
    with pytest.raises(InvalidInput, match="log_weight"):
        law.check(SideDraft(1, KEPT, 26.0))
    hottest = RetrievalConfig(method="dense", temperature=1e-4)
    assert most_log_weight(SideConfig(retrieval=hottest)) <= MOST_LOG_WEIGHT
    assert INFO.most_log_weight == MOST_LOG_WEIGHT
