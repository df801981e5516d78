"""The machine of collective speculation: any order of events gives the target's own answers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from collective_world import EOS, GREEDY, World, alone, endless_prompts, judge, recorded
from hypothesis import given, settings
from hypothesis import strategies as st

from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.decoding.sampling import Distribution, SamplingConfig, to_wire
from collab_llm_nodes.decoding.weights import VOTED, Weights, WeightsConfig
from collab_llm_nodes.errors import (
    Busy,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    ModelError,
)
from collab_llm_nodes.protocols.base import Source
from collab_llm_nodes.protocols.collective import length as length_module
from collab_llm_nodes.protocols.collective.length import FIXED, LengthConfig
from collab_llm_nodes.protocols.collective.machine import RETRY_S, Job, Machine
from collab_llm_nodes.protocols.collective.messages import Claim, Proposal
from collab_llm_nodes.protocols.collective.requests import RequestState
from collab_llm_nodes.protocols.collective.schedule import ScheduleConfig

ADAPTING = LengthConfig()


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the length change often."""
    monkeypatch.setattr(length_module, "_WINDOW", 2)


def job(number: int, **fields: Any) -> Job:
    return replace(Job(f"job {number}", (7, number), GREEDY, 24), **fields)


def make(
    models: int = 3,
    length: LengthConfig = ADAPTING,
    weights: WeightsConfig | None = None,
    pipelined: bool = False,
    **schedule: Any,
) -> World:
    made = Machine(
        models,
        EOS,
        schedule=ScheduleConfig(**schedule),
        weights=weights,
        length=length,
        pipelined=pipelined,
    )
    return World(made)


def check_complete(world: World, jobs: list[Job]) -> None:
    """Every answer is whole, and the target's."""
    assert {j.id: world.answers[j.id] for j in jobs} == {j.id: alone(j) for j in jobs}
    assert set(world.ended) == {j.id for j in jobs}
    assert all(end.error is None for end in world.ended.values())
    assert world.released == world.seen
    assert (world.machine.active, world.machine.waiting, world.machine.pooled) == (0, 0, 0)


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("every_token", [False, True])
@pytest.mark.parametrize("models", [0, 1, 3])
def test_a_batch_gets_the_targets_answers(pipelined: bool, every_token: bool, models: int) -> None:
    world = make(
        models, pipelined=pipelined, vote_every_token=every_token, draft_batch=3, target_batch=4
    )
    jobs = [job(i) for i in range(10)]
    world.submit(*jobs)
    world.run()
    check_complete(world, jobs)


def test_a_token_is_reported_with_its_rule_and_counted() -> None:
    world = make(length=LengthConfig(FIXED), draft_batch=1)
    world.submit(job(1, max_tokens=16))
    world.run()
    last = world.updates[-1]
    assert len(last.sources) == len(last.tokens) == last.metrics.tokens
    assert last.sources.count(Source.ACCEPTED) == last.metrics.accepted > 0
    assert last.metrics.rounds == len(world.updates) < last.metrics.tokens
    assert 0 < last.metrics.acceptance < 1
    assert 1 < last.metrics.tau <= 5
    assert last.metrics.time_to_first_token_s < last.metrics.total_s


def test_speculation_saves_verifications_and_the_vote_is_better_than_one() -> None:
    def rounds(models: int, s: int) -> int:
        world = make(models, LengthConfig(FIXED, initial=s))
        world.submit(*(job(i) for i in range(30)))
        world.run()
        return sum(update.metrics.rounds for update in last_updates(world))

    assert rounds(0, 4) == rounds(3, 0)
    assert rounds(3, 4) < rounds(1, 4) < 0.6 * rounds(0, 4)


def last_updates(world: World) -> list[Any]:
    return list({update.id: update for update in world.updates}.values())


# ---------------------------------------------------------------- any schedule


