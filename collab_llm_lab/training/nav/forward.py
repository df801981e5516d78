"""A fast batched forward pass over the weights of a ``Qwen2VLForConditionalGeneration``.

Same arithmetic as the transformers model (a test compares them), arranged for training: all
pictures have one size, so positions are constants and vision attention is one batched call; the
vision tower and the prompt's common prefix run once per picture for all its questions; no
padding mask is needed because padding is on the right.

Shapes: B pictures, K questions each, P prefix tokens (picture included), L question and answer
tokens, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen2VLForConditionalGeneration

from collab_llm_nodes.sim.renderer import HEIGHT_PX, WIDTH

PATCH, MERGE = 14, 2
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
"""Means and deviations of the colour channels with which Qwen2-VL normalises pictures."""
LONGEST_TEXT = 192
"""Question and answer tokens that fit."""


@dataclass(frozen=True)
class Grid:
    """Image tokens of a picture: ``rows`` x ``columns`` squares of 2 x 2 patches."""

    rows: int
    columns: int

    @classmethod
    def of(cls, height: int, width: int) -> Grid:
        """Return the grid of a picture of ``height`` x ``width`` pixels."""
        return cls(height // (PATCH * MERGE), width // (PATCH * MERGE))

    @property
    def tokens(self) -> int:
        return self.rows * self.columns

    @property
    def patches(self) -> int:
        return self.tokens * MERGE**2

    @property
    def thw(self) -> Tensor:
        """Frames, rows and columns of patches, int64 [1, 3]: ``image_grid_thw`` of one picture."""
        return torch.tensor([[1, self.rows * MERGE, self.columns * MERGE]])


GRID = Grid.of(HEIGHT_PX, WIDTH)
"""Grid of every picture."""


class Output(NamedTuple):
    """Results of a forward pass that a training step needs."""

    vision: Tensor
    """[B, tokens, D]: the image tokens as they enter the language model."""
    layers: list[Tensor]
    """[B, K, L, D] after each decoder layer (before the final norm)."""


class FastForward(nn.Module):
    """The forward pass of a model, whose parameters it shares.

    Args:
        prefix: ids up to the end of the picture.
    """

    prefix: Tensor
    cos: Tensor
    sin: Tensor
    v_cos: Tensor
    v_sin: Tensor
    mean: Tensor
    std: Tensor

    def __init__(self, model: Qwen2VLForConditionalGeneration, prefix: list[int]) -> None:
        super().__init__()
        self.model: Any = model
        self.config: Any = model.config
        visual: Any = model.model.visual
        text: Any = model.model.language_model
        ids = torch.tensor(prefix)
        self.register_buffer("prefix", ids, persistent=False)
        self.first_image = int((ids == self.config.image_token_id).nonzero()[0])
        self.prefix_length = len(prefix)
        # M-RoPE positions: get_rope_index once, for the longest text there is
        row = torch.cat([ids, torch.zeros(LONGEST_TEXT, dtype=ids.dtype)])[None]
        kinds = (row == self.config.image_token_id).int()
        positions, _ = model.model.get_rope_index(row, kinds, image_grid_thw=GRID.thw)
        cos, sin = text.rotary_emb(torch.zeros(1), positions)
        self.register_buffer("cos", cos[0], persistent=False)
        self.register_buffer("sin", sin[0], persistent=False)
        from transformers.vision_utils import get_vision_position_ids

        where = get_vision_position_ids(GRID.thw, MERGE)
        v_cos, v_sin = visual.rotary_pos_emb(torch.zeros(1), where)
        self.register_buffer("v_cos", v_cos, persistent=False)
        self.register_buffer("v_sin", v_sin, persistent=False)
        self.register_buffer("mean", torch.tensor(MEAN), persistent=False)
        self.register_buffer("std", torch.tensor(STD), persistent=False)

    def see(self, pictures: Tensor) -> Tensor:
        """Return image tokens [B, tokens, D] of uint8 pictures [B, height, width, 3]."""
        visual = self.model.model.visual
        b = pictures.shape[0]
        x = (pictures.float() / 255.0 - self.mean) / self.std
        x = x.view(b, GRID.rows, MERGE, PATCH, GRID.columns, MERGE, PATCH, 3)
        x = x.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(b, GRID.patches, 3 * PATCH * PATCH)
        # a still picture is two equal frames: fold the two temporal halves of the kernel
        kernel = visual.patch_embed.proj.weight.sum(dim=2).flatten(1)
        x = F.linear(x, kernel).float()
        heads = self.config.vision_config.num_heads
        for block in visual.blocks:
            h = block.norm1(x)
            qkv = block.attn.qkv(h).view(b, x.shape[1], 3, heads, -1).permute(2, 0, 3, 1, 4)
            q, k, v = qkv.unbind(0)
            q, k = _rotate(q, self.v_cos, self.v_sin), _rotate(k, self.v_cos, self.v_sin)
            a = _attention(q, k, v, None)
            x = x + block.attn.proj(a.transpose(1, 2).reshape(b, x.shape[1], -1))
            x = x + block.mlp.fc2(_quick_gelu(block.mlp.fc1(block.norm2(x))))
        merger = visual.merger
        x = merger.ln_q(x).reshape(b, GRID.tokens, -1)
        return merger.mlp(x).float()

    def forward(self, pictures: Tensor, texts: Tensor, questions: int) -> Output:
        """Run uint8 pictures [B, height, width, 3] with K right-padded texts each, [B * K, L]."""
        vision = self.see(pictures)
        return Output(vision, self.read(vision, texts, questions))

    def read(
        self, vision: Tensor, texts: Tensor, questions: int, depth: int | None = None
    ) -> list[Tensor]:
        """Return layer outputs [B, K, L, D] of texts after image tokens; of ``depth`` layers."""
        text = self.model.model.language_model
        b, k, p, length = vision.shape[0], questions, self.prefix_length, texts.shape[1]
        pre = text.embed_tokens(self.prefix)
        first, after = self.first_image, self.first_image + GRID.tokens
        pre = torch.cat(
            [pre[:first].expand(b, -1, -1), vision, pre[after:].expand(b, -1, -1)], dim=1
        )
        x = torch.cat([pre, text.embed_tokens(texts).view(b, k * length, -1)], dim=1)
        cos = torch.cat([self.cos[:p], self.cos[p : p + length].repeat(k, 1)])
        sin = torch.cat([self.sin[:p], self.sin[p : p + length].repeat(k, 1)])
        causal = torch.full((p + length, p + length), -1e4, device=vision.device).triu(1)
        layers = []
        for layer in text.layers[:depth]:
            x = x + self._attend(layer, _rms(x, layer.input_layernorm), cos, sin, causal, k)
            h = _rms(x, layer.post_attention_layernorm)
            mlp = layer.mlp
            x = x + mlp.down_proj(F.silu(mlp.gate_proj(h)) * mlp.up_proj(h))
            layers.append(x[:, p:].view(b, k, length, -1))
        return layers

    def _attend(
        self, layer: Any, h: Tensor, cos: Tensor, sin: Tensor, causal: Tensor, k: int
    ) -> Tensor:
        attn = layer.self_attn
        b, n, p, d = h.shape[0], h.shape[1], self.prefix_length, attn.head_dim
        length = (n - p) // k
        query = attn.q_proj(h).view(b, n, -1, d).transpose(1, 2)
        key = attn.k_proj(h).view(b, n, -1, d).transpose(1, 2)
        value = attn.v_proj(h).view(b, n, -1, d).transpose(1, 2)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        first = _attention(query[:, :, :p], key[:, :, :p], value[:, :, :p], causal[:p, :p])
        rest = _attention(
            _split(query, p, k, length),
            _joined(key, p, k, length),
            _joined(value, p, k, length),
            causal[p:],
        )
        rest = rest.view(b, k, -1, length, d).transpose(1, 2).reshape(b, -1, k * length, d)
        out = torch.cat([first, rest], dim=2).transpose(1, 2).reshape(b, n, -1)
        return attn.o_proj(out)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [..., V] of the last layer's output [..., D]."""
        return F.linear(
            _rms(hidden, self.model.model.language_model.norm), self.model.lm_head.weight
        )


