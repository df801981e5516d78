"""A target that would wait for drafts: when it decodes without them, and that nothing is lost."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from collective_world import EOS, GREEDY, World, alone, endless_prompts, recorded

from collab_llm_nodes.protocols.collective.length import FIXED, LengthConfig
from collab_llm_nodes.protocols.collective.machine import Job, Machine
from collab_llm_nodes.protocols.collective.schedule import ScheduleConfig
from collab_llm_nodes.protocols.collective.waits import Waits


def learned(drafting_s: float, verification_s: float, tokens: float, undrafted_s: float) -> Waits:
    waits = Waits()
    for _ in range(100):
        waits.on_drafted(drafting_s)
        waits.on_verified(verification_s, tokens)
        waits.on_undrafted(undrafted_s)
    return waits


@pytest.mark.parametrize(
    ("drafting_s", "since_s", "pays"),
    [
        (16.0, 13.0, True),  # the pass of 6 ends 3 after the drafts; a drafted token takes 4
        (16.0, 15.0, False),  # it would delay them by 5
        (16.0, 99.0, False),  # they are due
        (40.0, 13.0, True),  # they take long
    ],
)
def test_a_pass_without_drafts_pays_if_a_token_of_it_delays_them_by_less_than_one_of_theirs(
    drafting_s: float, since_s: float, pays: bool
) -> None:
    waits = learned(drafting_s, verification_s=12.0, tokens=3.0, undrafted_s=6.0)
    assert waits.pays(since_s) == pays


def test_the_first_passes_find_out_what_they_take() -> None:
    waits = Waits()
    waits.on_drafted(1.0)
    waits.on_verified(2.0, 2.0)
    assert waits.pays(5.0)
    waits.on_undrafted(1.9)
    assert not waits.pays(5.0)


def test_one_pause_of_the_machine_changes_little() -> None:
    waits = learned(16.0, 12.0, 3.0, 6.0)
    waits.on_undrafted(1000.0)
    assert waits.pays(11.0)


def test_a_busier_machine_slows_both_kinds_of_passes() -> None:
    waits = learned(drafting_s=48.0, verification_s=12.0, tokens=3.0, undrafted_s=6.0)
    for _ in range(100):
        waits.on_verified(36.0, 3.0)  # no pass without drafts has been made since
    assert waits.pays(39.0), "a pass of 18 delays them by 9; a drafted token takes 12"
    assert not waits.pays(43.0)


def pipeline(requests: int, *, endless: bool = False, **schedule: Any) -> tuple[World, list[Job]]:
    """Return a world with two batches of two or more.

    Args:
        endless: answers have 60 tokens instead of 24 at most.
    """
    machine = Machine(
        3,
        EOS,
        schedule=ScheduleConfig(draft_batch=2, target_batch=2, **schedule),
        length=LengthConfig(FIXED, initial=3),
        pipelined=True,
    )
    world = World(machine)
    prompts = endless_prompts() if endless else ((7, i) for i in itertools.count())
    jobs = [
        Job(f"job {i}", prompt, GREEDY, 60 if endless else 24)
        for i, prompt in enumerate(itertools.islice(prompts, requests))
    ]
    world.submit(*jobs)
    return world, jobs


def step(world: World) -> None:
    """Have the target answer if it is at work, else a draft model."""
    world.now += 0.01
    if world.verifying:
        world.answer_target()
    else:
        world.answer_draft()


@pytest.mark.parametrize("fill_waits", [True, False])
def test_a_free_target_decodes_the_requests_that_nobody_drafts_for(fill_waits: bool) -> None:
    world, jobs = pipeline(4, fill_waits=fill_waits)
    undrafted = 0
    while world.drawing or world.verifying:
        world.now += 0.01
        if world.verifying:
            drafted_for = {ask.id for draw in world.drawing for ask in draw.asks}
            claims = world.verifying.claims
            assert not drafted_for & {claim.id for claim in claims}
            undrafted += all(claim.draft == () for claim in claims)
            world.answer_target()
        else:
            world.now += 0.1  # three models take their time
            world.answer_draft()
    assert (undrafted > 4) == fill_waits
    assert {job.id: world.answers[job.id] for job in jobs} == {job.id: alone(job) for job in jobs}


@pytest.mark.parametrize("fill_waits", [True, False])
def test_a_free_target_reads_the_prompts_of_those_who_wait(fill_waits: bool) -> None:
    world, jobs = pipeline(5, fill_waits=fill_waits)
    assert {ask.id for draw in world.drawing for ask in draw.asks} == {jobs[0].id, jobs[1].id}
    claims = world.verifying.claims if world.verifying else ()
    assert [claim.id for claim in claims] == ([jobs[2].id, jobs[3].id] if fill_waits else [])
    assert all(claim.draft == () == claim.answer for claim in claims)


def test_a_target_reads_no_more_prompts_than_may_be_active() -> None:
    world, jobs = pipeline(5, max_active=3)
    assert world.verifying is not None
    assert [claim.id for claim in world.verifying.claims] == [jobs[2].id]


def test_what_the_target_does_while_others_are_drafted_counts_for_their_verification(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It reads the prompt of a new request, and decodes its first token."""
    selector = recorded(monkeypatch)
    world, _ = pipeline(4, endless=True)
    while not selector.seen or selector.seen[-1].read:  # all prompts are read
        step(world)
    while world.verifying is None or not world.drawing or world.machine.pooled:
        step(world)
    world.submit(Job("new", (7, 99), GREEDY, 24))
    world.answer_target()
    assert world.verifying is not None
    assert [claim.id for claim in world.verifying.claims] == ["new"]
    world.answer_target()
    selector.seen.clear()
    while world.drawing:
        world.answer_draft()
    while not selector.seen:
        world.answer_target()
    assert selector.seen[0].read == 2
    assert selector.seen[0].extra >= 1


def test_drafts_in_the_pool_come_first() -> None:
    world, _ = pipeline(6)
    while world.drawing:
        world.answer_draft()
    assert world.machine.pooled == 2
    world.answer_target()
    assert world.verifying is not None
    assert all(claim.draft for claim in world.verifying.claims)


def test_no_model_misses_its_turn_for_passes_without_drafts() -> None:
    """``ask_all_every`` counts drafts, not passes."""
    world, _ = pipeline(4, ask_all_every=2)
    asked: dict[str, list[int]] = {}
    while world.drawing or world.verifying:
        world.now += 0.01
        if world.verifying:
            world.answer_target()
        else:
            models = {draw.model for draw in world.drawing}
            for ask in world.drawing[0].asks:
                asked.setdefault(ask.id, []).append(len(models))
            while world.drawing:
                world.answer_draft()
    assert asked
    assert all(counts[2] == 3 for counts in asked.values() if len(counts) > 2)