@settings(max_examples=150)
@given(st.data())
def test_any_schedule_gives_the_targets_answers(data: st.DataObject) -> None:
    """Orders, failures, silence, late answers, cancelling, deadlines: nothing is lost or wrong."""
    models = data.draw(st.integers(0, 3), "models")
    draft_batch = data.draw(st.integers(1, 4), "draft_batch")
    target_batch = data.draw(st.integers(1, 4), "target_batch")
    high = data.draw(st.integers(0, 5), "pool_high")
    every_token = data.draw(st.booleans(), "every token")
    fill_waits = data.draw(st.booleans(), "fill_waits")
    rule = VOTED if not every_token and data.draw(st.booleans(), "voted") else "per_request"
    world = make(
        models,
        weights=WeightsConfig(rule),
        pipelined=data.draw(st.booleans(), "pipelined"),
        draft_batch=draft_batch,
        target_batch=target_batch,
        pool_high=high,
        pool_low=data.draw(st.integers(0, high), "pool_low"),
        max_active=data.draw(st.integers(1, 6), "max_active"),
        draft_timeout_s=1.0,
        vote_every_token=every_token,
        fill_waits=fill_waits,
    )
    machine = world.machine
    jobs = [
        job(i, max_tokens=data.draw(st.integers(1, 12), "max_tokens"))
        for i in range(data.draw(st.integers(1, 8), "jobs"))
    ]
    to_come, given_up = list(jobs), set[str]()
    bound = (high or target_batch) - 1 + draft_batch
    for _ in range(data.draw(st.integers(0, 60), "events")):
        events = ["pass"]
        events += ["submit"] * bool(to_come)
        events += ["cancel", "deadline"] * bool(set(world.answers) - set(world.ended))
        events += ["draft"] * 3 + ["fail", "drop"] if world.drawing else []
        events += ["target"] * 2 if world.verifying else []
        event = data.draw(st.sampled_from(events))
        if event == "submit":
            new = to_come.pop()
            if data.draw(st.integers(0, 3), "hurry") == 0:
                new = replace(new, due=world.now + 1.5)
            world.submit(new)
        elif event == "cancel":
            chosen = data.draw(st.sampled_from(sorted(set(world.answers) - set(world.ended))))
            given_up.add(chosen)
            machine.cancel(chosen)
            world.poll()
        elif event == "deadline":
            world.now = max(world.now, min(machine.wake_at(), world.now + 3.0))
            world.poll()
        elif event == "draft":
            world.answer_draft(data.draw(st.integers(0, len(world.drawing) - 1)))
        elif event == "drop":
            world.answer_draft(0, drop=lambda ask: ask.id.endswith("1"))
        elif event == "fail":
            machine.on_draft_failure(world.drawing.pop(0).model, ModelError("broken"), world.now)
            world.poll()
        elif event == "target":
            world.answer_target()
        else:
            world.now += 0.3
            world.poll()
        assert machine.pooled <= bound
        assert world.held <= machine._schedule.max_active
        assert fill_waits or world.held <= bound + target_batch
    if to_come:
        world.submit(*to_come)
    world.run()
    late = {id for id, end in world.ended.items() if isinstance(end.error, DeadlineExceeded)}
    cancelled = {id for id, end in world.ended.items() if isinstance(end.error, Cancelled)}
    assert cancelled <= given_up
    assert machine.pool_peak <= bound
    assert set(world.ended) == {j.id for j in jobs}, "nothing is lost"
    for each in jobs:
        found, own = world.answers[each.id], alone(each)
        complete = each.id not in late | cancelled
        assert found == (own if complete else own[: len(found)])
    assert world.released == world.seen
    assert (machine.active, machine.waiting, machine.pooled) == (0, 0, 0)


# ---------------------------------------------------------------- limits


def test_the_pool_is_bound_and_drafting_pauses_at_the_high_mark() -> None:
    """Figure 7: without control the pool grows to all requests; with it to high - 1 + b_SSM."""

    def grown(**marks: Any) -> World:
        world = make(pipelined=True, draft_batch=2, target_batch=4, max_active=40, **marks)
        world.submit(*(job(i) for i in range(40)))
        for _ in range(200):  # the target is slow
            if world.drawing:
                world.answer_draft()
        return world

    controlled, free = grown(), grown(pool_high=1000, pool_low=1000)
    assert controlled.machine.pooled == 4
    assert free.machine.pooled > 30
    assert controlled.held < free.held / 3
    assert not controlled.drawing
    controlled.answer_target()
    assert controlled.drawing, "it resumes below the mark"
    for world in (controlled, free):
        world.run()
        check_complete(world, [job(i) for i in range(40)])


