"""The laws of speculative aggregation: exact by enumeration, and wrong versions are noticed."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from enumeration import Scripted, TableModel, enumerate_program
from mutants import mutated

from collab_llm_nodes.decoding import aggregation
from collab_llm_nodes.decoding.aggregation import MOST_LOG_WEIGHT, AggregationConfig, Party
from collab_llm_nodes.decoding.sampling import SparseDistribution
from collab_llm_nodes.errors import ConfigError, InvalidInput, ModelError

WEIGHTS = [(0.0, 0.0), (1.2, -0.3), (-2.0, 1.5), (-math.inf, 0.4), (0.4, -math.inf)]

# ------------------------------------------------------- the checks; the law is a module


def reference(p: np.ndarray, top_p: float, temperature: float = 1.0) -> np.ndarray:
    """Truncate, renormalise, round to fp16 and renormalise, written anew."""
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    kept, mass = np.zeros(len(p)), 0.0
    for i in order:
        if mass >= top_p:
            break
        kept[i] = p[i]
        mass += p[i]
    kept = (kept / kept.sum()).astype(np.float16).astype(np.float64)
    kept = kept ** (1.0 / temperature)
    return kept / kept.sum()


def target_law(
    sides: tuple[np.ndarray, np.ndarray], weights: tuple[float, float], temperature: float = 1.0
) -> np.ndarray:
    """Eq. 4, written anew, of sides that are truncated already; weights travel as float32."""
    h = np.exp(np.array(weights, np.float32).astype(np.float64) - max(weights))
    mixed = (h[0] * sides[0] + h[1] * sides[1]) / h.sum()
    mixed = mixed ** (1.0 / temperature)
    return mixed / mixed.sum()


def enumerated(
    law: ModuleType,
    config: object,
    sides: tuple[np.ndarray, np.ndarray],
    weights: tuple[float, float],
    temperature: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the law of the target token [V], and the shares of accepted drafts [2]."""
    vocab = len(sides[0])
    output, accepted = np.zeros(vocab), np.zeros(2)

    def program(draws: Scripted) -> object:
        own = law.AggregationLaw(config, vocab, temperature, 0, draws)
        drafts = tuple(own.propose(sides[s], weights[s], 5, law.Party(s)) for s in range(2))
        return own.judge(drafts, 5)

    for weight, judged in enumerate_program(program):
        output[judged.token] += weight  # type: ignore[attr-defined]
        accepted += weight * np.array(judged.accepted)  # type: ignore[attr-defined]
    return output, accepted


def check_exact(law: ModuleType, name: str, gamma: float, top_p: float, temperature: float) -> None:
    config = law.AggregationConfig(law=name, gamma=gamma, top_p=top_p)
    for seed, weights in enumerate(WEIGHTS):
        sides = (TableModel(5, seed)((1,)), TableModel(5, seed + 50)((1,)))
        got, accepted = enumerated(law, config, sides, weights, temperature)
        kept = tuple(reference(p, top_p) for p in sides)
        want = target_law(kept, weights, temperature)  # type: ignore[arg-type]
        assert 0.5 * np.abs(got - want).sum() < 1e-12
        if name == "coin":
            own = tuple(reference(p, top_p, temperature) for p in sides)
            shown = {(-math.inf, 0.4): 0.0, (0.4, -math.inf): 1.0}.get(weights, gamma)
            expected = law.coin_acceptance(own, want, shown)
            assert np.abs(accepted - expected).max() < 1e-12, "Eq. 5 predicts another acceptance"


def check_keyed(law: ModuleType, name: str, seeds: int = 4000) -> None:
    """With the keyed streams: the target's law, the predicted acceptance, equal judgements."""
    config = law.AggregationConfig(law=name, top_p=1.0, gamma=0.3)
    sides, weights = (TableModel(4, 3)((2,)), TableModel(4, 93)((2,))), (0.7, 0.0)
    output, accepted = np.zeros(4), np.zeros(2)
    for seed in range(seeds):
        own = law.AggregationLaw(config, 4, 1.0, seed)
        drafts = (
            own.propose(sides[0], weights[0], 9, law.Party.DEVICE),
            own.propose(sides[1], weights[1], 9, law.Party.CLOUD),
        )
        judged = own.judge(drafts, 9)
        assert judged.accepted == tuple(d.token == judged.token for d in drafts)
        output[judged.token] += 1 / seeds
        accepted += np.array(judged.accepted) / seeds
        assert own.judge(drafts, 9) == judged
    kept = (reference(sides[0], 1.0), reference(sides[1], 1.0))
    assert np.abs(output - target_law(kept, weights)).max() < 0.03
    assert np.abs(accepted - np.array(judged.expected)).max() < 0.03


