"""Batched chats against the same prompts alone; prefixes; limits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tiny_models import scene, tiny_model

from collab_llm_lab.reference import generate, generate_guided
from collab_llm_nodes.chat.base import Finish, Usage
from collab_llm_nodes.chat.batch import Batch, BatchConfig, Ended, Job
from collab_llm_nodes.chat.prefixes import WORTH_SHARING, Ids, Prefixes, common, group_by_prefix
from collab_llm_nodes.chat.quoting import Quoting
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.cache import BLOCK
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.session import Feed
from collab_llm_nodes.errors import Cancelled, CollabError, InvalidInput, ModelError
from collab_llm_nodes.models.architectures import ARCHITECTURES
from collab_llm_nodes.models.guide import Guide
from collab_llm_nodes.models.guided_text import GuidedText
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt, encode

GREEDY = SamplingConfig()
WARM = SamplingConfig(temperature=1.0, top_p=0.9)
ALONE = BatchConfig(max_batch=1, kept_tokens=0)


def engine_of(architecture: str = "llama", eager: bool = False) -> Engine:
    return Engine(tiny_model(architecture), eager=eager)


def prompt(engine: Engine, length: int, seed: int) -> list[int]:
    special = 7  # the first ids are control tokens
    rng = np.random.default_rng(seed)
    return rng.integers(special, engine.vocab_size, length).tolist()


def job(
    ids: Sequence[int], sampling: SamplingConfig = GREEDY, max_tokens: int = 8, owner: str = "me"
) -> Job:
    return Job(owner, np.array(ids, dtype=np.int32), sampling, max_tokens)


def finish(batch: Batch) -> list[Ended]:
    ended: list[Ended] = []
    while not batch.idle:
        ended += batch.step()
    return ended


def chunks_and_tasks(engine: Engine, chunks: int, tasks: int) -> list[list[int]]:
    """Prompts as MinionS makes them: an instruction, a chunk, a task."""
    instruction = prompt(engine, 20, 0)
    return [
        [*instruction, *prompt(engine, 150 + 10 * chunk, 1 + chunk), *prompt(engine, 9, 100 + task)]
        for chunk in range(chunks)
        for task in range(tasks)
    ]


class _Only:
    """Lets one token follow a reply of even length, and any an odd one."""

    def __init__(self, token: int) -> None:
        self._token = token

    def next_tokens(self, reply: Sequence[int]) -> set[int]:
        return set() if len(reply) % 2 else {self._token}


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_what_may_not_follow_in_a_quote_is_not_taken(sampling: SamplingConfig) -> None:
    engine = engine_of()
    ids, wanted = prompt(engine, 12, 3), 11
    free, held, beside = (job(ids, sampling) for _ in range(3))
    held.quoting = cast(Quoting, _Only(wanted))
    batch = Batch(engine, BatchConfig())
    batch.add([free, held, beside])
    finish(batch)
    assert free.tokens == beside.tokens
    assert free.tokens[0] != wanted
    assert held.tokens[::2] == [wanted] * len(held.tokens[::2])


@pytest.mark.parametrize("eager", [False, True])
def test_prompts_with_pictures_share_no_prefix(eager: bool) -> None:
    engine = engine_of("qwen2_vl", eager)
    asked = [encode(Prompt("what do you see?", (scene(i % 2),)), engine.loaded) for i in range(4)]
    jobs = [replace(job(each.ids), prompt=each) for each in asked]
    text = job(asked[0].ids[:3])
    batch = Batch(engine, BatchConfig(max_batch=3, prefill_tokens=16))
    batch.add([*jobs, text])
    finish(batch)
    for done, each in zip(jobs, asked, strict=True):
        assert done.tokens == generate(engine.loaded, each, GREEDY, 8, engine.eos)
    assert jobs[0].tokens != jobs[1].tokens
    assert [done.cached for done in jobs] == [0] * 4
    engine.close()


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_a_guided_reply_is_the_guided_models_own_in_fewer_passes(sampling: SamplingConfig) -> None:
    engine = engine_of()
    ids = prompt(engine, 12, 3)
    source = r"the next action is (turn (left|right) [1-9]0 degree|move forward [1-9]0 cm)\."
    held, free, beside = job(ids, sampling), job(ids, sampling), job(ids, sampling)
    held.guide, held.max_tokens = engine.loaded.guides.open(Guide("regex", source)), 40
    batch = Batch(engine, BatchConfig())
    batch.add([free, held, beside])
    finish(batch)
    assert free.tokens == beside.tokens
    grammar = LLMatcher.grammar_from_regex(source)
    own = generate_guided(engine.loaded, EncodedPrompt(tuple(ids)), grammar, sampling, 40)
    assert held.tokens == own
    assert re.fullmatch(source, engine.decode(own))
    assert batch.passes < len(own)


def test_a_guide_that_takes_too_much_work_ends_its_reply_alone() -> None:
    class Heavy:
        def allowed(self, answer: Sequence[int]) -> np.ndarray:
            raise InvalidInput("takes too much work", field="answer.guide")

    engine = engine_of()
    held, free = job(prompt(engine, 12, 3), GREEDY), job(prompt(engine, 9, 4), GREEDY)
    held.guide = cast(GuidedText, Heavy())
    batch = Batch(engine, BatchConfig())
    batch.add([held, free])
    ended = finish(batch)
    assert {type(each.reason) for each in ended if each.job is held} == {InvalidInput}
    assert free.tokens


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_reply_is_that_of_its_prompt_alone(
    architecture: str, eager: bool, sampling: SamplingConfig
) -> None:
    engine = engine_of(architecture, eager)
    try:
        prompts = [*chunks_and_tasks(engine, 2, 3), prompt(engine, 5, 55)]
        jobs = [
            job(ids, SamplingConfig(sampling.temperature, top_p=sampling.top_p, seed=i))
            for i, ids in enumerate(prompts)
        ]
        batch = Batch(engine, BatchConfig(max_batch=4, prefill_tokens=64))
        batch.add(jobs)
        finish(batch)
        assert sum(j.cached for j in jobs) > 4 * 150
        for done, ids in zip(jobs, prompts, strict=True):
            expected = generate(
                engine.loaded, EncodedPrompt(tuple(ids)), done.sampling, 8, engine.eos
            )
            assert done.tokens == expected
    finally:
        engine.close()


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=9),
    st.integers(1, 5),
    st.integers(1, 400),
    st.sampled_from([0, 200, 32768]),
    st.data(),
)
def test_no_schedule_changes_a_reply(
    wanted: list[tuple[int, int]], max_batch: int, prefill: int, kept: int, data: st.DataObject
) -> None:
    engine = engine_of()
    prompts = chunks_and_tasks(engine, 4, 3)
    batch = Batch(engine, BatchConfig(max_batch, prefill, kept))
    jobs = [job(prompts[3 * chunk + task], owner=f"o{task}") for chunk, task in wanted]
    ended: list[Ended] = []
    dropped = data.draw(st.sampled_from([None, "o0", "o1"]))
    for new in jobs:
        batch.add([new])
        for _ in range(data.draw(st.integers(0, 3))):
            ended += [] if batch.idle else batch.step()
    if dropped is not None:
        over = batch.end(dropped, Finish.DEADLINE)
        assert {id(j) for j, _, _ in over} == {
            id(j) for j in jobs if j.owner == dropped and id(j) not in {id(e[0]) for e in ended}
        }
        ended += over
    ended += finish(batch)
    assert len(ended) == len(jobs)
    assert {id(j) for j, _, _ in ended} == {id(j) for j in jobs}
    for done, usage, reason in ended:
        assert done.tokens == alone(engine, done)[: len(done.tokens)]
        if reason is not Finish.DEADLINE:
            assert len(done.tokens) == len(alone(engine, done))
            assert usage.prefill + usage.cached == len(done.ids)


_alone: dict[bytes, list[int]] = {}


def alone(engine: Engine, done: Job) -> list[int]:
    key = done.ids.tobytes()
    if key not in _alone:
        again = job(done.ids.tolist())
        batch = Batch(engine, ALONE)
        batch.add([again])
        finish(batch)
        _alone[key] = again.tokens
    return _alone[key]


def test_a_common_beginning_is_computed_once_and_held_once() -> None:
    engine = engine_of()
    prompts = chunks_and_tasks(engine, 3, 4)
    batch = Batch(engine, BatchConfig(max_batch=6, prefill_tokens=100))
    jobs = [job(ids) for ids in prompts]
    batch.add(jobs)
    ended = finish(batch)
    spent = sum((usage for _, usage, _ in ended), Usage())
    read = 20 + sum(150 + 10 * chunk + 9 for chunk in range(3)) + 3 * 3 * 9
    assert read - 9 <= spent.prefill <= read  # two tasks may begin with the same token, by chance
    assert spent.prefill + spent.cached == sum(map(len, prompts))
    # A fork copies what is shorter than a block of the cache, such as the instruction.
    assert batch.kept_tokens == sum(20 + 150 + 10 * chunk + 9 for chunk in range(3))


def test_later_calls_share_what_earlier_ones_have_read() -> None:
    engine = engine_of()
    first, later = chunks_and_tasks(engine, 1, 2)
    batch = Batch(engine, BatchConfig())
    batch.add([job(first)])
    finish(batch)
    again = job([*later, *prompt(engine, 30, 7)], owner="another")
    batch.add([again])
    ((_, usage, _),) = finish(batch)
    assert usage.cached >= 170
    assert usage.prefill == len(again.ids) - usage.cached


def test_samples_of_one_prompt_share_all_but_its_last_token() -> None:
    engine = engine_of()
    ids = chunks_and_tasks(engine, 1, 1)[0]
    samples = [job(ids, SamplingConfig(temperature=1.0, seed=seed)) for seed in range(4)]
    batch = Batch(engine, BatchConfig())
    batch.add(samples)
    finish(batch)
    assert sorted(s.cached for s in samples) == [0, *[len(ids) - 1] * 3]
    assert len({tuple(s.tokens) for s in samples}) > 1


def test_what_is_kept_is_bounded() -> None:
    engine = engine_of()
    batch = Batch(engine, BatchConfig(max_batch=2, kept_tokens=500))
    for seed in range(6):
        batch.add([job(prompt(engine, 200, seed), max_tokens=1)])
        finish(batch)
        assert batch.kept_tokens <= 500
    assert batch.kept_tokens == 400
    newest = job(prompt(engine, 200, 5), max_tokens=1)
    oldest = job(prompt(engine, 200, 0), max_tokens=1)
    batch.add([newest, oldest])
    finish(batch)
    assert (newest.cached, oldest.cached) == (199, 0)


def test_what_is_kept_is_held_once_in_memory() -> None:
    engine = engine_of()
    batch = Batch(engine, BatchConfig(max_batch=3, prefill_tokens=100))
    tasks = chunks_and_tasks(engine, 3, 3)
    batch.add([job(ids) for ids in tasks for _ in range(3)])
    finish(batch)
    caches = [kept.session._cache for kept in batch._prefixes._kept]
    parts = {id(share.part): share.part.columns for cache in caches for share in cache.shared}
    columns = sum(cache.own.shape[2] for cache in caches)
    columns += sum(part.shape[2] for part in parts.values())
    assert len(caches) >= 3
    assert columns <= batch.kept_tokens + 3 * BLOCK  # whole blocks, for each chunk
    alone = sum(len(ids) for ids in tasks)
    assert columns < alone


def test_jobs_beyond_the_batch_wait_and_owners_take_turns() -> None:
    engine = engine_of()
    batch = Batch(engine, BatchConfig(max_batch=2, kept_tokens=0))
    batch.add([job(prompt(engine, 6, i), max_tokens=4, owner="many") for i in range(5)])
    batch.step()
    assert batch.active == 2
    late = job(prompt(engine, 6, 9), max_tokens=4, owner="one")
    batch.add([late])
    order = [done.owner for done, _, _ in finish(batch)]
    assert order.index("one") <= 3


def test_the_reply_ends_where_the_models_context_does() -> None:
    engine = engine_of()
    long = job(prompt(engine, engine.context - 4, 3), max_tokens=100)
    batch = Batch(engine, BatchConfig(kept_tokens=0))
    batch.add([long])
    ((_, usage, reason),) = finish(batch)
    assert reason in (Finish.LENGTH, Finish.STOP)
    assert usage.decode <= 5


def test_an_error_ends_one_job_and_its_followers_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    prompts = chunks_and_tasks(engine, 1, 3)
    jobs = [job(ids) for ids in prompts]
    batch = Batch(engine, BatchConfig())
    batch.add(jobs)
    run = engine.run
    failed: list[Sequence[Feed]] = []

    def fails_once(feeds: Sequence[Feed], **options: object) -> list[torch.Tensor | Exception]:
        if not failed:
            failed.append(feeds)
            return [RuntimeError("out of memory") for _ in feeds]
        return run(feeds)

    monkeypatch.setattr(engine, "run", fails_once)
    ended = finish(batch)
    errors = [(j, reason) for j, _, reason in ended if isinstance(reason, CollabError)]
    assert len(ended) == 3
    assert len(errors) == 1
    assert isinstance(errors[0][1], ModelError)
    assert "out of memory" in str(errors[0][1])
    for done, _, reason in ended:
        if not isinstance(reason, CollabError):
            assert done.tokens == alone(engine, done)


def test_logits_that_are_not_finite_end_their_job_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    jobs = [job(prompt(engine, 5, 1)), job(prompt(engine, 6, 2))]
    batch = Batch(engine, BatchConfig())
    batch.add(jobs)
    run = engine.run

    def spoiled(feeds: Sequence[Feed], **options: object) -> list[torch.Tensor | Exception]:
        not_finite = torch.full((1, engine.vocab_size), torch.nan)
        return [
            not_finite if len(feed.ids) == 5 else result
            for feed, result in zip(feeds, run(feeds), strict=True)
        ]

    monkeypatch.setattr(engine, "run", spoiled)
    reasons = {len(j.ids): reason for j, _, reason in finish(batch)}
    assert isinstance(reasons[5], ModelError)
    assert isinstance(reasons[6], Finish)


def test_a_cancelled_pass_changes_nothing() -> None:
    engine = engine_of()
    jobs = [job(ids) for ids in chunks_and_tasks(engine, 1, 2)]
    batch = Batch(engine, BatchConfig(prefill_tokens=100))
    batch.add(jobs)
    batch.step()

    def cancel() -> None:
        raise Cancelled("nobody waits")

    for _ in range(2):
        with pytest.raises(Cancelled):
            batch.step(cancel)
    finish(batch)
    for done in jobs:
        assert done.tokens == alone(engine, done)


def test_closing_frees_every_session() -> None:
    engine = engine_of()
    jobs = [job(ids) for ids in chunks_and_tasks(engine, 2, 2)]
    batch = Batch(engine, BatchConfig(prefill_tokens=100))
    batch.add(jobs)
    for _ in range(3):
        batch.step()
    assert batch.active
    batch.close()
    assert batch.idle
    assert batch.kept_tokens == 0


def test_ids_outside_the_vocabulary_end_their_job() -> None:
    engine = engine_of()
    batch = Batch(engine, BatchConfig())
    batch.add([job([1 << 20])])
    ((_, _, reason),) = finish(batch)
    assert isinstance(reason, InvalidInput)


def as_ids(ids: Sequence[int]) -> Ids:
    return np.array(ids, dtype=np.int32)


def test_common_beginnings() -> None:
    assert common(as_ids([1, 2, 3]), as_ids([1, 2, 4])) == 2
    assert common(as_ids([1, 2, 3]), as_ids([1, 2])) == 2
    assert common(as_ids([5]), as_ids([1])) == 0
    assert common(as_ids([]), as_ids([1])) == 0


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=8), st.integers(0, 3))
def test_a_follower_shares_enough_with_its_leader(stems: list[list[int]], held: int) -> None:
    blocks = [[stem for s in stems_of for stem in [s] * 130] for stems_of in stems]
    prompts = [as_ids([*block, i]) for i, block in enumerate(blocks)]
    groups = group_by_prefix(prompts, lambda ids: min(len(ids), 130 * held))
    assert sorted(i for leader, rest in groups for i in (leader, *rest)) == list(
        range(len(prompts))
    )
    for leader, rest in groups:
        for follower in rest:
            known = min(len(prompts[follower]), 130 * held)
            assert common(prompts[leader], prompts[follower]) >= known + WORTH_SHARING
    shared = [
        common(prompts[a], prompts[b]) for n, (a, _) in enumerate(groups) for b, _ in groups[:n]
    ]
    assert all(s < 130 * held + WORTH_SHARING for s in shared)


def test_prefixes_hold_what_adds_enough_only() -> None:
    engine = engine_of()
    ids = as_ids(prompt(engine, 300, 1))
    session = engine.open(EncodedPrompt(()))
    session.feed(ids.tolist(), last=0)
    prefixes = Prefixes(1000)
    prefixes.keep(ids, session, awaited=False)
    prefixes.keep(ids, session, awaited=True)
    assert (len(prefixes), prefixes.tokens) == (1, 300)
    assert prefixes.known(ids[:200]) == 200
    assert prefixes.fork(ids[: WORTH_SHARING - 1]) is None
    twin = prefixes.fork(ids)
    assert twin is not None
    assert twin.length == 299
    small = Prefixes(299)
    small.keep(ids, session, awaited=True)
    assert len(small) == 0
    session.feed(ids[:20].tolist(), last=0)
    longer = as_ids([*ids, *ids[:20]])
    prefixes.keep(longer, session, awaited=False)
    assert len(prefixes) == 1
    prefixes.keep(longer, session, awaited=True)
    assert (len(prefixes), prefixes.tokens) == (2, 320)
