"""The exact output law by enumeration, and proof that the checks see a wrong law."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import ModuleType

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
from mutants import mutated

from collab_llm_nodes.decoding import randomness, rejection
from collab_llm_nodes.decoding.randomness import gumbel, gumbel_of, sample, uniform
from collab_llm_nodes.decoding.sampling import Distribution, SamplingConfig, to_wire
from collab_llm_nodes.errors import InvalidInput

REJECTION = SamplingConfig(temperature=1.0, law="rejection")
COUPLED = SamplingConfig(temperature=1.0, law="coupled")
GREEDY = SamplingConfig(temperature=0.0)

# ---------------------------------------------------------------- the checks; the law is a module


def one_round(
    law: ModuleType,
    target: TableModel,
    draft_model: TableModel,
    gamma: int,
    config: SamplingConfig,
    support: int,
    draws: Scripted | None,
    prefix: tuple[int, ...] = (),
) -> tuple[int, ...]:
    """Draft, judge, and return the extended sequence."""
    tokens: tuple[int, ...] = ()
    sent = []
    for i in range(gamma):
        q = Distribution.from_dense(draft_model(prefix + tokens))
        token, q_sent = law.propose(q, config, len(prefix) + i, support, draws)
        tokens += (token,)
        sent.append(q_sent)
    p = rows_of(target(prefix + tokens[:i]) for i in range(gamma + 1))
    outcome = law.verify_chain(
        p,
        tokens,
        sent if config.sends_probabilities else None,
        config,
        len(prefix),
        frozenset({EOS}),
        draws,
    )
    accepted = tokens[: outcome.accepted]
    assert EOS not in accepted[:-1], "went on after an end token"
    assert (outcome.next_token == -1) == (bool(accepted) and accepted[-1] == EOS), "lost a token"
    return prefix + accepted + (() if outcome.next_token < 0 else (outcome.next_token,))


def check_exact_law(law: ModuleType, vocab: int, gamma: int, support: int, seed: int) -> None:
    """One round, then plain decoding: the target's law (more rounds follow by induction)."""
    target, draft_model = TableModel(vocab, seed), TableModel(vocab, seed + 1000)
    length = gamma + 1
    output: dict[tuple[int, ...], float] = {}

    def program(draws: Scripted) -> object:
        return one_round(law, target, draft_model, gamma, REJECTION, support, draws)

    for weight, result in enumerate_program(program):
        assert isinstance(result, tuple)
        for sequence, p in autoregressive_law(target, length, result).items():
            output[sequence] = output.get(sequence, 0.0) + weight * p
    assert total_variation(output, autoregressive_law(target, length)) < 1e-12


def check_two_rounds(law: ModuleType, seed: int) -> None:
    target, draft_model = TableModel(3, seed), TableModel(3, seed + 1000)
    output: dict[tuple[int, ...], float] = {}

    def program(draws: Scripted) -> object:
        done = one_round(law, target, draft_model, 1, REJECTION, 3, draws)
        return (
            done
            if EOS in done
            else one_round(law, target, draft_model, 2, REJECTION, 3, draws, done)
        )

    for weight, result in enumerate_program(program):
        assert isinstance(result, tuple)
        for sequence, p in autoregressive_law(target, 5, result).items():
            output[sequence] = output.get(sequence, 0.0) + weight * p
    assert total_variation(output, autoregressive_law(target, 5)) < 1e-12