def check_shared_acceptance(law: ModuleType) -> None:
    """The sorted sum against the plain double sum."""
    for seed in range(20):
        q, p = TableModel(6, seed)((0,)).copy(), TableModel(6, seed + 7)((0,)).copy()
        both = [x for x in range(6) if q[x] and p[x]]
        plain = sum(1 / sum(max(q[y] / q[x], p[y] / p[x]) for y in range(6)) for x in both)
        assert law.shared_acceptance(q, p) == pytest.approx(plain, rel=1e-12)
    assert law.shared_acceptance(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 0
    assert law.shared_acceptance(p, p) == pytest.approx(1.0)


def check_all(law: ModuleType) -> None:
    check_exact(law, "coin", 0.3, 1.0, 1.0)
    check_exact(law, "coin", 0.5, 0.8, 0.7)
    check_exact(law, "shared", 0.5, 0.8, 1.0)
    check_keyed(law, "coin")
    check_keyed(law, "shared")
    check_shared_acceptance(law)


# ------------------------------------------------------- the real law


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [1e-320, 1e-10, 1.0, 1e300])
@pytest.mark.parametrize("law", ["shared", "coin"])
def test_extreme_weights_and_temperatures_of_a_peer_are_computed_without_a_word(
    law: str, temperature: float
) -> None:
    """NumPy writes a line to the log for each overflow, and a peer chooses these numbers."""
    own = aggregation.AggregationLaw(AggregationConfig(law=law), 4, temperature)
    sides = [np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4])]
    for weights in ((0.0, -720.0), (-740.0, 0.0), (MOST_LOG_WEIGHT, -3e38), (-math.inf, -math.inf)):
        drafts = [own.propose(p, weights[s], 3, s) for s, p in zip(Party, sides, strict=True)]
        judged = own.judge((drafts[0], drafts[1]), 3)
        assert 0 <= judged.token < 4
        assert all(0 <= share <= 1 + 1e-9 for share in judged.expected)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.5, 1.0])
