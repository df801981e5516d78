"""Many sessions on one model: the scheduler's laws, batched passes, KV caches lent in turn."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import queue
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from fake_models import PROMPT_IDS, VOCABULARY, FakeEngine, FakeSession, as_engine, encode
from folders import environment
from grpc_health.v1 import health_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_client import RawClient
from torch import Tensor

from collab_llm_nodes.bench.verifier import LOADS, Recording, Tally, drive_robots
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Feed
from collab_llm_nodes.errors import (
    CollabError,
    ConfigError,
    ModelError,
    ProtocolError,
    Unavailable,
)
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud import conversation as conversation_module
from collab_llm_nodes.protocols.edge_cloud.conversation import MAX_UNANSWERED, Verifier
from collab_llm_nodes.protocols.edge_cloud.info import Limits
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
from collab_llm_nodes.protocols.edge_cloud.server import ExitConfig, VerifierSession
from collab_llm_nodes.protocols.edge_cloud.service import ServerHandle, VerifierConfig, start_server
from collab_llm_nodes.protocols.edge_cloud.target import TargetSession
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient
from collab_llm_nodes.serving import compute as compute_module
from collab_llm_nodes.serving.compute import Compute, _Inbox
from collab_llm_nodes.serving.scheduler import (
    BatchConfig,
    Evicted,
    Granted,
    ReadyQueue,
    Refused,
    Slots,
)
from collab_llm_nodes.transport.logs import set_up_logging

WAIT_S = 30.0
GREEDY = SamplingConfig()
OPEN = Open("go to the red box", (), GREEDY, 24, VOCABULARY)
TAKE_ALL_EXITS = ExitConfig(min_lead_s=0.0)

# --- The line before the model ------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_passes_are_first_come_first_served_and_nobody_starves(data: st.DataObject) -> None:
    config = BatchConfig(
        max_batch=data.draw(st.integers(1, 4)), prefill_tokens=data.draw(st.integers(1, 8))
    )
    line: ReadyQueue[int] = ReadyQueue(config)
    drafts: deque[int] = deque()
    prompts: deque[list[int]] = deque()  # [key, unread]
    for now in range(data.draw(st.integers(1, 30))):
        for _ in range(data.draw(st.integers(0, 3))):
            key = 1000 * now + len(drafts) + len(prompts)
            if data.draw(st.booleans()):
                line.add_draft(key, now)
                drafts.append(key)
            else:
                unread = data.draw(st.integers(1, 20))
                line.add_prompt(key, unread, now)
                prompts.append([key, unread])
        if drafts and data.draw(st.integers(0, 9)) == 0:
            gone = data.draw(st.sampled_from(sorted(drafts)))
            line.discard(gone)
            drafts.remove(gone)
        assert len(line) == len(drafts) + len(prompts)
        assert (line.starts_at(coming=0) is None) == (not drafts and not prompts)
        batch = line.take()
        assert [key for key, _ in batch.drafts] == list(drafts)[: config.max_batch]
        for _ in batch.drafts:
            drafts.popleft()
        read = dict(batch.prompts)
        assert sum(read.values()) == min(config.prefill_tokens, sum(n for _, n in prompts))
        for key, count in batch.prompts:  # the oldest first, each to its end before the next
            assert prompts[0][0] == key
            prompts[0][1] -= count
            if not prompts[0][1]:
                prompts.popleft()


def test_a_pass_waits_for_others_only_while_there_are_any_and_room_for_them() -> None:
    line: ReadyQueue[str] = ReadyQueue(BatchConfig(max_batch=2, max_wait_s=0.5))
    assert line.starts_at(coming=3) is None
    line.add_draft("a", 10.0)
    assert line.starts_at(coming=0) == 10.0
    assert line.starts_at(coming=3) == 10.5
    line.add_draft("a", 11.0)  # it has its place already
    assert line.starts_at(coming=3) == 10.5
    line.add_draft("b", 10.2)
    assert line.starts_at(coming=3) == 10.0
    line.discard("a")
    assert line.starts_at(coming=3) == 10.7
    assert line.take().drafts == (("b", 10.2),)


def test_prompts_of_one_owner_do_not_hold_up_anothers() -> None:
    line: ReadyQueue[str] = ReadyQueue(BatchConfig(prefill_tokens=10))
    for number in range(5):
        line.add_prompt(f"a{number}", 8, 0.0, "a")
    line.add_prompt("b0", 8, 1.0, "b")
    line.add_prompt("b1", 8, 1.0, "b")
    line.add_prompt("nobody's", 4, 2.0)
    assert line.take().prompts == (("a0", 8), ("b0", 2))
    assert line.take().prompts == (("nobody's", 4), ("b0", 6))
    assert line.take().prompts == (("a1", 8), ("b1", 2))
    assert line.take().prompts == (("b1", 6), ("a2", 4))
    assert line.take().prompts == (("a2", 4), ("a3", 6))
    assert line.take().prompts == (("a3", 2), ("a4", 8))
    assert not line


# --- KV caches ----------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_caches_are_lent_in_order_and_never_taken_from_who_works(data: st.DataObject) -> None:
    config = BatchConfig(evict_idle_s=3.0, slot_wait_s=5.0)
    count = data.draw(st.integers(1, 3))
    slots: Slots[int] = Slots(count, config)
    line: dict[int, float] = {}
    busy: set[int] = set()
    idle: dict[int, float] = {}
    now, fresh = 0.0, 0
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["request", "work", "rest", "leave", "wait"]))
        if action == "request":
            fresh += 1
            slots.request(fresh, now)
            line[fresh] = now
        elif action == "work" and idle:
            key = data.draw(st.sampled_from(sorted(idle)))
            slots.work(key)
            del idle[key]
            busy.add(key)
        elif action == "rest" and busy:
            key = data.draw(st.sampled_from(sorted(busy)))
            slots.rest(key, now)
            busy.remove(key)
            idle[key] = now
        elif action == "leave" and (everybody := sorted({*line, *busy, *idle})):
            key = data.draw(st.sampled_from(everybody))
            slots.leave(key)
            line.pop(key, None)
            busy.discard(key)
            idle.pop(key, None)
        elif action == "wait":
            now += data.draw(st.floats(0.1, 4.0))
        due = slots.due
        changes = slots.advance(now)
        if due is None:
            assert not line
        for change in changes:
            if isinstance(change, Evicted):
                assert change.key == next(iter(idle)), "not the longest idle"
                assert now - idle.pop(change.key) >= config.evict_idle_s - 1e-9  # sums of seconds
            elif isinstance(change, Granted):
                assert change.key == next(iter(line)), "not the first in line"
                del line[change.key]
                busy.add(change.key)
            else:
                assert isinstance(change, Refused)
                assert now - line.pop(change.key) >= config.slot_wait_s
        assert len(slots) == len(busy) + len(idle) <= count
        assert slots.waiting == len(line)
        if line:  # whoever waits, waits for a reason
            assert len(slots) == count
            assert all(now - since < config.evict_idle_s + 1e-9 for since in idle.values())
            assert slots.due is not None
            assert slots.due > now


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_owners_share_the_caches_fairly(data: st.DataObject) -> None:
    """Nobody without one waits while an owner has two idle, and those who work keep theirs."""
    slots: Slots[tuple[str, int]] = Slots(4, BatchConfig(evict_idle_s=60.0, slot_wait_s=60.0))
    line: set[tuple[str, int]] = set()
    busy: set[tuple[str, int]] = set()
    idle: set[tuple[str, int]] = set()
    for number in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["request", "request", "rest", "work", "leave"]))
        if action == "request":
            key = (data.draw(st.sampled_from("abc")), number)
            slots.request(key, 0.0, key[0])
            line.add(key)
        elif action == "rest" and busy:
            key = data.draw(st.sampled_from(sorted(busy)))
            slots.rest(key, 0.0)
            busy.remove(key)
            idle.add(key)
        elif action == "work" and idle:
            key = data.draw(st.sampled_from(sorted(idle)))
            slots.work(key)
            idle.remove(key)
            busy.add(key)
        elif action == "leave" and (everybody := sorted(line | busy | idle)):
            key = data.draw(st.sampled_from(everybody))
            slots.leave(key)
            for held in (line, busy, idle):
                held.discard(key)
        for change in slots.advance(0.0):
            if isinstance(change, Evicted):
                idle.remove(change.key)
            else:
                assert isinstance(change, Granted)
                line.remove(change.key)
                busy.add(change.key)
        held_by = Counter(owner for owner, _ in busy | idle)
        assert held_by.total() <= 4
        for newcomer, _ in line:
            assert held_by.total() == 4
            assert all(held_by[owner] <= held_by[newcomer] + 1 for owner, _ in idle)


# --- The verifier -------------------------------------------------------------------------------


class Passes(FakeEngine):
    """Writes down who took part in each pass; can be held up at the start of one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(1, **options)
        self.sizes: list[tuple[int, ...]] = []  # tokens of each feed
        self.entered = threading.Semaphore(0)
        self.hold = threading.Event()
        self.hold.set()

    @contextlib.contextmanager
    def held(self, start: Callable[[], object]) -> Iterator[None]:
        """The pass that ``start`` causes ends with the context."""
        self.hold.clear()
        while self.entered.acquire(blocking=False):
            pass
        start()
        assert self.entered.acquire(timeout=WAIT_S)
        yield
        self.hold.set()

    def run(self, feeds: Sequence[Feed], **exits: Any) -> list[Tensor | Exception]:
        self.sizes.append(tuple(len(feed.ids) for feed in feeds))
        self.entered.release()
        assert self.hold.wait(WAIT_S)
        return super().run(feeds, **exits)


