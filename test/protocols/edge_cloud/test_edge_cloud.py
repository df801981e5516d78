"""The edge-cloud path with real (tiny, random) models: one answer, whoever decodes it."""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from fake_models import EOS, VOCAB, FakeEngine, as_engine, encode
from tiny_models import tiny_prompt
from tiny_pairs import DRAFTS, target_of

from collab_llm_lab import reference
from collab_llm_nodes.decoding.rejection import propose
from collab_llm_nodes.decoding.sampling import (
    Distribution,
    SamplingConfig,
    distributions,
    distributions_of,
)
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import (
    Cancelled,
    CollabError,
    DeadlineExceeded,
    InvalidInput,
    Unavailable,
    VocabularyMismatch,
)
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt
from collab_llm_nodes.models.prompt import encode as encode_for_model
from collab_llm_nodes.protocols.edge_cloud import continuations as continuations_module
from collab_llm_nodes.protocols.edge_cloud import drafter as drafter_module
from collab_llm_nodes.protocols.edge_cloud import server as server_module
from collab_llm_nodes.protocols.edge_cloud import target as target_module
from collab_llm_nodes.protocols.edge_cloud.ahead import AheadConfig
from collab_llm_nodes.protocols.edge_cloud.client import (
    DraftJob,
    EdgeClient,
    EdgeClientConfig,
    Source,
)
from collab_llm_nodes.protocols.edge_cloud.drafter import Drafter
from collab_llm_nodes.protocols.edge_cloud.loop import Cancel, EdgeLoop, PreDraftRequest, Resume
from collab_llm_nodes.protocols.edge_cloud.messages import Draft, EarlyExit, Open, Verdict
from collab_llm_nodes.protocols.edge_cloud.planner import Profile
from collab_llm_nodes.protocols.edge_cloud.predraft import PreDraftConfig
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.runner import InProcessRunner
from collab_llm_nodes.protocols.edge_cloud.server import ExitConfig
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server
from collab_llm_nodes.protocols.edge_cloud.target import TargetJudge, TargetSession
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient
from collab_llm_nodes.transport.wire import Failure

GREEDY = SamplingConfig()
COUPLED = SamplingConfig(0.8, top_k=20, seed=3, law="coupled")
REJECTION = SamplingConfig(0.8, top_k=20, seed=3)
MAX_TOKENS = 16
WAIT_S = 20.0
ARCHITECTURES = ("qwen2_vl", "llama")


@cache
def alone(architecture: str, prompt: Prompt, sampling: SamplingConfig) -> tuple[int, ...]:
    """Return what the target says without any of this."""
    target = target_of(architecture)
    encoded = encode_for_model(prompt, target.loaded)
    return tuple(reference.generate(target.loaded, encoded, sampling, MAX_TOKENS, target.eos))


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_in_process_equals_the_target_alone(architecture: str, draft: str) -> None:
    target = target_of(architecture)
    run = InProcessRunner(DRAFTS[draft](architecture), target)
    for sampling in (GREEDY, COUPLED):
        prompt = tiny_prompt(architecture)
        answer = run.generate(prompt, sampling, MAX_TOKENS)
        assert answer.tokens == alone(architecture, prompt, sampling)
        assert len(answer.sources) == len(answer.tokens)
        metrics = answer.metrics
        assert metrics.tokens == len(answer.tokens)
        if draft == "same":  # gamma accepted and a bonus token, each round
            assert metrics.accepted == metrics.drafted or answer.tokens[-1] in target.eos
            assert Source.RECOVERED not in answer.sources


