"""A Llama's forward pass by hand: every layer's output, and the attention of its first heads.

Equal to transformers' (tested); written out because it compiles to few kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from collab_llm_nodes.models.architectures import layer_parts


class TextForward(nn.Module):
    """The forward pass of ``model``, a ``LlamaForCausalLM``; parameters are the model's own."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: Any, length: int) -> None:
        super().__init__()
        self.model = model
        self.head_size = int(model.config.head_dim)
        positions = torch.arange(length, device=model.device)[None]
        cos, sin = model.model.rotary_emb(torch.zeros(1, device=model.device), positions)
        self.register_buffer("cos", cos[0].float(), persistent=False)
        self.register_buffer("sin", sin[0].float(), persistent=False)

    def forward(self, ids: Tensor) -> list[Tensor]:
        """Return the output of each layer, [B, T, hidden], for ids [B, T]; attention is causal."""
        x = self._embed(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        layers = []
        for layer in self.model.model.layers:
            query, key, value = self._project(layer, x, cos, sin)
            x = self._finish(layer, x, _attend(query, key, value, None))
            layers.append(x)
        return layers

    def guided(
        self,
        ids: Tensor,
        layers: Sequence[int],
        wanted: Tensor,
        positions: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the last layer's output, and the attention of the first heads of some layers.

        Args:
            ids: int64 [B, T].
            layers: numbers of the guided layers, from 0.
            wanted: int64 [B, N], the places in a row whose attention is returned.
            positions: int64 [B, T], those within a text, if a row holds several texts.
            visible: bool [B, T, T], the tokens that each token sees; None: all before it.

        Returns:
            The output [B, T, hidden], and of each guided layer the logarithm of its first head's
            attention, [B, N, T].
        """
        length = ids.shape[1]
        if positions is None:
            cos, sin = self.cos[:length], self.sin[:length]
        else:
            cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        if visible is None:
            mask, seen = None, torch.arange(length, device=ids.device) <= wanted[..., None]
        else:
            mask = visible[:, None]
            seen = visible.gather(1, wanted[..., None].expand(-1, -1, length))
        x, attention = self._embed(ids), []
        places = wanted[..., None].expand(-1, -1, self.head_size)
        for number, layer in enumerate(self.model.model.layers):
            query, key, value = self._project(layer, x, cos, sin)
            if number in layers:
                asking = query[:, 0].gather(1, places)
                scores = asking @ key[:, 0].transpose(1, 2) * self.head_size**-0.5
                attention.append(scores.float().masked_fill(~seen, -1e9).log_softmax(-1))
            x = self._finish(layer, x, _attend(query, key, value, mask))
        return x, attention

    def normed(self, hidden: Tensor) -> Tensor:
        """Return the normed output, which the LM head and the Medusa heads read."""
        return _rms(hidden, self.model.model.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [..., V] of any layer's output."""
        return F.linear(self.normed(hidden), self.model.lm_head.weight)

    def _embed(self, ids: Tensor) -> Tensor:
        # Not the module: it keeps the padding's row, here the end of a text, from being learnt.
        return F.embedding(ids, self.model.model.embed_tokens.weight)

    def _project(
        self, layer: Any, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value [B, heads, T, d]; the first two are rotated."""
        parts = layer_parts(layer)
        h = _rms(x, parts.attention_norm)
        shape = (*h.shape[:2], -1, self.head_size)
        query, key, value = (
            part(h).view(shape).transpose(1, 2) for part in (parts.query, parts.key, parts.value)
        )
        return _rotate(query, cos, sin), _rotate(key, cos, sin), value

    def _finish(self, layer: Any, x: Tensor, attended: Tensor) -> Tensor:
        parts = layer_parts(layer)
        x = x + parts.out(attended.transpose(1, 2).flatten(2))
        h = _rms(x, parts.mlp_norm)
        gate, up = parts.up
        done: Tensor = x + parts.down(F.silu(gate(h)) * up(h))
        return done


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(
        query, key, value.to(query.dtype), attn_mask=mask, is_causal=mask is None
    )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


def _rms(x: Tensor, norm: Any) -> Tensor:
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    scaled: Tensor = norm.weight * (x * scale)
    return scaled