@pytest.mark.parametrize(("requests", "overlap"), [(4, False), (9, True)])
def test_a_pipeline_overlaps_where_more_is_under_way_than_a_batch(
    requests: int, overlap: bool
) -> None:
    fixed = LengthConfig(FIXED)
    world = make(length=fixed, pipelined=True, draft_batch=4, target_batch=4)
    jobs = [job(i) for i in range(requests)]
    for each in jobs:
        world.machine.submit(each, world.now)
        world.answers[each.id] = ()
    world.poll()
    both, sizes = False, list[int]()
    while world.drawing or world.verifying:
        both |= bool(world.drawing and world.verifying)
        if world.verifying and not sizes:
            sizes.append(len(world.verifying.claims))
        world.answer_draft() if world.drawing else world.answer_target()
    assert both == overlap
    assert sizes == [4]
    check_complete(world, jobs)


def test_requests_that_join_in_sequence_fill_the_batch_and_no_more() -> None:
    world = make(length=LengthConfig(FIXED), draft_batch=4, target_batch=4, max_active=9)
    world.submit(job(0))
    world.submit(*(job(i) for i in range(1, 9)))  # while the first draft is made
    while world.drawing:
        world.answer_draft()
    assert world.verifying is not None
    assert (len(world.verifying.claims), world.machine.pooled) == (4, 0)
    assert (world.machine.active, world.machine.waiting) == (4, 5)
    world.run()
    check_complete(world, [job(i) for i in range(9)])


def test_between_the_marks_drafting_stays_paused() -> None:
    marks: dict[str, Any] = {"pool_high": 4, "pool_low": 2}
    fixed = LengthConfig(FIXED)
    world = make(length=fixed, pipelined=True, draft_batch=1, target_batch=1, max_active=9, **marks)
    world.submit(*(job(i) for i in range(20)))
    while world.drawing:
        world.answer_draft()
    pooled = []
    for _ in range(3):
        world.answer_target()
        pooled.append((world.machine.pooled, bool(world.drawing)))
    assert pooled == [(3, False), (2, False), (1, True)]


def test_five_hundred_prompts_at_once() -> None:
    world = make(max_active=16, max_waiting=100)
    taken = [job(i, max_tokens=4) for i in range(116)]
    world.submit(*taken)
    for i in range(116, 500):
        with pytest.raises(Busy):
            world.machine.submit(job(i), world.now)
    world.run()
    check_complete(world, taken)
    assert world.held <= 16
    world.submit(job(500))
    world.run()
    assert world.answers["job 500"] == alone(job(500))


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (job(1, max_tokens=0), "max_tokens"),
        (job(1, prompt=()), "prompt"),
        (job(0), "id"),
    ],
)
def test_a_bad_job_is_refused(bad: Job, field: str) -> None:
    world = make()
    world.submit(job(0))
    with pytest.raises(InvalidInput) as caught:
        world.machine.submit(bad, 0.0)
    assert caught.value.field == field


def test_a_deadline_in_mid_batch_keeps_what_is_finished() -> None:
    world = make(length=LengthConfig(FIXED))
    short, long = job(1, max_tokens=2, due=9.0), job(2, max_tokens=500, due=9.0)
    long = replace(long, id="long", prompt=next(p for p in endless_prompts()))
    world.submit(short, long)
    for _ in range(3 * 4):
        if world.drawing:
            world.answer_draft()
        else:
            world.answer_target()
    world.now = 9.0
    assert world.machine.wake_at() <= world.now
    world.poll()
    assert world.ended[short.id].error is None
    assert isinstance(world.ended[long.id].error, DeadlineExceeded)
    assert world.answers[short.id] == alone(short)
    assert 0 < len(world.answers[long.id]) < 500
    assert world.answers[long.id] == alone(long)[: len(world.answers[long.id])]
    world.run()
    assert world.machine.active == 0


# ---------------------------------------------------------------- a draft model in trouble


