"""The majority's path, by hand and against a brute-force tree; its law, exactly."""

from __future__ import annotations

import dataclasses

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
from hypothesis import given
from hypothesis import strategies as st

from collab_llm_nodes.decoding.rejection import propose, verify_chain
from collab_llm_nodes.decoding.sampling import Distribution, SamplingConfig, SparseDistribution
from collab_llm_nodes.decoding.vote import Vote, deciding, proposal, vote

REJECTION = SamplingConfig(temperature=1.0)
COUPLED = SamplingConfig(temperature=1.0, law="coupled")
GREEDY = SamplingConfig()

WE, LIKE, LIKED, APPLE, PEAR, IT = range(1, 7)


@given(
    st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=1, max_size=4),
    st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]), min_size=4, max_size=4),
)
def test_the_drafts_of_those_that_decide_give_the_same_vote(
    drafts: list[tuple[int, ...]], weights: list[float]
) -> None:
    asked = deciding(set(range(len(drafts))), weights)
    some = [draft if model in asked else None for model, draft in enumerate(drafts)]
    assert vote(some, weights) == vote(drafts, weights)


def test_a_model_decides_alone_where_it_outweighs_the_others_together() -> None:
    assert deciding({0, 1, 2}, [0.2, 1.0, 0.7]) == {1}
    assert deciding({0, 1, 2}, [0.3, 1.0, 0.7]) == {0, 1, 2}
    assert deciding({0, 2}, [0.3, 1.0, 0.7]) == {2}
    assert deciding(set(), []) == set()


def test_the_papers_figure_5() -> None:
    drafts = [(WE, LIKE, APPLE), (WE, LIKE, PEAR), (WE, LIKED, IT)]
    assert vote(drafts, [0.6, 0.5, 0.7]) == Vote((WE, LIKE, APPLE), 0)
    assert vote(drafts, [0.3, 0.3, 0.7]) == Vote((WE, LIKED, IT), 2)


@pytest.mark.parametrize(
    ("drafts", "weights", "expected"),
    [
        pytest.param([(1, 2)], [0.2], Vote((1, 2), 0), id="one model"),
        pytest.param([(1,), (2,)], [0.5, 0.5], Vote((1,), 0), id="tie: the first"),
        pytest.param([(1,), (1,)], [0.4, 0.5], Vote((1,), 1), id="shared path: the heaviest"),
        pytest.param([(1,), (1,)], [0.5, 0.5], Vote((1,), 0), id="shared path: the first"),
        pytest.param(
            [(1,), (1,), (2,)], [0.25, 0.25, 0.5], Vote((2,), 2), id="tie: the heaviest model's"
        ),
        pytest.param([(1,), (1, 2)], [0.9, 0.1], Vote((1, 2), 1), id="goes on after a short one"),
        pytest.param([None, (3,)], [9.0, 0.1], Vote((3,), 1), id="a model failed"),
        pytest.param([(1,), (3,)], [0.0, 0.1], Vote((3,), 1), id="weight 0 has no say"),
        pytest.param([(), ()], [0.4, 0.6], Vote((), 1), id="empty drafts"),
        pytest.param([None, None], [1.0, 1.0], Vote((), -1), id="all failed"),
        pytest.param([(1,), (2,)], [0.0, 0.0], Vote((), -1), id="all weights 0"),
    ],
)
def test_defined_cases(
    drafts: list[tuple[int, ...] | None], weights: list[float], expected: Vote
) -> None:
    assert vote(drafts, weights) == expected


def walk(drafts: list[tuple[int, ...]], weights: list[float]) -> tuple[int, ...]:
    """The paper's walk over node weights, written as its formula."""
    path: tuple[int, ...] = ()
    while True:
        nodes = {
            d[: len(path) + 1] for d in drafts if len(d) > len(path) and d[: len(path)] == path
        }
        if not nodes:
            return path
        weigh = {
            u: sum(w for d, w in zip(drafts, weights, strict=True) if d[: len(u)] == u)
            for u in nodes
        }
        path = max(weigh, key=weigh.__getitem__)


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=5).map(tuple), min_size=1, max_size=6),
    st.permutations([1.0, 2.0, 4.0, 8.0, 16.0, 32.0]),
)
def test_any_tree_is_walked_as_the_formula_says(
    drafts: list[tuple[int, ...]], weights: list[float]
) -> None:
    own = weights[: len(drafts)]  # powers of two: no two sets of models weigh the same
    made = vote(drafts, own)
    assert made.tokens == walk(drafts, own)
    assert drafts[made.model] == made.tokens
    best = max(w for d, w in zip(drafts, own, strict=True) if d == made.tokens)
    assert own[made.model] == best


# ---------------------------------------------------------------- the law of the output


def law_of_votes(seed: int, s: int, *, printed_rule: bool, argmax: bool = False) -> float:
    """Return the total variation between the target's law and that of one voted round."""
    vocab = 3
    target = TableModel(vocab, seed)
    models = [TableModel(vocab, seed + 100 * (i + 1)) for i in range(3)]
    weights = [1.0, 0.9, 0.8]

    def program(draws: Scripted) -> tuple[int, ...]:
        drafts: list[tuple[int, ...]] = []
        sent: list[list[SparseDistribution]] = []
        for model in models:
            tokens: tuple[int, ...] = ()
            q: list[SparseDistribution] = []
            while len(tokens) < s and EOS not in tokens:
                if argmax:
                    token = int(model(tokens).argmax())
                else:
                    own = Distribution.from_dense(model(tokens))
                    token, law = propose(own, REJECTION, len(tokens), vocab, draws)
                    assert law is not None
                    q.append(law)
                tokens += (token,)
            drafts.append(tokens)
            sent.append(q)
        made = vote(drafts, weights)
        rows = rows_of(target(made.tokens[:i]) for i in range(len(made.tokens) + 1))
        claimed = sent[made.model] if printed_rule else proposal(made.tokens, REJECTION)
        outcome = verify_chain(rows, made.tokens, claimed, REJECTION, 0, frozenset({EOS}), draws)
        kept = made.tokens[: outcome.accepted]
        return kept if outcome.next_token < 0 else (*kept, outcome.next_token)

    law: dict[tuple[int, ...], float] = {}
    for weight, result in enumerate_program(program):
        assert isinstance(result, tuple)
        for sequence, p in autoregressive_law(target, s + 1, result).items():
            law[sequence] = law.get(sequence, 0.0) + weight * p
    return total_variation(law, autoregressive_law(target, s + 1))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("argmax", [False, True])
def test_a_voted_token_as_a_certain_proposal_keeps_the_targets_law(seed: int, argmax: bool) -> None:
    assert law_of_votes(seed, 1, printed_rule=False, argmax=argmax) < 1e-12
    assert law_of_votes(seed, 2, printed_rule=False, argmax=True) < 1e-12


def test_the_printed_rule_is_biased() -> None:
    """The paper's min(1, p/q) with the voted model's q, for three random triples of models."""
    biases = [law_of_votes(seed, 1, printed_rule=True) for seed in range(3)]
    assert biases == pytest.approx([0.0595, 0.0779, 0.0168], abs=5e-4)


def test_a_proposal_exists_under_the_rejection_law_only() -> None:
    claimed = proposal((4, 7), REJECTION)
    assert claimed is not None
    assert [int(q.ids[0]) for q in claimed] == [4, 7]
    assert all(q.law.tolist() == [1.0] for q in claimed)
    assert proposal((4, 7), COUPLED) is None
    assert proposal((4, 7), dataclasses.replace(REJECTION, temperature=0.0)) is None
    assert proposal((4, 7), GREEDY) is None
