"""The four operations of a decoder layer between its products, in plain torch.

``triton_kernels.py`` has them as kernels of a GPU. These say what those compute, and take their
place where there is no Triton, or where :func:`choose` finds that its kernels do not work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from collab_llm_nodes.engine.backend import Chunk, Heads
from collab_llm_nodes.engine.paged_pass import Batch, PagedPass, Span
from collab_llm_nodes.engine.paging import PagedCache, PagePool

log = logging.getLogger(__name__)

Activation = Literal["silu", "gelu_tanh"]
_APART = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Most that a row of a kernel may differ from the reference's, over the size of that row."""


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of the queries and keys of each head, [head_dim] each."""

    query: Tensor
    key: Tensor
    epsilon: float


class Attend(Protocol):
    """Attention over pages."""

    def __call__(
        self, query: Tensor, layer: Tensor, batch: Batch, heads: Heads, *, windowed: bool
    ) -> Tensor:
        """Return [rows, query heads * head_dim] of queries of the same shape.

        Args:
            layer: keys and values, [pages, 2 * kv_heads, page, head_dim].
            windowed: ``batch.lows`` hold.
        """


class RotateAndWrite(Protocol):
    """Rotation of queries and keys, and the writing of keys and values."""

    def __call__(
        self,
        qkv: Tensor,
        layer: Tensor,
        batch: Batch,
        heads: Heads,
        table: Tensor | None,
        norms: HeadNorms | None,
    ) -> Tensor:
        """Return the queries [rows, query heads * head_dim], and write the rest to ``layer``.

        Args:
            qkv: [rows, (query heads + 2 * kv_heads) * head_dim].
            layer: as for :class:`Attend`.
            table: cosines and signed sines [positions, 2, head_dim]; None: nothing is rotated.
        """


@dataclass(frozen=True)
class Kernels:
    """The operations.

    Attributes:
        add_norm: called as ``add_norm(x, delta, gain, epsilon)``: adds ``delta`` (None: nothing) to
            x [rows, width] in place, and returns the RMS norm of x times ``gain`` [width].
        gate: called as ``gate(x, activation)``: [rows, 2 * width] -> [rows, width], the first half
            activated times the second.
    """

    attend: Attend
    rotate_and_write: RotateAndWrite
    add_norm: Callable[[Tensor, Tensor | None, Tensor, float], Tensor]
    gate: Callable[[Tensor, Activation], Tensor]


def attend(query: Tensor, layer: Tensor, batch: Batch, heads: Heads, *, windowed: bool) -> Tensor:
    """Attend chunk by chunk, see :class:`Attend`."""
    output = torch.zeros_like(query)
    for span in batch.spans:
        own = layer[batch.pages[span.pages]].transpose(0, 1).flatten(1, 2)
        keys, values = own[:, : span.end].split(heads.key)
        rows = query[span.rows].view(-1, heads.key, heads.shared, heads.dim)
        new = len(rows)
        seen = _seen(batch, span, own.shape[1], windowed=windowed)
        found = functional.scaled_dot_product_attention(
            rows.transpose(0, 1).reshape(1, heads.key, -1, heads.dim),
            keys[None],
            values[None],
            attn_mask=seen.repeat_interleave(heads.shared, 0)[:, : span.end],
        )
        by_row = found.view(heads.key, new, heads.shared, heads.dim).transpose(0, 1)
        output[span.rows] = by_row.reshape(new, -1)
    return output


def _seen(batch: Batch, span: Span, width: int, *, windowed: bool) -> Tensor:
    """Return bool [rows of the chunk, width]: the columns that each sees."""
    columns = torch.arange(width, device=batch.pages.device)
    seen = columns < batch.limits[span.rows, None]
    if span.tree:
        places = columns - batch.bases[span.rows, None]
        words = batch.words[span.rows]
        at = (places >> 5).clamp(0, words.shape[1] - 1)
        bits = (words.gather(1, at) >> (places & 31)) & 1
        inside = (places >= 0) & (places < 32 * words.shape[1])
        seen |= inside & (bits > 0)
    return seen & (columns >= batch.lows[span.rows, None]) if windowed else seen


def rotate_and_write(
    qkv: Tensor,
    layer: Tensor,
    batch: Batch,
    heads: Heads,
    table: Tensor | None,
    norms: HeadNorms | None,
) -> Tensor:
    """Rotate and write, see :class:`RotateAndWrite`."""
    rows = qkv.view(len(qkv), -1, heads.dim)
    query, key, value = rows.split([heads.query, heads.key, heads.key], 1)
    if norms is not None:
        query = rms_norm(query, norms.query, norms.epsilon)
        key = rms_norm(key, norms.key, norms.epsilon)
    if table is not None:
        cos, sin = table[batch.positions][:, :, None].unbind(1)
        query, key = (x * cos + x.roll(heads.dim // 2, -1) * sin for x in (query, key))
    page = layer.shape[2]
    pages, places = batch.slots // page, batch.slots % page
    layer[pages, :, places] = torch.cat([key, value], 1)
    return query.reshape(len(qkv), -1)


def add_norm(x: Tensor, delta: Tensor | None, gain: Tensor, epsilon: float) -> Tensor:
    """Add and norm, see :class:`Kernels`."""
    if delta is not None:
        x.add_(delta)
    return rms_norm(x, gain, epsilon)


def rms_norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + epsilon) * gain over the last dimension, summed in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * scale * gain.float()).to(x.dtype)


def gate(x: Tensor, activation: Activation) -> Tensor:
    """Activate and multiply, see :class:`Kernels`."""
    gates, up = x.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gates) * up
    return functional.gelu(gates, approximate="tanh") * up


REFERENCE = Kernels(attend, rotate_and_write, add_norm, gate)


def choose(heads: Heads, width: int, like: Tensor) -> Kernels:
    """Return Triton's kernels if they are there and right on this device; else the reference.

    Args:
        width: of a hidden state.
        like: a tensor of the model's type and device.
    """
    if like.device.type != "cuda":
        return REFERENCE
    try:
        from collab_llm_nodes.engine.triton_kernels import TRITON

        check(TRITON, heads, width, like)
    except Exception as error:  # noqa: BLE001 - a compiler may fail in any manner
        log.warning("no Triton kernels, plain torch takes their place (slower): %s", error)
        return REFERENCE
    return TRITON


def check(kernels: Kernels, heads: Heads, width: int, like: Tensor) -> None:
    """Compare kernels with the reference on a small pass: a chain, a tree, and a long cache.

    Raises:
        ArithmeticError: one of them differs.
    """
    found, expected = (_trial(each, heads, width, like) for each in (kernels, REFERENCE))
    for name, own in found.items():
        apart = _distance(own, expected[name])
        if not apart <= _APART[like.dtype]:  # NaN is not
            raise ArithmeticError(f"{name}: a row is off by {apart:.2g} of what torch computes")


def _distance(found: Tensor, expected: Tensor) -> float:
    """Return the largest error of a row, over the size of that row."""
    size = expected.float().norm(dim=-1).clamp_min(1e-3)
    return float(((found.float() - expected.float()).norm(dim=-1) / size).max())


def _trial(kernels: Kernels, heads: Heads, width: int, like: Tensor) -> dict[str, Tensor]:
    """Return what the operations give for random numbers, always the same."""
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(like)

    def gain() -> Tensor:
        return 1 + random(heads.dim) / 10

    batch, layer = _trial_pass(heads, like)
    layer.copy_(random(*layer.shape))
    rows = len(batch.slots)
    qkv = random(rows, (heads.query + 2 * heads.key) * heads.dim)
    norms = HeadNorms(gain(), gain(), 1e-6)
    table = random(1024, 2, heads.dim)
    query = kernels.rotate_and_write(qkv, layer, batch, heads, table, norms)
    x = random(rows, width)
    return {
        "rotate": query,
        "write": layer,
        "attend": kernels.attend(query, layer, batch, heads, windowed=False),
        "attend in a window": kernels.attend(query, layer, batch, heads, windowed=True),
        "norm": kernels.add_norm(x, random(rows, width), random(width), 1e-6),
        "add": x,
        "silu": kernels.gate(random(rows, 2 * width), "silu"),
        "gelu": kernels.gate(random(rows, 2 * width), "gelu_tanh"),
    }


def _trial_pass(heads: Heads, like: Tensor) -> tuple[Batch, Tensor]:
    """Return the arrays of a pass of three sessions, and keys and values of one layer."""
    pool = PagePool(1, 2 * heads.key, heads.dim, like)
    chunks = []
    for start, new, mask in ((0, 11, None), (300, 1, None), (70, 3, _FORK)):
        cache = PagedCache(pool)
        cache.reserve(0, start + new)
        if mask is not None:
            mask = torch.cat([torch.ones(new, start, dtype=torch.bool), mask], 1)
        chunks.append(Chunk(cache, start, new, start, mask, new))
    made = PagedPass(chunks, heads, 40)
    packed = torch.from_numpy(made.pack(made.smallest)).to(like.device)
    return Batch.of(packed, made.smallest, made.spans), pool.tensor[0]


_FORK = torch.tensor([[True, False, False], [True, True, False], [True, False, True]])
"""The columns that three nodes see: two of them follow the first."""