def test_a_silent_model_is_left_out_until_it_answers() -> None:
    world = make(length=LengthConfig(FIXED), draft_timeout_s=1.0)
    machine = world.machine
    world.submit(job(1), job(2))
    late = world.drawing.pop(0)
    stuck = late.model
    world.answer_draft()
    world.answer_draft()
    assert not under_verification(world), "it waits for the third"
    assert machine.wake_at() == pytest.approx(world.now + 1.0)
    world.now = machine.wake_at()
    world.poll()
    assert [(i.model, i.error.code) for i in world.incidents] == [(stuck, "UNAVAILABLE")]
    assert under_verification(world), "the others go on"
    world.answer_target()
    assert stuck not in {draw.model for draw in world.drawing}
    machine.on_proposals(stuck, late.batch, late.step, [], world.now)  # long after its time
    assert machine.serving(world.now) == (0, 1, 2)
    world.run()
    check_complete(world, [job(1), job(2)])


def under_verification(world: World) -> bool:
    """True if the target is at work."""
    return world.verifying is not None


def test_a_failed_model_comes_back_after_a_while() -> None:
    world = make()
    world.submit(job(1))
    world.drawing = world.drawing[1:]
    world.machine.on_draft_failure(0, ModelError("no memory"), world.now)
    world.poll()
    assert [i.error.code for i in world.incidents] == ["MODEL_ERROR"]
    assert world.machine.serving(world.now) == (1, 2)
    assert world.machine.serving(world.now + RETRY_S) == (0, 1, 2)
    world.run()
    check_complete(world, [job(1)])


def test_without_any_draft_model_the_target_goes_on_alone() -> None:
    world = make(2)
    world.submit(job(1), job(2))
    world.drawing = []
    for model in (0, 1):
        world.machine.on_draft_failure(model, ModelError("broken"), world.now)
    world.poll()
    assert world.verifying is not None
    assert all(claim.draft == () for claim in world.verifying.claims)
    world.run()
    check_complete(world, [job(1), job(2)])


def test_a_target_that_fails_ends_all_answers() -> None:
    world = make(draft_batch=1, max_active=2, pipelined=True)
    world.submit(*(job(i) for i in range(4)))
    world.machine.on_target_failure(ModelError("out of memory"))
    world.poll()
    assert {end.error.code for end in world.ended.values() if end.error} == {"MODEL_ERROR"}
    assert len(world.ended) == 4
    world.run()
    assert world.machine.active == 0


def test_a_claim_that_cannot_be_verified_ends_its_answer_only() -> None:
    world = make()
    world.submit(job(1), job(2))
    while world.drawing:
        world.answer_draft()
    asked = world.verifying
    assert asked is not None
    world.verifying = None
    words = [InvalidInput("too long"), *(judge(claim) for claim in asked.claims[1:])]
    world.machine.on_verdicts(asked.batch, words, world.now)
    world.poll()
    world.run()
    assert isinstance(world.ended["job 1"].error, InvalidInput)
    assert world.answers["job 2"] == alone(job(2))


# ---------------------------------------------------------------- the law


SAMPLED = SamplingConfig(temperature=1.0, seed=1)


def first_claim(world: World, sampling: SamplingConfig) -> Claim:
    """Have each model propose tokens with a q, and return what the target is to judge."""
    world.submit(job(1, sampling=sampling))
    row = to_wire(Distribution.from_dense(np.full(20, 0.05)), 20)
    while world.drawing:
        draw = world.drawing.pop()
        (ask,) = draw.asks
        q = (row,) * ask.count if ask.send_q else None
        world.answer(draw, [Proposal((draw.model + 1,) * ask.count, q)])
    assert world.verifying is not None
    (claim,) = world.verifying.claims
    return claim


@pytest.mark.parametrize("every_token", [False, True])
def test_a_sampled_vote_is_a_certain_proposal(every_token: bool) -> None:
    world = make(length=LengthConfig(FIXED), vote_every_token=every_token, ask_all_every=1)
    claim = first_claim(world, SAMPLED)
    assert claim.draft == (1, 1, 1, 1)
    assert claim.q is not None
    assert [(q.ids.tolist(), q.law.tolist()) for q in claim.q] == [([1], [1.0])] * 4


@pytest.mark.parametrize("every_token", [False, True])
def test_the_papers_rule_claims_the_voted_models_q(every_token: bool) -> None:
    world = make(
        length=LengthConfig(FIXED),
        vote_every_token=every_token,
        paper_faithful=True,
        ask_all_every=1,
    )
    claim = first_claim(world, SAMPLED)
    assert claim.q is not None
    assert [len(q.ids) for q in claim.q] == [20] * 4


