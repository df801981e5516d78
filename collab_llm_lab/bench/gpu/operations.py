"""The kernels of a layer by themselves: right, how soon compiled, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from collab_llm_lab.bench.gpu.forms import Sizes
from collab_llm_lab.bench.gpu.lab import Lab
from collab_llm_lab.bench.gpu.timing import copy_bytes_per_s, synchronize, timed
from collab_llm_nodes.engine import paged_kernels
from collab_llm_nodes.engine.backend import Chunk, Heads
from collab_llm_nodes.engine.device import selected
from collab_llm_nodes.engine.paged_kernels import Kernels
from collab_llm_nodes.engine.paged_pass import Batch, PagedPass
from collab_llm_nodes.engine.paging import PagedCache, PagePool
from collab_llm_nodes.models.loading import DTYPES

OTHERS = (Heads(8, 4, 256), Heads(6, 2, 96), Heads(4, 4, 64))
"""Heads that the models of the other steps do not have."""
DRAFT = 5


@torch.inference_mode()
def kernels(lab: Lab) -> None:
    """Compare Triton's kernels with plain torch, which an engine falls back to, and time them.

    On a CPU plain torch takes their place.
    """
    own = paged_kernels.REFERENCE
    if lab.cuda:
        from collab_llm_nodes.engine.triton_kernels import TRITON

        own = TRITON
    with selected(lab.device):
        for heads, dtype in (
            (heads_of(lab.form.large), "bfloat16"),
            (heads_of(lab.form.small), "bfloat16"),
            (heads_of(lab.form.small), "float32"),
            *((heads, "bfloat16") for heads in OTHERS),
        ):
            name = f"{heads.query} of {heads.key} x {heads.dim} {dtype}"
            lab.attempt(name, partial(_check, lab, name, own, heads, DTYPES[dtype]))
        lab.attempt("attention", partial(_attention, lab, own))
        lab.attempt("other kernels", partial(_others, lab, own))


def heads_of(sizes: Sizes) -> Heads:
    """Return the heads of a model."""
    return Heads(sizes.heads, sizes.key_heads, sizes.hidden // sizes.heads)


def _check(lab: Lab, name: str, own: Kernels, heads: Heads, dtype: torch.dtype) -> None:
    """Compare all operations for one shape, twice: the first time they are compiled."""
    like, took_ms = torch.empty(0, dtype=dtype, device=lab.device), list[float]()
    for _ in range(2):
        begun = time.perf_counter()
        paged_kernels.check(own, heads, lab.form.large.hidden, like)
        synchronize(lab.device)
        took_ms.append(1e3 * (time.perf_counter() - begun))
    lab.figure(name, {"first_ms": took_ms[0], "second_ms": took_ms[1]})
    lab.verdict(name, True)


def _attention(lab: Lab, own: Kernels) -> None:
    """Time attention over caches of several lengths; ``bandwidth_share`` is of their reading."""
    bandwidth = copy_bytes_per_s(lab.device, lab.form.copied_bytes)
    filled, context = lab.form.filled, lab.form.context
    for sessions, columns, rows in (
        (1, filled, 1),
        (1, filled, DRAFT),
        (1, context // 4, DRAFT),
        (max(lab.form.sessions), filled, DRAFT),
        (1, 0, max(lab.form.prefills)),
    ):
        call, read = _attended(lab, own, sessions, columns, rows)
        found = timed(lab.device, call, lab.form.repeats)
        share = 1e3 * read / bandwidth / found["ms"]
        name = f"attention: {sessions} x {rows} rows after {columns}"
        lab.figure(name, {**found, "bandwidth_share": share})


def _attended(
    lab: Lab, own: Kernels, sessions: int, columns: int, rows: int
) -> tuple[Callable[[], Tensor], int]:
    """Return a call of attention over as many sessions, and the bytes of keys and values."""
    heads = heads_of(lab.form.large)
    like = torch.empty(0, dtype=torch.bfloat16, device=lab.device)
    pool = PagePool(1, 2 * heads.key, heads.dim, like)
    chunks = []
    for _ in range(sessions):
        cache = PagedCache(pool)
        cache.reserve(0, columns + rows)
        chunks.append(Chunk(cache, columns, rows, columns, None, rows))
    pool.tensor.normal_()
    batch = _batch(chunks, heads, lab.device)
    query = torch.randn(len(batch.slots), heads.query * heads.dim, device=lab.device).to(like)
    read = sessions * (columns + rows) * 2 * heads.key * heads.dim * like.itemsize
    return partial(own.attend, query, pool.tensor[0], batch, heads, windowed=False), read


def _batch(chunks: Sequence[Chunk], heads: Heads, device: torch.device) -> Batch:
    made = PagedPass(chunks, heads, None)
    packed = torch.from_numpy(made.pack(made.smallest)).to(device)
    return Batch.of(packed, made.smallest, made.spans)


def _others(lab: Lab, own: Kernels) -> None:
    """Time the small kernels for a pass of few rows: a launch each, and little else."""
    sizes = lab.form.large
    x, delta = (torch.randn(8, sizes.hidden, device=lab.device).bfloat16() for _ in range(2))
    gain = torch.ones_like(x[0])
    up = torch.randn(8, 2 * sizes.intermediate, device=lab.device).bfloat16()
    calls: dict[str, Callable[[], Any]] = {
        "add and norm": lambda: own.add_norm(x, delta, gain, 1e-6),
        "gate": lambda: own.gate(up, "silu"),
    }
    for name, call in calls.items():
        lab.figure(name, timed(lab.device, call, lab.form.repeats))
