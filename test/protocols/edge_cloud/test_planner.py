"""Predictions: of outcomes by the draft model, of time by the planner; and what an API charges."""

from __future__ import annotations

import time

import numpy as np
import pytest
from enumeration import rows_of
from fake_models import EOS, VOCAB, FakeEngine, as_engine, encode
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model, tiny_prompt
from torch import Tensor

from collab_llm_lab.bench.cost import PROVIDERS, api_cost
from collab_llm_lab.bench.emulation import batch_factor, paced_draft
from collab_llm_nodes.decoding.rejection import propose, verify_chain, verify_own
from collab_llm_nodes.decoding.sampling import Distribution, SamplingConfig, distributions, to_wire
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import CollabError, ConfigError, InvalidInput, ModelError
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt
from collab_llm_nodes.models.prompt import encode as encode_for_model
from collab_llm_nodes.protocols.edge_cloud import planner as planner_module
from collab_llm_nodes.protocols.edge_cloud.ahead import MAX_AHEAD_ENTRIES, AheadConfig
from collab_llm_nodes.protocols.edge_cloud.client import DraftJob, EdgeClient, EdgeClientConfig
from collab_llm_nodes.protocols.edge_cloud.drafter import Drafter
from collab_llm_nodes.protocols.edge_cloud.lookahead import Lookahead
from collab_llm_nodes.protocols.edge_cloud.messages import Draft, Verdict
from collab_llm_nodes.protocols.edge_cloud.metrics import EdgeCloudMetrics
from collab_llm_nodes.protocols.edge_cloud.planner import (
    Mode,
    Planner,
    PlannerConfig,
    Profile,
    round_seconds,
    settings_of,
)
from collab_llm_nodes.protocols.edge_cloud.prediction import predict
from collab_llm_nodes.protocols.edge_cloud.predraft import PreDraftConfig, ReadyDrafts
from collab_llm_nodes.protocols.edge_cloud.runner import InProcessRunner

GREEDY = SamplingConfig()
COUPLED = SamplingConfig(1.0, seed=5, law="coupled")
REJECTION = SamplingConfig(1.0, seed=5)
PROMPT = Prompt("go to the red box")
NO_END: frozenset[int] = frozenset()


# --- Outcomes -----------------------------------------------------------------------------------


def test_outcomes_are_the_runners_up_and_the_best_bonus_tokens_by_probability() -> None:
    rows = rows_of(np.array([[0.7, 0.2, 0.1], [0.05, 0.9, 0.05]]))
    found = predict(rows, (0,), GREEDY, 0, NO_END, 3).outcomes
    assert [outcome for outcome, _ in found] == [(0, 1), (1,), (2,)]
    assert [p for _, p in found] == pytest.approx([0.63, 0.2, 0.1])


def test_outcomes_that_end_the_answer_are_not_predicted() -> None:
    rows = rows_of(np.array([[0.5, 0.3, 0.2]] * 2))
    found = predict(rows, (1,), GREEDY, 0, frozenset({0}), 9).outcomes
    assert {outcome for outcome, _ in found} == {(2,), (1, 1), (1, 2)}
    ended = predict(rows, (0,), GREEDY, 0, frozenset({0}), 9).outcomes
    assert {outcome for outcome, _ in ended} == {(1,), (2,)}, "nothing follows an end token"


@pytest.mark.parametrize(
    "law", [GREEDY, COUPLED, REJECTION], ids=["greedy", "coupled", "rejection"]
)
def test_a_target_that_is_the_draft_model_does_what_was_expected_most(law: SamplingConfig) -> None:
    """Shared randomness is used: where p = q the verdict is known but for what cannot be."""
    rng = np.random.default_rng(1)
    right = 0
    for position in range(100):
        logits = rng.normal(size=(3, VOCAB)).astype(np.float32) * 2
        p = distributions(logits, law)
        drafter = [to_wire(row, VOCAB) for row in p]
        q = drafter[:2] if law.sends_probabilities else None
        laws = p
        if law.sends_probabilities:  # what was sent is what is drawn from
            laws = [Distribution(sent.ids, sent.law, VOCAB) for sent in drafter]
        draft = []
        for i in range(2):
            token, _ = propose(laws[i], law, position + i, VOCAB)
            draft.append(token)
        outcome = verify_chain(p, draft, q, law, position, NO_END)
        verdict = (*draft[: outcome.accepted], outcome.next_token)
        beliefs = distributions(logits, SamplingConfig(1.0)) if law.greedy else p
        found = predict(beliefs, draft, law, position, NO_END, 16).outcomes
        right += verdict in [o for o, _ in found]
    assert right >= 95


