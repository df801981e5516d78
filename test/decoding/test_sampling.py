"""Distributions: what is sampled, what crosses the wire, and agreement with transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from enumeration import dense
from hypothesis import given, settings
from hypothesis import strategies as st

from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.decoding.sampling import (
    Distribution,
    SamplingConfig,
    SparseDistribution,
    at_least,
    distribution,
    distributions,
    distributions_of,
    most_likely,
    of_device,
    to_wire,
)
from collab_llm_nodes.errors import ConfigError, InvalidInput, ModelError


def test_greedy_is_one_hot_argmax() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0, -torch.inf]])
    assert dense(distributions(logits, SamplingConfig())).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert most_likely(logits) == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_most_likely_is_the_argmax_of_the_distribution(dtype: torch.dtype) -> None:
    """Coarse logits: nearly every row has a tie."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randint(-3, 4, (200, 130), generator=generator).to(dtype)
    p = dense(distributions(logits, SamplingConfig()))
    assert most_likely(logits) == p.argmax(-1).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1, 0, 1), (0.7, 5, 1), (1.3, 0, 0.8), (0.9, 7, 0.6)]
)
def test_equals_transformers_warpers(temperature: float, top_k: int, top_p: float) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits[0, 3:9] = logits[0].max()  # ties at the k-th place are all kept
    expected = TemperatureLogitsWarper(float(temperature))(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    config = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    p = dense(distributions(logits, config))
    np.testing.assert_allclose(p, expected.softmax(-1).numpy(), atol=1e-12)
    np.testing.assert_allclose(p.sum(-1), 1, atol=1e-12)


@pytest.mark.parametrize("sharpness", [0.1, 4.0])
def test_top_p_of_a_large_vocabulary(sharpness: float) -> None:
    """Both ways through the nucleus: a few tokens hold it, or thousands."""
    from transformers import TopPLogitsWarper

    generator = torch.Generator().manual_seed(2)
    logits = sharpness * torch.randn(5000, 2, generator=generator, dtype=torch.float64).T
    logits[0, :50] = logits[0, 0]
    p = dense(distributions(logits, SamplingConfig(temperature=1.0, top_p=0.9)))
    expected = TopPLogitsWarper(0.9)(None, logits).softmax(-1).numpy()
    assert (np.count_nonzero(p, axis=1) > 1024).tolist() == [sharpness < 1] * 2
    assert np.array_equal(np.count_nonzero(p, axis=1), np.count_nonzero(expected, axis=1))
    np.testing.assert_allclose(np.sort(p), np.sort(expected), atol=1e-12)
    np.testing.assert_allclose(p[1], expected[1], atol=1e-12)


def test_half_precision_logits_are_read_exactly() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0])
    config = SamplingConfig(temperature=1.0)
    half, single = distribution(logits.bfloat16(), config), distribution(logits.numpy(), config)
    assert np.array_equal(half.probs, single.probs)


LAWS = [
    SamplingConfig(),
    SamplingConfig(0.7),
    SamplingConfig(0.7, top_k=3),
    SamplingConfig(1.3, top_k=2000),
    SamplingConfig(0.7, top_p=0.9),
    SamplingConfig(3.0, top_p=0.95),
    SamplingConfig(1e-40, top_p=0.5),
    SamplingConfig(1.0, top_k=50, top_p=0.6),
]


@pytest.mark.parametrize("step", [0.0, 0.5, 4.0], ids=["distinct", "ties", "nearly all tie"])
def test_rows_reduced_on_an_accelerator_give_the_distributions_of_the_host(step: float) -> None:
    """Sessions of one pass, each with its own law; ties may be where the download ends."""
    generator = torch.Generator().manual_seed(5)
    parts = [3.0 * torch.randn(3, 6000, generator=generator) for _ in LAWS]
    for part in parts:
        part[1, 40:] = -torch.inf  # an exit that scores candidates only
        if step:
            part[:, :] = (part / step).round() * step
    found = [row for part, _ in of_device(parts, LAWS) for row in part]
    expected = [
        row for part, law in zip(parts, LAWS, strict=True) for row in distributions(part, law)
    ]
    for row, same in zip(found, expected, strict=True):
        assert row is not None
        assert row.ids.tolist() == same.ids.tolist()
        np.testing.assert_allclose(row.probs, same.probs, rtol=1e-12)


@pytest.mark.parametrize("law", [SamplingConfig(1.0, top_p=0.1), SamplingConfig(1.0, top_k=900)])
def test_a_tie_that_the_download_cuts_is_decided_on_the_host(law: SamplingConfig) -> None:
    logits = torch.zeros(1, 6000)
    logits[0, 5000:5005] = 0.25
    (((row,), _),) = of_device([logits], [law])
    assert row is not None
    assert row.ids.tolist() == distribution(logits[0], law).ids.tolist()
    assert len(row.ids) == (6000 if law.top_k else 599)


