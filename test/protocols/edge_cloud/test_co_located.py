"""Co-located speculation: the verifier drafts by itself, and the answer stays the target's own."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import verifier_bed
from fake_models import PROMPT_IDS, VOCAB, VOCABULARY, FakeEngine, FakeSession, as_engine, encode
from guided_models import spelling_engine, spelt
from tiny_models import scene
from verifier_bed import GREEDY, OPEN, PROMPT, WAIT_S, Connect, Gate, Serve

from collab_llm_nodes.decoding.sampling import SamplingConfig, SparseDistribution
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.interface import Feed, OnExit
from collab_llm_nodes.errors import ModelError, VocabularyMismatch
from collab_llm_nodes.models.guide import Guide
from collab_llm_nodes.models.loading import ModelConfig, TargetConfig, load
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt
from collab_llm_nodes.protocols.edge_cloud import co_located
from collab_llm_nodes.protocols.edge_cloud.co_located import PATIENCE_S, DraftingThread, OwnDrafts
from collab_llm_nodes.protocols.edge_cloud.messages import Draft, Opened, Verdict
from collab_llm_nodes.protocols.edge_cloud.planner import Mode, Planner, PlannerConfig
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.server import Proposal, VerifierSession, Wanted
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, load_draft, start_server
from collab_llm_nodes.protocols.edge_cloud.verifier_client import VerifierClient
from collab_llm_nodes.protocols.means import Mean

serve, connect = verifier_bed.serve, verifier_bed.connect  # fixtures
ASKED = "find the red mug. history: none. search: place 1, turned 0."
SENDING = SamplingConfig(1.0, seed=4)  # the rejection law
LAWS = (GREEDY, SamplingConfig(1.0, law="coupled", seed=4))


def drafted(client: VerifierClient, gamma: int = 4) -> RemoteRunner:
    """Return a robot whose own draft model knows nothing of the target."""
    client.describe(WAIT_S)
    robot = as_engine(FakeEngine(99))
    return RemoteRunner(robot, client, gamma=gamma, encode=encode, drafted_by="verifier")


def beside(engine: FakeEngine) -> dict[str, Any]:
    """Return the options of ``serve`` for a draft model beside the target."""
    return {"draft": (as_engine(engine), encode)}


@pytest.mark.parametrize("sampling", LAWS)
def test_the_answer_is_the_targets_and_rounds_are_drafted(
    serve: Serve, connect: Connect, sampling: SamplingConfig
) -> None:
    target = FakeEngine(1)
    run = drafted(connect(serve(target, **beside(FakeEngine(1, noise=0.3))).port))
    for text in ("go to the red box", "find the blue ball"):
        answer = run.generate(Prompt(text), sampling, 24)
        assert answer.mode == Mode(4, co_located=True)
        assert answer.tokens == target.answer(encode(Prompt(text)), sampling, 24)
        assert answer.metrics.accepted > 0
        assert answer.metrics.rounds < answer.metrics.tokens
        assert answer.metrics.early_exits == 0, "nobody drafts for them"


def test_sessions_side_by_side_share_the_draft_model_and_free_it(
    serve: Serve, connect: Connect
) -> None:
    target, draft = FakeEngine(1), FakeEngine(1, noise=0.3)
    run = drafted(connect(serve(target, **beside(draft)).port))
    prompts = [Prompt(f"room {i}") for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda p: run.generate(p, GREEDY, 24).tokens, prompts))
    assert answers == [target.answer(encode(p), GREEDY, 24) for p in prompts]
    for engine in (target, draft):
        for _ in prompts:
            engine.freed.get(timeout=WAIT_S)
        assert engine.alive == 0


def test_a_guide_limits_drafts_and_answer(serve: Serve, connect: Connect) -> None:
    choices = ("abca", "abda", "bbaa")
    target, draft = spelling_engine(1), spelling_engine(1, noise=0.3)
    client = connect(serve(target, **beside(draft)).port)
    client.describe(WAIT_S)
    robot = RemoteRunner(
        as_engine(spelling_engine(9)), client, encode=encode, drafted_by="verifier"
    )
    for sampling in (GREEDY, SENDING):
        answer = robot.generate(PROMPT, sampling, 24, guide=Guide("choice", "\n".join(choices)))
        assert spelt(answer.tokens) in choices


@pytest.mark.parametrize("sampling", LAWS)
def test_the_shipped_pair_with_a_picture(connect: Connect, sampling: SamplingConfig) -> None:
    models = VerifierConfig(
        address="127.0.0.1:0", model=TargetConfig("nav-target"), draft=ModelConfig("nav-draft")
    )
    robot, prompt = Engine(load(ModelConfig("nav-draft"))), Prompt(ASKED, (scene(3),))
    server = start_server(models)
    try:
        client = connect(server.port)
        assert client.describe(WAIT_S).draft == "nav-draft"
        alone = RemoteRunner(robot, client, gamma=0).generate(prompt, sampling, 24)
        run = RemoteRunner(robot, client, gamma=4, drafted_by="verifier")
        answer = run.generate(prompt, sampling, 24)
    finally:
        server.stop()
    assert answer.tokens == alone.tokens
    assert answer.metrics.rounds < alone.metrics.rounds
    profile = run.planner.profile
    assert profile.t_d.value > 0
    assert profile.tau(4, co_located=True) > 1


def test_a_proposal_is_judged_like_the_same_draft_of_a_robot() -> None:
    """Under the rejection law, so that the distributions count as well."""
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    probs = tuple(
        SparseDistribution(torch.arange(VOCAB).int().numpy(), row.softmax(0).numpy())
        for row in torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(3))
    )
    opened = replace(OPEN, sampling=SENDING)
    for tokens in ((5, 7), (5, 8), (1, 2)):
        robot = VerifierSession(opened, eos=frozenset({0}), vocab_size=VOCAB)
        own = VerifierSession(opened, eos=frozenset({0}), vocab_size=VOCAB, co_located=2)
        robot.offer(Draft(0, 0, tokens, probs))
        own.offer(Draft(0, 0, (), (), autoregressive_rounds=20))
        assert not own.due
        assert own.wanted == Wanted(0, (), 2, 23)
        assert own.propose(Proposal(0, tokens, probs, took_s=0.5))
        assert not own.propose(Proposal(0, (3,), probs[:1])), "one is enough"
        assert robot.begin() == own.begin() == tokens
        verdict = own.conclude(logits, 0.0)
        assert verdict == replace(robot.conclude(logits, 0.0), draft_s=0.5)
        assert own.finished or own.wanted == Wanted(1, verdict.tokens, 2, 23 - len(verdict.tokens))


def test_tokens_that_the_robot_does_not_know_are_not_proposed() -> None:
    session = VerifierSession(OPEN, eos=frozenset({0}), vocab_size=6, co_located=4)
    session.offer(Draft(0, 0, (), autoregressive_rounds=20))
    session.propose(Proposal(0, (2, 5, 6, 1)))
    assert session.begin() == (2, 5)


class BrokenEngine(FakeEngine):
    """A draft model without memory for its passes."""

    def run(self, feeds: Sequence[Feed[FakeSession]], **options: Any) -> Any:
        raise ModelError("out of memory", field="device", remedy="none")


class UnreadyEngine(FakeEngine):
    """A draft model whose device fails at once."""

    def warm_up(self, on_exit: OnExit) -> None:
        raise RuntimeError("no device")


@pytest.mark.parametrize("kind", [BrokenEngine, UnreadyEngine])
def test_a_draft_model_that_fails_costs_no_answer(
    serve: Serve, connect: Connect, kind: type[FakeEngine]
) -> None:
    target = FakeEngine(1)
    run = drafted(connect(serve(target, **beside(kind(1))).port))
    answer = run.generate(PROMPT, GREEDY, 24)
    assert answer.tokens == target.answer(encode(PROMPT), GREEDY, 24)
    assert answer.metrics.rounds == answer.metrics.tokens


def test_a_session_that_ends_while_it_drafts_gets_its_proposal() -> None:
    """Else a robot whose session is evicted at that moment would wait until its deadline."""
    gate, engine, thread, drafts, found = waiting()
    assert gate.reached.wait(WAIT_S)
    drafts.close()
    gate.go.set()
    assert found.get(timeout=WAIT_S).tokens == ()
    engine.freed.get(timeout=WAIT_S)
    assert thread.stop(WAIT_S)


def test_nobody_waits_for_a_draft_model_that_is_stuck(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in its first pass over a long prompt, or while kernels are chosen on a busy machine."""
    monkeypatch.setattr(co_located, "PATIENCE_S", 0.01)
    gate = Gate(FakeEngine.num_layers)
    target, draft = FakeEngine(1), FakeEngine(1, exits=(), before_layer=gate)
    run = drafted(connect(serve(target, **beside(draft)).port))
    try:
        answer = run.generate(PROMPT, GREEDY, 24)
        assert gate.reached.is_set()
    finally:
        gate.go.set()
    assert answer.tokens == target.answer(encode(PROMPT), GREEDY, 24)
    assert answer.metrics.rounds == answer.metrics.tokens


