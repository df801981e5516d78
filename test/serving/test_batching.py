"""Many sessions on one model: batched passes, KV caches lent in turn."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import passes_bed
import pytest
import torch
from fake_models import PROMPT_IDS, FakeEngine, as_engine, encode
from passes_bed import (
    GREEDY,
    OPEN,
    TAKE_ALL_EXITS,
    WAIT_S,
    Join,
    Passes,
    Posted,
    Serve,
    StillClock,
    compute_of,
    share_a_pass,
    target_of,
)
from raw_client import RawClient
from verifier_bed import Inbox

from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud import target as target_module
from collab_llm_nodes.protocols.edge_cloud.info import Limits
from collab_llm_nodes.protocols.edge_cloud.messages import (
    Close,
    Draft,
    EarlyExit,
    Opened,
    Verdict,
)
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.server import ExitConfig, VerifierSession
from collab_llm_nodes.protocols.edge_cloud.target import TargetJudge, TargetSession
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient
from collab_llm_nodes.serving.compute import Judge, _Inbox, _Pass
from collab_llm_nodes.serving.scheduler import (
    BatchConfig,
)
from collab_llm_nodes.transport.admission import Shares
from collab_llm_nodes.transport.server import ServerHandle
from collab_llm_nodes.transport.streams import MAX_UNANSWERED
from collab_llm_nodes.transport.wire import Failure

serve, join, still = passes_bed.serve, passes_bed.join, passes_bed.still  # fixtures


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
        inbox = server._server.service._compute._inbox
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
    """An evicted robot replays; all of them get the answers that they would have got alone."""
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


def test_a_session_for_motion_takes_the_cache_of_a_question_which_is_asked_to_replay(
    serve: Serve, join: Join
) -> None:
    """Also when the question is at work; its answer goes on later from where it was."""
    engine = FakeEngine(1)
    patience = BatchConfig(evict_idle_s=60.0, slot_wait_s=60.0)
    server = serve(engine, limits=Limits(max_sessions=1), batch=patience)
    question, motion = join(server), join(server)
    question.send(OPEN, Draft(0, 0, (), autoregressive_rounds=20))
    confirmed = question.skip_to(Verdict).tokens
    motion.send(replace(OPEN, text="find the cone", for_motion=True), Draft(0, 0, ()))
    motion.skip_to(Verdict)
    question.send(Draft(21, 21, ()))  # if it has become idle, it is told now
    while not isinstance(message := question.next_but(EarlyExit), Failure):
        assert isinstance(message, Verdict)
        confirmed += message.tokens
    assert message.code == "REPLAY"
    motion.send(Close())
    again = join(server)
    again.send(replace(OPEN, replay=confirmed, round=len(confirmed)))
    again.send(Draft(len(confirmed), len(confirmed), ()))
    expected = engine.answer(encode(Prompt(OPEN.text)), GREEDY, 24)
    confirmed += again.skip_to(Verdict).tokens
    assert confirmed == expected[: len(confirmed)]


def test_questions_do_not_use_up_what_an_address_may_send_for_motion(serve: Serve) -> None:
    server = serve(FakeEngine(1), shares=Shares(bytes_per_s=1e3))
    address, large = f"127.0.0.1:{server.port}", replace(OPEN, text="where? " * 1000)
    with grpc.insecure_channel(address) as channel:
        asked = RawClient(channel)
        asked.send(large)
        asked.skip_to(Opened)
        refused = RawClient(channel)
        refused.send(large)
        assert refused.skip_to(Failure).code == "BUSY"
    with VerifierClient(ClientLinkConfig(address=address)) as client:
        inbox = Inbox()
        client.open(replace(OPEN, for_motion=True), inbox.put)
        inbox.get(Opened)
        client.open(OPEN, inbox.put)
        assert inbox.get(Failure).code == "BUSY"


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


def test_autoregressive_rounds_stream_without_drafts(serve: Serve, join: Join) -> None:
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


# --- The compute thread alone -------------------------------------------------------------------


@pytest.mark.parametrize("all_at_once", [True, False])
def test_in_a_shared_pass_each_hears_what_it_would_alone(
    monkeypatch: pytest.MonkeyPatch, all_at_once: bool
) -> None:
    """The same holds if there is no memory to judge all of them at once."""
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
        compute.submit(robot := opened(text), draft)
        alone[text] = heard(robot)
    assert all(len(each) == 4 for each in alone.values()), "three exits and a verdict"
    robots = {text: opened(text) for text in drafts}
    if not all_at_once:
        for name in ("distributions_of", "previews_of"):
            monkeypatch.setattr(target_module, name, lambda *_: 1 / 0)
    with engine.held(lambda: compute.open(Posted(), target_of(engine))):
        for text, robot in robots.items():
            compute.submit(robot, drafts[text])
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
            compute.submit(robot, Draft(0, 0, (5, 6)))
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
    compute = compute_of(engine, judge=TargetJudge(exits), emulated_compute_s=0.08)
    robot, start = Posted(), 0
    compute.open(robot, target_of(engine))
    for round_ in range(3):  # the first pass tells how long passes take
        compute.submit(robot, Draft(round_, start, ()))
        layers = []
        while not isinstance(message := robot.next(), Verdict):
            layers += [message.layer] if isinstance(message, EarlyExit) else []
        start += len(message.tokens)
        assert layers == (taken if round_ else [1, 2, 3])
    assert compute.stop(WAIT_S)


def test_one_slow_exit_does_not_end_all_exits(
    still: StillClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would never be measured again."""
    preview, slow = TargetSession.preview, [0.3]

    def stalls(*args: Any) -> EarlyExit | None:
        still.sleep(slow.pop() if slow else 0.0)
        return preview(*args)

    monkeypatch.setattr(TargetSession, "preview", stalls)
    judge = TargetJudge(ExitConfig(min_lead_s=0.001))
    compute = compute_of(FakeEngine(1), judge=judge, emulated_compute_s=0.08)
    engine, exits = FakeEngine(1), list[int]()
    while len(exits) < 40:
        robot, start = Posted(), 0
        compute.open(robot, target_of(engine))
        for round_ in itertools.count():
            compute.submit(robot, Draft(round_, start, ()))
            exits.append(0)
            while not isinstance(message := robot.next(), Verdict):
                exits[-1] += isinstance(message, EarlyExit)
            start += len(message.tokens)
            if message.finished:
                break
        compute.leave(robot)
    assert exits[0] == 3, "nothing was known"
    assert exits[1] == 0, "an exit seems to cost more than it brings"
    assert exits[-1] == 3
    assert compute.stop(WAIT_S)


def test_an_exit_is_not_charged_with_the_layers_before_it(still: StillClock) -> None:
    """On an accelerator they are still running when the exit is queued behind them."""

    class Seen(Judge):
        def preview(self, layer: int, exits: Any) -> Any:
            still.sleep(0.001)  # its logits are there
            return [None] * len(exits)

    run = _Pass(as_engine(FakeEngine(1)), Seen(), 0.0)

    def took() -> float:
        still.sleep(0.05)  # until the layers, and then the exit, are done
        return 0.0003

    robot = Posted()
    run.watch(robot, target_of(FakeEngine(1)))(1, torch.zeros(1, 1))
    run._post_exits(1, took)
    assert run.exits == 1
    assert run.exits_s == pytest.approx(0.0013)