# --- The draft model's tree ---------------------------------------------------------------------


def fresh(law: SamplingConfig) -> Drafter:
    return Drafter(as_engine(FakeEngine(1, noise=0.5)), encode(PROMPT), law)


PREFIXES = st.lists(st.lists(st.integers(1, 3), max_size=4).map(tuple), min_size=1, max_size=5)


@pytest.mark.parametrize("law", [GREEDY, REJECTION], ids=["greedy", "rejection"])
@settings(max_examples=40)
@given(PREFIXES, st.lists(st.integers(1, 3), max_size=4).map(tuple))
def test_drafts_side_by_side_and_after_any_history_are_those_of_a_fresh_drafter(
    law: SamplingConfig, prefixes: list[tuple[int, ...]], confirmed: tuple[int, ...]
) -> None:
    drafter = fresh(law)
    for answer in (confirmed[:1], confirmed):
        jobs = [DraftJob(1, (*answer, *prefix), 3) for prefix in prefixes]
        lines = [drafter.begin(job) for job in jobs]
        for _ in range(3):  # one pass per token for all of them
            drafter.step([line for line in lines if line.draft is None], read=[answer])
        assert [line.draft for line in lines] == [fresh(law).draft(job) for job in jobs]
        drafter.advance(answer)
    job = DraftJob(2, (2, 2), 3)  # not a continuation of what is confirmed
    assert drafter.draft(job) == fresh(law).draft(job)


def test_likely_outcomes_do_not_depend_on_what_was_read_before() -> None:
    drafter, job = fresh(GREEDY), DraftJob(0, (), 4)
    draft = drafter.draft(job)
    assert draft is not None
    first = drafter.predict(job, draft, 5)
    assert first == fresh(GREEDY).predict(job, draft, 5)
    assert sum(p for _, p in first.outcomes) <= 1.0
    assert all(outcome[-1] != EOS for outcome, _ in first.outcomes)


def test_a_draft_model_that_is_too_sure_is_believed_less() -> None:
    """Beliefs of 0.9 where 0.7 is right: the temperature rises until they are about right."""
    p, rng = Profile(), np.random.default_rng(0)
    (row,) = rows_of(np.array([[0.9, 0.1]]))
    beliefs = []
    for _ in range(2000):
        (belief,) = predict([row, row], (0,), GREEDY, 0, NO_END, 1, p.temperature).beliefs
        p.on_belief(belief, bool(rng.random() < 0.7))
        beliefs.append(belief)
    assert 1.5 < p.temperature <= 4.0
    assert np.mean(beliefs[1000:]) == pytest.approx(0.7, abs=0.03)


class Bench:
    """A lookahead behind a draft that is under verification."""

    def __init__(self, *, trees: bool = True, **ahead: int) -> None:
        self.sent: list[Draft] = []
        self.engine = FakeEngine(1, noise=0.5)
        self.engine.grows_trees = trees
        self.client = EdgeClient(EdgeClientConfig(4, 40))
        self.drafter = Drafter(as_engine(self.engine), encode(PROMPT), GREEDY)
        self.ready = ReadyDrafts()
        config = AheadConfig(min_probability=0.0, **ahead)
        self.lookahead = Lookahead(
            self.client,
            self.drafter,
            self.sent.append,
            self.ready,
            PreDraftConfig(),
            config,
            Profile(),
        )
        job = self.client.next_draft()
        draft = self.drafter.draft(job)
        assert draft is not None
        self.draft = draft
        self.client.on_sent(draft)
        self.lookahead.start_round(job, draft)

    def work(self) -> None:
        while self.lookahead.step():
            pass


def test_what_is_demanded_is_made_first_and_never_sent_twice() -> None:
    bench = Bench(push_window=8)
    replies: list[CollabError | None] = []
    bench.lookahead.demand((7,), replies.append)
    for _ in range(5):
        bench.lookahead.step()
    assert replies == [None]
    bench.work()
    bench.lookahead.demand((7,), replies.append)
    assert replies == [None, None]
    made = bench.ready.lookup((7,))
    assert made is not None
    assert made.after == (7,)
    prefixes = [(d.start, d.after) for d in bench.sent]
    assert len(prefixes) == len(set(prefixes)) == 8
    bench.lookahead.demand((), replies.append)
    assert isinstance(replies[2], InvalidInput), "nothing comes of nothing"