def test_rows_of_one_law_come_from_an_accelerator_in_one_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is copied is in proportion to the candidates, not to the vocabulary."""
    copied = []
    download = torch.Tensor.cpu

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor.numel())
        return download(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    logits = 2.0 * torch.randn(5, 150_000, generator=torch.Generator().manual_seed(6))
    logits[:, :20] += 18.0
    for law, most in ((SamplingConfig(), 15), (SamplingConfig(0.7, top_p=0.9), 15_000)):
        of_device([logits[:2], logits[2:]], [law, law])
        assert len(copied) == 1
        assert copied.pop() <= most


def test_a_row_that_says_nothing_spoils_no_other() -> None:
    nan, inf = math.nan, math.inf
    first = torch.tensor([[0.0, 2.0, 2.0], [1.0, -inf, 0.0]])
    bad = [torch.tensor([[0.0, 1.0, 2.0], row]) for row in ([0.0, nan, 1.0], [0.0, inf, 1.0])]
    nothing, last = torch.full((1, 3), -inf), torch.tensor([[-inf, 3.0, -inf]])
    parts = [first, *bad, nothing, last]
    for law in (SamplingConfig(), SamplingConfig(0.5), SamplingConfig(0.5, top_p=0.9)):
        host = distributions_of(parts, [law] * 5)
        assert [isinstance(part, ModelError) for part in host] == [False, True, True, True, False]
        device = of_device(parts, [law] * 5)
        assert [None in part for part, _ in device] == [False, True, True, True, False]
    assert distributions_of([], []) == []


@given(
    st.lists(st.sampled_from([-np.inf, -1.0, 0.0, 0.25, 3.0]) | st.floats(-9, 9), min_size=1),
    st.integers(1, 40),
    st.integers(1, 5000),
)
def test_the_largest_entries_are_found_with_all_that_ties(
    values: list[float], count: int, repeat: int
) -> None:
    x = np.tile(np.array(values), repeat)
    ids = at_least(x, count)
    possible = np.sort(x[x > -np.inf])[::-1]
    assert len(ids) >= min(count, len(possible))
    assert ids.tolist() == sorted(ids)
    if len(ids):
        assert ids.tolist() == np.flatnonzero(x >= x[ids].min()).tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    with pytest.raises(ModelError, match="not finite"):
        distribution(torch.tensor([0.0, bad]), SamplingConfig())
    with pytest.raises(ModelError, match="not finite"):
        most_likely(torch.tensor([[0.0, 1.0], [0.0, bad]]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1.0),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("law", "x"),
        ("foo", 1),
    ],
)
def test_configuration_errors_name_the_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(SamplingConfig, {key: value})
    assert caught.value.field == key


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(1, 60), st.floats(0.1, 8))
def test_wire_form_survives_fp16(seed: int, vocab: int, support: int, sharpness: float) -> None:
    rng = np.random.default_rng(seed)
    p = distribution(rng.normal(size=vocab) * sharpness, SamplingConfig(temperature=1.0))
    sent = to_wire(p, support)
    received = SparseDistribution(sent.ids.copy(), sent.probs.astype(np.float16))
    assert received == sent
    assert hash(received) == hash(sent)
    assert np.array_equal(sent.law, received.law)
    assert abs(sent.law.sum() - 1) < 1e-12
    assert len(sent.ids) <= min(vocab, support)
    best = np.sort(p.probs)[::-1][:support].sum()
    expected = np.array([p[token] for token in sent.ids]) / best
    assert np.abs(sent.law - expected).max() < 2e-3


def test_the_most_probable_go_to_the_wire_and_the_lower_ids_win_ties() -> None:
    p = np.random.default_rng(2).dirichlet(np.ones(9), size=3)
    p = np.concatenate([p, np.full((1, 9), 1 / 9), np.eye(9)[3:4]])
    for support in (1, 4, 9, 20):
        rows = [to_wire(Distribution.from_dense(row), support) for row in p]
        assert rows[3].ids.tolist() == list(range(min(support, 9)))
        assert rows[4].ids.tolist() == [3]
        for row, sent in zip(p[:3], rows, strict=False):
            assert sent.ids.tolist() == sorted(np.argsort(-row)[:support])


def test_the_least_probabilities_go_to_the_wire_as_fp16_rounds_them() -> None:
    least = np.linspace(2.0e-8, 7.0e-8, 51)
    p = np.concatenate([[1.0 - least.sum()], least])
    sent = to_wire(Distribution.from_dense(p), 64)
    expected = (p / p.sum()).astype(np.float16)
    assert sent.ids.tolist() == np.flatnonzero(expected).tolist()
    assert sent.probs.tolist() == expected[expected > 0].tolist()


@pytest.mark.parametrize(
    ("ids", "probs"),
    [([], []), ([1, 2], [1.0]), ([2, 1], [0.5, 0.5]), ([1, 1], [0.5, 0.5]), ([-1], [1.0]),
     ([1], [0.0]), ([1], [float("nan")]), ([[1]], [[1.0]])],
)  # fmt: skip
def test_malformed_wire_forms_are_refused(ids: list[int], probs: list[float]) -> None:
    with pytest.raises(InvalidInput):
        SparseDistribution(np.array(ids, dtype=np.int32), np.array(probs, dtype=np.float32))
