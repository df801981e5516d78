"""The latency model of Appendix C, with the paper's example."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collab_llm_lab.bench.minions.latency import (
    Side,
    Task,
    minion,
    minions,
    printed_bound,
    proved_bound,
    remote_only,
)

# Bandwidths are not given in the paper, and the bounds do not depend on them.
RTX_4090_LLAMA_8B = Side(layers=32, width=4096, flops=160e12, bandwidth=1.0e12)
H100S_LLAMA_405B = Side(layers=126, width=16384, flops=8000e12, bandwidth=26.8e12)
A = 0.2


def test_the_papers_example_with_its_ratio_and_with_the_rounded_one() -> None:
    exact = printed_bound(RTX_4090_LLAMA_8B, H100S_LLAMA_405B, A)
    assert exact == pytest.approx(4.81, abs=0.005)
    rounded = 1 + (1 + A) * 50 * (1 / 16)  # the paper takes L_l d_l / (L_r d_r) for 1/16
    assert rounded == 4.75
    assert abs(exact - rounded) < 0.07


@pytest.mark.parametrize("chunks", [4, 5, 100])
def test_the_proof_gives_a_tighter_bound(chunks: int) -> None:
    bound = proved_bound(RTX_4090_LLAMA_8B, H100S_LLAMA_405B, A, chunks)
    assert bound == pytest.approx(1.95, abs=0.005)


def test_few_chunks_loosen_the_proofs_bound_up_to_the_printed_one() -> None:
    bounds = [proved_bound(RTX_4090_LLAMA_8B, H100S_LLAMA_405B, A, c) for c in (4, 3, 2, 1)]
    assert bounds == sorted(bounds)
    assert bounds[0] < bounds[1]
    assert bounds[-1] == printed_bound(RTX_4090_LLAMA_8B, H100S_LLAMA_405B, A)


@given(
    st.floats(1e3, 1e6),
    st.integers(1, 200),
    st.floats(0.001, 0.99),
    st.floats(1.0, 1000.0),
    st.sampled_from([8, 16, 32]),
    st.sampled_from([1024, 4096]),
)
def test_minions_keep_within_both_bounds(
    n: float, chunks: int, a: float, out_remote: float, layers: int, width: int
) -> None:
    local = Side(layers, width, 160e12, 1.0e12)
    task = Task(n, out_local=a * n / chunks, out_remote=out_remote, chunks=chunks)
    assert task.extracted == pytest.approx(a * n)
    alone = remote_only(H100S_LLAMA_405B, task).total_s
    ratio = minions(local, H100S_LLAMA_405B, task).total_s / alone
    proved = proved_bound(local, H100S_LLAMA_405B, a, chunks)
    assert ratio < proved * (1 + 1e-9)
    assert proved <= printed_bound(local, H100S_LLAMA_405B, a) * (1 + 1e-9)


def test_the_model_by_hand() -> None:
    local, remote = Side(1, 1, 10.0, 5.0), Side(2, 3, 20.0, 40.0)
    task = Task(n=6, out_local=2, out_remote=4, chunks=3, instructions=2, samples=2, share=0.5)
    assert task.extracted == 12
    weights = 2 * 12 * 2 * 3**2
    read, said = (6 * weights + 2 * 2 * 3 * 36) / 20, 4 * (weights + 4 * 2 * 3 * 6) / 40
    assert remote_only(remote, task).total_s == pytest.approx(read + said)
    one = minion(local, remote, task)
    assert one.local_s == pytest.approx((6 * 24 + 2 * 36) / 10 + 2 * (24 + 4 * 6) / 5)
    assert one.remote_s == pytest.approx(
        (2 * weights + 2 * 2 * 3 * 4) / 20 + 4 * (weights + 4 * 2 * 3 * 2) / 40
    )
    many = minions(local, remote, task)
    assert many.local_s == pytest.approx((6 * 24 + 2 * 36 / 3) / 10 + 12 * (24 + 2 * 6 / 3) / 10)
    assert many.remote_s == pytest.approx(
        (12 * weights + 2 * 2 * 3 * 144) / 20 + 4 * (weights + 4 * 2 * 3 * 12) / 40
    )


def test_cutting_a_document_saves_attention() -> None:
    whole = Task(50_000, 100, 300, chunks=1)
    cut = Task(50_000, 10, 300, chunks=10)
    local = RTX_4090_LLAMA_8B
    assert cut.extracted == whole.extracted
    assert (
        minions(local, H100S_LLAMA_405B, cut).local_s
        < minions(local, H100S_LLAMA_405B, whole).local_s
    )
