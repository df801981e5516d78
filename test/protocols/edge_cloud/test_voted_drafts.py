"""Several draft models vote on each token: the answer stays the target's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from enumeration import (
    EOS,
    Scripted,
    TableModel,
    autoregressive_law,
    enumerate_program,
    rows_of,
    total_variation,
)
from fake_models import FakeEngine, as_engine, encode
from tiny_models import tiny_folder, tiny_model, tiny_prompt

from collab_llm_lab import reference
from collab_llm_nodes.decoding.rejection import verify_chain
from collab_llm_nodes.decoding.sampling import SamplingConfig, SparseDistribution
from collab_llm_nodes.decoding.weights import Weights
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.models.prompt import encode as encode_for_model
from collab_llm_nodes.protocols.base import Resources
from collab_llm_nodes.protocols.edge_cloud.client import DraftJob
from collab_llm_nodes.protocols.edge_cloud.drafter import Drafter
from collab_llm_nodes.protocols.edge_cloud.predraft import PreDraftConfig
from collab_llm_nodes.protocols.edge_cloud.runner import InProcessRunner
from collab_llm_nodes.protocols.edge_cloud.running import EdgeCloud, EdgeCloudConfig

GREEDY = SamplingConfig()
COUPLED = SamplingConfig(0.8, top_k=20, seed=3, law="coupled")
REJECTION = SamplingConfig(0.8, top_k=20, seed=3)
MAX_TOKENS = 16
PROMPT = encode(Prompt("x"))
FAKES = (FakeEngine(noise=0.5), FakeEngine(noise=0.9), FakeEngine(seed=5))


def voters(sampling: SamplingConfig, fakes: tuple[FakeEngine, ...] = FAKES) -> Drafter:
    first, *others = ((as_engine(fake), PROMPT) for fake in fakes)
    return Drafter(*first, sampling, others=others)


@cache
def target() -> Engine:
    return Engine(tiny_model("llama", exit_layers=(1, 2, 3)))


@cache
def drafts() -> tuple[Engine, ...]:
    noisy = [tiny_model("llama", head_noise=scale) for scale in (0.3, 0.6)]
    return (*map(Engine, noisy), Engine(tiny_model("llama", 7)))


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED])
def test_the_answer_is_the_targets(sampling: SamplingConfig) -> None:
    first, *others = drafts()
    prompt = tiny_prompt("llama")
    answer = InProcessRunner(first, target(), others=others).generate(prompt, sampling, MAX_TOKENS)
    encoded = encode_for_model(prompt, target().loaded)
    expected = reference.generate(target().loaded, encoded, sampling, MAX_TOKENS, target().eos)
    assert answer.tokens == tuple(expected)
    assert answer.metrics.accepted > 0


def test_the_cache_changes_no_sampled_answer() -> None:
    """A draft made ahead is the draft made in its turn: weights hang on the prefix alone."""
    first, *others = drafts()
    ahead = InProcessRunner(first, target(), others=others)
    none = PreDraftConfig(max_predrafts=0)
    plain = InProcessRunner(first, target(), predraft=none, others=others)
    hits = 0
    for seed in range(3):
        prompt, law = tiny_prompt("llama", seed), SamplingConfig(0.5, seed=seed)
        answer = ahead.generate(prompt, law, MAX_TOKENS)
        assert answer.tokens == plain.generate(prompt, law, MAX_TOKENS).tokens
        hits += answer.metrics.cache_hits
    assert hits > 0


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION])
def test_a_draft_does_not_depend_on_what_was_read_before(sampling: SamplingConfig) -> None:
    """Advances, rollbacks and catching up leave what a fresh drafter drafts."""
    used = voters(sampling)
    answers = [(), (5,), (5, 6, 7), (5, 6, 7, 8, 9, 2), (5, 6), (4, 4, 4, 4, 4), (5, 6, 7, 8, 1)]
    for answer in answers:
        used.advance(answer)
        draft = used.draft(DraftJob(0, answer, 4))
        assert draft == voters(sampling).draft(DraftJob(0, answer, 4))
        assert draft is not None
        used.advance((*answer, *draft.tokens[:2]))
        if draft.probs is not None:
            assert [row.law.tolist() for row in draft.probs] == [[1.0]] * len(draft.tokens)


def test_two_of_three_win_until_the_third_is_right() -> None:
    same, other = FakeEngine(seed=1), FakeEngine(seed=2)
    drafter = voters(GREEDY, (same, same, other))
    majority, minority = (fake.answer(PROMPT, GREEDY, 24) for fake in (same, other))
    before = drafter.draft(DraftJob(0, (), 2))
    assert before is not None
    assert before.tokens == majority[:2]
    prefix = minority[:8]
    after = drafter.draft(DraftJob(1, prefix, 2))
    assert after is not None
    assert after.tokens == other.answer(PROMPT, GREEDY, 10)[8:]
    assert after.tokens[0] != int(same.logits((*PROMPT.ids, *prefix)).argmax())


def test_each_block_of_an_answer_is_scored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    updates: list[Sequence[float | None]] = []
    update = Weights.update

    def counted(self: Weights, rates: Sequence[float | None]) -> None:
        updates.append(rates)
        update(self, rates)

    monkeypatch.setattr(Weights, "update", counted)
    drafter = voters(COUPLED)
    answer: tuple[int, ...] = ()
    for _ in range(20):
        draft = drafter.draft(DraftJob(0, answer, 4))
        assert draft is not None
        answer = (*answer, *draft.tokens[:2], 1 + draft.tokens[0] % 23)
    assert len(updates) == (len(answer) - 3) // 4, "those of the last draft's prefix"
    assert all(rate is not None for rates in updates for rate in rates)
    other = (*answer[:8], 1 + answer[8] % 23, *answer[9:])
    drafter.draft(DraftJob(0, other, 1))
    assert len(updates) == (len(answer) - 3) // 4 + len(other) // 4 - 2, "from where they part"


@pytest.mark.parametrize("seed", range(3))
def test_the_law_of_a_voted_round_is_the_targets(seed: int) -> None:
    """The drafter's real proposals are judged by the law, over all branches."""
    law, vocab, gamma = SamplingConfig(1.0), 24, 2
    draft = voters(law).draft(DraftJob(0, (), gamma))
    assert draft is not None
    model = TableModel(4, seed)
    # The table knows four tokens: the voted ones are folded onto them.
    tokens = tuple(token % 4 for token in draft.tokens)
    claimed = draft.probs
    assert claimed is not None
    assert all(len(q.ids) == 1 and q.ids[0] < vocab for q in claimed)
    q = [
        SparseDistribution(row.ids % np.int32(4), row.probs) for row in claimed
    ]  # as certain as what was sent

    def program(draws: Scripted) -> tuple[int, ...]:
        rows = rows_of(model(tokens[:i]) for i in range(len(tokens) + 1))
        outcome = verify_chain(rows, tokens, q, law, 0, frozenset({EOS}), draws)
        kept = tokens[: outcome.accepted]
        return kept if outcome.next_token < 0 else (*kept, outcome.next_token)

    found: dict[tuple[int, ...], float] = {}
    for weight, result in enumerate_program(program):
        assert isinstance(result, tuple)
        for sequence, p in autoregressive_law(model, gamma + 1, result).items():
            found[sequence] = found.get(sequence, 0.0) + weight * p
    assert total_variation(found, autoregressive_law(model, gamma + 1)) < 1e-12