@pytest.mark.parametrize(
    ("gamma", "predrafts", "max_tokens"),
    [(0, 6, 16), (1, 0, 16), (8, 2, 16), (4, 6, 1), (4, 6, 2), (64, 1, 16)],
)
def test_no_setting_changes_the_answer(gamma: int, predrafts: int, max_tokens: int) -> None:
    target = target_of("llama")
    run = InProcessRunner(
        DRAFTS["noisy"]("llama"),
        target,
        gamma=gamma,
        predraft=PreDraftConfig(max_predrafts=predrafts, queue="random"),
        exits=ExitConfig(confidence="max", queue="fifo"),
    )
    prompt = tiny_prompt("llama")
    for sampling in (GREEDY, COUPLED):
        answer = run.generate(prompt, sampling, max_tokens)
        assert answer.tokens == alone("llama", prompt, sampling)[:max_tokens]


def test_cached_drafts_are_used_and_change_nothing_under_the_rejection_law() -> None:
    target, draft = target_of("llama"), DRAFTS["noisy"]("llama")
    with_cache = InProcessRunner(draft, target)
    without = InProcessRunner(draft, target, predraft=PreDraftConfig(max_predrafts=0))
    hits = 0
    for seed in range(4):
        prompt, law = tiny_prompt("llama", seed), SamplingConfig(0.5, seed=seed)
        cached = with_cache.generate(prompt, law, MAX_TOKENS)
        plain = without.generate(prompt, law, MAX_TOKENS)
        assert plain.metrics.cache_hits == 0
        assert cached.tokens == plain.tokens
        hits += cached.metrics.cache_hits
    assert hits > 0