Serve = Callable[..., ServerHandle]
Join = Callable[[ServerHandle], RawClient]


def client_of(server: ServerHandle) -> RawClient:
    """On a connection of its own."""
    return RawClient(grpc.insecure_channel(f"127.0.0.1:{server.port}"))


@pytest.fixture
def serve() -> Iterator[Serve]:
    running: list[ServerHandle] = []

    def start(engine: FakeEngine, **options: Any) -> ServerHandle:
        options = {"address": "127.0.0.1:0", "exits": TAKE_ALL_EXITS, **options}
        running.append(start_server(VerifierConfig(**options), as_engine(engine), encode))
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def join() -> Iterator[Join]:
    robots: list[RawClient] = []

    def make(server: ServerHandle) -> RawClient:
        robots.append(client_of(server))
        return robots[-1]

    yield make
    for robot in robots:
        robot.close()


class StillClock:
    """The compute thread's ``time``: it goes on only while that thread sleeps."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> StillClock:
    clock = StillClock()
    monkeypatch.setattr(compute_module, "time", clock)
    return clock


def share_a_pass(
    engine: Passes,
    server: ServerHandle,
    first: RawClient,
    others: Sequence[tuple[RawClient, Draft]],
) -> None:
    """Have ``others`` send while a pass for ``first`` is held up."""
    with engine.held(lambda: first.send(Draft(0, 0, (5,)))):
        for robot, draft in others:
            robot.send(draft)
        inbox = server._server.verifier._compute._inbox
        deadline = time.monotonic() + WAIT_S
        while len(inbox) < len(others):  # all are at the compute thread's door
            assert time.monotonic() < deadline


def test_drafts_that_come_during_a_pass_share_the_next(serve: Serve, join: Join) -> None:
    engine = Passes()
    server = serve(engine, batch=BatchConfig(max_wait_s=0.0))
    robots = [join(server) for _ in range(5)]
    for robot in robots:
        robot.send(OPEN)
        robot.skip_to(Opened)
    engine.sizes.clear()
    share_a_pass(engine, server, robots[0], [(robot, Draft(0, 0, (5, 6))) for robot in robots[1:]])
    verdicts = [robot.skip_to(Verdict) for robot in robots]
    assert engine.sizes == [(2,), (3, 3, 3, 3)]
    assert all(v.queue_s > 0 for v in verdicts[1:])
    expected = engine.answer(encode(Prompt(OPEN.text)), GREEDY, 24)
    for verdict in verdicts:
        assert verdict.tokens == expected[: len(verdict.tokens)]


def test_a_free_model_waits_for_who_shared_the_last_pass_and_nobody_else(
    serve: Serve, join: Join
) -> None:
    engine = Passes()
    server = serve(engine, batch=BatchConfig(max_wait_s=0.5))
    robots = idle, first, second = [join(server) for _ in range(3)]
    for robot in robots:
        robot.send(OPEN)
        robot.skip_to(Opened)
    solo = Draft(0, 0, ())
    share_a_pass(engine, server, idle, [(first, solo), (second, solo)])
    starts = [len(robot.skip_to(Verdict).tokens) for robot in robots][1:]
    for robot, start in zip((first, second), starts, strict=True):
        robot.send(Draft(1, start, ()))
    assert first.skip_to(Verdict).queue_s < 0.5
    assert engine.sizes[-2:] == [(1, 1), (1, 1)]


def test_who_sleeps_for_several_events_is_woken_by_the_last_or_by_the_clock() -> None:
    inbox = _Inbox()
    inbox.put(lambda: None)
    inbox.wait(2, 0.01)  # ends although only one is there
    assert len(inbox) == 1
    woken = threading.Event()

    def sleep() -> None:
        inbox.wait(3, None)
        woken.set()

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    while inbox._wanted != 3:
        pass
    inbox.put(lambda: None)
    assert not woken.wait(0.05)
    inbox.put(lambda: None)
    assert woken.wait(WAIT_S)
    sleeper.join()
    inbox.wait(3, None)  # they are there: no sleep


def test_a_pass_takes_no_more_than_max_batch(serve: Serve) -> None:
    engine = Passes()
    server = serve(engine, batch=BatchConfig(max_batch=2), limits=Limits(max_sessions=6))
    assert_answers_right(engine, server, robots=6)
    prompt = len(PROMPT_IDS) + 4 - 1  # longer than any draft with its pending token
    assert max(sum(n < prompt for n in sizes) for sizes in engine.sizes) == 2


def test_a_long_prompt_is_read_in_parts_and_verdicts_go_on(serve: Serve, join: Join) -> None:
    engine = Passes()
    server = serve(engine, batch=BatchConfig(prefill_tokens=2))
    quick, slow = join(server), join(server)
    quick.send(OPEN)
    quick.skip_to(Opened)
    with engine.held(lambda: quick.send(Draft(0, 0, ()))):
        engine.sizes.clear()
        replay = engine.answer(encode(Prompt(OPEN.text)), GREEDY, 24)[:5]
        slow.send(replace(OPEN, replay=replay, round=3))
        inbox = server._server.verifier._compute._inbox
        deadline = time.monotonic() + WAIT_S
        while not inbox:
            assert time.monotonic() < deadline
        quick.send(Draft(1, 1, ()))
        while len(inbox) < 2:
            assert time.monotonic() < deadline
    quick.skip_to(Verdict)
    assert quick.skip_to(Verdict).round == 1
    slow.skip_to(Opened)
    unread = len(PROMPT_IDS) + 4 + len(replay) - 1
    assert engine.sizes == [(1, 2)] + [(2,)] * (unread // 2 - 1) + [(1,)] * (unread % 2)


def assert_answers_right(engine: FakeEngine, server: ServerHandle, robots: int) -> int:
    """``robots`` answers at once over real links; returns how often a stream was made again."""
    prompts = [Prompt(f"room {i}") for i in range(robots)]
    draft = as_engine(FakeEngine(1, noise=0.5))
    with VerifierClient(ClientLinkConfig(address=f"127.0.0.1:{server.port}")) as client:
        runner = RemoteRunner(draft, client, encode=encode)
        with ThreadPoolExecutor(robots) as pool:
            answers = list(
                pool.map(lambda p: runner.generate(p, GREEDY, 24, WAIT_S).tokens, prompts)
            )
        assert answers == [engine.answer(encode(p), GREEDY, 24) for p in prompts]
        return client.status.reconnects


def test_more_robots_than_caches_lose_no_token(serve: Serve) -> None:
    """Whoever is evicted replays; everybody gets the answer it would have got alone."""
    engine = FakeEngine(1)
    limits, batch = Limits(max_sessions=2), BatchConfig(evict_idle_s=0.0)
    server = serve(engine, limits=limits, batch=batch)
    assert_answers_right(engine, server, robots=6)


def test_an_idle_cache_goes_to_a_newcomer_and_its_owner_is_asked_to_replay(
    serve: Serve, join: Join
) -> None:
    engine = FakeEngine(1)
    limits, batch = Limits(max_sessions=1), BatchConfig(evict_idle_s=0.0)
    server = serve(engine, limits=limits, batch=batch)
    first, second = join(server), join(server)
    first.send(OPEN, Draft(0, 0, ()))
    confirmed = first.skip_to(Verdict).tokens
    second.send(OPEN)
    second.skip_to(Opened)
    engine.freed.get(timeout=WAIT_S)
    first.send(Draft(1, 1, ()))
    assert first.skip_to(Failure).code == "REPLAY"
    again = join(server)
    again.send(replace(OPEN, replay=confirmed, round=1), Draft(1, 1, ()))
    expected = engine.answer(encode(Prompt(OPEN.text)), GREEDY, 24)
    assert confirmed + again.skip_to(Verdict).tokens == expected[:2]


def test_a_newcomer_waits_connected_until_a_cache_is_free(serve: Serve, join: Join) -> None:
    patience = BatchConfig(evict_idle_s=60.0, slot_wait_s=60.0)
    server = serve(FakeEngine(1), limits=Limits(max_sessions=1), batch=patience)
    holder, waiting = join(server), join(server)
    holder.send(OPEN)
    holder.skip_to(Opened)
    waiting.send(OPEN, Draft(0, 0, ()))
    holder.send(Close())
    assert waiting.skip_to(Verdict).round == 0


def test_streams_beyond_the_limit_are_told_so(serve: Serve, join: Join) -> None:
    server = serve(FakeEngine(1), limits=Limits(max_sessions=1, max_streams=1))
    holder = join(server)
    holder.send(OPEN)
    holder.skip_to(Opened)
    failure = join(server).skip_to(Failure)
    assert (failure.code, failure.field) == ("UNAVAILABLE", "session")


def test_connections_beyond_the_limit_are_refused(serve: Serve, join: Join) -> None:
    server = serve(FakeEngine(1), limits=Limits(max_connections=1))
    holder = join(server)
    holder.send(OPEN)
    holder.skip_to(Opened)
    with grpc.insecure_channel(
        f"127.0.0.1:{server.port}", [("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(codec.DESCRIBE)(b"", timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_solo_rounds_stream_without_drafts(serve: Serve, join: Join) -> None:
    engine = FakeEngine(1)
    robot = join(serve(engine))
    robot.send(OPEN, Draft(0, 0, (), autoregressive_rounds=23))
    tokens: tuple[int, ...] = ()
    verdict = None
    while verdict is None or not verdict.finished:
        verdict = robot.skip_to(Verdict)
        tokens += verdict.tokens
        assert len(verdict.tokens) == 1
    assert tokens == engine.answer(encode(Prompt(OPEN.text)), GREEDY, 24)


def test_a_draft_pushed_ahead_is_verified_without_another_message(serve: Serve, join: Join) -> None:
    engine = FakeEngine(1)
    expected = engine.answer(encode(Prompt(OPEN.text)), GREEDY, 24)
    robot = join(serve(engine))
    robot.send(OPEN, Draft(0, 0, expected[:2]))
    robot.send(Draft(1, 3, expected[3:5], after=expected[:3]))
    robot.send(Draft(1, 3, (), after=(*expected[:2], (expected[2] + 1) % 20)))  # void
    first, second = robot.skip_to(Verdict), robot.skip_to(Verdict)
    assert (first.tokens, second.tokens) == (expected[:3], expected[3:6])


def test_a_flood_between_two_verdicts_is_refused_and_others_go_on(serve: Serve, join: Join) -> None:
    engine = Passes()
    server = serve(engine)
    calm, flood = join(server), join(server)
    calm.send(OPEN)
    calm.skip_to(Opened)
    flood.send(OPEN, Draft(0, 0, ()))
    flood.skip_to(Verdict)
    flood.send(*[Draft(0, 0, ())] * (MAX_UNANSWERED + 1))  # stale, all of them
    assert flood.skip_to(Failure).code == "BUSY"
    calm.send(Draft(0, 0, ()))
    assert calm.skip_to(Verdict).round == 0


def test_exits_do_not_seem_worth_sending_because_they_take_long(
    serve: Serve, join: Join, still: StillClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes that are long with exits only: they would be taken for ever."""
    preview = TargetSession.preview

    def slow_preview(*args: Any) -> EarlyExit | None:
        still.sleep(10.0)
        return preview(*args)

    monkeypatch.setattr(TargetSession, "preview", slow_preview)
    robot = join(serve(FakeEngine(1), exits=ExitConfig(min_lead_s=5.0)))
    robot.send(OPEN, Draft(0, 0, (5, 6)))  # nothing is known of passes: its exits are taken
    start = len(robot.skip_to(Verdict).tokens)
    assert still.monotonic() > 0
    robot.send(Draft(1, start, ()))
    assert isinstance(robot.next(), Verdict)