def test_a_draft_model_without_trees_makes_one_draft_at_a_time() -> None:
    bench = Bench(trees=False, push_window=8)
    replies: list[CollabError | None] = []
    bench.lookahead.expect((7,), 1.0)  # as an early exit suggests
    bench.lookahead.demand((7,), replies.append)
    assert [type(reply) for reply in replies] == [ModelError]
    assert not bench.lookahead.step()
    assert not bench.sent
    bench.lookahead.advance((7,))
    job = DraftJob(1, (7,), 4)
    assert bench.drafter.draft(job) == fresh(GREEDY).draft(job)


def test_pushes_are_no_deeper_than_allowed() -> None:
    for depth in (1, 2, 3):
        bench = Bench(push_window=48, push_depth=depth)
        bench.work()
        assert max(draft.round for draft in bench.sent) == depth


def test_a_guess_that_cannot_be_continued_costs_only_itself() -> None:
    bench = Bench()

    def refuse(ids: object, parents: object) -> Tensor:
        raise InvalidInput("no room", field="ids")

    replies: list[CollabError | None] = []
    bench.lookahead.demand((7,), replies.append)
    kv = bench.drafter._models[0]._kv
    grow, kv.grow = kv.grow, refuse  # type: ignore[method-assign]
    assert bench.lookahead.step()
    kv.grow = grow  # type: ignore[method-assign]
    (refused,) = replies
    assert isinstance(refused, InvalidInput)
    assert refused.field == "outcome"
    bench.lookahead.advance((7,))
    job = DraftJob(1, (7,), 4)
    assert bench.drafter.draft(job) == fresh(GREEDY).draft(job), "the tree is as it was"


def test_a_draft_model_out_of_room_for_guesses_still_drafts() -> None:
    """Pre-drafts look further than the answer; the context ends a few tokens behind it."""
    target, draft = (Engine(tiny_model("llama", seed=0)) for _ in range(2))
    prompt = tiny_prompt("llama")
    plain = InProcessRunner(draft, target, predraft=PreDraftConfig(max_predrafts=0))
    right = plain.generate(prompt, max_tokens=12).tokens
    draft.context = len(encode_for_model(prompt, draft.loaded).ids) + len(right) + 1
    assert InProcessRunner(draft, target).generate(prompt, max_tokens=12).tokens == right


def test_pushes_stay_within_what_the_verifier_keeps() -> None:
    client = EdgeClient(EdgeClientConfig(8, 200))
    client.on_sent(Draft(0, 0, (1,)))
    wide = to_wire(Distribution.from_dense(np.full(5000, 1 / 5000)), 4096)
    pushed = 0
    for token in range(40):
        job = client.predraft((2, token))
        assert job is not None
        draft = Draft(job.round, len(job.prefix), (1,) * 8, (wide,) * 8)
        pushed += client.push(job, draft, window=64) is not None
    assert pushed == MAX_AHEAD_ENTRIES // (8 * 4096)


# --- Time ---------------------------------------------------------------------------------------


def profile(
    t_p: float, t_q: float, t_c: float, alpha: float, *, pass_s: float | None = None
) -> Profile:
    """Return what a robot would have measured at an operating point."""
    p = Profile()
    for _ in range(100):
        p.on_pass(1, t_p)
        p.step.add(pass_s or t_p)
        p.on_verdict(Draft(0, 0, ()), Verdict(0, (1,), 0, False, t_q))
    rng = np.random.default_rng(0)
    for _ in range(1000):
        accepted = min(8, int(rng.geometric(1.0 - alpha)) - 1)
        draft = Draft(0, 0, (1,) * 8)
        p.on_verdict(draft, Verdict(0, (1,) * (accepted + 1), accepted, False, t_q))
        p.on_outcome(predicted=True, exit_s=None)
    p.rtt.add(2 * t_c)
    return p


GO2 = {"t_p": 0.072, "t_q": 0.620, "t_c": 0.120}


def test_speculation_costs_what_table_4_says() -> None:
    p = profile(**GO2, alpha=0.6)
    assert round_seconds(p, Mode(4), 3) == pytest.approx(0.240 + 0.288 + 0.620)
    assert round_seconds(p, Mode(0), 3) == pytest.approx(0.620)