class Waiting(NamedTuple):
    """A session of a draft model whose passes a gate holds."""

    gate: Gate
    engine: FakeEngine
    thread: DraftingThread
    drafts: OwnDrafts
    found: queue.SimpleQueue[Proposal]


def waiting(kind: type[FakeEngine] = FakeEngine) -> Waiting:
    gate, found = Gate(FakeEngine.num_layers), queue.SimpleQueue[Proposal]()
    engine = kind(1, exits=(), before_layer=gate)
    thread = DraftingThread(as_engine(engine), 8)
    drafts = thread.open(EncodedPrompt(PROMPT_IDS), OPEN, found.put)
    drafts.want(Wanted(0, (), 4, 23))
    return Waiting(gate, engine, thread, drafts, found)


def test_a_draft_model_that_has_caught_up_drafts_again() -> None:
    gate, _, thread, drafts, found = waiting()
    assert gate.reached.wait(WAIT_S)
    thread.end_overdue(time.monotonic())
    assert found.empty(), "not yet"
    thread.end_overdue(time.monotonic() + PATIENCE_S)
    late = found.get_nowait()
    assert (late.round, late.tokens, late.took_s >= PATIENCE_S) == (0, (), True)
    drafts.want(Wanted(1, (5,), 4, 22))
    assert found.get_nowait() == Proposal(1), "at once"
    gate.go.set()
    caught_up = threading.Event()
    thread.post(caught_up.set)
    assert caught_up.wait(WAIT_S)
    number = 2
    while not (found_ := wanted(drafts, found, number)).tokens:  # it is behind for a moment longer
        number += 1
    assert found_.round == number, "no draft of a round that is over"
    assert thread.stop(WAIT_S)


