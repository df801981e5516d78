"""The machines of lanes, drafters and verdicts, without a model: any schedule gives one answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from enumeration import dense
from hypothesis import given, settings
from hypothesis import strategies as st

from collab_llm_nodes.decoding.sampling import SamplingConfig, distributions
from collab_llm_nodes.errors import InvalidInput, ModelError, ProtocolError
from collab_llm_nodes.protocols.jupiter.drafters import (
    Draft,
    Drafter,
    MedusaChain,
    MedusaTree,
    NoDrafter,
    PromptLookup,
)
from collab_llm_nodes.protocols.jupiter.lane import (
    DecodeConfig,
    LaneAnswer,
    SharedPrefix,
    divide,
    undivided,
)
from collab_llm_nodes.protocols.jupiter.messages import Outcome, Result, Step, Want, WorkerInfo
from collab_llm_nodes.protocols.jupiter.results import check_result
from collab_llm_nodes.protocols.jupiter.stage_lanes import judge, walk

VOCAB, EOS, HEADS, CONTEXT = 7, 0, 5, 200


def says(tokens: Sequence[int]) -> int:
    """Return the token that the model says after ``tokens``; it ends now and then."""
    drawn = random.Random(str(list(tokens[-3:])) + str(len(tokens) // 9))
    return drawn.randrange(VOCAB)


def right(prompt: Sequence[int], most: int) -> list[int]:
    """Return the answer that the model gives alone."""
    answer: list[int] = []
    while len(answer) < most and answer[-1:] != [EOS]:
        answer.append(says([*prompt, *answer]))
    return answer


class Stages:
    """All stages as one: caches of token ids, corrected and fed by steps.

    A cache is its linear part, then tree nodes as (token, parent column).
    """

    def __init__(self, eos: int = EOS) -> None:
        self.eos = frozenset([eos])
        self.linear: dict[int, list[int]] = {}
        self.nodes: dict[int, list[tuple[int, int]]] = {}

    def run(self, step: Step) -> Outcome:
        if step.close:
            self.linear.pop(step.lane, None)
            return Outcome()
        if step.lane not in self.linear:
            source = [] if step.fork_of is None else list(self.linear[step.fork_of])
            self.linear[step.lane], self.nodes[step.lane] = source, []
        else:
            assert step.fork_of is None
        linear, nodes = self.linear[step.lane], self.nodes[step.lane]
        if step.retain is not None:
            linear += self.path(len(linear), nodes, step.retain)
        assert step.start <= len(linear), "nothing that the cache lacks counts as held"
        del linear[step.start :]
        nodes.clear()
        if step.parents:
            before = [-1, *step.parents]
            base = len(linear)
            nodes += [(t, base + p) for t, p in zip(step.ids, before, strict=True)]
            texts = [[*linear, *self.path(base, nodes, base + i)] for i in range(len(step.ids))]
        else:
            linear += step.ids
            texts = [linear[: step.start + i + 1] for i in range(len(step.ids))]
        if step.want is Want.NOTHING:
            return Outcome()
        texts = texts[len(texts) - step.rows :]
        draft = step.ids[len(step.ids) - step.rows + 1 :]
        parents = step.parents or range(len(draft))
        path, token = walk(lambda row, depth: says(texts[row]), draft, parents, self.eos)
        return Outcome(path, token, self.guesses(texts[path[-1] if path else 0], token, step))

    def path(self, base: int, nodes: Sequence[tuple[int, int]], column: int) -> list[int]:
        found: list[int] = []
        while column >= base:
            token, column = nodes[column - base]
            found.insert(0, token)
        return found

    def guesses(self, text: Sequence[int], token: int, step: Step) -> tuple[int, ...]:
        """Return guesses that are sometimes right."""
        if not step.guesses or token < 0:
            return ()
        chance, known, found = random.Random(len(text)), [*text, token], list[int]()
        for _ in range(HEADS):
            known.append(says(known))
            own = [known[-1]] if chance.random() < 0.7 else []
            others = [t for t in range(VOCAB) if t not in own]
            found += [*own, *others][: step.guesses]
        return tuple(found)


DRAFTERS: list[Drafter] = [NoDrafter(), MedusaChain(), MedusaTree(), PromptLookup()]


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    st.integers(1, 40),
    st.sampled_from(DRAFTERS),
    st.integers(0, 6),
    st.integers(0, 2**32),
)
def test_any_drafts_divisions_and_losses_leave_the_answer_as_it_is(
    prompt: list[int], most: int, drafter: Drafter, shared: int, seed: int
) -> None:
    stages, chance = Stages(), random.Random(seed)
    shared_prefix = SharedPrefix(0, prompt) if shared else None
    own = prompt[: max(1, shared)]
    text = [*prompt, *own] if shared else prompt
    lane = LaneAnswer(
        1,
        own if shared else prompt,
        DecodeConfig(most, drafter=drafter),
        eos=frozenset([EOS]),
        context=CONTEXT,
        prefix=shared_prefix,
    )

    def lengths(tokens: int) -> list[int]:
        if tokens < 3:
            return [tokens]
        first = chance.randrange(1, tokens)
        return [first, tokens - first]

    fresh = True
    while not lane.finished:
        if fresh and shared_prefix is not None:
            for step in shared_prefix.steps(lengths):
                stages.run(step)
        fresh = False
        *before, last = lane.steps(lengths)
        if chance.random() < 0.2:  # lost with some passes done
            for step in before[: chance.randrange(len(before) + 1)]:
                stages.run(step)
            stages, fresh = Stages(), True
            lane.restart()
            if shared_prefix is not None:
                shared_prefix.restart()
            continue
        for step in before:
            assert stages.run(step) == Outcome()
        assert last.position == len(lane.tokens)
        lane.on_outcome(stages.run(last))
    assert lane.tokens == right(text, most)
    assert len(lane.accepted) == len(lane.tokens)
    assert lane.passes <= len(lane.tokens)
    if isinstance(drafter, NoDrafter):
        assert lane.passes == len(lane.tokens)


def test_drafts_save_passes_here() -> None:
    def passes(drafter: Drafter) -> int:
        lane = LaneAnswer(
            0, [3, 2], DecodeConfig(30, drafter=drafter), eos=frozenset([99]), context=CONTEXT
        )
        stages = Stages(99)
        while not lane.finished:
            (step,) = lane.steps()
            lane.on_outcome(stages.run(step))
        return lane.passes

    assert passes(MedusaTree()) <= passes(MedusaChain()) < passes(NoDrafter()) == 30


@pytest.mark.parametrize(("stands", "last"), [(True, 5), (False, 1)])
def test_drafts_are_as_long_as_what_stood_of_late_deserves(stands: bool, last: int) -> None:
    @dataclass(frozen=True)
    class Known:
        """Proposes the model's own tokens, or others."""

        guesses: int = 0

        def propose(self, tokens: Sequence[int], guesses: Sequence[int], most: int) -> Draft:
            found = list(tokens)
            for _ in range(min(5, most)):
                found.append((says(found) + (not stands)) % VOCAB)
            return Draft(tuple(found[len(tokens) :]))

    lane = LaneAnswer(
        0, [3, 2], DecodeConfig(120, drafter=Known()), eos=frozenset([99]), context=CONTEXT
    )
    stages, drafted = Stages(99), []
    while len(lane.tokens) < 60:
        (step,) = lane.steps()
        drafted.append(step.rows - 1)
        lane.on_outcome(stages.run(step))
    assert drafted[:2] == [0, 5], "a prompt has no draft, and the first draft is whole"
    assert drafted[-1] == last
    assert drafted[1:] == sorted(drafted[1:], reverse=True)


