"""The verifier's side of a session at a server that only scores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_links import GREEDY, OPEN

from collab_llm_nodes.decoding.sampling import SamplingConfig, certain, distributions
from collab_llm_nodes.errors import InvalidInput, ProtocolError
from collab_llm_nodes.protocols.edge_cloud.messages import Draft, Open, Verdict
from collab_llm_nodes.protocols.edge_cloud.stock.server import check_law, laws_of
from collab_llm_nodes.protocols.edge_cloud.stock.session import (
    Action,
    Score,
    StockSession,
    Stream,
)

EOS, SIZE = 1, 10
ANSWER = (5, 6, 7, 8, 9, 4, 3, 2, EOS)


def session(opened: Open = OPEN, ahead: int = 2) -> StockSession:
    return StockSession(opened, eos=frozenset({EOS}), vocab_size=SIZE, room=100, ahead=ahead)


def own_token(prefix: tuple[int, ...]) -> int:
    """Return the target's token after ``prefix``: the answer's, or one that leaves it for good."""
    right = prefix == ANSWER[: len(prefix)] and len(prefix) < len(ANSWER)
    return ANSWER[len(prefix)] if right else 2 + (sum(prefix) + len(prefix)) % (SIZE - 2)


def score_of(actions: list[Action]) -> Score:
    """Return the only action, which asks for scores."""
    (action,) = actions
    assert isinstance(action, Score)
    return action


def answer(machine: StockSession, score: Score, seconds: float = 0.1) -> list[Action]:
    prefixes = [(*score.prefix, *score.tokens[:n]) for n in range(len(score.tokens) + 1)]
    laws = [certain(own_token(prefix), SIZE) for prefix in prefixes]
    return machine.on_scores(score, laws, seconds)


def test_a_draft_asks_for_its_scores_and_they_make_the_verdict() -> None:
    machine = session()
    score = score_of(machine.on_draft(Draft(0, 0, (5, 6, 9))))
    assert score == Score((), (5, 6, 9))
    assert answer(machine, score) == [Verdict(0, (5, 6, 7), 2, False, 0.1)]


def test_a_draft_that_was_scored_ahead_is_judged_as_soon_as_its_round_comes() -> None:
    machine = session()
    now = score_of(machine.on_draft(Draft(0, 0, (5, 6))))
    ahead = score_of(machine.on_draft(Draft(1, 3, (8, 9), after=(5, 6, 7))))
    assert ahead == Score((5, 6, 7), (8, 9))
    assert answer(machine, ahead) == []
    verdicts = answer(machine, now)
    assert verdicts == [Verdict(0, (5, 6, 7), 2, False, 0.1), Verdict(1, (8, 9, 4), 2, False, 0.1)]


def test_no_more_drafts_are_scored_ahead_than_allowed() -> None:
    machine = session(ahead=1)
    machine.on_draft(Draft(0, 0, (5, 6)))
    assert len(machine.on_draft(Draft(1, 3, (8, 9), after=(5, 6, 7)))) == 1
    assert machine.on_draft(Draft(1, 2, (8, 9), after=(5, 7))) == []
    assert session(ahead=0).on_draft(Draft(0, 0, (5, 6))) == [Score((), (5, 6))]


def test_a_draft_ahead_that_waited_for_a_place_is_scored_after_a_void_one() -> None:
    machine = session(ahead=1)
    now = score_of(machine.on_draft(Draft(0, 0, (5, 9))))
    machine.on_draft(Draft(1, 3, (8, 9), after=(5, 9, 4)))  # void: 9 is not accepted
    machine.on_draft(Draft(1, 2, (7, 8), after=(5, 6)))
    assert answer(machine, now) == [Verdict(0, (5, 6), 1, False, 0.1), Score((5, 6), (7, 8))]


def test_scores_of_void_drafts_change_nothing() -> None:
    machine = session()
    now = score_of(machine.on_draft(Draft(0, 0, (5, 9))))
    void = score_of(machine.on_draft(Draft(1, 3, (8, 9), after=(5, 9, 4))))
    answer(machine, now)
    assert answer(machine, void) == []
    assert machine.on_draft(Draft(1, 2, (7,))) == [Score((5, 6), (7,))]


def test_a_lost_request_matters_only_if_its_round_has_come() -> None:
    machine = session()
    now = score_of(machine.on_draft(Draft(0, 0, (5, 6))))
    ahead = score_of(machine.on_draft(Draft(1, 3, (8, 9), after=(5, 6, 7))))
    assert machine.on_lost(now)
    assert not machine.on_lost(ahead)
    assert answer(machine, now)[-1] == ahead  # asked again


def test_a_server_that_decodes_alone_streams() -> None:
    machine = session()
    (stream,) = machine.on_draft(Draft(0, 0, (), autoregressive_rounds=23))
    assert stream == Stream((), 24)
    verdicts: list[Action] = []
    for n in range(len(ANSWER)):
        verdicts += answer(machine, Score(ANSWER[:n], ()))
    assert [v.tokens for v in verdicts if isinstance(v, Verdict)] == [(t,) for t in ANSWER]
    assert len(verdicts) == len(ANSWER)
    assert machine.finished


def test_a_sampled_answer_is_not_left_to_the_random_numbers_of_the_server() -> None:
    machine = session(replace(OPEN, sampling=SamplingConfig(1.0, top_k=4)))
    score = score_of(machine.on_draft(Draft(0, 0, (), (), autoregressive_rounds=23)))
    assert score == Score((), ())
    verdict, following = answer(machine, score)
    assert isinstance(verdict, Verdict)
    assert following == Score(verdict.tokens, ())


def test_a_replayed_session_continues_after_its_tokens() -> None:
    machine = session(replace(OPEN, replay=(5, 6, 7), round=1))
    score = score_of(machine.on_draft(Draft(1, 3, (8,))))
    assert answer(machine, score) == [Verdict(1, (8, 9), 1, False, 0.1)]


drafts = st.lists(st.integers(2, SIZE - 1), max_size=4).map(tuple)


@given(data=st.data())
def test_any_drafts_and_any_order_of_scores_give_the_targets_own_answer(
    data: st.DataObject,
) -> None:
    machine = session(ahead=data.draw(st.integers(0, 3)))
    verdicts: list[Verdict] = []
    asked: list[Score] = []
    offered = -1  # the latest round that a draft was offered for
    while not machine.finished:
        so_far, round_ = _tokens(verdicts), len(verdicts)
        if offered < round_:
            right = ANSWER[len(so_far) : len(so_far) + 3]
            tokens = right if data.draw(st.booleans()) else data.draw(drafts)
            offered = round_
            # Stale, if one for this round was pushed ahead.
            actions = machine.on_draft(Draft(round_, len(so_far), tokens))
        elif data.draw(st.booleans()):
            after = data.draw(drafts.filter(len))
            start = len(so_far) + len(after)
            actions = machine.on_draft(Draft(round_ + 1, start, (4,), after=after))
        else:
            actions = answer(machine, asked.pop(data.draw(st.integers(0, len(asked) - 1))))
        asked += [action for action in actions if isinstance(action, Score)]
        verdicts += [action for action in actions if isinstance(action, Verdict)]
    assert _tokens(verdicts) == ANSWER


def _tokens(told: list[Verdict]) -> tuple[int, ...]:
    return tuple(t for verdict in told for t in verdict.tokens)


def test_top_log_probabilities_determine_a_law_limited_by_top_k() -> None:
    logits = np.random.default_rng(0).normal(size=(3, SIZE)) * 3
    sampling = SamplingConfig(0.7, top_k=4, top_p=0.9)
    shifted = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    rows = [{int(i): float(row[i]) for i in np.argsort(-row)[:4]} for row in shifted]
    for ours, right in zip(
        laws_of(rows, sampling, SIZE), distributions(logits, sampling), strict=True
    ):
        assert ours.ids.tolist() == right.ids.tolist()
        assert ours.probs == pytest.approx(right.probs, abs=1e-12)


def test_a_law_that_likeliest_tokens_do_not_determine_is_refused() -> None:
    check_law(GREEDY, guided=True)
    check_law(SamplingConfig(1.0, top_k=20), guided=False)
    for sampling, guided in (
        (SamplingConfig(1.0, top_p=0.9), False),
        (SamplingConfig(1.0, top_k=20), True),
    ):
        with pytest.raises(InvalidInput):
            check_law(sampling, guided=guided)


@pytest.mark.parametrize(
    ("row", "sampling"),
    [
        ({}, GREEDY),
        ({SIZE: 0.0}, GREEDY),
        ({-1: 0.0}, GREEDY),
        ({3: -1.0, 4: -2.0}, SamplingConfig(1.0, top_k=3)),
    ],
)
def test_rows_that_lack_tokens_or_hold_others_are_refused(
    row: dict[int, float], sampling: SamplingConfig
) -> None:
    with pytest.raises(ProtocolError, match="log-probabilities"):
        laws_of([row], sampling, SIZE)