def test_a_prediction_of_a_voted_draft_orders_guesses() -> None:
    drafter = voters(REJECTION)
    job = DraftJob(0, (5, 6), 3)
    draft = drafter.draft(job)
    assert draft is not None
    found = drafter.predict(job, draft, 5)
    assert len(found.beliefs) == len(draft.tokens)
    assert all(0 <= belief <= 1 for belief in found.beliefs)
    probabilities = [probability for _, probability in found.outcomes]
    assert probabilities == sorted(probabilities, reverse=True)


def test_a_draft_of_another_tokenizer_is_refused_by_name() -> None:
    other = FakeEngine()
    other.vocabulary = "another"
    other.loaded.config.path = "/models/other"
    engine = as_engine(FakeEngine())
    with pytest.raises(ConfigError) as told:
        EdgeCloud(engine, EdgeCloudConfig(), Resources(), others=[engine, as_engine(other)])
    assert told.value.field == "drafts[1]"
    assert "/models/other" in str(told.value)
    assert "/models/fake" in str(told.value)


def test_further_drafts_are_loaded_like_the_first() -> None:
    path = str(tiny_folder("llama"))
    model = ModelConfig(path, "bfloat16")
    first, second = EdgeCloudConfig(model, ("other",)).models()
    assert first == model
    assert second == ModelConfig("other", "bfloat16")
    assert EdgeCloudConfig(model).models() == [model]
