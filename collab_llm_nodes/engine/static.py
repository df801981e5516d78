"""A hand-written layer loop over preallocated KV caches.

Per token it needs a quarter of the time of the transformers forward: maps of one input are fused,
no tensor is made that can be a view, and rolling back costs nothing, because columns after a
session's length are never read.

Alternatives measured with the embedded target, one thread: this loop 0.28 ms per token;
``torch.compile`` of the halves of a layer 0.43 ms (its guards cost more than its fusions save; it
also needs a compiler on the robot); the transformers forward 1.0 ms. TorchScript is deprecated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from collab_llm_nodes.engine import onednn
from collab_llm_nodes.engine.attention import (
    TOGETHER,
    GatheredAttention,
    InPlaceAttention,
    arrange,
    group_chunks,
)
from collab_llm_nodes.engine.backend import AfterLayer, Chunk, Heads, Output, Rows, plain_weight
from collab_llm_nodes.engine.blocks import KEPT_BYTES, Blocks
from collab_llm_nodes.engine.cache import BLOCK, StaticCache
from collab_llm_nodes.engine.device import OnDevice, Upload
from collab_llm_nodes.engine.kernels import Head, fuse, norm_function
from collab_llm_nodes.engine.masks import Masks
from collab_llm_nodes.engine.rotations import Rotations, positions_of
from collab_llm_nodes.models.architectures import (
    LayerParts,
    attention_windows,
    context_length,
    decoder_parts,
    has_plain_attention,
    layer_parts,
)
from collab_llm_nodes.models.loading import LoadedModel


class Layer(Protocol):
    """A decoder layer over packed rows, but for attention."""

    def before_attention(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> queries, keys and values [rows, heads * head_dim]."""

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """[rows, hidden] before the layer and [rows, heads * head_dim] -> [rows, hidden]."""


