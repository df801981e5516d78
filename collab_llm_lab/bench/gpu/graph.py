"""A captured layer loop: the time of a pass that no host holds up, the engine's ceiling."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from collab_llm_lab.bench.gpu.hardware import distance
from collab_llm_lab.bench.gpu.lab import Lab
from collab_llm_lab.bench.gpu.speed import filled, limit
from collab_llm_lab.bench.gpu.timing import timed
from collab_llm_nodes.models.architectures import LayerParts, decoder_parts, layer_parts
from collab_llm_nodes.models.loading import LoadedModel

ROWS = (1, 5, 9, 64)
CAPTURABLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@torch.inference_mode()
def graph(lab: Lab) -> None:
    """Time a plain layer loop over fixed tensors, captured in a CUDA graph; on a CPU as it is."""
    loaded = lab.held(lab.form.large, "bfloat16")
    engine = lab.engine(loaded)
    peer = lab.build(lab.form.large, "bfloat16")  # weights as [out, in]
    limit_ms = limit(lab, loaded)
    lab.figure("captured", lab.cuda)
    session = filled(lab, engine)
    before = torch.cat(session.keys_values(), dim=2)

    def compare(rows: int) -> None:
        ids = lab.ids(rows, seed=7)
        loop = LayerLoop(peer, before, ids)
        with sdpa_kernel(CAPTURABLE):
            call = _captured(loop) if lab.cuda else loop.run
            found = timed(lab.device, call, lab.form.repeats)
        session.length = lab.form.filled
        error = distance(loop.logits[:, : engine.vocab_size], session.feed(ids))
        lab.near(f"{rows} rows as the engine's", error, 0.1)
        lab.figure(f"{rows} rows", {**found, "bandwidth_share": limit_ms / found["ms"]})

    for rows in ROWS:
        lab.attempt(f"{rows} rows", partial(compare, rows))
    session.close()


def _captured(loop: LayerLoop) -> Any:
    """Return the replay of a graph of the loop, which has run before on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            loop.run()
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        loop.run()
    return captured.replay


class LayerLoop:
    """A decoder that reads fixed ids after a fixed cache, over tensors that stay where they are.

    Args:
        before: keys and values of the cache, [layers, 2 * key heads, columns, head width].

    Attributes:
        logits: [rows, rows of the head], after :meth:`run`.
    """

    def __init__(self, loaded: LoadedModel, before: Tensor, ids: tuple[int, ...]) -> None:
        config = loaded.model.config.get_text_config()
        parts = decoder_parts(loaded.model)
        self._layers = [layer_parts(layer) for layer in parts.layers]
        self._norm, self._head = parts.norm, parts.head
        self._epsilon = config.rms_norm_eps
        self._keys, self._heads = before.shape[1] // 2, config.num_attention_heads
        start, rows, width = before.shape[2], len(ids), before.shape[3]
        columns = -(-(start + rows) // 64) * 64
        self._new = slice(start, start + rows)
        self._cache = functional.pad(before, (0, 0, 0, columns - start))
        device, dtype = before.device, before.dtype
        embedding = loaded.model.get_input_embeddings().weight
        self._x = embedding[torch.tensor(ids, device=device)]
        pairs = torch.arange(0, width, 2, device=device) / width
        places = torch.arange(start, start + rows, device=device)
        theta: float = config.rope_parameters["rope_theta"]
        angles = (places[:, None] * theta**-pairs).repeat(1, 2)[:, None]
        self._cos, self._sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self._sin[..., : width // 2].neg_()
        seen = torch.arange(columns, device=device) <= places[:, None]
        mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -math.inf)
        # The heads that share keys and values are rows of one query.
        self._mask = mask.repeat_interleave(self._heads // self._keys, 0)[None, None]
        self.logits = torch.empty(0, device=device)

    def run(self) -> None:
        """Compute one pass."""
        x = self._x
        for number, layer in enumerate(self._layers):
            x = x + layer.out(self._attended(layer, number, self._normed(x, layer.attention_norm)))
            y = self._normed(x, layer.mlp_norm)
            gate, up = (widen(y) for widen in layer.up)
            x = x + layer.down(functional.silu(gate) * up)
        self.logits = self._head(self._normed(x, self._norm))

    def _attended(self, layer: LayerParts, number: int, x: Tensor) -> Tensor:
        rows, keys, cache = x.shape[0], self._keys, self._cache[number]
        query = self._turned(layer.query(x).view(rows, self._heads, -1))
        cache[:keys, self._new] = self._turned(layer.key(x).view(rows, keys, -1)).transpose(0, 1)
        cache[keys:, self._new] = layer.value(x).view(rows, keys, -1).transpose(0, 1)
        by_key = query.view(rows, keys, -1, query.shape[-1]).transpose(0, 1)
        output = functional.scaled_dot_product_attention(
            by_key.reshape(1, keys, -1, query.shape[-1]),
            cache[None, :keys],
            cache[None, keys:],
            attn_mask=self._mask,
        )
        # The memory-efficient kernel gives the heads another order in memory than those of a CPU.
        return output.view(keys, rows, -1, query.shape[-1]).transpose(0, 1).reshape(rows, -1)

    def _turned(self, heads: Tensor) -> Tensor:
        return heads * self._cos + heads.roll(heads.shape[-1] // 2, -1) * self._sin

    def _normed(self, x: Tensor, norm: torch.nn.Module) -> Tensor:
        weight = norm.weight
        assert isinstance(weight, Tensor)
        return functional.rms_norm(x, weight.shape, weight, self._epsilon)