# --- Over gRPC ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION])
def test_drafts_side_by_side_are_those_made_alone_at_one_calculation_a_step(
    sampling: SamplingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompt = as_engine(FakeEngine()), encode(Prompt("x"))
    jobs = [DraftJob(1, answer, 4) for answer in ((5,), (6,), (7, 8), (9,))]
    alone = [Drafter(engine, prompt, sampling).draft(job) for job in jobs]
    calls = []

    def counted(logits: torch.Tensor, config: SamplingConfig) -> list[Distribution]:
        calls.append(logits.shape)
        return distributions(logits, config)

    monkeypatch.setattr(drafter_module, "distributions", counted)
    drafter = Drafter(engine, prompt, sampling)
    lines = [drafter.begin(job) for job in jobs]
    steps = 0
    while unfinished := [line for line in lines if line.draft is None]:
        drafter.step(unfinished)
        steps += 1
    assert [line.draft for line in lines] == alone
    assert len(calls) == 1 + steps, "of the prompt, and of each step"


class Clock:
    """A ``time`` that stands still but for what a test lets something take."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def taking(self, seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, which takes ``seconds``."""

        def slow(*args: Any) -> Any:
            self.now += seconds
            return function(*args)

        return slow


def test_the_time_of_a_drafted_token_includes_its_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    for module in (drafter_module, continuations_module):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(drafter_module, "distributions", clock.taking(0.5, distributions))
    monkeypatch.setattr(drafter_module, "propose", clock.taking(0.25, propose))
    engine = FakeEngine(before_layer=clock.taking(1.0, lambda layer: None))
    drafter = Drafter(as_engine(engine), encode(Prompt("x")), REJECTION)
    passes = list[tuple[int, float]]()
    drafter.on_pass = lambda tokens, seconds: passes.append((tokens, seconds))
    draft = drafter.draft(DraftJob(0, (), 3))
    assert draft is not None
    assert passes == [(1, 1.75)] * 2, "the first token comes of the prompt's pass"


@pytest.mark.parametrize("sampling", [GREEDY, REJECTION], ids=["greedy", "sampled"])
def test_the_time_of_a_verification_includes_its_distributions(
    sampling: SamplingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetching them is what waits for an accelerator; the verdict then needs no logits."""
    clock = Clock()
    monkeypatch.setattr(target_module, "time", clock)
    slow = clock.taking(0.5, distributions_of)
    monkeypatch.setattr(target_module, "distributions_of", slow)
    monkeypatch.setattr(server_module, "distributions", lambda *_: 1 / 0)
    prompt = encode(Prompt("x"))
    session = TargetSession(as_engine(FakeEngine()), prompt, Open("x", (), sampling, 20, ""))
    session.prefill()
    draft = Drafter(as_engine(FakeEngine(1)), prompt, sampling).draft(DraftJob(0, (), 2))
    assert draft is not None
    verdict = session.verify(draft, lambda exit_: None)
    assert verdict is not None
    assert verdict.compute_s == 0.5


def test_the_judge_finds_what_all_sessions_of_a_pass_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is within the time of the pass: nothing is left to do with the logits."""
    monkeypatch.setattr(server_module, "distributions", lambda *_: 1 / 0)
    prompt, results = encode(Prompt("x")), []
    for sampling in (GREEDY, REJECTION, COUPLED):
        session = TargetSession(as_engine(FakeEngine()), prompt, Open("x", (), sampling, 20, ""))
        draft = Drafter(as_engine(FakeEngine(1)), prompt, sampling).draft(DraftJob(0, (), 2))
        assert draft is not None
        session.prefill()
        session.offer(draft)
        feed = session.begin()
        assert feed is not None
        results.append((session, feed.session.feed(feed.ids)))
    findings = TargetJudge(ExitConfig()).find(results)
    for (session, logits), finding in zip(results, findings, strict=True):
        assert session.conclude(logits, 0.0, 0.0, finding).tokens


def test_an_exit_that_is_not_finite_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Overflow(FakeEngine):
        """An adapter whose sums exceed fp16."""

        def logits(self, context: Sequence[int], layer: int | None = None) -> torch.Tensor:
            sound = super().logits(context, layer)
            return sound * float("nan") if layer == 2 else sound

    prompt, seen = encode(Prompt("x")), list[EarlyExit]()
    session = TargetSession(as_engine(Overflow()), prompt, Open("x", (), GREEDY, 20, ""))
    session.prefill()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            answer = session._state.generated
            verdict = session.verify(Draft(session._state.round, len(answer), (1, 2)), seen.append)
            assert verdict is not None
    assert tuple(session._state.generated) == FakeEngine().answer(prompt, GREEDY, 20)[: len(answer)]
    assert {exit_.layer for exit_ in seen} == {1, 3}
    assert len(caplog.records) == 1, "one line, however many exits"


@pytest.fixture(scope="module", params=ARCHITECTURES)
def remote(request: pytest.FixtureRequest) -> Iterator[tuple[str, Engine, VerifierClient]]:
    """A verifier with a tiny model, and a link to it."""
    target = target_of(request.param)
    with (
        start_server(VerifierConfig(address="127.0.0.1:0"), target) as server,
        VerifierClient(ClientLinkConfig(address=f"localhost:{server.port}")) as client,
    ):
        yield request.param, target, client


@pytest.mark.parametrize("draft", DRAFTS)
def test_over_grpc_equals_the_target_alone_and_the_in_process_runner(
    remote: tuple[str, Engine, VerifierClient], draft: str
) -> None:
    architecture, target, client = remote
    engine = DRAFTS[draft](architecture)
    over_grpc, in_process = RemoteRunner(engine, client), InProcessRunner(engine, target)
    prompt = tiny_prompt(architecture)
    for sampling in (GREEDY, COUPLED):
        answer = over_grpc.generate(prompt, sampling, MAX_TOKENS)
        assert answer.tokens == alone(architecture, prompt, sampling)
        assert answer.text == target.decode(answer.tokens)
    answer = over_grpc.generate(prompt, REJECTION, MAX_TOKENS)
    assert answer.tokens == in_process.generate(prompt, REJECTION, MAX_TOKENS).tokens


def test_robots_do_not_disturb_one_another(remote: tuple[str, Engine, VerifierClient]) -> None:
    """One target, one draft engine, four sessions at once, each with its own images."""
    architecture, _, client = remote
    prompts = [tiny_prompt(architecture, 10 * i, images=1 + i % 2) for i in range(4)]
    run = RemoteRunner(DRAFTS["noisy"](architecture), client)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda p: run.generate(p, GREEDY, MAX_TOKENS).tokens, prompts))
    assert answers == [alone(architecture, p, GREEDY) for p in prompts]