@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingConfig(temperature=1.0, law="coupled")], ids=["greedy", "coupled"]
)
def test_other_laws_take_no_q(sampling: SamplingConfig) -> None:
    world = make(length=LengthConfig(FIXED), paper_faithful=True)
    assert first_claim(world, sampling).q is None


# ---------------------------------------------------------------- weights, length


def test_a_model_that_is_always_wrong_loses_its_say() -> None:
    world = make(3, LengthConfig(FIXED), draft_batch=4)
    world.submit(*(job(i) for i in range(12)))
    while world.drawing or world.verifying:
        if world.drawing:
            draw = world.drawing[-1]
            if draw.model == 2:  # it repeats one token for ever
                world.answer(world.drawing.pop(), [Proposal((19,) * a.count) for a in draw.asks])
            else:
                world.answer_draft(len(world.drawing) - 1)
        else:
            world.answer_target()
    check_complete(world, [job(i) for i in range(12)])
    assert world.machine.weights[2] < 0.5 < max(world.machine.weights[:2])


def asked_models(ask_all_every: int, mute_from: int = 60) -> list[list[int]]:
    """Return the models that draft, round after round, where those beside the first are wrong.

    Args:
        mute_from: length of the answer from which on the first proposes nothing.
    """
    world = make(3, LengthConfig(FIXED, initial=2), ask_all_every=ask_all_every)
    world.submit(job(1))
    found = []
    while world.drawing or world.verifying:
        if world.drawing:
            found.append(sorted(draw.model for draw in world.drawing))
        while world.drawing:
            draw = world.drawing.pop()
            (ask,) = draw.asks
            done = len(ask.answer)
            right = alone(job(1))[done : done + ask.count]
            first = None if done >= mute_from else Proposal(right)
            world.answer(draw, [Proposal((19,) * ask.count) if draw.model else first])
        if world.verifying:
            world.answer_target()
    check_complete(world, [job(1)])
    return found


def test_a_model_that_outweighs_the_others_drafts_alone_but_for_rare_rounds() -> None:
    rounds = asked_models(4)
    all_draft = [number for number, models in enumerate(rounds) if models == [0, 1, 2]]
    assert all_draft == [0, 4], "the next would be the 12th"
    assert len(rounds) > 8
    assert all(models == [0] for models in [*rounds[1:4], *rounds[5:]]), "one clear round decides"


def test_a_model_that_proposes_nothing_decides_nothing() -> None:
    """Else it alone would be asked, for ever."""
    rounds = asked_models(64, mute_from=9)
    mute = rounds.index([1, 2])
    assert rounds[:mute] == [[0, 1, 2], *[[0]] * 4], "the last of them got no draft"
    assert all(models == [1, 2] for models in rounds[mute:])
    assert [0, 1, 2] in asked_models(8, mute_from=9)[mute:], "it is asked again with all"


def first_lengths(world: World, drafts: int) -> list[int]:
    """Return the lengths of the first drafts for one request."""
    found: list[int] = []
    world.submit(replace(job(1, max_tokens=60), prompt=next(endless_prompts())))
    while len(found) < drafts:
        if world.drawing:
            world.answer_draft()
        elif world.verifying:
            found.append(len(world.verifying.claims[0].draft))
            world.answer_target()
    return found


@pytest.mark.parametrize("every_token", [False, True])
def test_the_first_draft_is_short_where_several_models_make_it(every_token: bool) -> None:
    length = LengthConfig(FIXED, initial=3)
    world = make(3, length, vote_every_token=every_token)
    assert first_lengths(world, 3) == [1, 3, 3]
    assert first_lengths(make(3, LengthConfig(FIXED, initial=0)), 2) == [0, 0]


@pytest.mark.parametrize(
    ("models", "weights", "ask_all_every"),
    [(1, "per_request", 64), (3, VOTED, 64), (3, "per_request", 1)],
)
def test_other_first_drafts_are_whole(models: int, weights: str, ask_all_every: int) -> None:
    """One model decides; weights are those of all requests; or all is as in the paper."""
    length = LengthConfig(FIXED, initial=3)
    world = make(models, length, WeightsConfig(weights), ask_all_every=ask_all_every)
    assert first_lengths(world, 2) == [3, 3]


