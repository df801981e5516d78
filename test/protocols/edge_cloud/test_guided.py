"""Guided answers of real (tiny, random) models, over every path."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from functools import cache

import pytest
from llguidance import LLMatcher
from tiny_models import tiny_model, tiny_prompt
from tiny_pairs import DRAFTS, target_of

from collab_llm_lab import reference
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import InvalidInput, ProtocolError
from collab_llm_nodes.models.guide import Guide
from collab_llm_nodes.models.prompt import encode
from collab_llm_nodes.protocols.base import Request
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud import verifier_pb2 as pb
from collab_llm_nodes.protocols.edge_cloud.client import DraftJob, EdgeClient, EdgeClientConfig
from collab_llm_nodes.protocols.edge_cloud.drafter import Drafter
from collab_llm_nodes.protocols.edge_cloud.link import Deliver, Disconnect, LinkConfig, SessionLink
from collab_llm_nodes.protocols.edge_cloud.messages import (
    Draft,
    Opened,
    Verdict,
    open_message,
)
from collab_llm_nodes.protocols.edge_cloud.planner import Mode, Profile, round_seconds
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.runner import InProcessRunner
from collab_llm_nodes.protocols.edge_cloud.running import EdgeCloudConfig
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server
from collab_llm_nodes.protocols.edge_cloud.target import TargetSession
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient
from collab_llm_nodes.protocols.guides import AnswerConfig, guide_of
from collab_llm_nodes.protocols.options import with_options
from collab_llm_nodes.robot.grammar import Code, parse
from collab_llm_nodes.transport.wire import Failure

GREEDY = SamplingConfig()
COUPLED = SamplingConfig(0.8, top_k=20, seed=3, law="coupled")
REJECTION = SamplingConfig(0.8, top_p=0.9, seed=3)
MAX_TOKENS = 40
SENTENCE = (
    r"the (red|green|blue) (box|ball|cone) is (far left|ahead|not in view)\. "
    r"the next action is (turn (left|right) [1-9]0 degree|stop)\."
)
GUIDE = Guide("regex", SENTENCE)


@cache
def alone(architecture: str, sampling: SamplingConfig, seed: int = 0) -> tuple[int, ...]:
    """Return the guided target's own answer, by a loop that shares no code with the product."""
    loaded = target_of(architecture).loaded
    encoded = encode(tiny_prompt(architecture, seed), loaded)
    grammar = LLMatcher.grammar_from_regex(SENTENCE)
    return tuple(reference.generate_guided(loaded, encoded, grammar, sampling, MAX_TOKENS))


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2_vl"])
def test_the_answer_is_the_guided_targets_own(architecture: str, draft: str) -> None:
    target = target_of(architecture)
    for gamma, sampling in ((4, GREEDY), (4, COUPLED), (0, GREEDY), (0, COUPLED), (1, GREEDY)):
        run = InProcessRunner(DRAFTS[draft](architecture), target, gamma=gamma)
        answer = run.generate(tiny_prompt(architecture), sampling, MAX_TOKENS, guide=GUIDE)
        assert answer.tokens == alone(architecture, sampling)
        assert re.fullmatch(SENTENCE, answer.text)
        assert answer.metrics.accepted <= answer.metrics.drafted


@pytest.mark.parametrize("gamma", [0, 3])
def test_sampled_answers_are_texts_of_the_guide(gamma: int) -> None:
    run = InProcessRunner(DRAFTS["noisy"]("llama"), target_of("llama"), gamma=gamma)
    texts = set()
    for seed in range(6):
        law = replace(REJECTION, seed=seed)
        texts.add(run.generate(tiny_prompt("llama"), law, MAX_TOKENS, guide=GUIDE).text)
    assert len(texts) > 1
    assert all(re.fullmatch(SENTENCE, text) for text in texts)


def test_forced_tokens_cost_no_pass_on_either_side() -> None:
    only = Guide("regex", re.escape("the next action is stop.").replace("\\ ", " "))
    draft = DRAFTS["unrelated"]("llama")
    for gamma in (0, 4):
        run = InProcessRunner(draft, target_of("llama"), gamma=gamma)
        answer = run.generate(tiny_prompt("llama"), GREEDY, MAX_TOKENS, guide=only)
        assert answer.text == "the next action is stop."
        assert answer.metrics.rounds == 1
        assert answer.metrics.tokens == answer.metrics.accepted == len(answer.tokens) > 4


def test_a_draft_goes_on_with_forced_tokens_beyond_gamma() -> None:
    engine = DRAFTS["same"]("llama")
    prompt = encode(tiny_prompt("llama"), engine.loaded)
    drafter = Drafter(engine, prompt, GREEDY, guide=engine.loaded.guides.open(GUIDE))
    passes: list[int] = []
    drafter.on_pass = lambda tokens, seconds: passes.append(tokens)
    job = DraftJob(0, (), gamma=1)
    draft = drafter.draft(job)
    assert draft is not None
    assert drafter.chosen((), draft.tokens) == len(passes) == 1
    assert engine.decode(draft.tokens).startswith("the ")
    assert len(draft.tokens) > 2
    short = drafter.draft(replace(job, room=2))
    assert short is not None
    assert short.tokens == draft.tokens[:2]
    with pytest.raises(InvalidInput, match="guide"):
        drafter.check((), (next(t for t in range(300, 0, -1) if t != draft.tokens[0]),))
    drafter.check((), draft.tokens[:2])


