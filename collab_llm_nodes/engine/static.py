"""A hand-written layer loop over preallocated KV caches.

Per token it needs a quarter of the time of the transformers forward: maps of one input are fused,
no tensor is made that can be a view, and rolling back costs nothing, because what lies behind a
session's length is simply never read.

Alternatives measured with the embedded target, one thread: this loop 0.28 ms per token;
``torch.compile`` of the halves of a layer 0.43 ms (its guards cost more than its fusions save; it
also needs a compiler on the robot); the transformers forward 1.0 ms. TorchScript is deprecated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from collab_llm_nodes.engine.backend import AfterLayer, Chunk
from collab_llm_nodes.engine.kernels import Head, fused, norm_of
from collab_llm_nodes.models.architectures import (
    LayerParts,
    attention_windows,
    decoder_parts,
    layer_parts,
)
from collab_llm_nodes.models.loading import LoadedModel

BLOCK = 128  # columns by which a cache grows
SHORT = 16  # new tokens up to which sessions attend together, and masks are views of a table
ROPE_TYPES = ("default", "linear", "llama3")  # angles that depend on the position alone


class StaticCache:
    """Keys and values of one session: [layers, capacity, 2 * kv_heads, head_dim].

    Token by token, keys before values, so that a layer writes both with one copy.
    """

    def __init__(self, layers: int, heads: int, head_dim: int, like: Tensor) -> None:
        self.data = like.new_empty(layers, 0, heads, head_dim)

    def reserve(self, columns: int) -> None:
        """Make room for ``columns`` columns."""
        layers, capacity, heads, head_dim = self.data.shape
        if columns > capacity:
            size = -(-columns // BLOCK) * BLOCK
            grown = self.data.new_empty(layers, size, heads, head_dim)
            grown[:, :capacity] = self.data
            self.data = grown


@dataclass(frozen=True)
class _Heads:
    """How many heads there are, and how wide."""

    query: int
    key: int
    dim: int

    @property
    def shared(self) -> int:
        """Query heads per key-value head."""
        return self.query // self.key


class _Group:
    """Chunks of up to ``SHORT`` new tokens that attend together, or a longer one alone.

    One chunk works on its cache in place. Several are gathered, aligned at their ends, so that the
    new columns are the last ones of each. (A loop over sessions needs twice the time at 16.) Where
    they have different numbers of new tokens, each has as many slots for queries as the one with
    the most, and uses its last ones.
    """

    def __init__(self, chunks: Sequence[Chunk], first_row: int, heads: _Heads, masks: _Masks):
        self.count = count = len(chunks)
        self.new = new = max(chunk.new for chunk in chunks)
        rows = sum(chunk.new for chunk in chunks)
        self.rows = slice(first_row, first_row + rows)
        self._chunks = chunks
        self._heads = heads
        for chunk in chunks:
            chunk.cache.reserve(chunk.end)
        longest = max(chunk.end for chunk in chunks)
        # A prompt from its start: causal without a mask, which would be large.
        self._whole = new > SHORT and longest == new and chunks[0].mask is None
        if count == 1:
            self._gathered = chunks[0].cache.data[:, None, :longest]
            self._mask = None if self._whole else masks.one(chunks[0])
        else:
            self._gathered = self._gather(longest)
            self._mask = masks.several(chunks, new, longest)
        by_head = self._gathered.transpose(2, 3)  # [layers, count, 2 * kv_heads, columns, head_dim]
        self._keys = by_head[:, :, : heads.key].unbind(0)
        self._values = by_head[:, :, heads.key :].unbind(0)
        self._slots: Tensor | None = None  # of the rows, if some have none
        if rows == count * new:
            self._written = self._gathered[:, :, longest - new :].unbind(0)
        else:
            ends = range(new, count * new + 1, new)
            slots = [
                s for e, chunk in zip(ends, chunks, strict=True) for s in range(e)[-chunk.new :]
            ]
            self._slots = torch.tensor(slots, device=self._gathered.device)
            self._columns = self._slots + (self._slots // new + 1) * (longest - new)
            self._written = self._gathered.flatten(1, 2).unbind(0)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """[rows, heads, head_dim] of the group's rows -> [rows, query heads * head_dim].

        Writes keys and values of ``layer`` (from 0). The query heads that share a key-value head
        are rows of one matrix, so that nothing is repeated.
        """
        heads, count, new = self._heads, self.count, self.new
        query, written = qkv[:, : heads.query], qkv[:, heads.query :]
        if self._slots is None:
            self._written[layer].copy_(written.view(count, new, -1, heads.dim))
        else:
            self._written[layer].index_copy_(0, self._columns, written)
            padded = query.new_zeros(count * new, heads.query, heads.dim)
            query = padded.index_copy_(0, self._slots, query)
        if self._whole:
            output = functional.scaled_dot_product_attention(
                query.transpose(0, 1)[None],
                self._keys[layer],
                self._values[layer],
                is_causal=True,
                enable_gqa=heads.shared > 1,
            )
            return output[0].transpose(0, 1).reshape(new, -1)
        if new > 1:
            query = query.reshape(count, new, heads.key, -1, heads.dim).transpose(1, 2)
        output = functional.scaled_dot_product_attention(
            query.reshape(count, heads.key, -1, heads.dim),
            self._keys[layer],
            self._values[layer],
            attn_mask=self._mask,
        )
        if new > 1:
            output = output.view(count, heads.key, new, -1, heads.dim).transpose(1, 2)
        output = output.reshape(count * new, -1)
        return output if self._slots is None else output[self._slots]

    def finish(self) -> None:
        """Give every session what the pass has computed for it."""
        if self.count > 1:
            rows, longest = self._gathered.unbind(1), self._gathered.shape[2]
            torch._foreach_copy_(
                [c.cache.data.narrow(1, c.start, c.new) for c in self._chunks],
                [
                    row.narrow(1, longest - c.new, c.new)
                    for row, c in zip(rows, self._chunks, strict=True)
                ],
            )

    def _gather(self, longest: int) -> Tensor:
        layers, _, heads, head_dim = self._chunks[0].cache.data.shape
        gathered = self._chunks[0].cache.data.new_empty(
            layers, self.count, longest, heads, head_dim
        )
        rows = gathered.unbind(1)
        torch._foreach_copy_(
            [
                row.narrow(1, longest - c.end, c.start)
                for row, c in zip(rows, self._chunks, strict=True)
            ],
            [c.cache.data.narrow(1, 0, c.start) for c in self._chunks],
        )
        # Masked columns are still multiplied (by 0, which NaN would survive).
        torch._foreach_zero_(
            [row.narrow(1, 0, longest - c.end) for row, c in zip(rows, self._chunks, strict=True)]
        )
        return gathered


class _Masks:
    """Additive attention masks; each row stands once per query head of a key-value head."""

    def __init__(self, context: int, queries: int, like: Tensor) -> None:
        self._queries = queries
        self._context = context
        # Row i of the causal mask of new tokens behind s columns is 0 up to column s + i. The
        # table holds these rows for s = context; for any other s they are a part of it.
        self._table = torch.full((SHORT, context + SHORT), -torch.inf).triu_(context + 1)
        self._table = self._table.repeat_interleave(queries, dim=0).to(like)

    def one(self, chunk: Chunk) -> Tensor | None:
        """[new * queries, end], None where nothing is hidden."""
        if chunk.mask is not None:
            mask = self._table.new_zeros(chunk.mask.shape).masked_fill_(~chunk.mask, -torch.inf)
            return mask.repeat_interleave(self._queries, dim=0)
        new = chunk.new
        return None if new == 1 else self._causal(new, chunk.start)

    def several(self, chunks: Sequence[Chunk], new: int, longest: int) -> Tensor:
        """[chunks, 1, new * queries, longest] of causal chunks aligned at their ends."""
        padding = torch.tensor([longest - chunk.end for chunk in chunks])
        hidden = torch.arange(longest) < padding[:, None]
        causal = self._causal(new, longest - new)
        return causal.masked_fill(hidden.to(causal.device)[:, None, None], -torch.inf)

    def _causal(self, new: int, start: int) -> Tensor:
        if new <= SHORT:
            first = self._context - start
            return self._table[: new * self._queries, first : self._context + new]
        mask = self._table.new_full((new, start + new), -torch.inf).triu_(start + 1)
        return mask.repeat_interleave(self._queries, dim=0)


class _Layer:
    """One decoder layer over packed rows."""

    def __init__(self, parts: LayerParts, number: int) -> None:
        self.number = number  # layers done behind it
        self.attention_norm = norm_of(parts.attention_norm)
        self.mlp_norm = norm_of(parts.mlp_norm)
        self.norm_first = parts.norm_first
        self.qkv = fused([parts.query, parts.key, parts.value])
        self.out = fused([parts.out])
        self.up = fused(parts.up)
        self.gated = len(parts.up) == 2
        self.activation: Callable[[Tensor], Tensor] = getattr(
            parts.activation, "forward", parts.activation
        )
        self.down = fused([parts.down])

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """[rows, hidden] before the layer and [rows, heads * head_dim] -> [rows, hidden]."""
        x = self.out.add_to(x, attended)
        if self.norm_first:
            return self.down.add_to(x, self._widen(self.mlp_norm(x)))
        x = self.attention_norm(x)
        return self.mlp_norm(self.down.add_to(x, self._widen(x)))

    def _widen(self, x: Tensor) -> Tensor:
        up = self.up(x)
        if not self.gated:
            return self.activation(up)
        gate, up = up.chunk(2, dim=-1)
        return self.activation(gate).mul_(up)


class StaticBackend:
    """As ``backend.Backend``; sessions of any lengths share a pass.

    Raises nothing on models for which ``supports`` is true.
    """

    batches = True

    def __init__(self, loaded: LoadedModel, head: Head, exit_layers: Sequence[int]) -> None:
        model = loaded.model
        decoder, config = model.get_decoder(), model.config.get_text_config()
        self._parts = parts = decoder_parts(model)
        self._exit_layers = frozenset(exit_layers)
        self._layers = [_Layer(layer_parts(layer), i + 1) for i, layer in enumerate(parts.layers)]
        attention: Any = parts.layers[0].self_attn
        queries = config.num_attention_heads
        keys = getattr(config, "num_key_value_heads", None) or queries
        self._heads = _Heads(queries, keys, attention.head_dim)
        self._like = model.get_input_embeddings().weight.detach()
        self._masks = _Masks(config.max_position_embeddings, self._heads.shared, self._like[:0])
        self._rotary = getattr(decoder, "rotary_emb", None)
        self._rotations: tuple[Tensor, Tensor] | None = None
        self._growing = threading.Lock()
        self._embed_positions = getattr(decoder, "embed_positions", None)  # OPT
        self._project_in = getattr(decoder, "project_in", None)
        self._head = head

    @staticmethod
    def supports(loaded: LoadedModel) -> bool:
        """No sliding windows, and rotations that depend on the position alone."""
        rotary = getattr(loaded.model.get_decoder(), "rotary_emb", None)
        rope_type = "default" if rotary is None else rotary.rope_type
        return not any(attention_windows(loaded.model)) and rope_type in ROPE_TYPES

    def new_cache(self) -> StaticCache:
        return StaticCache(len(self._layers), 2 * self._heads.key, self._heads.dim, self._like)

    def forward(
        self, chunks: Sequence[Chunk], embedded: Tensor, after_layer: AfterLayer | None
    ) -> list[Tensor]:
        groups = self._group(chunks)
        x, rotation = self._enter(chunks, embedded)
        for layer in self._layers:
            normed = layer.attention_norm(x) if layer.norm_first else x
            attended = self._attend(layer, normed, rotation, groups)
            x = layer.after_attention(x, attended)
            if after_layer is not None and layer.number in self._exit_layers:
                after_layer(layer.number, x)
        for group in groups:
            group.finish()
        return self._logits(x, chunks)

    def move(self, cache: StaticCache, kept: Sequence[int]) -> None:
        moved = [(old, new) for new, old in enumerate(kept) if old != new]
        if moved:
            old, new = torch.tensor(moved, device=cache.data.device).unbind(1)
            cache.data[:, new] = cache.data[:, old]

    def cut(self, cache: StaticCache, columns: int) -> None:
        """Nothing to do: what lies behind a chunk's start is never read."""

    def close(self) -> None:
        """Nothing to do."""

    def _group(self, chunks: Sequence[Chunk]) -> list[_Group]:
        groups, rows = [], 0
        for _, together in groupby(chunks, lambda c: 0 if c.new <= SHORT else id(c)):
            groups.append(_Group(list(together), rows, self._heads, self._masks))
            rows = groups[-1].rows.stop
        return groups

    def _enter(
        self, chunks: Sequence[Chunk], x: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """What the first layer reads [rows, hidden], and the rotations of queries and keys."""
        if self._rotary is not None:
            return x, self._rotation(chunks)
        if self._project_in is not None:
            x = self._project_in(x)
        assert self._embed_positions is not None
        positions = _positions(chunks, self._like.device)
        return x + self._embed_positions(None, position_ids=positions), None

    def _attend(
        self,
        layer: _Layer,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        groups: Sequence[_Group],
    ) -> Tensor:
        """[rows, hidden] -> [rows, heads * head_dim]; writes keys and values."""
        heads = self._heads
        qkv = layer.qkv(x).view(-1, heads.query + 2 * heads.key, heads.dim)
        if rotation is not None:
            cos, sin = rotation
            rotated = qkv[:, : heads.query + heads.key]
            swapped = rotated.roll(heads.dim // 2, -1)
            rotated.mul_(cos).addcmul_(swapped, sin)
        if len(groups) == 1:
            return groups[0].attend(layer.number - 1, qkv)
        return torch.cat([group.attend(layer.number - 1, qkv[group.rows]) for group in groups])

    def _rotation(self, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [rows, 1, head_dim]: x rotated is x * cos + swapped x * sin."""
        if any(isinstance(c.positions, Tensor) and c.positions.ndim == 2 for c in chunks):  # M-RoPE
            parts = [self._angles(_positions([chunk], self._like.device)) for chunk in chunks]
            return _joined([cos for cos, _ in parts]), _joined([sin for _, sin in parts])
        cos, sin = self._table(max(chunk.end for chunk in chunks))
        if len(chunks) == 1 and isinstance(chunks[0].positions, int):
            first, last = chunks[0].positions, chunks[0].positions + chunks[0].new
            return cos[first:last], sin[first:last]
        positions = _positions(chunks, self._like.device)
        return cos[positions], sin[positions]

    def _table(self, columns: int) -> tuple[Tensor, Tensor]:
        """Rotations of the positions of so many columns, which are no larger."""
        table = self._rotations
        if table is None or table[0].shape[0] < columns:
            with self._growing:  # else a thread that needs fewer could put back a shorter one
                table = self._rotations
                if table is None or table[0].shape[0] < columns:
                    table = self._angles(torch.arange(-(-columns // 1024) * 1024))
                    self._rotations = table
        return table

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As ``_rotation``, for positions [k] or [3, k]."""
        assert self._rotary is not None
        cos, sin = self._rotary(self._like, positions[..., None, :].to(self._like.device))
        half = self._heads.dim // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        return cos.view(-1, 1, self._heads.dim), sin.view(-1, 1, self._heads.dim)

    def _logits(self, x: Tensor, chunks: Sequence[Chunk]) -> list[Tensor]:
        """[rows, hidden] -> [keep, vocabulary] of each chunk."""
        keeps = [chunk.keep for chunk in chunks]
        if sum(keeps) < x.shape[0]:
            ends = accumulate(chunk.new for chunk in chunks)
            x = _joined([x[end - keep : end] for end, keep in zip(ends, keeps, strict=True)])
        logits = self._head(self._head.norm(x))
        return list(logits.split(keeps)) if len(keeps) > 1 else [logits]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows of all parts; a single part as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _positions(chunks: Sequence[Chunk], device: torch.device) -> Tensor:
    """Of all tokens: [rows], or of one chunk's own form."""
    if len(chunks) == 1 and not isinstance(chunks[0].positions, int):
        return chunks[0].positions.to(device)
    spelled: list[int] = []
    for chunk in chunks:
        if isinstance(chunk.positions, int):
            spelled += range(chunk.positions, chunk.positions + chunk.new)
        else:
            spelled += chunk.positions.tolist()
    return torch.tensor(spelled, device=device)
