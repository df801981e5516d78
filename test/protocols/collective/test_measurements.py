"""Measurements of each verification, from which the speculation length is learnt."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from collective_world import (
    EOS,
    GREEDY,
    RecordingSelector,
    World,
    endless_prompts,
    propose,
    recorded,
)

from collab_llm_nodes.protocols.collective import machine as machine_module
from collab_llm_nodes.protocols.collective.length import Verification
from collab_llm_nodes.protocols.collective.machine import Job, Machine
from collab_llm_nodes.protocols.collective.schedule import ScheduleConfig


def endless_jobs(count: int, tokens: int) -> list[Job]:
    """Return jobs with prompts of two tokens, whose answers have as many tokens as they may."""
    prompts = itertools.islice(endless_prompts(), count)
    return [Job(f"{tokens}, {i}", prompt, GREEDY, tokens) for i, prompt in enumerate(prompts)]


def lone_machine(target_batch: int = 1, *, pipelined: bool = False, models: int = 1) -> Machine:
    """Return a machine that drafts for one request at a time."""
    schedule = ScheduleConfig(draft_batch=1, target_batch=target_batch)
    return Machine(models, EOS, schedule=schedule, pipelined=pipelined)


def serve(world: World, *, draft_s: float = 0.0, verify_s: float = 0.0) -> None:
    """Have the models answer until all is done; each takes its time."""
    while world.drawing or world.verifying:
        if world.drawing:
            world.now += draft_s
        while world.drawing:
            world.answer_draft()
        if world.verifying:
            world.now += verify_s
            world.answer_target()


@pytest.mark.parametrize("every_token", [False, True])
def test_what_drafts_take_is_measured_apart(
    monkeypatch: pytest.MonkeyPatch, every_token: bool
) -> None:
    """A token takes 0.1 s, and a verification 0.5 s."""
    selector = recorded(monkeypatch)
    world = World(Machine(1, EOS, schedule=ScheduleConfig(vote_every_token=every_token)))
    world.submit(*endless_jobs(1, tokens=24))
    while world.drawing or world.verifying:
        while world.drawing:
            draw = world.drawing.pop()
            (ask,) = draw.asks
            world.now += 0.1 * ask.count
            world.answer(draw, [propose(draw.model, ask)])
        if world.verifying:
            world.now += 0.5
            world.answer_target()
    whole = [each for each in selector.seen if each.drafted == [3]]
    assert len(whole) > 3
    for each in whole:
        assert (each.draft_s, each.llm_s, each.step_s) == pytest.approx((0.3, 0.5, 0.8))


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_pipeline_hides_what_drafts_take_where_it_has_several_batches(
    monkeypatch: pytest.MonkeyPatch, pipelined: bool
) -> None:
    selector = recorded(monkeypatch)
    world = World(lone_machine(pipelined=pipelined))
    world.submit(*endless_jobs(4, tokens=24))
    serve(world, draft_s=0.1, verify_s=0.1)
    assert all((each.draft_s > 0.0) != pipelined for each in selector.seen if any(each.drafted))
    for job in endless_jobs(2, tokens=23):
        world.submit(job)
        selector.seen.clear()
        serve(world, draft_s=0.1, verify_s=0.1)
        assert all(each.draft_s > 0.0 for each in selector.seen if any(each.drafted))


def test_prompts_count_as_read_by_the_target_once(monkeypatch: pytest.MonkeyPatch) -> None:
    selector = recorded(monkeypatch)
    world = World(lone_machine())
    for job in endless_jobs(2, tokens=24):
        world.submit(job)
        serve(world)
    assert [each.read for each in selector.seen if each.read] == [2, 2]
    assert selector.seen[0].read == 2


def test_prompts_and_missed_tokens_count_as_unread_by_the_draft_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six verifications without drafts follow the first ones; the prompt has two tokens."""
    selector = recorded(monkeypatch)
    world = World(lone_machine())
    world.submit(*endless_jobs(1, tokens=60))
    for s in (3, 0, 3):
        selector.s = selector.best = s
        for _ in range(6):
            serve_one(world)
    seen: list[Verification] = selector.seen
    assert [bool(any(each.drafted)) for each in seen[6:13]] == [True, *[False] * 6]
    assert seen[0].unread == 2
    assert max(each.unread for each in seen[1:8]) <= 1, "the target's own token"
    assert [each.unread - seen[7].unread for each in seen[7:14]] == [0, 1, 2, 3, 4, 5, 6]
    assert max(each.unread for each in seen[14:]) <= 1


def serve_one(world: World) -> None:
    """Have the target answer once, and the draft models before."""
    while world.drawing:
        world.answer_draft()
    world.answer_target()


def test_what_a_silent_model_has_missed_counts_when_it_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only one of three models reads on; all draft again in the 16th round."""
    selector = recorded(monkeypatch)
    schedule = ScheduleConfig(draft_batch=1, target_batch=1, ask_all_every=16)
    world = World(Machine(3, EOS, schedule=schedule))
    world.submit(*endless_jobs(1, tokens=60))
    models = []
    while world.drawing or world.verifying:
        models.append(len(world.drawing))
        serve_one(world)
    unread = [each.unread for each in selector.seen]
    assert unread[0] == 2, "all three have read the prompt"
    alone = [i for i, count in enumerate(models) if count == 1]
    assert alone
    again = next(i for i in range(alone[0], len(models)) if models[i] == 3)
    assert unread[again] > max(unread[i] for i in alone if i < again)


def test_a_request_that_nothing_was_drafted_for_has_a_prompt_to_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer of one token has no room for a draft."""
    selector = recorded(monkeypatch)
    world = World(lone_machine())
    for job in (*endless_jobs(1, tokens=1), *endless_jobs(1, tokens=24)):
        world.submit(job)
        serve(world)
    assert [(each.drafted, each.unread) for each in selector.seen[:2]] == [([0], 2), ([3], 2)]


def test_the_length_of_another_size_of_batch_learns_nothing_from_a_verification(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three requests join while the first one is verified."""
    made: list[RecordingSelector] = []

    def selector(config: object) -> RecordingSelector:
        made.append(RecordingSelector(3))
        return made[-1]

    monkeypatch.setattr(machine_module, "selector", selector)
    world = World(lone_machine(4, pipelined=True))
    jobs: Sequence[Job] = endless_jobs(4, tokens=24)
    world.submit(jobs[0])
    world.answer_draft()
    world.submit(*jobs[1:])
    world.answer_target()
    assert [len(each.seen) for each in made] == [1, 0]