@pytest.mark.parametrize(
    "outcome",
    [Outcome((99,), 1), Outcome((2, 1), 1), Outcome((0,), 1), Outcome((), -1), Outcome((1, 3), 1)],
)
def test_a_verdict_on_another_tree_is_refused(outcome: Outcome) -> None:
    info = WorkerInfo("", "", "", 1, CONTEXT, 1000, 1, 1, frozenset([EOS]), HEADS, "")
    lane = LaneAnswer(0, [1], DecodeConfig(9, drafter=MedusaTree()), eos=info.eos, context=CONTEXT)
    lane.steps()
    lane.on_outcome(Outcome((), 3, tuple(range(5)) * 3))
    (step,) = lane.steps()
    assert step.parents[:4] == (0, 1, 2, 0)
    check_result(Result(0, (Outcome((1, 2), 1),), ()), [step], 0, info)
    with pytest.raises(ProtocolError):
        check_result(Result(0, (outcome,), ()), [step], 0, info)


@pytest.mark.parametrize("lengths", [[1, 1], [4], [2, 0, 1], [-1, 4], []])
def test_parts_that_are_none_are_refused(lengths: list[int]) -> None:
    with pytest.raises(InvalidInput, match="sub-sequences"):
        divide(Step(0, 0, (1, 2, 3)), lambda tokens: lengths)
    assert divide(Step(0, 0, (1, 2, 3)), undivided) == [Step(0, 0, (1, 2, 3))]