def test_push_ahead_reaches_the_targets_own_pace_and_no_more() -> None:
    p = profile(**GO2, alpha=0.6)
    assert round_seconds(p, Mode(4, ahead=True), 3) == pytest.approx(0.620)
    slow_draft = profile(0.2, 0.620, 0.120, 0.0)
    assert round_seconds(slow_draft, Mode(4, ahead=True), 3) == pytest.approx(5 * 0.2)
    far = profile(0.01, 0.1, 1.0, 0.0)
    assert round_seconds(far, Mode(4, ahead=True), 2) == pytest.approx((2.0 + 0.05 + 0.005) / 2)


def test_unexpected_verdicts_cost_what_speculation_costs() -> None:
    p = profile(**GO2, alpha=0.6)
    hit = round_seconds(p, Mode(4, ahead=True), 3)
    for _ in range(10000):
        p.on_outcome(predicted=False, exit_s=None)
    missed = round_seconds(p, Mode(4, ahead=True), 3)
    assert missed - hit == pytest.approx(0.240 + 0.288 + 0.036, rel=0.01)


def test_an_early_exit_costs_what_it_comes_late() -> None:
    p = profile(**GO2, alpha=0.6)
    for _ in range(10000):
        p.on_outcome(predicted=False, exit_s=0.3)
    late = 0.3 + 0.240 + 0.036 + 0.288 - 0.620
    assert round_seconds(p, Mode(4, ahead=True), 3) == pytest.approx(0.620 + late, rel=0.01)


def test_what_comes_late_costs_only_what_the_draft_model_makes_nobody_wait_for_anyway() -> None:
    p = profile(**GO2, alpha=0.6, pass_s=0.2)
    usual = round_seconds(p, Mode(4, ahead=True), 3)
    assert usual == pytest.approx(1.0)
    for _ in range(10000):
        p.on_outcome(predicted=False, exit_s=0.1)
    late = 0.1 + 0.240 + 4.5 * 0.2
    assert round_seconds(p, Mode(4, ahead=True), 3) == pytest.approx(late, rel=0.01)
    for _ in range(10000):
        p.on_outcome(predicted=False, exit_s=None)
    missed = 0.620 + 0.240 + 0.288 + 0.1
    assert round_seconds(p, Mode(4, ahead=True), 3) == pytest.approx(missed, rel=0.01)


def test_drafts_that_end_with_the_answer_are_shorter_and_give_less() -> None:
    p = profile(**GO2, alpha=1.0 - 1e-9)
    whole_s = round_seconds(p, Mode(4), 3)
    p.on_draft(4, 4)
    assert p.tokens(4) == 4.0, "a draft of gamma shows no end"
    assert p.tau(4) == pytest.approx(5.0)
    for _ in range(2000):
        p.on_draft(1, 4)
        p.on_draft(2, 4)  # two of three tokens end a draft
    fewer = 1 + 1 / 3 + 1 / 9 + 1 / 27
    assert p.tokens(4) == pytest.approx(fewer, rel=0.02)
    assert p.tau(4) == pytest.approx(1.5, rel=0.02), "nothing follows an end"
    saved = whole_s - round_seconds(p, Mode(4), 3)
    assert saved == pytest.approx((4 - fewer) * GO2["t_p"], rel=0.02)


@pytest.mark.parametrize("gamma", [1, 2, 4, 8])
def test_tau_and_the_length_of_drafts_are_what_was_seen(gamma: int) -> None:
    """Tokens are ends and draft tokens wrong by chance; the real law judges."""
    rng, p = np.random.default_rng(1), Profile()
    drafted, gained = [], []
    for _ in range(4000):
        own = [EOS if rng.random() < 0.2 else 1 for _ in range(gamma + 1)]
        draft = [token if rng.random() < 0.9 else 2 for token in own[:gamma]]
        if EOS in draft:
            del draft[draft.index(EOS) + 1 :]
        outcome = verify_own(own, draft, frozenset({EOS}))
        tokens = (*draft[: outcome.accepted], *[outcome.next_token] * (outcome.next_token >= 0))
        p.on_draft(len(draft), gamma)
        p.on_verdict(Draft(0, 0, tuple(draft)), Verdict(0, tokens, outcome.accepted, False, 0.1))
        drafted.append(len(draft))
        gained.append(len(tokens))
    assert p.tau(gamma) == pytest.approx(np.mean(gained), rel=0.12 if gamma == 1 else 0.06)
    if gamma > 1:  # drafts of one token show no ends
        assert p.tokens(gamma) == pytest.approx(np.mean(drafted), rel=0.04)
        before = p.tokens(8)
        p.on_draft(1, 1)
        assert p.tokens(8) == before