def check_own_token_laws(law: ModuleType, vocab: int, gamma: int, seed: int) -> None:
    """Coupled: whatever the draft, the output is the target's own picks, whose law is p."""
    target = TableModel(vocab, seed)
    for draft in itertools.product(range(vocab), repeat=gamma):
        p = rows_of(target(draft[:i]) for i in range(gamma + 1))

        class Fixed(Scripted):
            """The target's pick at each position is one fixed random choice."""

            picks: dict[int, int] = {}

            def pick(self, p: Distribution, position: int, purpose: str) -> int:
                assert purpose == "gumbel"
                if position not in self.picks:
                    self.picks[position] = super().pick(p, position, purpose)
                return self.picks[position]

        def program(
            script: Scripted, p: list[Distribution] = p, draft: tuple[int, ...] = draft
        ) -> object:
            draws = Fixed(())
            draws.left, draws.picks = script.left, {}
            out = law.verify_chain(p, draft, None, COUPLED, 7, frozenset({EOS}), draws)
            return out, dict(draws.picks)

        mass = 0.0
        for weight, result in enumerate_program(program):
            assert isinstance(result, tuple)
            outcome, picks = result
            own = [picks[t] for t in sorted(picks)]
            assert sorted(picks) == list(range(7, 7 + len(picks))), "keyed by the wrong position"
            emitted = [*draft[: outcome.accepted]]
            if outcome.next_token >= 0:
                emitted.append(outcome.next_token)
            assert emitted == own, "output differs from the target's own tokens"
            assert EOS not in own[:-1]
            assert (outcome.next_token < 0) == (
                outcome.accepted > 0 and own[-1] == EOS and outcome.accepted == len(own)
            )
            mass += weight
        assert abs(mass - 1) < 1e-12


