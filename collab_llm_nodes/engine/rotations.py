"""Rotations of queries and keys by their positions, as the model's own code computes them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from collab_llm_nodes.engine.backend import Chunk
from collab_llm_nodes.engine.device import round_up


class Rotations:
    """Cosines and signed sines, for x * cos + x with its halves swapped * sin.

    Args:
        like: a tensor of the type and the place of queries.

    Attributes:
        by_layer: type of each layer's rotation, since Gemma's differ; None where it has none.
        kinds: all these types; none where positions are embedded instead.
    """

    def __init__(self, model: Any, like: Tensor, head_dim: int) -> None:
        decoder = model.get_decoder()
        self._rotary = getattr(decoder, "rotary_emb", None)
        self._like, self._head_dim = like, head_dim
        several = isinstance(getattr(self._rotary, "rope_type", None), dict)
        self.by_layer = [_kind(layer.self_attn, several) for layer in decoder.layers]
        found = {kind for kind in self.by_layer if kind is not None}
        self.kinds = found if self._rotary is not None else set[str]()
        self._tables: dict[str, Tensor] = {}
        self._growing = threading.Lock()

    def table(self, columns: int, kind: str) -> Tensor:
        """Return the rotations [some, 2, head_dim] of the first ``columns`` positions, or more."""
        table = self._tables.get(kind)
        if table is None or table.shape[0] < columns:
            with self._growing:  # else a thread that needs fewer could put back a shorter one
                table = self._tables.get(kind)
                if table is None or table.shape[0] < columns:
                    positions = torch.arange(round_up(columns, 1024), device=self._like.device)
                    table = self.angles(positions, kind)
                    self._tables[kind] = table
        return table

    def angles(self, positions: Tensor, kind: str) -> Tensor:
        """Return the rotations [k, 2, head_dim] of positions [k], or M-RoPE's [3, k]."""
        assert self._rotary is not None
        kinds = (kind,) if kind else ()
        if hasattr(self._rotary, "mrope_section"):  # transformers 5.17 takes all three rows only
            positions = positions.expand(3, -1)
        cos, sin = self._rotary(self._like, positions[..., None, :].to(self._like.device), *kinds)
        half, dim = self._head_dim // 2, self._head_dim
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        return torch.stack((cos.view(-1, dim), sin.view(-1, dim)), dim=1)


def _kind(attention: Any, several: bool) -> str | None:
    """Return the type of a layer's rotation; None where it has none."""
    if not getattr(attention, "use_rope", True):
        return None
    return str(attention.layer_type) if several else ""


def positions_of(chunks: Sequence[Chunk]) -> Tensor:
    """Return the positions of all tokens [rows]; M-RoPE's [3, rows] if any chunk has such."""
    spelled: list[Tensor] = []
    for chunk in chunks:
        positions = chunk.positions
        if isinstance(positions, int):
            positions = torch.arange(positions, positions + chunk.new)
        spelled.append(positions)
    if any(positions.ndim == 2 for positions in spelled):
        spelled = [positions.expand(3, -1) for positions in spelled]
    return spelled[0] if len(spelled) == 1 else torch.cat(spelled, dim=-1)