def test_tau_is_the_sum_of_the_chances_to_get_that_far() -> None:
    p = profile(**GO2, alpha=0.5)
    assert p.tau(0) == 1.0
    assert p.tau(4) == pytest.approx(sum(0.5**i for i in range(5)), rel=0.15)


def test_the_planner_tries_each_kind_once_and_then_takes_the_fastest() -> None:
    planner = Planner(PlannerConfig(enabled=True), gamma=4, depth=3)
    assert planner.choose() == Mode(0)
    planner.profile.on_verdict(Draft(0, 0, ()), Verdict(0, (1,), 0, False, 0.62))
    assert planner.choose() == Mode(4, ahead=True)
    planner.profile = profile(**GO2, alpha=0.6)
    chosen = planner.choose()
    every = [Mode(g, a) for g in range(1, 9) for a in (False, True)] + [Mode(0)]
    best = min(planner.seconds_per_token(mode) for mode in every)
    assert planner.seconds_per_token(chosen) <= 1.02 * best
    assert chosen.ahead


def test_with_a_fast_server_behind_a_slow_link_the_verifier_decodes_alone() -> None:
    """Paper 003's own formula: speculation wins only if 2 T_c + gamma T_p < (tau - 1) T_q."""
    planner = Planner(PlannerConfig(enabled=True), gamma=4, depth=1)
    planner.profile = profile(0.05, 0.025, 0.1, 0.3)
    assert {planner.choose() for _ in range(15)} == {Mode(0)}


def test_a_verifier_that_claims_to_take_no_time_is_left_to_decode_alone() -> None:
    planner = Planner(PlannerConfig(enabled=True), gamma=4, depth=1)
    planner.profile = profile(0.05, 0.0, 0.1, 0.6)
    assert {planner.choose() for _ in range(100)} == {Mode(0)}