def wanted(drafts: OwnDrafts, found: queue.SimpleQueue[Proposal], round_: int) -> Proposal:
    drafts.want(Wanted(round_, (5,) * round_, 4, 22))
    return found.get(timeout=WAIT_S)


class DyingEngine(FakeEngine):
    """A draft model that fails in a way that nobody foresaw, and cannot free its sessions."""

    def warm_up(self, on_exit: OnExit) -> None:
        self.before_layer(self.num_layers)
        raise RuntimeError("no device")

    def open(self, prompt: EncodedPrompt, expected: int = 0) -> FakeSession:
        session = super().open(prompt, expected)
        session.close = partial(self._fail, session)  # type: ignore[method-assign]
        return session

    def _fail(self, session: FakeSession) -> None:
        self.freed.put(None)
        raise RuntimeError("no device")


def test_a_dead_draft_model_delivers_what_is_wanted_before_and_after() -> None:
    gate, engine, thread, drafts, found = waiting(DyingEngine)
    gate.go.set()
    assert found.get(timeout=WAIT_S) == Proposal(0)
    drafts.close()
    engine.freed.get(timeout=WAIT_S)
    another = thread.open(EncodedPrompt(PROMPT_IDS), OPEN, found.put)
    another.want(Wanted(0, (), 4, 23))
    assert found.get(timeout=WAIT_S) == Proposal(0)
    assert thread.stop(WAIT_S)


def test_answers_that_are_given_up_leave_the_others_alone(serve: Serve, connect: Connect) -> None:
    """Short sessions, cancelled ones and lost connections, all at a time."""
    target, draft = FakeEngine(1), FakeEngine(1, noise=0.3)
    port = serve(target, **beside(draft)).port
    run = drafted(connect(port))

    def ask(number: int) -> bool:
        prompt, length = Prompt(f"room {number}"), 1 + number % 9
        if number % 3 == 0:
            client = connect(port)
            inbox = verifier_bed.Inbox()
            session = client.open(replace(OPEN, text=prompt.text, co_located=4), inbox.put)
            session.send(Draft(0, 0, (), autoregressive_rounds=20))
            inbox.skip_to(Opened if number % 2 else Verdict)
            client.close() if number % 4 else session.close()
            return True
        answer = run.generate(prompt, GREEDY, length)
        return answer.tokens == target.answer(encode(prompt), GREEDY, length)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(60)))
    for engine in (target, draft):
        while engine.alive:
            engine.freed.get(timeout=WAIT_S)


