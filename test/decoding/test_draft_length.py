"""Acceptance by runs of draft tokens, and trials within a share of the time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from collab_llm_nodes.decoding.draft_length import Acceptance, Trials


def test_acceptance_of_all_lengths_from_drafts_of_one() -> None:
    known = Acceptance()
    assert known.tokens(5) == 1.0
    rng, run = np.random.default_rng(0), 0
    for _ in range(20_000):
        right = rng.random(4) < 0.7
        accepted = 4 if right.all() else int(right.argmin())
        known.add(run, 4, accepted)
        run = run + 4 if accepted == 4 else 0
    for s in range(5):
        assert known.tokens(s) == pytest.approx(sum(0.7**i for i in range(s + 1)), rel=0.05)
    assert known.tokens(9) == pytest.approx(sum(0.7**i for i in range(10)), rel=0.05), "as before"
    ended = sum((0.7 * 0.9) ** i for i in range(5))
    assert known.tokens(4, ends=0.1) == pytest.approx(ended, rel=0.05), "nothing follows an end"


def test_a_place_that_few_drafts_have_reached_is_like_the_one_before() -> None:
    known = Acceptance()
    for accepted in (0, 1) * 100:
        known.add(0, 1, accepted)
    known.add(0, 2, 2)
    known.add(0, 2, 2)
    assert known.tokens(2) - known.tokens(1) < 0.6 * (known.tokens(1) - 1.0)
    for _ in range(4000):
        known.add(0, 2, 2)
        known.add(2, 2, 2)
    assert known.tokens(2) == pytest.approx(3.0, rel=0.1)


def passages(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Draw a text of easy and hard passages: whether a draft has each token right, [tokens]."""
    right = np.zeros(tokens, bool)
    easy = True
    for place in range(tokens):
        easy ^= rng.random() < 0.1
        right[place] = rng.random() < (0.97 if easy else 0.3)
    return right


def rounds(right: np.ndarray, s: int) -> Iterator[int]:
    """Yield the accepted tokens of each round with drafts of ``s`` tokens."""
    place = 0
    while place + s < len(right):
        accepted = int(np.append(right[place : place + s], False).argmin())
        yield accepted
        place += accepted + 1


@pytest.mark.parametrize("drafted", [2, 5, 9])
def test_drafts_of_one_length_predict_others_where_passages_are_easy_and_hard(
    drafted: int,
) -> None:
    """Counts by place in the draft would give 8 % too few tokens for 5 from drafts of 9."""
    right = passages(np.random.default_rng(0), 20_000)
    known, run = Acceptance(), 0
    for accepted in rounds(right, drafted):
        known.add(run, drafted, accepted)
        run = run + drafted if accepted == drafted else 0
    for s in range((drafted + 1) // 2, 2 * drafted + 1):
        truth = 1.0 + np.mean([*rounds(right, s)])
        assert known.tokens(s) == pytest.approx(truth, rel=0.06)


def test_a_draft_after_an_unknown_run_is_no_evidence() -> None:
    known = Acceptance()
    known.add(None, 1, 1)
    assert known.tokens(1) == 1.0


def test_what_the_end_of_an_answer_cuts_off_is_not_accepted() -> None:
    known = Acceptance()
    for _ in range(2000):
        known.add(0, 4, 1)  # of one token, and accepted whole
    assert known.tokens(4) == pytest.approx(2.0, rel=0.01)


def test_the_latest_drafts_count() -> None:
    known = Acceptance()
    for number in range(20_000):
        known.add(0, 1, int(number >= 10_000))
    assert known.tokens(1) == pytest.approx(2.0, rel=0.01)


def test_trials_lose_their_share_of_the_time_and_no_more() -> None:
    trials = Trials[str](share=0.01, every=4)
    losses = [("dear", 1.0), ("cheap", 0.02), ("free", -0.1)]
    turns = [trials.choose("best", 2.0, losses) for _ in range(10_000)]
    assert set(turns) == {"best", "dear", "cheap", "free"}
    lost = sum(dict(losses).get(turn, 0.0) for turn in turns if turn != "free")
    assert lost < 0.01 * 2.0 * len(turns)
    assert turns.count("dear") == pytest.approx(10_000 * 2.0 * 0.01 / 3, rel=0.05)
    free = [turn for turn, chosen in enumerate(turns) if chosen == "free"]
    assert min(np.diff(free)) >= 4


def test_without_a_share_only_what_loses_nothing_is_tried() -> None:
    trials = Trials[int](share=0.0, every=1)
    assert {trials.choose(4, 1.0, [(8, 0.001)]) for _ in range(100)} == {4}
    assert trials.choose(4, 1.0, [(8, 0.0)]) == 8
    trials.share = 1.0
    assert trials.choose(4, 1.0, [(8, 0.5)]) == 8