@pytest.mark.parametrize("point", [(0.05, 0.025, 0.1, 0.3), (*GO2.values(), 0.6)])
def test_what_seems_slower_is_tried_now_and_then_for_a_bounded_share_of_the_time(
    point: tuple[float, float, float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = Planner(PlannerConfig(enabled=True), gamma=4, depth=1)
    planner.profile = profile(*point)
    modes = [planner.choose() for _ in range(2000)]
    usual = max(set(modes), key=modes.count)
    seconds = [planner.seconds_per_token(mode) for mode in modes]
    assert set(modes) - {usual}, "never looked again"
    assert sum(seconds) <= 1.011 * len(modes) * planner.seconds_per_token(usual)
    monkeypatch.setattr(planner_module, "_EXPLORE_SHARE", 0.0)
    never = Planner(PlannerConfig(enabled=True), gamma=4, depth=1)
    never.profile = planner.profile
    assert len({never.choose() for _ in range(500)}) == 1


def test_what_is_near_is_tried_too() -> None:
    planner = Planner(PlannerConfig(enabled=True), gamma=4, depth=3)
    planner.profile = profile(**GO2, alpha=0.5, pass_s=0.15)
    modes = [planner.choose() for _ in range(2000)]
    usual = max(set(modes), key=modes.count)
    assert (usual.gamma, usual.ahead) == (3, True)
    rivals = {Mode(6, True), Mode(1, True), Mode(3), Mode(0)}
    assert set(modes) == {usual, *rivals}
    assert all(modes.count(rival) <= 2000 / 16 for rival in rivals)


def test_a_busy_verifier_is_not_asked_token_by_token() -> None:
    """The cloud alone would wait for its turn for every token."""
    for queue_s, alone in ((0.0, True), (0.3, False)):
        planner = Planner(PlannerConfig(enabled=True), gamma=4, depth=1)
        p = planner.profile = profile(0.05, 0.025, 0.06, 0.6)
        for _ in range(200):
            p.on_verdict(Draft(0, 0, ()), Verdict(0, (1,), 0, False, 0.025, queue_s))
            p.on_verdict(Draft(0, 0, (1,) * 4), Verdict(0, (1,) * 3, 2, False, 0.025, queue_s))
        assert (planner.choose() == Mode(0)) == alone


def test_longer_drafts_take_longer_to_verify() -> None:
    p = Profile()
    p.on_verdict(Draft(0, 0, ()), Verdict(0, (1,), 0, False, 0.1))
    p.on_verdict(Draft(0, 0, (1,) * 4), Verdict(0, (1,), 0, False, 0.3))
    assert p.verify_s(4) == pytest.approx(0.3)
    assert p.verify_s(8) == pytest.approx(0.5)


def test_what_was_measured_under_another_load_gives_way() -> None:
    """A pass over one token and one over a draft are never measured at the same time."""
    alone, draft = Draft(0, 0, ()), Draft(0, 0, (7, 7, 7, 7))

    def verdict(took_s: float) -> Verdict:
        return Verdict(1, (7,), 0, False, took_s)

    p = Profile()
    p.on_verdict(alone, verdict(0.05))  # the first pass of all is slow
    assert round_seconds(p, Mode(0), 3) == pytest.approx(0.05), "nothing is known of drafts"
    for _ in range(100):
        p.on_verdict(draft, verdict(0.02))
    assert round_seconds(p, Mode(0), 3) == pytest.approx(0.02)
    assert p.verify_s(4) == pytest.approx(0.02)
    for took_s in (0.08, 0.01):  # a neighbour comes and goes
        for _ in range(500):
            p.on_verdict(alone, verdict(took_s))
        assert round_seconds(p, Mode(0), 3) == pytest.approx(took_s, rel=0.01)
        assert p.verify_s(4) == pytest.approx(max(took_s, 0.02), rel=0.01)


def test_a_round_trip_is_known_even_if_no_round_ever_waits_for_one() -> None:
    p = Profile()
    p.on_round_trip(0.9, Verdict(0, (1,), 0, False, 0.1))
    assert p.rtt.value == pytest.approx(0.8), "with the prefill in it"
    p.on_round_trip(0.3, Verdict(3, (1,), 0, False, 0.1))
    assert p.rtt.value == pytest.approx(0.2)


def test_predictions_that_do_not_come_true_are_corrected() -> None:
    planner = Planner(PlannerConfig(enabled=True), gamma=4, depth=3)
    planner.profile = profile(**GO2, alpha=0.6)
    promised = planner.choose()
    assert promised.ahead
    seconds = 5.0 * planner.round_seconds(promised)
    for _ in range(20):
        planner.on_answer(
            promised,
            EdgeCloudMetrics(rounds=11, total_s=1.0 + 10 * seconds, time_to_first_token_s=1.0),
        )
    assert planner.round_seconds(promised) == pytest.approx(seconds, rel=0.05)
    assert not planner.choose().ahead
    before = planner.round_seconds(Mode(0))
    planner.on_answer(Mode(0), EdgeCloudMetrics(rounds=1, total_s=9.0))
    assert planner.round_seconds(Mode(0)) == before, "one round says nothing of later ones"


def test_a_way_is_corrected_by_its_own_past_and_not_by_that_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner_module, "_EXPLORE_SHARE", 0.0)
    planner = Planner(PlannerConfig(enabled=True), gamma=4, depth=3)
    p = planner.profile = profile(**GO2, alpha=0.6)
    usual, short = planner.choose(), Mode(2, ahead=True)
    assert usual.gamma > 2
    for mode, factor in [(usual, 1.0), (short, 0.3)] * 20:
        seconds = factor * round_seconds(p, mode, 3)
        planner.on_answer(
            mode,
            EdgeCloudMetrics(rounds=11, total_s=1.0 + 10 * seconds, time_to_first_token_s=1.0),
        )
    assert planner.round_seconds(usual) == pytest.approx(round_seconds(p, usual, 3), rel=0.01)
    assert planner.choose() == short


def test_the_first_answer_says_as_much_of_its_way_as_of_those_like_it() -> None:
    """Else a way that was quicker than predicted would seem slow beside those never tried."""
    planner = Planner(PlannerConfig(enabled=True), gamma=4, depth=3)
    p = planner.profile = profile(**GO2, alpha=0.6)
    used, untried = planner.choose(), Mode(2, ahead=True)
    seconds = 0.5 * round_seconds(p, used, 3)
    planner.on_answer(
        used, EdgeCloudMetrics(rounds=11, total_s=1.0 + 10 * seconds, time_to_first_token_s=1.0)
    )
    for mode in (used, untried):
        assert planner.round_seconds(mode) == pytest.approx(0.5 * round_seconds(p, mode, 3))


def test_a_gain_too_small_is_not_worth_the_radio() -> None:
    for min_gain, alone in ((0.0, False), (0.9, True)):
        planner = Planner(PlannerConfig(enabled=True, min_gain=min_gain), gamma=4, depth=3)
        planner.profile = profile(**GO2, alpha=0.6)
        assert (planner.choose() == Mode(0)) == alone


@pytest.mark.parametrize(("price", "kind"), [(0.0, "push_ahead"), (30.0, "sd"), (1e6, "ar")])
def test_bytes_that_have_a_price_count_in_the_choice(
    price: float, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a stock server a round is kilobytes, a streamed token a few hundred bytes."""
    monkeypatch.setattr(planner_module, "_EXPLORE_SHARE", 0.0)
    planner = Planner(PlannerConfig(enabled=True, seconds_per_megabyte=price), gamma=4, depth=3)
    p = planner.profile = profile(**GO2, alpha=0.6)
    for mode, size in [(Mode(0), 300), (Mode(4), 7_000), (Mode(4, ahead=True), 50_000)] * 20:
        seconds = round_seconds(p, mode, 3)
        planner.on_answer(
            mode,
            EdgeCloudMetrics(rounds=11, total_s=1.0 + 10 * seconds, time_to_first_token_s=1.0),
            10 * size,
        )
        assert planner.round_bytes(mode) == pytest.approx(size)
    assert planner.round_bytes(Mode(2)) == pytest.approx(7_000), "as of its kind"
    assert planner.choose().kind == kind


@pytest.mark.parametrize(("rounds", "alone"), [(9, True), (1000, False)])
def test_a_gain_that_few_rounds_promise_may_have_been_luck(rounds: int, alone: bool) -> None:
    planner = Planner(PlannerConfig(enabled=True), gamma=4, depth=3)
    p = planner.profile = profile(0.05, 0.07, 0.06, alpha=0.6)
    best = planner.choose()
    gain = 1.0 - planner.seconds_per_token(best) / planner.seconds_per_token(Mode(0))
    assert 0.05 < gain < 0.15
    p.drafted.count = rounds
    assert (planner.choose() == Mode(0)) == alone


def test_drafts_are_no_longer_than_allowed() -> None:
    planner = Planner(PlannerConfig(enabled=True, max_gamma=2), gamma=4, depth=3)
    planner.profile = profile(**GO2, alpha=0.95)
    assert planner.choose().gamma == 2
    with pytest.raises(ConfigError, match="max_gamma"):
        PlannerConfig(max_gamma=17)


def test_a_planner_that_is_not_enabled_leaves_the_settings_alone() -> None:
    mode = Planner(PlannerConfig(), gamma=3, depth=2).choose()
    predraft, ahead = PreDraftConfig(max_predrafts=7), AheadConfig(batch=5)
    assert mode.gamma == 3
    assert settings_of(mode, predraft, ahead) == (predraft, ahead)
    plain = settings_of(Mode(3), predraft, ahead)
    assert (plain[0].max_predrafts, plain[1].push_window) == (0, 0)


# --- Cost and emulation -------------------------------------------------------------------------


def test_the_cost_model_gives_the_papers_table() -> None:
    """Paper 003, Table 1: gamma = 4, tau = 2.5, rounded to dollars."""
    want = [(540, 360, 270), (540, 312, 270), (454, 286, 217), (420, 390, 210)]
    got = [tuple(round(c) for c in api_cost(p, 4, 2.5).values()) for p in PROVIDERS]
    assert got == want


def test_a_pass_over_more_tokens_takes_longer_as_in_table_9() -> None:
    factors = [batch_factor(n) for n in (1, 2, 4, 8, 16, 32)]
    assert factors == sorted(factors)
    assert factors[0] == 1.0
    assert batch_factor(8) == pytest.approx(8.97 / 7.76)


def test_a_paced_engine_takes_its_time_and_changes_nothing() -> None:
    engine, prompt = Engine(tiny_model("llama")), EncodedPrompt((3, 1, 2))
    engine.eos = frozenset()
    job = DraftJob(0, (), 3)
    expected = Drafter(engine, prompt, GREEDY).draft(job)
    paced = Drafter(paced_draft(engine, 0.01), prompt, GREEDY)
    started = time.perf_counter()
    assert paced.draft(job) == expected
    assert time.perf_counter() - started >= 0.02, "its first token comes of the prompt's pass"