def test_the_draft_models_caches_are_part_of_the_memory(serve: Serve) -> None:
    asked = queue.SimpleQueue[float]()

    class Measured(FakeEngine):
        def cache_bytes(self, tokens: int) -> int:
            return (30 if self.exit_layers else 10) * tokens

        def cache_room(self, *, share: float = 1.0, **pass_: int) -> float:
            asked.put(share)
            return math.inf

    serve(Measured(1), **beside(Measured(1, exits=())))
    assert asked.get(timeout=WAIT_S) == 0.75, "the rest is the draft model's"
    serve(Measured(1))
    assert asked.get(timeout=WAIT_S) == 1.0
    assert asked.empty()


class ColdEngine(FakeEngine):
    """A model whose first passes the test holds."""

    def warm_up(self, on_exit: OnExit) -> None:
        self.before_layer(self.num_layers)


@pytest.mark.parametrize("cold", ["target", "draft"])
def test_a_verifier_listens_once_its_models_are_warm(serve: Serve, cold: str) -> None:
    """Else the first robot's deadline of five seconds passes while a busy machine warms up."""
    gate = Gate(FakeEngine.num_layers)
    engines = {name: FakeEngine(1) for name in ("target", "draft")}
    engines[cold] = ColdEngine(1, exits=(), before_layer=gate)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(serve, engines["target"], **beside(engines["draft"]))
        try:
            assert gate.reached.wait(WAIT_S)
            with pytest.raises(TimeoutError):
                starting.result(0.1)
        finally:
            gate.go.set()
        assert starting.result(WAIT_S).port


def test_a_verifier_without_a_draft_model_leaves_drafting_to_the_robot(
    serve: Serve, connect: Connect
) -> None:
    target = FakeEngine(1)
    answer = drafted(connect(serve(target).port)).generate(PROMPT, GREEDY, 24)
    assert answer.mode == Mode(4, ahead=True)
    assert answer.tokens == target.answer(encode(PROMPT), GREEDY, 24)


def planner(rtt_s: float, here_s: float, there_s: float) -> Planner:
    """Return a planner that knows a target of 100 ms and tokens accepted with a chance of 0.8."""
    made = Planner(PlannerConfig(enabled=True), gamma=4, depth=3)
    p = made.profile
    for mean, value in (
        (p.t_p, here_s),
        (p.t_d, there_s),
        (p.t_q1, 0.1),
        (p.t_q, 0.1),
        (p.rtt, rtt_s),
        (p.drafted, 4.0),
        (p.unexpected, 0.5),
    ):
        for _ in range(int(Mean().weight)):
            mean.add(value)
    for acceptance in (p.acceptance, p.acceptance_there):
        for i in range(400):
            acceptance.add(i % 7, 1, i % 5 != 0)
    return made


def test_the_planner_has_the_verifier_draft_where_that_is_faster() -> None:
    far, near = planner(0.3, 0.01, 0.01), planner(0.001, 0.001, 0.05)
    assert far.choose(co_located=True).kind == "co_located"
    assert far.choose().kind != "co_located", "without a draft model there"
    assert near.choose(co_located=True).kind != "co_located"
    mode = Mode(4, co_located=True)
    expected = (0.1 + 4 * 0.01) / far.profile.tau(4, co_located=True)
    assert far.seconds_per_token(mode) == pytest.approx(expected)


def test_the_planner_measures_the_verifiers_draft_model_before_it_judges_it() -> None:
    known = planner(0.001, 0.001, 0.05)
    assert known.choose(co_located=True).kind == "push_ahead"
    known.profile.t_d = Mean()
    assert known.choose(co_located=True) == Mode(4, co_located=True)
    assert known.choose().kind == "push_ahead"


def test_a_draft_model_with_another_tokenizer_is_refused() -> None:
    target = FakeEngine(1)
    target.loaded.shared_sizes = {VOCABULARY: VOCAB}
    config = VerifierConfig(model=TargetConfig("nav-target"), draft=ModelConfig("nav-draft"))
    with pytest.raises(VocabularyMismatch):
        load_draft(config, as_engine(target))
    assert load_draft(VerifierConfig(), as_engine(target)) is None