class _Layer:
    """One decoder layer over packed rows."""

    def __init__(self, parts: LayerParts) -> None:
        self.attention_norm = norm_function(parts.attention_norm)
        self.mlp_norm = norm_function(parts.mlp_norm)
        self.norm_first = parts.norm_first
        self.qkv = fuse([parts.query, parts.key, parts.value])
        self.out = fuse([parts.out])
        self.up = fuse(parts.up)
        self.gated = len(parts.up) == 2
        self.head_norms = _HeadNorms.of(parts)
        self.out_norm = None if parts.out_norm is None else norm_function(parts.out_norm)
        self.down_norm = None if parts.down_norm is None else norm_function(parts.down_norm)
        self.activation: Callable[[Tensor], Tensor] = getattr(
            parts.activation, "forward", parts.activation
        )
        self.down = fuse([parts.down])

    def before_attention(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> queries, keys and values [rows, heads * head_dim]."""
        qkv = self.qkv(self.attention_norm(x) if self.norm_first else x)
        return qkv if self.head_norms is None else self.head_norms(qkv)

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """[rows, hidden] before the layer and [rows, heads * head_dim] -> [rows, hidden]."""
        if self.out_norm is not None and self.down_norm is not None:
            x = x + self.out_norm(self.out(attended))
            return x + self.down_norm(self.down(self._widen(self.mlp_norm(x))))
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


@dataclass(frozen=True)
class _HeadNorms:
    """Norms of the queries and keys of each head, between their map and their rotation.

    Attributes:
        widths: of all queries, keys and values of a row.
    """

    query: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], Tensor]
    head_dim: int
    widths: tuple[int, int, int]

    @classmethod
    def of(cls, parts: LayerParts) -> _HeadNorms | None:
        if parts.query_norm is None or parts.key_norm is None:
            return None
        widths = parts.query.out_features, parts.key.out_features, parts.value.out_features
        (head_dim,) = parts.query_norm.weight.shape  # type: ignore[misc]
        return cls(norm_function(parts.query_norm), norm_function(parts.key_norm), head_dim, widths)

    def __call__(self, qkv: Tensor) -> Tensor:
        """[rows, heads * head_dim] -> the same, with queries and keys normed."""
        query, key, value = qkv.split_with_sizes(self.widths, 1)
        normed = [
            norm(part.reshape(-1, self.head_dim)).view(part.shape)
            for norm, part in ((self.query, query), (self.key, key))
        ]
        return torch.cat((*normed, value), dim=1)


@dataclass(frozen=True)
class Plan:
    """A pass whose arrays wait for their upload.

    Attributes:
        groups: of the chunks, in their order.
        positions: [rows] or [3, rows]; None: of one chunk, whose tokens follow each other.
    """

    chunks: Sequence[Chunk]
    groups: Sequence[GatheredAttention | InPlaceAttention]
    positions: OnDevice | None


class StaticBackend:
    """A ``backend.Backend`` whose sessions, of any lengths, share a pass.

    Raises nothing on models for which ``supports`` is true.
    """

    batches = True
    session_bytes = 0
    block = BLOCK
    scratch_bytes = KEPT_BYTES + TOGETHER  # copies of columns: idle ones, and those of a pass
    arrange = staticmethod(arrange)

    def __init__(self, loaded: LoadedModel, head: Head) -> None:
        model = loaded.model
        decoder, config = model.get_decoder(), model.config.get_text_config()
        self._parts = parts = decoder_parts(model)
        self._layers = [_Layer(layer_parts(layer)) for layer in parts.layers]
        self._heads = Heads.of(model)
        self._like = plain_weight(model)
        self.device, self.dtype = self._like.device, self._like.dtype
        windows = attention_windows(model)
        self._windowed = [window is not None for window in windows]
        window = max((window for window in windows if window is not None), default=None)
        self._masks = Masks.on(context_length(config), self._heads.shared, self._like[:0], window)
        self._blocks = Blocks()
        self._rotations = Rotations(model, self._like, self._heads.dim)
        self._embed_positions = getattr(decoder, "embed_positions", None)  # OPT
        self._project_in = getattr(decoder, "project_in", None)
        self._embed_scale = getattr(model.get_input_embeddings(), "embed_scale", None)  # Gemma
        self._head = head

    @staticmethod
    def supports(loaded: LoadedModel) -> bool:
        """Return True for known layers with plain attention, in windows of one size at most.

        Their rotations depend on the position alone.
        """
        return has_plain_attention(loaded.model)

    def new_cache(self, expected: int = 0) -> StaticCache:
        heads = self._heads
        return StaticCache.empty(len(self._layers), 2 * heads.key, heads.dim, self._like, expected)

    def plan(self, chunks: Sequence[Chunk], upload: Upload) -> Plan:
        groups = group_chunks(chunks, self._heads, self._masks, self._blocks, upload)
        alone = len(chunks) == 1 and isinstance(chunks[0].positions, int)
        if alone and self._embed_positions is None:
            return Plan(chunks, groups, None)
        return Plan(chunks, groups, upload.add(positions_of(chunks)))

    def forward(self, plan: Plan, rows: Rows, after_layer: AfterLayer | None) -> list[Output]:
        return self.outputs(self.hidden(plan, rows, after_layer), plan.chunks)

    def hidden(
        self,
        plan: Plan,
        given: Rows,
        after_layer: AfterLayer | None,
        *,
        enter: bool = True,
    ) -> Tensor:
        """Return the states [wanted rows, hidden_size] after the last layer.

        The last layer makes keys and values of all tokens, and all else of the wanted rows only: of
        a prompt, usually one.

        Args:
            given: embedded tokens; or, if not ``enter``, the states after an earlier stage's
                layers.
        """
        chunks, groups = plan.chunks, plan.groups
        x, added, _ = given
        if enter:
            x = self._enter(plan, x)
        for group in groups:
            group.begin()
        rotations = self._rotations_of(plan)
        layers = self._layers_for(chunks)
        rows = x.shape[0]
        x = self._filled_up(x)
        try:
            for number, layer in enumerate(layers):
                rotation = rotations.get(self._rotations.by_layer[number])
                qkv = layer.before_attention(x)[:rows]
                attended = self._attend(number, qkv, rotation, groups)
                last = number == len(layers) - 1
                if last:
                    x, attended = _wanted(x[:rows], chunks), _wanted(attended, chunks)
                    added = [_wanted(each, chunks) for each in added]
                    rows = x.shape[0]
                    x = self._filled_up(x)
                if rows:
                    x = layer.after_attention(x, self._filled_up(attended))
                    if number < len(added):
                        x[:rows] += added[number]
                if after_layer is not None and not last:
                    after_layer(number + 1, x[:rows])
            for group in groups:
                group.finish()
        finally:
            for group in groups:
                group.leave()
        return x[:rows]

    def _filled_up(self, x: Tensor) -> Tensor:
        """Append rows of zeros up to the number that the layers' maps compute (``onednn.py``).

        Otherwise each map would do that with its input, and cut its output.
        """
        spare = self._rows(x.shape[0]) - x.shape[0]
        return functional.pad(x, (0, 0, 0, spare)) if spare else x

    def _rows(self, rows: int) -> int:
        """Return how many rows the layers compute where ``rows`` are wanted."""
        return self._layers[0].up.rows(rows)

    def filled(self, keys_values: Tensor) -> StaticCache:
        return StaticCache([], keys_values.to(self._like.device))

    @torch.inference_mode()
    def capture(self) -> None:
        """Make oneDNN's kernels for few rows, which it keeps.

        Else a robot's process would grow for minutes, until it has met every number. It still grows
        with lengths of prompts: there are too many to make their kernels in advance.
        """
        layer = self._layers[0]  # all have maps of the same sizes
        if not layer.up.by_onednn:
            return
        for rows in range(1, onednn.FEW + 1):
            x = self._like.new_zeros(rows, self._parts.hidden_size)
            layer.before_attention(x)
            layer.after_attention(x, x.new_zeros(rows, self._heads.query * self._heads.dim))
            self.read(x)

    def keep_room(self, room: float) -> float:
        """Return ``room``: each cache allocates its own."""
        return room

    def close(self) -> None:
        """Do nothing: the model is as it was."""

    def _enter(self, plan: Plan, x: Tensor) -> Tensor:
        """Turn embedded tokens into the input [rows, hidden] of the first layer."""
        if self._embed_scale is not None:
            x = x * self._embed_scale.to(x.dtype)
        if self._embed_positions is None:
            return x
        if self._project_in is not None:
            x = self._project_in(x)
        assert plan.positions is not None
        embedded: Tensor = x + self._embed_positions(None, position_ids=plan.positions())
        return embedded

    def _layers_for(self, chunks: Sequence[Chunk]) -> Sequence[Layer]:
        """Return the layers that a pass over the chunks goes through."""
        return self._layers

    def _attend(
        self,
        layer: int,
        qkv: Tensor,
        rotation: tuple[Tensor, ...] | None,
        groups: Sequence[GatheredAttention | InPlaceAttention],
    ) -> Tensor:
        """Queries, keys, values -> [rows, heads * head_dim]; writes those of ``layer`` (from 0)."""
        heads = self._heads
        qkv = qkv.view(-1, heads.query + 2 * heads.key, heads.dim)
        if rotation is not None:
            cos, sin = rotation
            rotated = qkv.narrow(1, 0, heads.query + heads.key)
            swapped = rotated.roll(heads.dim // 2, -1)
            rotated.mul_(cos).addcmul_(swapped, sin)
        windowed = self._windowed[layer]
        if len(groups) == 1:
            return groups[0].attend(layer, qkv, windowed)
        return torch.cat([group.attend(layer, qkv[group.rows], windowed) for group in groups])

    def _rotations_of(self, plan: Plan) -> dict[str | None, tuple[Tensor, ...]]:
        """Return the rotation of each type of layers; none where positions are embedded."""
        return {kind: self._rotation(plan, kind) for kind in self._rotations.kinds}

    def _rotation(self, plan: Plan, kind: str) -> tuple[Tensor, ...]:
        """Return cosines and signed sines [rows, 1, head_dim], for x * cos + swapped x * sin."""
        chunks, rotations = plan.chunks, self._rotations
        if plan.positions is None:
            first, new = chunks[0].positions, chunks[0].new
            found = rotations.table(chunks[0].end, kind).narrow(0, first, new)
        else:
            positions = plan.positions()
            if positions.ndim == 2:  # M-RoPE
                found = rotations.angles(positions, kind)
            else:
                columns = max([chunk.end for chunk in chunks])
                found = rotations.table(columns, kind)[positions]
        return found[:, :, None].unbind(1)

    def outputs(self, x: Tensor, chunks: Sequence[Chunk]) -> list[Output]:
        """Read the rows [wanted rows, hidden] that ``hidden`` has returned."""
        keeps = [chunk.keep for chunk in chunks]
        states, logits = self._read(x, chunks)
        if len(chunks) == 1:
            return [Output(logits, states)]
        return [Output(*own) for own in zip(logits.split(keeps), states.split(keeps), strict=True)]

    def _read(self, x: Tensor, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
        """Return normed states and logits of the rows that the chunks want."""
        return self.read(x)

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return normed states and logits of rows [rows, hidden]."""
        states = self._head.norm(x)
        return states, self._head(states)


def _wanted(x: Tensor, chunks: Sequence[Chunk]) -> Tensor:
    """Return of the rows [rows, width] of all chunks those that are wanted."""
    if sum(chunk.keep for chunk in chunks) == x.shape[0]:
        return x
    ends = accumulate(chunk.new for chunk in chunks)
    return _joined([x[end - chunk.keep : end] for end, chunk in zip(ends, chunks, strict=True)])


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return the parts joined; a single part as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