def test_the_coin_is_exact(gamma: float, top_p: float, temperature: float) -> None:
    check_exact(aggregation, "coin", gamma, top_p, temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_shared_noise_is_exact(top_p: float, temperature: float) -> None:
    check_exact(aggregation, "shared", 0.5, top_p, temperature)


def test_all_checks_pass_on_the_real_law() -> None:
    check_all(aggregation)


def test_the_printed_rule_is_biased_and_the_corrected_one_is_not() -> None:
    """At shares 0.8 and 0.2 the printed rule draws from the mixture with the shares swapped."""
    sides = (np.array([0.6, 0.25, 0.15, 0.0]), np.array([0.1, 0.25, 0.3, 0.35]))
    weights = (math.log(0.8), math.log(0.2))
    kept = (reference(sides[0], 1.0), reference(sides[1], 1.0))
    want, swapped = target_law(kept, weights), target_law(kept, weights[::-1])
    printed = AggregationConfig(law="coin", top_p=1.0, paper_faithful=True)
    got, _ = enumerated(aggregation, printed, sides, weights)
    assert 0.5 * np.abs(got - swapped).sum() < 1e-12
    assert 0.5 * np.abs(got - want).sum() > 0.25
    right, _ = enumerated(aggregation, AggregationConfig(law="coin", top_p=1.0), sides, weights)
    assert 0.5 * np.abs(right - want).sum() < 1e-12


def test_the_printed_rule_is_that_of_algorithm_1() -> None:
    """Written out as printed, against the enumeration of ours."""
    sides = (reference(TableModel(4, 8)((1,)), 1.0), reference(TableModel(4, 9)((1,)), 1.0))
    weights = (0.9, -0.4)
    eta = aggregation.shares(*np.array(weights, np.float32).tolist())
    law = np.zeros(4)
    for own in (0, 1):
        p_a, p_b = sides[own], sides[1 - own]
        residual = np.maximum(0, p_b - p_a) / np.maximum(0, p_b - p_a).sum()
        for x in range(4):
            reject = eta[own] * (1 - p_b[x] / p_a[x]) if p_a[x] > p_b[x] else 0.0
            law[x] += 0.5 * p_a[x] * (1 - reject)
            law += 0.5 * p_a[x] * reject * residual
    printed = AggregationConfig(law="coin", top_p=1.0, paper_faithful=True)
    got, _ = enumerated(aggregation, printed, sides, weights)
    assert np.abs(got - law).max() < 1e-12


def test_acceptance_falls_with_divergence_and_follows_gamma() -> None:
    """Theorem 4.2: a side's acceptance grows with the weight of its chain; the other's falls."""
    p, q = TableModel(5, 1)((0,)), TableModel(5, 2)((0,))
    target = 0.7 * p + 0.3 * q
    found = [aggregation.coin_acceptance((p, q), target, gamma) for gamma in (0.0, 0.25, 0.5, 1.0)]
    device, cloud = zip(*found, strict=True)
    assert list(device) == sorted(device)
    assert list(cloud) == sorted(cloud, reverse=True)
    assert device[0] < device[-1]
    # identical sides: the shared noise accepts all, the coin does not
    assert aggregation.shared_acceptance(p, p) == pytest.approx(1.0)
    assert aggregation.coin_acceptance((p, p), p, 0.5)[0] < 0.9


def test_the_second_sum_of_equation_5_is_over_the_target() -> None:
    """With p_l p_r as printed, the enumerated acceptance is not met."""
    sides = (reference(TableModel(5, 11)((0,)), 1.0), reference(TableModel(5, 12)((0,)), 1.0))
    weights, gamma = (0.5, 0.0), 0.5
    _, accepted = enumerated(aggregation, AggregationConfig(law="coin", top_p=1.0), sides, weights)
    eta = aggregation.shares(*weights)
    delta = 1 - np.minimum(*sides).sum()
    printed = gamma * (1 - eta[1] * delta) + (1 - gamma) * (sides[0] @ sides[1])
    assert abs(accepted[0] - printed) > 0.01
    corrected = aggregation.coin_acceptance(sides, target_law(sides, weights), gamma)
    assert accepted[0] == pytest.approx(corrected[0], abs=1e-12)


@pytest.mark.parametrize("law", ["shared", "coin"])
def test_greedy_takes_the_argmax_of_the_mixture(law: str) -> None:
    sides = (np.array([0.5, 0.4, 0.1]), np.array([0.0, 0.45, 0.55]))
    own = aggregation.AggregationLaw(AggregationConfig(law=law, top_p=1.0), 3, 0.0)
    drafts = (
        own.propose(sides[0], 0.0, 0, Party.DEVICE),
        own.propose(sides[1], 0.0, 0, Party.CLOUD),
    )
    assert (drafts[0].token, drafts[1].token) == (0, 2)
    assert own.judge(drafts, 0).token == 1
    assert own.judge(drafts, 0).accepted == (False, False)


def test_a_side_without_documents_has_no_say() -> None:
    sides = (np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.0, 1.0]))
    own = aggregation.AggregationLaw(AggregationConfig(), 3, 1.0, 4)
    for position, weights in itertools.product(range(20), [(-math.inf, 3.0), (-5.0, -math.inf)]):
        drafts = (
            own.propose(sides[0], weights[0], position, Party.DEVICE),
            own.propose(sides[1], weights[1], position, Party.CLOUD),
        )
        assert (own.judge(drafts, position).token == 2) == (weights[0] == -math.inf)
    assert aggregation.shares(-math.inf, -math.inf) == (0.5, 0.5)
    assert aggregation.shares(5000.0, -5000.0) == (1.0, 0.0)