def test_bad_prompts_are_refused_by_name(remote: tuple[str, Engine, VerifierClient]) -> None:
    """The edge refuses them before anything is sent; test_verifier.py has the verifier's checks."""
    architecture, _, client = remote
    run = RemoteRunner(DRAFTS["noisy"](architecture), client)
    for prompt in (Prompt(""), Prompt("go", (b"no JPEG",)), Prompt("x" * 9000)):
        with pytest.raises(InvalidInput):
            run.generate(prompt)


def test_the_verifier_checks_the_image_itself(remote: tuple[str, Engine, VerifierClient]) -> None:
    architecture, _, client = remote
    if architecture != "qwen2_vl":
        pytest.skip("a text model takes no image at all")
    engine = DRAFTS["noisy"](architecture)
    fine = encode_for_model(tiny_prompt(architecture), engine.loaded)
    run = RemoteRunner(engine, client, encode=lambda prompt: fine)
    with pytest.raises(InvalidInput, match="JPEG") as caught:
        run.generate(Prompt("go to the red ball", (b"no JPEG",)))
    assert caught.value.field == "images[0]"
    assert caught.value.remedy


def test_another_vocabulary_is_refused(remote: tuple[str, Engine, VerifierClient]) -> None:
    _, _, client = remote
    run = RemoteRunner(as_engine(FakeEngine(1)), client, encode=encode)
    with pytest.raises(VocabularyMismatch) as caught:
        run.generate(Prompt("go"))
    assert caught.value.remedy


# --- The loop alone -----------------------------------------------------------------------------

PROMPT = Prompt("go to the red box")
PLAIN = PreDraftConfig(max_predrafts=0)
WAITING = AheadConfig(push_window=0)


class Bench:
    """A loop against a target session that answers within ``send``."""

    def __init__(
        self,
        *,
        predraft: PreDraftConfig = PLAIN,
        ahead: AheadConfig = WAITING,
        preempt: bool = True,
        may_run: Callable[[], bool] = lambda: True,
    ) -> None:
        self.target = FakeEngine(1)
        self.draft_engine = FakeEngine(1, noise=0.5)
        self.expected = self.target.answer(encode(PROMPT), GREEDY, MAX_TOKENS)
        opened = Open(PROMPT.text, (), GREEDY, MAX_TOKENS, "")
        self.session = TargetSession(as_engine(self.target), encode(PROMPT), opened)
        self.session.prefill()
        self.client = EdgeClient(EdgeClientConfig(4, MAX_TOKENS))
        self.sent: list[Draft] = []
        self.exits: list[EarlyExit] = []
        drafter = Drafter(as_engine(self.draft_engine), encode(PROMPT), GREEDY)
        self.profile = Profile()
        self.loop = EdgeLoop(
            self.client,
            drafter,
            self.send,
            predraft=predraft,
            ahead=ahead,
            profile=self.profile,
            preempt=preempt,
            may_run=may_run,
        )

    def send(self, draft: Draft) -> None:
        self.sent.append(draft)
        self.session.offer(draft)
        while (verdict := self.session.verify_next(self.loop.post)) is not None:
            self.loop.post(verdict)


