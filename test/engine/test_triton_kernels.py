"""Triton's kernels in its interpreter (``conftest.py``): the reference, whatever is beside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from folders import SUPPORT
from torch import Tensor

from collab_llm_nodes.engine import paged_kernels
from collab_llm_nodes.engine.backend import Chunk, Heads
from collab_llm_nodes.engine.paged_kernels import Kernels
from collab_llm_nodes.engine.paged_pass import SHORT, SPLIT, Batch, Layout, PagedPass
from collab_llm_nodes.engine.paging import PagedCache, PagePool

pytest.importorskip("triton")

HEADS = Heads(6, 2, 16)
WINDOW = 40
SHARED_BYTES = 163 << 10
"""Of a program on an A100 or an Orin; an H100 has more."""


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    from collab_llm_nodes.engine.triton_kernels import TRITON

    return TRITON


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("heads", [Heads(4, 4, 16), HEADS, Heads(7, 1, 24)])
def test_kernels_are_the_reference(kernels: Kernels, heads: Heads, dtype: torch.dtype) -> None:
    """With one query head for a key head, several, and widths that are no powers of two.

    The interpreter multiplies no bfloat16.
    """
    paged_kernels.check(kernels, heads, 48, torch.empty(0, dtype=dtype))


def test_a_wrong_kernel_is_found(kernels: Kernels) -> None:
    def off(query: Tensor, layer: Tensor, batch: Batch, heads: Heads, *, windowed: bool) -> Tensor:
        return paged_kernels.attend(query, layer, batch, heads, windowed=False)

    wrong = Kernels(off, kernels.rotate_and_write, kernels.add_norm, kernels.gate)
    with pytest.raises(ArithmeticError, match="attend in a window"):
        paged_kernels.check(wrong, HEADS, 16, torch.empty(0))


def attended(
    kernels: Kernels, sizes: Sequence[tuple[int, int]], layout: Layout | None = None
) -> list[Tensor]:
    """Return what chunks of (columns before, new tokens) attend to in one pass, by chunk."""
    pool = PagePool(1, 2 * HEADS.key, HEADS.dim, torch.empty(0))
    chunks, contents = [], []
    for start, new in sizes:
        random = torch.Generator().manual_seed(start)
        cache = PagedCache(pool)
        cache.fill(torch.randn(1, 2 * HEADS.key, start + new, HEADS.dim, generator=random))
        chunks.append(Chunk(cache, start, new, start, None, new))
        contents.append(torch.randn(new, HEADS.query * HEADS.dim, generator=random))
    made = PagedPass(chunks, HEADS, WINDOW)
    layout = layout or made.smallest
    batch = Batch.of(torch.from_numpy(made.pack(layout)), layout, made.spans)
    query = torch.zeros(layout.rows, HEADS.query * HEADS.dim)
    query[: made.spans[-1].rows.stop] = torch.cat(contents)
    found = kernels.attend(query, pool.tensor[0], batch, HEADS, windowed=False)
    return [found[span.rows] for span in made.spans]


def test_a_rows_result_is_the_same_alone_and_in_a_batch(kernels: Kernels) -> None:
    """To the last bit, for caches of one item and of several, with items and rows to spare."""
    sizes = [(3, 1), (SPLIT + 30, 5), (2 * SPLIT, 2), (70, 23)]
    together = attended(kernels, sizes, Layout(64, 2, 64))
    backwards = attended(kernels, sizes[::-1])[::-1]
    for size, own, other in zip(sizes, together, backwards, strict=True):
        (alone,) = attended(kernels, [size])
        assert torch.equal(own, alone)
        assert torch.equal(own, other)


def test_long_chunks_are_not_split(kernels: Kernels) -> None:
    sizes = [(SPLIT, SHORT + 1), (5, 2)]
    for own, expected in zip(
        attended(kernels, sizes), attended(paged_kernels.REFERENCE, sizes), strict=True
    ):
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)


def test_rows_that_only_fill_a_pass_up_stay_finite(kernels: Kernels) -> None:
    pool = PagePool(1, 2 * HEADS.key, HEADS.dim, torch.empty(0))
    cache = PagedCache(pool)
    cache.reserve(0, 1)
    made = PagedPass([Chunk(cache, 0, 1, 0, None, 1)], HEADS, None)
    batch = Batch.of(torch.from_numpy(made.pack(made.smallest)), made.smallest, made.spans)
    query = torch.ones(made.smallest.rows, HEADS.query * HEADS.dim)
    found = kernels.attend(query, pool.tensor[0], batch, HEADS, windowed=False)
    assert torch.equal(found, torch.zeros_like(found))


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_gpus(capability: int, tmp_path: Path) -> None:
    """For A100 and H100, in bfloat16 and float32; no GPU is needed for that."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "triton_compiled.py"), str(capability)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kernels, shared = map(int, done.stdout.split())
    assert kernels == 26
    assert shared <= SHARED_BYTES