@pytest.mark.parametrize("faithful", [False, True])
@pytest.mark.parametrize("law", ["shared", "coin"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_draft_of_the_only_side_with_a_say_is_the_target(
    law: str, temperature: float, faithful: bool
) -> None:
    """The target does not depend on the other side's draft, so that need not be waited for."""
    if faithful and law == "shared":
        return
    config = AggregationConfig(law=law, top_p=0.9, paper_faithful=faithful)
    for seed, party in itertools.product(range(60), Party):
        own = aggregation.AggregationLaw(config, 6, temperature, seed)
        weights = [-math.inf, -math.inf]
        weights[party] = -40.0
        drafts = [
            own.propose(TableModel(6, 2 * seed + side)((1,)), weights[side], 7, side)
            for side in Party
        ]
        pair = (drafts[0], drafts[1])
        assert aggregation.only_voice(pair) is party
        assert own.judge(pair, 7).token == pair[party].token
    assert aggregation.only_voice((pair[0], pair[0])) is None


def test_a_draft_is_drawn_of_what_is_sent() -> None:
    """Also where fp16 rounding moves mass: the support of the draft is the support on the wire."""
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(300, 0.05)).astype(np.float32)
    own = aggregation.AggregationLaw(AggregationConfig(top_p=0.8), 300, 1.0, 1)
    for position in range(50):
        draft = own.propose(p, 0.0, position, Party.CLOUD)
        assert draft.token in draft.kept.ids
        assert p[draft.kept.ids].sum() >= 0.8 * (1 - 1e-6)
        assert p[draft.kept.ids].sum() - p[draft.kept.ids].min() < 0.8


@pytest.mark.parametrize(
    ("token", "ids", "weight", "field"),
    [
        (3, [0, 1], 0.0, "token"),
        (0, [0, 1], math.nan, "log_weight"),
        (0, [0], math.inf, "log_weight"),
        (0, [0], 3e38, "log_weight"),
    ],
)
def test_malformed_drafts_are_typed_errors(
    token: int, ids: list[int], weight: float, field: str
) -> None:
    kept = SparseDistribution(np.array(ids), np.ones(len(ids), np.float32))
    with pytest.raises(InvalidInput) as caught:
        aggregation.SideDraft(token, kept, weight)
    assert caught.value.field == field


def test_what_cannot_be_judged_is_a_typed_error() -> None:
    kept = SparseDistribution(np.array([1, 7]), np.array([0.9, 0.1], np.float32))
    outside = aggregation.SideDraft(1, kept, 0.0)
    own = aggregation.AggregationLaw(AggregationConfig(law="coin"), 4)
    with pytest.raises(InvalidInput, match="vocabulary"):
        own.judge((outside, outside), 0)
    unlikely = aggregation.SideDraft(7, kept, 0.0)
    greedy = aggregation.AggregationLaw(AggregationConfig(law="coin"), 8, 0.0)
    with pytest.raises(InvalidInput, match="probability 0"):
        greedy.judge((unlikely, unlikely), 0)
    with pytest.raises(ModelError):
        own.propose(np.array([0.5, np.nan, 0.1, 0.1]), 0.0, 0, Party.DEVICE)
    with pytest.raises(ConfigError, match="paper_faithful"):
        AggregationConfig(paper_faithful=True)


# ------------------------------------------------------- mutations must turn a check red

MUTATIONS = {
    "shares swapped": (
        "return device / (device + cloud), cloud",
        "return cloud / (device + cloud), device",
    ),
    "one side only": ("+= share * draft.kept.law", "= share * draft.kept.law"),
    "shares ignored": ("+= share * draft.kept.law", "+= 0.5 * draft.kept.law"),
    "drawn before rounding": (
        "self._pick(self._tempered(sent), position",
        "self._pick(np.bincount(kept.ids, kept.probs, kept.size), position",
    ),
    "never truncated": ("top_p=self.config.top_p", "top_p=1.0"),
    "coin ignored": ("draws.accept(self._gamma(drafts), position", "draws.accept(0.5, position"),
    "coin shows the silent side": ("float(voice is Party.DEVICE)", "float(voice is Party.CLOUD)"),
    "judged by the wrong side": ("own[party]\n", "own[party.other]\n"),
    "temperature of the mixture dropped": (
        "return _raised(mixed, self.temperature)",
        "return mixed",
    ),
    "Eq. 5 as printed": ("(q @ target)", "(own[0] @ own[1])"),
    "cloud judged on the draft's stream": (
        '"draft_cloud", "accept_cloud"',
        '"accept_cloud", "accept_cloud"',
    ),
    "another position's noise": ('self._pick(p, position, "gumbel")', 'self._pick(p, 0, "gumbel")'),
    "smaller ratio counted": ("below[at] / target[both]", "below[at] / q[both]"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutated_law_is_caught(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = mutated(aggregation, *MUTATIONS[name], tmp_path, monkeypatch)
    with pytest.raises((AssertionError, InvalidInput, IndexError)):
        check_all(mutant)