def test_no_outcome_outside_the_guide_is_predicted() -> None:
    engine = DRAFTS["noisy"]("llama")
    prompt = encode(tiny_prompt("llama"), engine.loaded)
    for sampling in (GREEDY, COUPLED, REJECTION):
        guided = engine.loaded.guides.open(GUIDE)
        drafter = Drafter(engine, prompt, sampling, guide=guided)
        job = DraftJob(0, (), gamma=3)
        draft = drafter.draft(job)
        assert draft is not None
        prediction = drafter.predict(job, draft, 16)
        assert prediction.outcomes
        assert all(guided.allows(outcome) for outcome, _ in prediction.outcomes)
        forced = [i for i in range(len(draft.tokens)) if guided.forced(draft.tokens[:i], 1)]
        assert forced
        assert all(prediction.beliefs[i] == 1.0 for i in forced)


def test_over_the_network_with_predictions_and_drafts_ahead() -> None:
    target, draft = target_of("llama"), DRAFTS["noisy"]("llama")
    server = start_server(VerifierConfig(address="127.0.0.1:0"), target)
    with (
        server,
        VerifierClient(ClientLinkConfig(address=f"127.0.0.1:{server.port}")) as client,
    ):
        for gamma in (0, 3):
            run = RemoteRunner(draft, client, gamma=gamma)
            for sampling in (GREEDY, COUPLED):
                answer = run.generate(tiny_prompt("llama"), sampling, MAX_TOKENS, guide=GUIDE)
                assert answer.tokens == alone("llama", sampling)
            free = run.generate(tiny_prompt("llama"), GREEDY, 4)
            assert free.tokens != alone("llama", GREEDY)[:4], "the next answer is free again"
        with pytest.raises(InvalidInput) as refused:
            run.generate(tiny_prompt("llama"), guide=Guide("json", '{"enum": []}'))
        assert refused.value.field == "answer.guide"


def test_the_verifier_itself_refuses_a_guide_that_it_cannot_use() -> None:
    target = target_of("llama")
    opened = open_message(
        tiny_prompt("llama"), GREEDY, 8, target.vocabulary, guide=Guide("regex", "(?!a)b")
    )
    received: list[object] = []
    server = start_server(VerifierConfig(address="127.0.0.1:0"), target)
    with (
        server,
        VerifierClient(ClientLinkConfig(address=f"127.0.0.1:{server.port}")) as client,
    ):
        ended = threading.Event()

        def receive(message: object) -> None:
            received.append(message)
            ended.set()

        client.open(opened, receive)
        assert ended.wait(30.0)
    (failure,) = received
    assert isinstance(failure, Failure)
    assert (failure.code, failure.field) == ("INVALID_INPUT", "answer.guide")


def test_a_replay_that_the_guide_does_not_allow_is_refused() -> None:
    target = target_of("llama")
    own = alone("llama", GREEDY)
    opened = open_message(tiny_prompt("llama"), GREEDY, MAX_TOKENS, "", guide=GUIDE)
    prompt = encode(tiny_prompt("llama"), target.loaded)
    session = TargetSession(target, prompt, replace(opened, replay=own[:5]))
    session.prefill()
    generated = list(own[:5])
    draft: Draft | None = Draft(0, 5, (), autoregressive_rounds=MAX_TOKENS)
    assert draft is not None
    session.offer(replace(draft, autoregressive_rounds=MAX_TOKENS - 6))
    while (verdict := session.verify_next(lambda exit_: None)) is not None:
        generated += verdict.tokens
    assert tuple(generated) == own
    with pytest.raises(InvalidInput, match="guide") as refused:
        TargetSession(target, prompt, replace(opened, replay=own[1:5]))
    assert refused.value.field == "replay"


def test_a_wrong_draft_of_a_guided_session_is_rejected_and_nothing_more() -> None:
    target = target_of("llama")
    opened = open_message(tiny_prompt("llama"), GREEDY, MAX_TOKENS, "", guide=GUIDE)
    session = TargetSession(target, encode(tiny_prompt("llama"), target.loaded), opened)
    session.prefill()
    verdict = session.verify(Draft(0, 0, (9, 10, 11)), lambda exit_: None)
    assert verdict is not None
    assert verdict.accepted == 0
    assert verdict.tokens == alone("llama", GREEDY)[:1]


def test_a_verifier_that_ignores_the_guide_ends_the_session() -> None:
    opened = open_message(tiny_prompt("llama"), GREEDY, 8, "v", guide=GUIDE)
    link = SessionLink(opened, LinkConfig())
    link.start(0.0)
    link.on_connected(0.1)
    actions = link.on_message(Opened("s", 5), 0.2)
    assert isinstance(actions[0], Deliver)
    assert isinstance(actions[0].message, Failure)
    assert actions[0].message.field == "answer.guide"
    assert isinstance(actions[1], Disconnect)
    assert link.done
    knows = SessionLink(opened, LinkConfig())
    knows.start(0.0)
    knows.on_connected(0.1)
    assert knows.on_message(Opened("s", 5, guided=True), 0.2) == [
        Deliver(Opened("s", 5, guided=True))
    ]