def test_the_first_draft_is_short_after_rounds_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    selector = recorded(monkeypatch, s=0)
    world = make(3)
    world.submit(replace(job(1, max_tokens=60), prompt=next(endless_prompts())))
    for _ in range(4):
        world.answer_target()
    selector.s = selector.best = 3
    world.answer_target()
    assert [ask.count for draw in world.drawing for ask in draw.asks] == [1, 1, 1]
    while world.drawing:
        world.answer_draft()
    world.answer_target()
    assert selector.seen[-1].runs == [None], "it only finds out which models are right"


def test_the_length_learns_the_runs_of_accepted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    selector = recorded(monkeypatch, s=2)
    world = make(1)
    world.submit(replace(job(1, max_tokens=60), prompt=next(endless_prompts())))
    world.run()
    runs, run = [], 0
    for each in selector.seen:  # of one request
        runs.append([run])
        run = run + each.accepted[0] if each.accepted == each.drafted else 0
    assert [each.runs for each in selector.seen[:-1]] == runs[:-1], "the last token has no draft"
    assert max(runs) > [2]


def test_a_run_is_unknown_after_tokens_without_drafts_until_one_is_rejected() -> None:
    request = RequestState(job(1), Weights.equal(WeightsConfig(), 1), 0.0)
    found = []
    for drafted, accepted in ((2, 2), (0, 0), (2, 2), (3, 1), (2, 2), (1, 1)):
        found.append(request.run)
        request.on_verdict(drafted, accepted)
    assert found == [0, 2, None, None, 0, 2]
    assert request.run == 3


def test_pauses_between_the_rounds_in_which_all_draft_double() -> None:
    schedule = ScheduleConfig(ask_all_every=3)
    assert [round for round in range(50) if schedule.asks_all(round)] == [0, 3, 9, 21, 45]


def test_all_models_draft_always_as_in_the_paper() -> None:
    assert all(models == [0, 1, 2] for models in asked_models(1))


def test_the_papers_rule_is_for_whole_drafts_only() -> None:
    with pytest.raises(ConfigError) as caught:
        make(weights=WeightsConfig(VOTED), vote_every_token=True)
    assert caught.value.field == "vote_every_token"


def test_a_draining_batch_does_not_adapt_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    selector = recorded(monkeypatch)
    world = make(draft_batch=8)
    prompts = endless_prompts()
    stays = replace(job(1, max_tokens=60), prompt=next(prompts))
    leaves = replace(job(2, max_tokens=1), prompt=next(prompts))
    world.submit(stays, leaves)
    world.run()
    assert len(selector.seen) == 1, "the first verification is of both"
    world.submit(*(replace(job(i, max_tokens=60), prompt=next(prompts)) for i in (3, 4)))
    world.run()
    assert len(selector.seen) > 8, "a batch that does not shrink counts"


def test_no_other_length_is_tried_on_a_batch_that_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would be learned, and the trial would last as long as the batch."""
    recorded(monkeypatch, s=4, best=3)
    world = make(draft_batch=8)
    jobs = [
        replace(job(i, max_tokens=60), prompt=p)
        for i, p in zip(range(4), endless_prompts(), strict=False)
    ]
    world.submit(*jobs)
    assert world.machine.s == 4
    world.machine.cancel(jobs[0].id)
    assert world.machine.s == 3


def test_each_size_of_batch_has_a_length_of_its_own() -> None:
    world = make(draft_batch=8, target_batch=8)
    prompts = endless_prompts()
    lone, *many = (replace(job(i, max_tokens=60), prompt=next(prompts)) for i in range(9))
    begin = world.machine.s
    for number in range(40):
        world.submit(replace(lone, id=f"lone {number}"))
        world.run()
    found = world.machine.s
    assert found != begin
    world.submit(*many)
    assert world.machine.s == begin
    world.run()
    world.submit(lone)
    assert world.machine.s == found


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"draft_batch": 0}, "draft_batch"),
        ({"pool_high": 3, "pool_low": 4}, "pool_low"),
        ({"pool_low": 17}, "pool_low"),
        ({"draft_timeout_s": math.nan}, "draft_timeout_s"),
        ({"batch": 3}, "batch"),
    ],
)
def test_settings_that_make_no_sense_are_refused(values: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(ScheduleConfig, values)
    assert caught.value.field == field
