"""``paged_kernels.py`` as kernels of a GPU; what they compute is said there.

Sums are made in float32, in an order that depends on a row's own session alone. A page that hides
all of its columns from a row leaves that row's sums as they are, to the last bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from collab_llm_nodes.engine.backend import Heads
from collab_llm_nodes.engine.paged_kernels import Activation, HeadNorms, Kernels
from collab_llm_nodes.engine.paged_pass import NO_TREE, TILE, Batch, tile_tokens

_LOG2_E = 1.4426950408889634
_BLOCK = 1024


def attend(query: Tensor, layer: Tensor, batch: Batch, heads: Heads, *, windowed: bool) -> Tensor:
    """Attend to each item's columns, then join the items of each row."""
    rows, items = len(query), len(batch.items)
    tokens = tile_tokens(heads)
    tile = max(TILE, triton.next_power_of_2(heads.shared))
    sizes: dict[str, Any] = {
        "HEADS": heads.key,
        "SHARED": heads.shared,
        "DIM": heads.dim,
        "WIDE": triton.next_power_of_2(heads.dim),
        "TILE": tile,
    }
    sums = query.new_empty(items, heads.key, tile, heads.dim, dtype=torch.float32)
    tops = query.new_empty(items, heads.key, tile, 2, dtype=torch.float32)
    _attend[items, heads.key](
        query,
        layer,
        *(batch.count, batch.items, batch.pages),
        *(batch.limits, batch.lows, batch.bases, batch.words),
        *(sums, tops),
        heads.dim**-0.5 * _LOG2_E,
        batch.words.shape[1],
        TOKENS=tokens,
        PAGE=layer.shape[2],
        WINDOWED=windowed,
        NO_TREE=NO_TREE,
        **sizes,
        **attend_options(heads.dim * query.itemsize),
    )
    output = torch.empty_like(query)
    group = triton.next_power_of_2(heads.shared)
    _join[rows, heads.key](sums, tops, batch.parts, output, GROUP=group, **sizes)
    return output


def attend_options(head_bytes: int) -> dict[str, int]:
    """Return the warps of a program, and the pages it loads ahead: wide heads fill its memory."""
    wide = head_bytes > 256
    return {"num_warps": 8 if wide else 4, "num_stages": 1 if wide else 2}


def rotate_and_write(
    qkv: Tensor,
    layer: Tensor,
    batch: Batch,
    heads: Heads,
    table: Tensor | None,
    norms: HeadNorms | None,
) -> Tensor:
    """Rotate and write with a program for each head of each row."""
    rows = len(qkv)
    query = qkv.new_empty(rows, heads.query * heads.dim)
    _rotate_and_write[rows, heads.query + 2 * heads.key](
        qkv,
        layer,
        query,
        *(batch.positions, batch.slots),
        qkv if table is None else table,
        qkv if norms is None else norms.query,
        qkv if norms is None else norms.key,
        0.0 if norms is None else norms.epsilon,
        ROTATES=table is not None,
        NORMS=norms is not None,
        QUERIES=heads.query,
        HEADS=heads.key,
        DIM=heads.dim,
        WIDE=triton.next_power_of_2(heads.dim),
        PAGE=layer.shape[2],
        num_warps=1,
    )
    return query


def add_norm(x: Tensor, delta: Tensor | None, gain: Tensor, epsilon: float) -> Tensor:
    """Add and norm with a program for each row."""
    output = torch.empty_like(x)
    _add_norm[len(x),](
        x,
        x if delta is None else delta,
        gain,
        output,
        epsilon,
        ADDS=delta is not None,
        WIDTH=x.shape[1],
        WIDE=triton.next_power_of_2(x.shape[1]),
        num_warps=8,
    )
    return output


def gate(x: Tensor, activation: Activation) -> Tensor:
    """Activate and multiply with a program for each part of a row."""
    rows, width = x.shape[0], x.shape[1] // 2
    output = x.new_empty(rows, width)
    _gate[rows, triton.cdiv(width, _BLOCK)](
        x, output, SILU=activation == "silu", WIDTH=width, BLOCK=_BLOCK, num_warps=4
    )
    return output