def test_a_tree_s_nodes_follow_their_parents_and_are_the_likeliest() -> None:
    guesses = [10 * head + rank for head in range(5) for rank in range(3)]
    draft = MedusaTree(3, 16).propose([1], guesses, 100)
    assert len(draft.tokens) == 16
    for place, parent in enumerate(draft.parents, start=1):
        assert parent < place
        depth = draft.tokens[place - 1] // 10
        assert depth == (draft.tokens[parent - 1] // 10 + 1 if parent else 0)
    chain = [0, 10, 20, 30, 40]  # the best of each head stand in it, one after another
    at = 0
    for token in chain:
        at = 1 + next(
            i
            for i, (t, p) in enumerate(zip(draft.tokens, draft.parents, strict=True))
            if t == token and p == at
        )
    siblings = [(parent, token) for parent, token in zip(draft.parents, draft.tokens, strict=True)]
    assert len(set(siblings)) == len(siblings)
    assert MedusaTree().propose([1], [], 5) == Draft()
    assert len(MedusaTree().propose([1], guesses, 4).tokens) == 4


def test_lookup_takes_what_followed_the_longest_and_latest_match() -> None:
    known = [1, 2, 3, 4, 9, 2, 3, 5, 6, 7, 8, 1, 2, 3]
    assert PromptLookup(3, 3).propose(known, (), 9).tokens == (4, 9, 2)  # 1 2 3 is longer
    assert PromptLookup(3, 2).propose(known, (), 9).tokens == (5, 6, 7)  # 2 3, the latest
    assert PromptLookup(3, 2).propose(known, (), 1).tokens == (5,)
    assert PromptLookup().propose([1, 2, 3], (), 9) == Draft()
    assert PromptLookup().propose([1], (), 9) == Draft()


def test_a_verdict_has_the_model_s_own_law() -> None:
    """With any drafts the first token has the model's distribution, and the second its own."""
    torch.manual_seed(1)
    logits = torch.randn(3, VOCAB)  # after the pending token, and after each of two drafts
    law = SamplingConfig(temperature=0.8, top_k=4)
    seeds = 4000
    counts = np.zeros(VOCAB)
    after = np.zeros(VOCAB)
    stood = 0
    draft = (int(logits[0].argmax()), 2)
    for seed in range(seeds):
        sampling = SamplingConfig(law.temperature, law.top_k, seed=seed)
        path, token = judge(logits, draft, (0, 1), sampling, 5, frozenset())
        counts[draft[0] if path else token] += 1
        if path:
            stood += 1
            after[draft[1] if len(path) == 2 else token] += 1
    p = dense(distributions(logits, law))
    assert np.abs(counts / seeds - p[0]).sum() < 0.06
    assert np.abs(after / stood - p[1]).sum() < 0.1


def test_a_verdict_depends_on_no_draft() -> None:
    torch.manual_seed(2)
    table = torch.randn(VOCAB, VOCAB)  # logits after each token
    law = SamplingConfig(temperature=1.0, seed=3)
    found = set()
    for draft in product(range(VOCAB), repeat=2):
        rows = table[[1, *draft]]
        path, token = judge(rows, draft, (0, 1), law, 0, frozenset())
        said = [*draft[: len(path)], token]
        while len(said) < 3:
            _, token = judge(table[said[-1:]], (), (), law, len(said), frozenset())
            said.append(token)
        found.add(tuple(said))
    assert len(found) == 1


def test_logits_that_say_nothing_are_a_typed_error() -> None:
    with pytest.raises(ModelError):
        judge(torch.full((1, 4), float("nan")), (), (), SamplingConfig(), 0, frozenset())