@pytest.mark.parametrize("preempt", [False, True])
@pytest.mark.parametrize(
    ("predraft", "ahead"),
    [
        (PLAIN, AheadConfig()),
        (PreDraftConfig(), AheadConfig(predictions=0, push_window=0)),
        (PreDraftConfig(), AheadConfig(push_window=0)),
        (PreDraftConfig(), AheadConfig(push_depth=3)),
    ],
    ids=["plain", "exits", "predictions", "push"],
)
def test_the_loop_decodes(predraft: PreDraftConfig, ahead: AheadConfig, preempt: bool) -> None:
    bench = Bench(predraft=predraft, ahead=ahead, preempt=preempt)
    bench.loop.run(5.0)
    assert tuple(bench.client.generated) == bench.expected
    metrics = bench.client.metrics
    assert metrics.pushed == sum(d.after is not None for d in bench.sent)
    if predraft is PLAIN or ahead.push_window == 0:
        assert metrics.pushed == 0
        assert [d.round for d in bench.sent] == list(range(len(bench.sent)))
    elif not preempt:
        assert metrics.pushed > 0
    if predraft is not PLAIN and not preempt:
        assert metrics.cache_hits > 0
        assert any(d.cached for d in bench.sent)


def test_the_profile_sees_which_drafts_end_with_the_answer() -> None:
    bench = Bench()
    bench.loop.run(5.0)
    ends: list[bool] = []
    for draft in bench.sent:
        gamma = min(4, MAX_TOKENS - draft.start - 1)
        ends += [token == EOS for token in draft.tokens[: max(0, gamma - 1)]]
    cut = [d for d in bench.sent if 0 < len(d.tokens) < 4 and EOS not in d.tokens]
    assert cut, "no draft is shorter for want of room"
    assert bench.profile.ends.count == len(ends) > 0
    assert bench.profile.ends.value == pytest.approx(sum(ends) / len(ends))


class Robot(Bench):
    """A loop in a thread of its own, whose drafts are verified when the test does so."""

    def __init__(self, *, predraft: PreDraftConfig, ahead: AheadConfig) -> None:
        super().__init__(predraft=predraft, ahead=ahead)
        self.left: queue.SimpleQueue[tuple[Draft, threading.Thread]] = queue.SimpleQueue()

    def send(self, draft: Draft) -> None:
        self.sent.append(draft)
        self.left.put((draft, threading.current_thread()))

    def verify(self, draft: Draft) -> Verdict:
        verdict = self.session.verify(draft, lambda e: None)
        assert verdict is not None
        return verdict


def test_a_ready_draft_leaves_while_the_draft_model_is_in_a_pass() -> None:
    """The pass ends only when the draft has left: one that waited for it would never leave."""
    robot = Robot(predraft=PreDraftConfig(), ahead=AheadConfig(predictions=0, push_window=0))
    made, in_pass, go_on = threading.Event(), threading.Event(), threading.Event()

    def hold(layer: int) -> None:
        if made.is_set() and not go_on.is_set():
            in_pass.set()
            assert go_on.wait(WAIT_S)

    awaited: list[bool] = []
    robot.loop._on_tokens = lambda tokens: awaited.append(robot.client.in_flight is not None)
    robot.draft_engine.before_layer = hold
    with ThreadPoolExecutor(1) as pool:
        over = pool.submit(robot.loop.run, 10 * WAIT_S)
        first, loop_thread = robot.left.get(timeout=WAIT_S)
        verdict = robot.verify(first)
        robot.loop.post(PreDraftRequest(0, verdict.tokens, lambda ready: made.set()))
        assert made.wait(WAIT_S)
        other = (verdict.tokens[0] % 20 + 1,)
        robot.loop.post(PreDraftRequest(0, other, lambda ready: None))
        assert in_pass.wait(WAIT_S)
        robot.loop.post(verdict)
        second, thread = robot.left.get_nowait()  # it left within ``post``
        assert thread is not loop_thread
        assert (second.round, second.start, second.cached) == (1, len(verdict.tokens), True)
        # Its verdict may even come before the loop has handled the one that it follows.
        verdict = robot.verify(second)
        robot.loop.post(verdict)
        go_on.set()
        while not verdict.finished:
            verdict = robot.verify(robot.left.get(timeout=WAIT_S)[0])
            robot.loop.post(verdict)
        over.result(WAIT_S)
    assert tuple(robot.client.generated) == robot.expected
    rounds = robot.client.metrics.rounds
    assert [draft.round for draft in robot.sent] == list(range(rounds)), "each is sent once"
    assert robot.client.metrics.cache_hits >= 1
    assert awaited[0], "whoever watches the verifier's silence knows that it is asked again"
    assert not awaited[-1]