def check_boundaries(law: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """u = 0 accepts nothing impossible, u just below 1 accepts everything certain."""
    monkeypatch.setattr(law, "uniform", lambda *_: 0.0)
    assert not law.KeyedDraws(1).accept(0.0, 3, "accept")
    assert law.KeyedDraws(1).accept(2.0**-53, 3, "accept")
    monkeypatch.setattr(law, "uniform", lambda *_: 1.0 - 2.0**-53)
    assert law.KeyedDraws(1).accept(1.0, 3, "accept")
    assert not law.KeyedDraws(1).accept(1.0 - 2.0**-53, 3, "accept")
    monkeypatch.undo()


def check_keyed_law(law: ModuleType, config: SamplingConfig, seeds: int = 3000) -> None:
    """Chi-square over seeds: the keyed streams are independent where the law needs it."""
    target, draft_model = TableModel(3, 5), TableModel(3, 1005)
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(seeds):
        keyed = SamplingConfig(temperature=1.0, law=config.law, seed=seed)
        tokens: tuple[int, ...] = ()
        while len(tokens) < 3 and EOS not in tokens:
            tokens = one_round(law, target, draft_model, 2, keyed, 3, None, tokens)
        counts[tokens[:3]] = counts.get(tokens[:3], 0) + 1
    expected = autoregressive_law(target, 3)
    assert all(expected.get(k, 0) > 0 for k in counts)
    likely = {k: v * seeds for k, v in expected.items() if v * seeds >= 5}
    chi2 = sum((counts.get(k, 0) - e) ** 2 / e for k, e in likely.items())
    # mean + 4 standard deviations of chi-square: about 1e-4, and the seeds are fixed
    freedom = len(likely) - 1
    assert chi2 < freedom + 4 * (2 * freedom) ** 0.5


def check_no_stream_is_read_twice(law: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that every random number serves one decision within one round."""
    read: list[tuple[object, ...]] = []

    def recorded(*key: object) -> float:
        read.append(key)
        return uniform(*key)  # type: ignore[arg-type]

    monkeypatch.setattr(law, "uniform", recorded)
    for seed in range(30):
        read.clear()
        config = SamplingConfig(temperature=1.0, seed=seed)
        one_round(law, TableModel(3, 5), TableModel(3, 1005), 2, config, 3, None)
        assert len(read) == len(set(read)), "one random number served two decisions"
    monkeypatch.undo()


def check_all(law: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    check_no_stream_is_read_twice(law, monkeypatch)
    check_boundaries(law, monkeypatch)
    for seed in range(2):
        check_exact_law(law, vocab=3, gamma=2, support=3, seed=seed)
        check_exact_law(law, vocab=4, gamma=1, support=2, seed=seed)
        check_own_token_laws(law, vocab=3, gamma=2, seed=seed)
    check_two_rounds(law, seed=3)
    check_keyed_law(law, REJECTION)
    check_keyed_law(law, COUPLED)


# ---------------------------------------------------------------- the real law


@pytest.mark.parametrize(("vocab", "gamma"), [(2, 0), (2, 3), (3, 2), (4, 2), (5, 1), (5, 3)])
@pytest.mark.parametrize("truncate", [False, True])
def test_rejection_law_is_exact(vocab: int, gamma: int, truncate: bool) -> None:
    check_exact_law(rejection, vocab, gamma, support=2 if truncate else vocab, seed=vocab + gamma)


@pytest.mark.parametrize(("vocab", "gamma"), [(2, 3), (3, 2), (5, 2)])
def test_coupled_law_is_exact(vocab: int, gamma: int) -> None:
    check_own_token_laws(rejection, vocab, gamma, seed=vocab)


def test_all_checks_pass_on_the_real_law(monkeypatch: pytest.MonkeyPatch) -> None:
    check_all(rejection, monkeypatch)


def test_greedy_accepts_the_argmax_only() -> None:
    p = rows_of(np.eye(4)[[2, 1, 3]])
    eos = frozenset({EOS})

    def verify(*draft: int) -> tuple[int, int]:
        outcome = rejection.verify_chain(p[: len(draft) + 1], draft, None, GREEDY, 0, eos)
        return outcome.accepted, outcome.next_token

    assert verify(2, 1) == (2, 3)
    assert verify(2, 3) == (1, 1)
    assert verify(0, 1) == (0, 2)
    assert verify() == (0, 2)
    p = rows_of(np.eye(4)[[2, EOS, 3]])
    assert verify(2, EOS) == (2, -1)
    assert verify(2, 1) == (1, EOS)


def test_exits_and_final_share_random_numbers() -> None:
    """The same distributions give the same outcome, close ones mostly do."""
    target = TableModel(5, 3)
    config = SamplingConfig(temperature=1.0, seed=9)
    same = 0
    for position in range(200):
        own = Distribution.from_dense(target((1,)))
        draft, sent = rejection.propose(own, config, position, 5)
        p = np.stack([target((2,)), target((2, draft))])
        near = np.stack([0.95 * row + 0.01 for row in p])
        near /= near.sum(axis=1, keepdims=True)
        assert sent is not None
        final, exit_ = (
            rejection.verify_chain(rows_of(x), [draft], [sent], config, position, frozenset())
            for x in (p, near)
        )
        same += final == exit_
    assert same > 180


@pytest.mark.parametrize(
    ("draft", "probs", "config", "field"),
    [
        ([1, 1], None, GREEDY, "draft"),
        ([7], None, GREEDY, "draft"),
        ([-1], None, GREEDY, "draft"),
        ([1], None, REJECTION, "probs"),
        ([1], [np.array([0.0, 1.0])], GREEDY, "probs"),
        ([1], [np.array([0.0, 1.0])], COUPLED, "probs"),
        ([1], [np.array([0.0, 1.0])] * 2, REJECTION, "probs"),
        ([0], [np.array([0.0, 1.0])], REJECTION, "probs[0]"),
        ([1], [np.array([0.0, 1.0, 0.0, 0.5])], REJECTION, "probs[0].ids"),
    ],
)
def test_malformed_drafts_are_typed_errors(
    draft: list[int], probs: list[np.ndarray] | None, config: SamplingConfig, field: str
) -> None:
    p = rows_of(np.full((2, 2), 0.5))
    q = None if probs is None else [to_wire(x, 4) for x in rows_of(probs)]
    with pytest.raises(InvalidInput) as caught:
        rejection.verify_chain(p, draft, q, config, 0, frozenset())
    assert caught.value.field == field


# ---------------------------------------------------------------- mutations must turn a check red

MUTATIONS = {
    "ratio swapped": (
        "p[token] / q[token]",
        "q[token] / max(p[token], 1e-9)",
    ),
    "residual swapped": (
        "np.maximum(p.probs[places] - q.probs[shared], 0.0)",
        "np.maximum(q.probs[shared] - p.probs[places], 0.0)",
    ),
    "residual is p": ("np.maximum(p.probs[places] - q.probs[shared], 0.0)", "p.probs[places]"),
    "residual without the rest": ("residual = p.probs.copy()", "residual = 0 * p.probs"),
    "neighbour for the token": ("shared = p.ids[places] == q.ids", "shared = places >= 0"),
    "correction token dropped": ("Outcome(i, stands)", "Outcome(i, -1)"),
    "rejected token kept": ("return Outcome(i, stands)", "return Outcome(i + 1, stands)"),
    "bonus dropped": (
        'Outcome(gamma, draws.pick(p[gamma], position + gamma, "bonus"))',
        "Outcome(gamma, -1)",
    ),
    "bonus from the row before": ("draws.pick(p[gamma], ", "draws.pick(p[gamma - 1], "),
    "<= for <": ("purpose) < probability", "purpose) <= probability"),
    "end token ignored": ("        if token in eos:", "        if False:"),
    "end token ignored, own token": ("        if own in eos:", "        if False:"),
    "drawn before rounding": (
        'draws.pick(_law(sent, q.size), position, "draft")',
        'draws.pick(q, position, "draft")',
    ),
    "accepts what differs": ("draft[i] != own", "draft[i] == own"),
    "keyed one late": (
        "_own_token(p_i, config, position + i",
        "_own_token(p_i, config, position + i + 1",
    ),
    "one key for all": ("_own_token(p_i, config, position + i", "_own_token(p_i, config, position"),
    "accept shares the draft's stream": ('= ("accept", "recover")', '= ("draft", "recover")'),
    "recover shares the accept's stream": ('= ("accept", "recover")', '= ("accept", "accept")'),
    "noise without p": ("np.log(p.probs) + noise", "noise"),
    "noise subtracted": ("np.log(p.probs) + noise", "np.log(p.probs) - noise"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutated_law_is_caught(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = mutated(rejection, *MUTATIONS[name], tmp_path, monkeypatch)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
        check_all(mutant, patch)


# ---------------------------------------------------------------- random streams


def test_streams_are_fixed_for_all_time() -> None:
    """Raw Philox bits: the same numbers on every machine and numpy version."""
    assert uniform(0, 0, "draft") == pytest.approx(STREAM[0], abs=0)
    assert uniform(2**64 + 5, 123, "accept") == uniform(5, 123, "accept") == STREAM[1]
    assert gumbel(7, 3, 4)[2] == pytest.approx(STREAM[2], rel=1e-14)


STREAM = (0.8133540609793564, 0.8069382791861253, -0.06475608070376813)


def test_streams_differ_by_seed_position_and_purpose() -> None:
    keys = itertools.product(range(10), range(50), randomness.PURPOSES)
    values = [uniform(*key) for key in keys]
    assert len(set(values)) == len(values)
    assert 0.47 < np.mean(values) < 0.53
    assert min(values) >= 0
    assert max(values) < 1
    with pytest.raises(KeyError):
        uniform(0, 0, "typo")


def test_a_smaller_vocabulary_gets_a_prefix_of_the_noise() -> None:
    assert np.array_equal(gumbel(1, 2, 100)[:37], gumbel(1, 2, 37))


def test_the_noise_of_some_tokens_is_that_of_all() -> None:
    ids = np.array([0, 3, 50, 99])
    assert np.array_equal(gumbel_of(1, 2, 100, ids), gumbel(1, 2, 100)[ids])
    assert np.array_equal(gumbel_of(1, 2, 100, np.arange(100)), gumbel(1, 2, 100))


def test_coupled_pick_follows_p() -> None:
    p = np.array([0.5, 0.0, 0.3, 0.2])
    law = Distribution.from_dense(p)
    picks = [rejection.KeyedDraws(3).pick(law, t, "gumbel") for t in range(4000)]
    share = np.bincount(picks, minlength=4) / len(picks)
    assert share[1] == 0
    assert np.abs(share - p).max() < 0.03


def test_sample_never_returns_an_impossible_token() -> None:
    p = np.array([0.0, 0.3, 0.0, 0.7, 0.0])
    last = 1.0 - 2.0**-53
    assert [sample(p, u) for u in (0.0, 0.299, 0.31, last)] == [1, 1, 3, 3]
    tenths = np.full(10, 0.1)  # sums to 1 - 1e-16
    assert sample(np.append(tenths, 0.0), last) == 9
    assert sample(7 * p, 0.31) == 3
