"""The cost of prompts that draft models read, and that it counts against speculation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from collective_world import EOS, GREEDY, World, endless_prompts, propose

from collab_llm_nodes.protocols.collective.length import (
    FIXED,
    LengthConfig,
    Verification,
    _Fixed,
    selector,
)
from collab_llm_nodes.protocols.collective.machine import Job, Machine
from collab_llm_nodes.protocols.collective.prompts import PromptCost
from collab_llm_nodes.protocols.collective.schedule import ScheduleConfig


def test_a_prompt_costs_what_its_first_draft_takes_more_than_others() -> None:
    cost = PromptCost()
    cost.on_drafted(16, unread=16, first_s=0.34)  # no other is known yet
    cost.on_drafted(8, unread=0, first_s=0.01)  # fewer requests
    cost.on_answer(100)
    assert cost.per_token_s == 0.0
    cost.on_drafted(16, unread=0, first_s=0.02)
    assert cost.per_token_s == pytest.approx(0.32 / 16 / 100)
    cost.on_answer(300)
    assert cost.per_token_s == pytest.approx(0.32 / 16 / 200)


def test_nothing_is_known_before_an_answer_is_complete() -> None:
    cost = PromptCost()
    cost.on_drafted(1, unread=0, first_s=0.02)
    cost.on_drafted(1, unread=1, first_s=0.05)
    assert cost.per_token_s == 0.0


def test_one_pause_of_the_machine_does_not_change_the_cost() -> None:
    cost = PromptCost()
    cost.on_answer(10)
    cost.on_drafted(2, unread=0, first_s=0.02)
    for took_s in (0.06, 60.0, 0.06):
        cost.on_drafted(2, unread=2, first_s=took_s)
    assert cost.per_token_s == pytest.approx(0.002)


def test_pauses_of_drafts_for_old_requests_do_not_change_the_cost() -> None:
    cost = PromptCost()
    cost.on_answer(10)
    for took_s in (0.02, 60.0, 0.02, 0.02, 60.0):
        cost.on_drafted(2, unread=0, first_s=took_s)
    cost.on_drafted(2, unread=2, first_s=0.06)
    assert cost.per_token_s == pytest.approx(0.002)


def test_a_prompt_never_costs_less_than_nothing() -> None:
    cost = PromptCost()
    cost.on_answer(10)
    cost.on_drafted(2, unread=0, first_s=60.0)  # a pause of the machine
    cost.on_drafted(2, unread=1, first_s=0.03)
    assert cost.prompt_s == cost.per_token_s == 0.0


def test_only_the_latest_prompts_and_answers_count() -> None:
    cost = PromptCost()
    cost.on_drafted(1, unread=0, first_s=0.0)
    for took_s, tokens in ((9.0, 1), (2.0, 100)):
        for _ in range(100):
            cost.on_drafted(1, unread=1, first_s=took_s)
            cost.on_answer(tokens)
    assert (cost.prompt_s, cost.per_token_s) == pytest.approx((2.0, 0.02))


def share_with_drafts(step_s: float, prompts_s: float) -> float:
    """Return the share of rounds with drafts of one token, which is accepted.

    Such a round takes ``step_s``, one without drafts 1 s.
    """
    chosen = selector(LengthConfig(initial=1, longest=1))
    drafted, rounds = 0, 4000
    for _ in range(rounds):
        s = chosen.s
        drafted += s
        took_s = step_s if s else 1.0
        chosen.observe(Verification([s], [s], [s], took_s, took_s, prompts_s=prompts_s))
    return drafted / rounds


def test_prompts_of_short_answers_make_speculation_dear() -> None:
    assert share_with_drafts(1.34, prompts_s=0.0) > 0.9
    assert share_with_drafts(1.34, prompts_s=0.3) > 0.9
    assert share_with_drafts(1.34, prompts_s=0.4) < 0.1


def test_a_trial_without_drafts_saves_no_prompts() -> None:
    """With prompts both ways cost about the same, but a trial loses a fifth."""
    assert share_with_drafts(1.6, prompts_s=0.19) > 0.9


def lone_machine(target_batch: int = 1, *, initial: int = 3, pipelined: bool = False) -> Machine:
    """Return a machine with one draft model, which drafts for one request at a time."""
    return Machine(
        1,
        EOS,
        schedule=ScheduleConfig(draft_batch=1, target_batch=target_batch),
        length=LengthConfig(FIXED, initial=initial),
        pipelined=pipelined,
    )


def what_is_told(
    monkeypatch: pytest.MonkeyPatch, *jobs: Sequence[Job], pipelined: bool = False
) -> list[Verification]:
    """Return what the length is told while these jobs are done, some after the others.

    A draft takes 0.1 s, 0.4 s more where the model reads a prompt, and a verification 0.1 s.
    """
    told: list[Verification] = []
    monkeypatch.setattr(_Fixed, "observe", lambda self, each: told.append(each))
    world = World(lone_machine(pipelined=pipelined))
    for some in jobs:
        world.submit(*some)
        while world.drawing or world.verifying:
            if world.drawing:
                world.now += 0.1 if world.drawing[0].asks[0].answer else 0.5
                world.answer_draft()
            if world.verifying:
                world.now += 0.1
                world.answer_target()
    return told


def endless_jobs(count: int, tokens: int) -> list[Job]:
    prompts = itertools.islice(endless_prompts(), count)
    return [Job(f"{tokens}, {i}", prompt, GREEDY, tokens) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("pipelined", [False, True])
def test_the_length_is_told_what_prompts_cost_where_nothing_hides_it(
    monkeypatch: pytest.MonkeyPatch, pipelined: bool
) -> None:
    told = what_is_told(monkeypatch, endless_jobs(4, tokens=24), pipelined=pipelined)
    assert told[0].prompts_s == 0.0
    prompts_s = {each.prompts_s for each in told}
    assert prompts_s == {0.0} if pipelined else told[-1].prompts_s == pytest.approx(0.4 / 24)


@pytest.mark.parametrize(("every_token", "first_s"), [(False, 0.12), (True, 0.1)])
def test_the_length_is_told_what_drafts_and_their_first_tokens_take(
    monkeypatch: pytest.MonkeyPatch, every_token: bool, first_s: float
) -> None:
    """A token takes 0.1 s; models tell that the first one has taken 0.4 of a draft."""
    told: list[Verification] = []
    monkeypatch.setattr(_Fixed, "observe", lambda self, each: told.append(each))
    machine = Machine(
        1,
        EOS,
        schedule=ScheduleConfig(vote_every_token=every_token),
        length=LengthConfig(FIXED, initial=3),
    )
    world = World(machine)
    world.submit(*endless_jobs(1, tokens=24))
    while world.drawing or world.verifying:
        while world.drawing:
            draw = world.drawing.pop()
            (ask,) = draw.asks
            world.now += 0.1 * ask.count
            world.answer(draw, [replace(propose(draw.model, ask), first=0.4)])
        if world.verifying:
            world.now += 0.5
            world.answer_target()
    whole = [each for each in told if each.drafted == [3]]
    assert len(whole) > 3
    for each in whole:
        assert (each.draft_s, each.first_s) == pytest.approx((0.3, first_s))
        assert each.step_s == pytest.approx(0.8)


def test_a_pipeline_that_has_one_batch_only_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = endless_jobs(3, tokens=24)
    told = what_is_told(monkeypatch, *([job] for job in jobs), pipelined=True)
    assert told[-1].prompts_s == pytest.approx(0.4 / 24)


def test_a_request_that_nothing_was_drafted_for_has_a_prompt_to_be_read() -> None:
    """An answer of one token has no room for a draft."""
    machine = Machine(1, EOS, length=LengthConfig(FIXED, initial=3))
    world = World(machine)
    world.submit(*endless_jobs(1, tokens=1), *endless_jobs(1, tokens=24))
    assert machine._drawing is not None
    assert [draft.reads for draft in machine._drawing.drafts] == [False, True]


def test_a_draft_behind_none_catches_up_and_says_nothing_of_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The draft models read a prompt and what the target has made of it: that takes 9 s."""
    told: list[Verification] = []
    monkeypatch.setattr(_Fixed, "observe", lambda self, each: told.append(each))
    machine = lone_machine(initial=0)
    world = World(machine)
    world.submit(*endless_jobs(1, tokens=24))
    for _ in range(5):
        world.answer_target()
    machine._selector = selector(LengthConfig(FIXED, initial=3))
    while world.drawing or world.verifying:
        if world.drawing:
            world.now += 9.0 if not any(each.catches_up for each in told) else 0.1
            world.answer_draft()
        if world.verifying:
            world.answer_target()
    first = [each.asked for each in told].index([3])
    assert 0 < first < len(told) - 1
    assert [i for i, each in enumerate(told) if each.catches_up] == [first]
    assert machine._prompts.prompt_s == 0.0


def test_the_length_of_another_size_of_batch_learns_nothing_from_a_verification(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three requests join while the first one is verified."""
    learned: list[int] = []
    monkeypatch.setattr(_Fixed, "observe", lambda self, each: learned.append(id(self)))
    machine = lone_machine(4, pipelined=True)
    world = World(machine)
    jobs = endless_jobs(4, tokens=24)
    world.submit(jobs[0])
    world.answer_draft()
    world.answer_target()  # it has read a prompt, so nobody learns from it
    world.answer_draft()
    began = machine._selector
    world.submit(*jobs[1:])
    assert machine._selector is not began
    world.answer_target()
    assert learned == [id(began)]


def test_prompts_do_not_count_twice_where_every_round_reads_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = endless_jobs(8, tokens=2)
    told = what_is_told(monkeypatch, *([job] for job in endless_jobs(2, tokens=24)), short)
    assert [each.step_s for each in told[-2:]] == pytest.approx([0.2, 0.2])  # two of eight rounds
    assert all(each.prompts_s > 0.0 for each in told[-2:])