def gathered(hidden: Tensor, at: Tensor) -> Tensor:
    """Return the states [B K, A, D] of ``hidden`` [B, K, L, D] at the positions ``at`` [B K, A]."""
    hidden = hidden.flatten(0, 1)
    return torch.gather(hidden, 1, at[..., None].expand(-1, -1, hidden.shape[-1]))


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Compute attention plainly: its backward is 5x faster here than the fused CPU kernel's."""
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    if mask is not None:
        scores = scores + mask.to(scores.dtype)
    return scores.softmax(-1).to(value.dtype) @ value


def _split(x: Tensor, p: int, k: int, length: int) -> Tensor:
    """Return the questions' part of [B, H, P + K L, d] as [B K, H, L, d]."""
    b, heads, _, d = x.shape
    return x[:, :, p:].view(b, heads, k, length, d).transpose(1, 2).reshape(b * k, heads, length, d)


def _joined(x: Tensor, p: int, k: int, length: int) -> Tensor:
    """Return prefix and each question: [B K, H, P + L, d]."""
    b, heads, _, d = x.shape
    prefix = x[:, None, :, :p].expand(b, k, heads, p, d).reshape(b * k, heads, p, d)
    return torch.cat([prefix, _split(x, p, k, length)], dim=2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _rms(x: Tensor, norm: Any) -> Tensor:
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * (x * scale)