TRITON = Kernels(attend, rotate_and_write, add_norm, gate)


@triton.jit(do_not_specialize=["word_stride"])
def _attend(
    query,
    layer,
    count,
    items,
    pages,
    limits,
    lows,
    bases,
    words,
    sums,
    tops,
    scale,
    word_stride,
    TOKENS: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOWED: tl.constexpr,
    NO_TREE: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attend one tile to the columns of one item: sums of values, and the sum of weights."""
    number, head = tl.program_id(0), tl.program_id(1)
    if number < tl.load(count):
        item = items + number * 5
        row, tokens, place = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        begin, end = tl.load(item + 3), tl.load(item + 4)
        own = tl.arange(0, TILE)
        used = own < tokens * SHARED
        rows = (row + own // SHARED).to(tl.int64)  # times the width: more than 31 bits
        dims = tl.arange(0, WIDE)
        inside = dims < DIM
        asks = used[:, None] & inside[None, :]
        heads = head * SHARED + own % SHARED
        asked_at = rows[:, None] * (HEADS * SHARED * DIM) + heads[:, None] * DIM + dims[None, :]
        asked = tl.load(query + asked_at, mask=asks, other=0.0)
        limit = tl.load(limits + rows, mask=used, other=0)
        base = tl.load(bases + row)
        if WINDOWED:
            low = tl.load(lows + rows, mask=used, other=NO_TREE)
            begin = tl.maximum(begin, tl.min(low, 0) // PAGE * PAGE)
        slots = tl.arange(0, PAGE)
        page_at = slots[:, None] * DIM + dims[None, :]
        top = tl.full([TILE], float("-inf"), tl.float32)
        weight = tl.zeros([TILE], tl.float32)
        total = tl.zeros([TILE, WIDE], tl.float32)
        for first in range(begin, end, PAGE):
            page = tl.load(pages + place + first // PAGE).to(tl.int64)
            own_page = layer + (page * (2 * HEADS) + head) * (PAGE * DIM)
            columns = first + slots
            there = columns < end
            read = there[:, None] & inside[None, :]
            keys = tl.load(own_page + page_at, mask=read, other=0.0)
            values = tl.load(own_page + HEADS * PAGE * DIM + page_at, mask=read, other=0.0)
            scores = tl.dot(asked, tl.trans(keys), input_precision="tf32x3") * scale
            seen = columns[None, :] < limit[:, None]
            if base < NO_TREE:
                bit = columns - base
                noted = used[:, None] & ((bit >= 0) & (bit < 32 * word_stride))[None, :]
                word_at = rows[:, None] * word_stride + (bit >> 5)[None, :]
                word = tl.load(words + word_at, mask=noted, other=0)
                seen = seen | (((word >> (bit & 31)[None, :]) & 1) != 0)
            if WINDOWED:
                seen = seen & (columns[None, :] >= low[:, None])
            scores = tl.where(seen & there[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            finite = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - finite[:, None])
            shrunk = tl.exp2(top - finite)
            weight = weight * shrunk + tl.sum(weights, 1)
            total = tl.dot(
                weights.to(values.dtype), values, total * shrunk[:, None], input_precision="tf32x3"
            )
            top = higher
        out = (number * HEADS + head).to(tl.int64) * TILE + own
        tl.store(sums + out[:, None] * DIM + dims[None, :], total, mask=asks)
        tl.store(tops + out * 2, top, mask=used)
        tl.store(tops + out * 2 + 1, weight, mask=used)


@triton.jit
def _join(
    sums,
    tops,
    parts,
    output,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Join the items of one row, in order; a row without any gets zeros."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, count = tl.load(parts + row * 3), tl.load(parts + row * 3 + 1)
    token = tl.load(parts + row * 3 + 2)
    group, dims = tl.arange(0, GROUP), tl.arange(0, WIDE)
    used, inside = group < SHARED, dims < DIM
    both = used[:, None] & inside[None, :]
    top = tl.full([GROUP], float("-inf"), tl.float32)
    weight = tl.zeros([GROUP], tl.float32)
    total = tl.zeros([GROUP, WIDE], tl.float32)
    for number in range(first, first + count):
        own = (number * HEADS + head).to(tl.int64) * TILE + token * SHARED + group
        own_top = tl.load(tops + own * 2, mask=used, other=float("-inf"))
        own_weight = tl.load(tops + own * 2 + 1, mask=used, other=0.0)
        own_total = tl.load(sums + own[:, None] * DIM + dims[None, :], mask=both, other=0.0)
        higher = tl.maximum(top, own_top)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        shrunk, taken = tl.exp2(top - finite), tl.exp2(own_top - finite)
        weight = weight * shrunk + own_weight * taken
        total = total * shrunk[:, None] + own_total * taken[:, None]
        top = higher
    total = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
    at = row * (HEADS * SHARED * DIM) + (head * SHARED + group)[:, None] * DIM + dims[None, :]
    tl.store(output + at, total.to(output.dtype.element_ty), mask=both)


@triton.jit
def _rotate_and_write(
    qkv,
    layer,
    query,
    positions,
    slots,
    table,
    query_gain,
    key_gain,
    epsilon,
    ROTATES: tl.constexpr,
    NORMS: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Norm and rotate one head of one row; keys and values go to their page."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, WIDE)
    inside = dims < DIM
    other = (dims + DIM // 2) % DIM
    own = qkv + row * ((QUERIES + 2 * HEADS) * DIM) + head * DIM
    x = tl.load(own + dims, mask=inside, other=0.0).to(tl.float32)
    if head < QUERIES + HEADS:
        swapped = tl.load(own + other, mask=inside, other=0.0).to(tl.float32)
        if NORMS:
            gain = query_gain
            if head >= QUERIES:
                gain = key_gain
            size = 1.0 / tl.sqrt(tl.sum(x * x, 0) / DIM + epsilon)
            x = x * size * tl.load(gain + dims, mask=inside, other=0.0).to(tl.float32)
            swapped *= size
            swapped *= tl.load(gain + other, mask=inside, other=0.0).to(tl.float32)
        if ROTATES:
            angle = table + tl.load(positions + row) * (2 * DIM) + dims
            cos = tl.load(angle, mask=inside, other=0.0).to(tl.float32)
            sin = tl.load(angle + DIM, mask=inside, other=0.0).to(tl.float32)
            x = x * cos + swapped * sin
    if head < QUERIES:
        asked_at = query + row * (QUERIES * DIM) + head * DIM
        tl.store(asked_at + dims, x.to(query.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + row)
        page = (slot // PAGE).to(tl.int64)
        own_page = layer + (page * (2 * HEADS) + head - QUERIES) * (PAGE * DIM)
        tl.store(own_page + slot % PAGE * DIM + dims, x.to(layer.dtype.element_ty), mask=inside)


@triton.jit
def _add_norm(
    x, delta, gain, output, epsilon, ADDS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr
):
    """Add to one row, and norm it."""
    columns = tl.arange(0, WIDE)
    inside = columns < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + columns
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        wide += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(x.dtype.element_ty)
        tl.store(x + at, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    size = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + epsilon)
    gains = tl.load(gain + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + at, (wide * size * gains).to(output.dtype.element_ty), mask=inside)


@triton.jit
def _gate(x, output, SILU: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Activate a part of one row, and multiply."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gates = tl.load(x + row * (2 * WIDTH) + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * WIDTH) + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        active = gates / (1.0 + tl.exp(-gates))
    else:  # gelu by tanh; 2 sigmoid(2 y) - 1 is tanh(y)
        inner = 0.7978845608028654 * (gates + 0.044715 * gates * gates * gates)
        active = gates / (1.0 + tl.exp(-2.0 * inner))
    tl.store(output + row * WIDTH + columns, (active * up).to(output.dtype.element_ty), mask=inside)