def test_an_exit_that_cannot_be_judged_disturbs_nobody(
    serve: Serve, join: Join, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    preview = VerifierSession.preview

    def sick_preview(self: VerifierSession, layer: int, *args: Any) -> EarlyExit:
        if layer == 1:
            raise ValueError("out of its mind")
        return preview(self, layer, *args)

    monkeypatch.setattr(VerifierSession, "preview", sick_preview)
    robot = join(serve(FakeEngine(1), exits=TAKE_ALL_EXITS))
    robot.send(OPEN, Draft(0, 0, (5, 6)))
    assert robot.skip_to(Verdict).tokens
    assert "early exits are dropped: layer 1: out of its mind" in caplog.text


# --- Without gRPC -------------------------------------------------------------------------------


class Wire:
    """A stream made of two queues."""

    def __init__(self, *messages: ClientMessage) -> None:
        self._incoming: asyncio.Queue[bytes | None] = asyncio.Queue()
        for message in messages:
            self._incoming.put_nowait(codec.encode(message))
        self._sent: asyncio.Queue[ServerMessage] = asyncio.Queue()
        self.next = self._sent.get

    def end(self) -> None:
        """The client has no more to say."""
        self._incoming.put_nowait(None)

    async def read(self) -> bytes | None:
        return await self._incoming.get()

    async def write(self, data: bytes) -> None:
        self._sent.put_nowait(codec.decode_server(data))


def test_another_front_end_can_carry_the_conversation() -> None:
    engine = FakeEngine(1)

    async def talk() -> tuple[int, ...]:
        verifier = Verifier(VerifierConfig(), as_engine(engine), encode)
        verifier.start()
        wire = Wire(OPEN, Draft(0, 0, (), autoregressive_rounds=23))
        conversation = asyncio.ensure_future(verifier.converse(wire))
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
    monkeypatch.setattr(conversation_module, "_PARTING_S", 10 * WAIT_S)

    async def run() -> None:
        config = VerifierConfig(limits=Limits(max_streams=1 if why == "full" else 9))
        verifier = Verifier(config, as_engine(FakeEngine(1)), encode)
        verifier.start()
        welcome, refused = Wire(OPEN), Wire(OPEN)
        conversation = asyncio.ensure_future(verifier.converse(welcome))
        assert isinstance(await welcome.next(), Opened)
        other = verifier.drain(10 * WAIT_S) if why == "draining" else asyncio.sleep(0)
        meanwhile = asyncio.ensure_future(other)
        await asyncio.sleep(0)  # it has begun
        await verifier.converse(refused)
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
    """To free a cache fails, as after a CUDA error."""

    def open(self, prompt: EncodedPrompt) -> FakeSession:
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
    compute.open(first, target_of(FakeEngine(1)))
    assert isinstance(first.next(), Opened)
    compute._sessions[first].target._kv.close = StuckCaches(1)._fail  # type: ignore[method-assign]
    compute.draft(first, Draft(5, 0, ()))  # of a round that is not due: the session ends
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
from test_batching import *
from collab_llm_nodes.protocols.edge_cloud.service import VerifierServer, run_until_signal

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
server = VerifierServer(config, as_engine(StuckCaches(1)), encode)
asyncio.run(run_until_signal(server, 20.0, listening))
"""


# --- The compute thread alone -------------------------------------------------------------------


class Posted:
    """One of its clients."""

    def __init__(self) -> None:
        self.id = "0" * 32
        self.owner = ""
        self.gone = threading.Event()
        self._posted: queue.SimpleQueue[object] = queue.SimpleQueue()

    def post(self, message: object, more: bool = False) -> None:
        self._posted.put(message)

    def next(self) -> Any:
        return self._posted.get(timeout=WAIT_S)


def compute_of(engine: FakeEngine, **options: Any) -> Compute:
    options = {"max_sessions": 1, "batch": BatchConfig(), "exits": TAKE_ALL_EXITS, **options}
    return Compute(as_engine(engine), **options)


def target_of(engine: FakeEngine, text: str = OPEN.text) -> TargetSession:
    return TargetSession(as_engine(engine), encode(Prompt(text)), OPEN)


@pytest.mark.parametrize("all_at_once", [True, False])
def test_in_a_shared_pass_each_hears_what_it_would_alone(
    monkeypatch: pytest.MonkeyPatch, all_at_once: bool
) -> None:
    """Also if there is no memory to judge all of them at once."""
    engine = Passes()
    compute = compute_of(engine, max_sessions=8, batch=BatchConfig(max_wait_s=0.0))

    def opened(text: str) -> Posted:
        robot = Posted()
        compute.open(robot, target_of(engine, text))
        assert isinstance(robot.next(), Opened)
        return robot

    def heard(robot: Posted) -> list[tuple[Any, ...]]:
        found = []
        while isinstance(message := robot.next(), EarlyExit):
            found.append((message.layer, message.tokens, message.accepted, message.confidence))
        assert isinstance(message, Verdict)
        return [*found, (message.tokens, message.accepted)]

    drafts = {"go": Draft(0, 0, (5, 6)), "turn": Draft(0, 0, (7,)), "stop": Draft(0, 0, (8, 9, 3))}
    alone = {}
    for text, draft in drafts.items():
        compute.draft(robot := opened(text), draft)
        alone[text] = heard(robot)
    assert all(len(each) == 4 for each in alone.values()), "three exits and a verdict"
    robots = {text: opened(text) for text in drafts}
    if not all_at_once:
        monkeypatch.setattr(compute_module, "tops_of", lambda *_, **__: 1 / 0)
    with engine.held(lambda: compute.open(Posted(), target_of(engine))):
        for text, robot in robots.items():
            compute.draft(robot, drafts[text])
    assert {text: heard(robot) for text, robot in robots.items()} == alone
    assert engine.sizes[-1] == (3, 2, 4)
    assert compute.stop(WAIT_S)


def test_a_pass_takes_the_emulated_time_however_many_share_it(still: StillClock) -> None:
    class Timed(Posted):
        def post(self, message: object, more: bool = False) -> None:
            super().post((still.monotonic(), message))

    engine = Passes()
    batch = BatchConfig(max_wait_s=0.0)
    compute = compute_of(engine, max_sessions=5, batch=batch, emulated_compute_s=0.2)
    robots = [Timed() for _ in range(4)]
    for robot in robots:
        compute.open(robot, target_of(engine))
        assert isinstance(robot.next()[1], Opened)
    with engine.held(lambda: compute.open(Posted(), target_of(engine))):
        started = still.monotonic() + 0.2
        for robot in robots:
            compute.draft(robot, Draft(0, 0, (5, 6)))
    for robot in robots:
        while isinstance((heard := robot.next())[1], EarlyExit):
            at, early = heard
            assert at - started == pytest.approx(0.05 * early.layer), "of 4 layers"
        at, verdict = heard
        assert isinstance(verdict, Verdict)
        assert (at - started, verdict.compute_s) == pytest.approx((0.2, 0.2))
    assert compute.stop(WAIT_S)


@pytest.mark.parametrize(
    ("min_lead_s", "taken"),
    [(10.0, []), (0.0, [1, 2, 3]), (0.05, [1])],  # of 4 layers, 80 ms: 60, 40 and 20 ms ahead
)
def test_exits_that_precede_the_verdict_by_too_little_are_not_taken(
    still: StillClock, min_lead_s: float, taken: list[int]
) -> None:
    engine, exits = FakeEngine(1), ExitConfig(min_lead_s=min_lead_s)
    compute = compute_of(engine, exits=exits, emulated_compute_s=0.08)
    robot, start = Posted(), 0
    compute.open(robot, target_of(engine))
    for round_ in range(3):  # the first pass tells how long passes take
        compute.draft(robot, Draft(round_, start, ()))
        layers = []
        while not isinstance(message := robot.next(), Verdict):
            layers += [message.layer] if isinstance(message, EarlyExit) else []
        start += len(message.tokens)
        assert layers == (taken if round_ else [1, 2, 3])
    assert compute.stop(WAIT_S)


# --- Silence ------------------------------------------------------------------------------------


def test_who_waits_for_the_verifier_is_not_silent(serve: Serve, join: Join) -> None:
    engine = Passes()
    server = serve(engine, limits=Limits(idle_s=0.2))
    robot = join(server)
    robot.send(OPEN)
    robot.skip_to(Opened)
    with engine.held(lambda: robot.send(Draft(0, 0, ()))):
        inbox = server._server.verifier._compute._inbox
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
        conversation = asyncio.ensure_future(verifier.converse(wire))
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
    drafts = tuple((codec.encode(Draft(i, i, ())), 0) for i in range(len(tokens)))
    pauses = (0.001,) * len(drafts)
    return Recording(codec.encode(opened), drafts, pauses, tuple((t,) for t in tokens))


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
    """As long as the recorded drafts took, in front of every round."""
    engine, pause_s = FakeEngine(1), 0.02
    server = serve(engine, limits=Limits(max_sessions=16))
    own = recording(engine, "room")
    slow = replace(own, drafting_s=(pause_s,) * len(own.drafts))
    job = drive_robots(f"127.0.0.1:{server.port}", [slow], 2, 0.1, LOADS["clients"], warm_up_s=0.0)
    tally = asyncio.run(asyncio.wait_for(job, WAIT_S))
    assert tally.seconds >= pause_s * len(tally.rounds_s) / 2