@pytest.mark.parametrize("passes_before", [0, 1, 2, 3])
def test_a_pre_draft_for_another_outcome_is_never_sent(passes_before: int) -> None:
    """The verdict comes during each of the forward passes of a pre-draft that it makes useless."""
    bench = Bench()
    held: list[Verdict] = []
    passes = itertools.count()

    def send(draft: Draft) -> None:
        bench.sent.append(draft)
        verdict = bench.session.verify(draft, lambda e: None)
        assert verdict is not None
        if draft.round > 0:
            bench.loop.post(verdict)
            return
        held.append(verdict)
        other = (verdict.tokens[0] % 20 + 1,)  # one token, and another one
        bench.loop.post(PreDraftRequest(0, other, lambda made: None))

    def verdict_comes(layer: int) -> None:
        if held and layer == bench.draft_engine.num_layers and next(passes) == passes_before:
            bench.loop.post(held.pop())

    bench.loop._send = send
    bench.draft_engine.before_layer = verdict_comes
    bench.loop.run(5.0)
    assert tuple(bench.client.generated) == bench.expected
    lengths = list(itertools.accumulate([0, *(len(d.tokens) for d in bench.sent)]))
    assert all(d.start <= most + d.round for d, most in zip(bench.sent, lengths, strict=False))
    assert not [d for d in bench.sent if d.cached]


def test_without_drafts_the_verifier_streams_its_own_answer() -> None:
    bench = Bench()
    bench.loop.client = bench.client = EdgeClient(EdgeClientConfig(0, MAX_TOKENS))
    bench.loop.run(5.0)
    assert tuple(bench.client.generated) == bench.expected
    assert len(bench.sent) == 1, "one message for the whole answer"
    assert bench.client.metrics.rounds == len(bench.expected)


def test_every_predraft_request_is_answered_once() -> None:
    bench = Bench()
    replies: list[CollabError | None] = []
    bench.loop.post(PreDraftRequest(0, (5,), replies.append))
    bench.loop.post(PreDraftRequest(99, (5,), replies.append))
    bench.loop.run(5.0)
    bench.loop.post(PreDraftRequest(0, (5,), replies.append))  # the loop has ended
    assert len(replies) == 3
    assert isinstance(replies[-1], Cancelled)


@pytest.mark.parametrize(
    ("round_", "outcome", "due", "error", "field_name"),
    [
        (10_000, (5,), math.inf, InvalidInput, "round"),
        (1, (5,), math.inf, InvalidInput, "round"),  # no draft for it has left
        (0, (), math.inf, InvalidInput, "outcome"),
        (0, (5,) * 6, math.inf, InvalidInput, "outcome"),  # the draft has four tokens
        (0, (5, -1), math.inf, InvalidInput, "outcome[1]"),
        (0, (VOCAB,), math.inf, InvalidInput, "outcome[0]"),
        (0, (5, EOS), math.inf, InvalidInput, "outcome[1]"),
        (0, (5,), 0.0, DeadlineExceeded, "deadline_s"),
    ],
)
def test_a_predraft_that_can_never_be_made_is_refused_while_the_round_is_verified(
    round_: int, outcome: tuple[int, ...], due: float, error: type[CollabError], field_name: str
) -> None:
    robot = Robot(predraft=PreDraftConfig(), ahead=AheadConfig(predictions=0, push_window=0))
    replies: queue.SimpleQueue[CollabError | None] = queue.SimpleQueue()
    with ThreadPoolExecutor(1) as pool:
        over = pool.submit(robot.loop.run, 10 * WAIT_S)
        first, _ = robot.left.get(timeout=WAIT_S)
        assert len(first.tokens) == 4
        robot.loop.post(PreDraftRequest(round_, outcome, replies.put, due))
        try:
            refused = replies.get(timeout=WAIT_S)
        finally:
            robot.loop.post(Cancel())
        assert isinstance(refused, error)
        assert refused.field == field_name
        assert isinstance(over.exception(), Cancelled)


