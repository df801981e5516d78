"""The transformers forward behind the engine's interface: slow, and right for every model."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from collab_llm_nodes.decoding.backend import AfterLayer, Chunk
from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.models.architectures import attention_windows, decoder_parts
from collab_llm_nodes.models.loading import LoadedModel


class EagerBackend:
    """As ``backend.Backend``; one session at a time."""

    batches = False

    def __init__(self, loaded: LoadedModel, exit_layers: Sequence[int]) -> None:
        self._loaded = loaded
        self._windows = any(attention_windows(loaded.model))
        # The hook of a layer runs in the thread of the forward pass: this finds its session.
        self._pass = threading.local()
        layers = decoder_parts(loaded.model).layers
        self._hooks = [
            layers[layer - 1].register_forward_hook(self._hook(layer)) for layer in exit_layers
        ]

    def new_cache(self) -> DynamicCache:
        # Without a config all layers keep all positions, also those with a sliding window (the
        # mask applies it), so every rollback is possible.
        return DynamicCache()

    def forward(self, chunks: Sequence[Chunk], after_layer: AfterLayer | None) -> list[Tensor]:
        (chunk,) = chunks
        before = [copy.copy(layer) for layer in chunk.cache.layers]  # tensors are never written to
        self._pass.after_layer = after_layer
        try:
            output = self._loaded.model(
                inputs_embeds=chunk.embedded[None],
                position_ids=self._positions(chunk),
                attention_mask=self._mask(chunk),
                past_key_values=chunk.cache,
                use_cache=True,
                logits_to_keep=chunk.keep or 1,  # 0 would mean all
            )
        except BaseException:
            chunk.cache.layers = before
            raise
        finally:
            self._pass.after_layer = None
        logits: Tensor = output.logits[0, : chunk.keep]
        return [logits]

    def move(self, cache: DynamicCache, kept: Sequence[int]) -> None:
        for layer in _filled(cache):
            columns = torch.tensor(kept, device=layer.keys.device)
            layer.keys = layer.keys[..., columns, :]
            layer.values = layer.values[..., columns, :]

    def cut(self, cache: DynamicCache, columns: int) -> None:
        for layer in _filled(cache):
            layer.keys = layer.keys[..., :columns, :]
            layer.values = layer.values[..., :columns, :]

    def close(self) -> None:
        """Take the hooks off the model, which others may go on using."""
        for hook in self._hooks:
            hook.remove()

    def _positions(self, chunk: Chunk) -> Tensor:
        if isinstance(chunk.positions, int):
            first, count = chunk.positions, len(chunk.embedded)
            return torch.arange(first, first + count, device=chunk.embedded.device)[None]
        positions = chunk.positions.to(chunk.embedded.device)
        return positions[..., None, :]

    def _mask(self, chunk: Chunk) -> Tensor | None:
        if chunk.mask is None:
            return None
        if self._windows:
            raise ModelError(
                "token trees with sliding-window attention", remedy="draft one continuation only"
            )
        return torch.zeros_like(chunk.mask, dtype=chunk.embedded.dtype).masked_fill_(
            ~chunk.mask, torch.finfo(chunk.embedded.dtype).min
        )[None, None]

    def _hook(self, layer: int) -> Callable[[nn.Module, object, Tensor], None]:
        def fire(module: nn.Module, args: object, hidden: Tensor) -> None:
            after_layer: AfterLayer | None = getattr(self._pass, "after_layer", None)
            if after_layer is not None:
                after_layer(layer, hidden[0])

        return fire


def _filled(cache: DynamicCache) -> list[DynamicLayer]:
    return [
        layer for layer in cache.layers if isinstance(layer, DynamicLayer) and layer.is_initialized
    ]