def test_a_verdict_may_accept_forced_tokens_of_a_guided_session_only() -> None:
    forced = Verdict(0, (4, 5, 6), 2, finished=False)
    config = EdgeClientConfig(gamma=0, max_tokens=8)
    guided, plain = EdgeClient(config, filled=True), EdgeClient(config)
    for client in (guided, plain):
        client.on_sent(Draft(0, 0, (), autoregressive_rounds=7))
    assert guided.on_verdict(forced) == (4, 5, 6)
    assert guided.in_flight == Draft(1, 3, (), autoregressive_rounds=6)
    with pytest.raises(ProtocolError):
        plain.on_verdict(forced)


@pytest.mark.parametrize(
    ("kind", "source"), [("lark", "x"), ("json", ""), ("regex", "a" * 20_000), ("", "a")]
)
def test_a_guide_beyond_its_bounds_is_refused_as_it_is_read(kind: str, source: str) -> None:
    opened = open_message(tiny_prompt("llama"), GREEDY, 8, "v", guide=GUIDE)
    assert codec.decode_client(codec.encode_client(opened)) == opened
    message = pb.ClientMessage.FromString(codec.encode_client(opened))
    message.open.guide.kind, message.open.guide.source = kind, source
    with pytest.raises(InvalidInput) as refused:
        codec.decode_client(message.SerializeToString())
    assert refused.value.field == "answer.guide"


def test_the_planner_judges_the_models_by_the_tokens_they_choose() -> None:
    guided, plain = Profile(), Profile()
    for round_ in range(
        200
    ):  # half of the drafted tokens are accepted, and each brings a forced one
        hit = round_ % 2
        plain.on_verdict(
            Draft(round_, 0, (1,)), Verdict(round_, (1, 2)[: 1 + hit], hit, False, 0.1)
        )
        tokens = (1, 8, 2)[: 1 + 2 * hit]
        verdict = Verdict(round_, tokens, 2 * hit, False, 0.1)
        guided.on_verdict(Draft(round_, 0, (1, 8)), verdict, (1, hit))
    assert guided.acceptance.tokens(4) == plain.acceptance.tokens(4)
    assert guided.drafted.value == plain.drafted.value == 1.0
    assert guided.tau(1) == pytest.approx(plain.tau(1) * (1 + guided.forced.value))
    assert guided.forced.value == pytest.approx(0.25, abs=0.02)
    assert round_seconds(guided, Mode(1), 3) == round_seconds(plain, Mode(1), 3)


def request(config: EdgeCloudConfig, **fields: object) -> Request:
    return Request("", config, turns=(), **fields)  # type: ignore[arg-type]


def test_actions_limit_the_answers_that_move_the_robot() -> None:
    config = EdgeCloudConfig()
    assert guide_of(request(config), config.answer) is None
    guide = guide_of(request(config, for_motion=True), config.answer)
    assert guide is not None
    assert re.fullmatch(guide.source, "The next action is turn left 45 degree.")
    asked = request(config, options=frozenset({"answer.guide"}))
    assert guide_of(asked, config.answer) == guide
    engine = Engine(tiny_model("llama"))
    run = InProcessRunner(engine, engine)
    for seed in range(3):
        law = SamplingConfig(1.0, seed=seed)
        answer = run.generate(tiny_prompt("llama"), law, 48, guide=guide)
        assert parse(answer.text).code is Code.OK


def test_a_request_sets_its_own_guide() -> None:
    config = with_options(
        EdgeCloudConfig(),
        ["answer.guide", "answer.guide_source"],
        ["json", json.dumps({"type": "boolean"})],
    )
    assert guide_of(request(config), config.answer) == Guide("json", '{"type": "boolean"}')
    none = with_options(EdgeCloudConfig(), ["answer.guide"], ["none"])
    assert guide_of(request(none, for_motion=True), none.answer) is None


@pytest.mark.parametrize("source", ["{", "[]", '"x"', '{"max_distance": "far"}', '{"speed": 1}'])
def test_wrong_settings_of_the_action_grammar_are_refused(source: str) -> None:
    answer = AnswerConfig(guide_source=source)
    with pytest.raises(InvalidInput) as refused:
        guide_of(request(EdgeCloudConfig(answer=answer), for_motion=True), answer)
    assert refused.value.field == "answer.guide"


def test_the_settings_of_the_action_grammar_limit_the_step() -> None:
    answer = AnswerConfig(guide_source='{"max_distance": 0.5, "markers": ["action:"]}')
    guide = guide_of(request(EdgeCloudConfig(answer=answer), for_motion=True), answer)
    assert guide is not None
    assert re.fullmatch(guide.source, "Action: move forward 50 cm.")
    assert not re.fullmatch(guide.source, "Action: move forward 51 cm.")