def test_a_loop_that_rests_before_each_pass_gives_the_same_answer() -> None:
    passes: list[int] = []
    asked = 0

    def may_run() -> bool:
        nonlocal asked
        asked += 1
        if asked % 3:
            bench.loop.post(Resume())
            return False
        passes.append(asked)
        return True

    bench = Bench(predraft=PreDraftConfig(), ahead=AheadConfig(), may_run=may_run)
    made: list[int] = []
    bench.draft_engine.before_layer = made.append
    bench.loop.run(5.0)
    assert tuple(bench.client.generated) == bench.expected
    assert bench.loop.paused
    assert made.count(bench.draft_engine.num_layers) <= len(passes)


def test_a_loop_that_rests_is_ended_by_what_arrives_and_refuses_pre_drafts() -> None:
    bench = Bench(may_run=lambda: False)
    replies: list[CollabError | None] = []
    for number in (0, 99):
        bench.loop.post(PreDraftRequest(number, (5,), replies.append))
    with pytest.raises(DeadlineExceeded, match="answers for motion went first"):
        bench.loop.run(0.05)
    assert [str(reply) for reply in replies] == ["an answer for motion uses the draft model"] * 2
    bench = Bench(may_run=lambda: False)
    bench.loop.post(Cancel())
    with pytest.raises(Cancelled):
        bench.loop.run(5.0)
    assert not bench.sent


def test_a_long_prompt_is_read_in_pieces_between_which_the_loop_may_rest() -> None:
    class Measured(FakeEngine):
        def run(self, feeds: Sequence[Any], **options: Any) -> Any:
            rows.extend(len(feed.ids) for feed in feeds)
            return super().run(feeds, **options)

    rows: list[int] = []
    prompt, job = EncodedPrompt(tuple(1 + i % 9 for i in range(300))), DraftJob(0, (), 4)
    drafter = Drafter(as_engine(Measured(1)), prompt, GREEDY)
    drafter.between_pieces = lambda: rows.append(0)
    whole = drafter.draft(job)
    assert rows == [256, 0, 44]
    plain = FakeEngine(1)
    assert whole is not None
    assert whole.tokens == plain.answer(prompt, GREEDY, 4)


def test_cancel_and_failures_end_the_loop() -> None:
    for event, error in (
        (Cancel(), Cancelled),
        (Failure("DEADLINE_EXCEEDED", "no verdict"), DeadlineExceeded),
    ):
        bench = Bench()
        bench.loop.post(event)
        with pytest.raises(error):
            bench.loop.run(5.0)


def test_silence_ends_the_loop_at_its_deadline() -> None:
    bench = Bench()
    mute = EdgeLoop(
        bench.client,
        Drafter(as_engine(bench.draft_engine), encode(PROMPT), GREEDY),
        lambda draft: None,
    )
    with pytest.raises(DeadlineExceeded, match="deadline"):
        mute.run(0.05)


def test_a_verdict_that_came_before_a_failure_counts() -> None:
    bench = Bench()

    def send(draft: Draft) -> None:
        bench.session.offer(draft)
        verdict = bench.session.verify_next(lambda e: None)
        assert verdict is not None
        bench.loop.post(verdict)
        bench.loop.post(Failure("UNAVAILABLE", "gone"))

    bench.loop._send = send
    with pytest.raises(Unavailable):
        bench.loop.run(5.0)
    assert tuple(bench.client.generated) == bench.expected[: len(bench.client.generated)] != ()
