"""The transformers forward behind the engine's interface: slow, and right for every model."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from collab_llm_nodes.engine.backend import AfterLayer, Chunk
from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.models.architectures import attention_windows, decoder_parts
from collab_llm_nodes.models.loading import LoadedModel


class EagerBackend:
    """As ``backend.Backend``; one session at a time."""

    batches = False

    def __init__(self, loaded: LoadedModel, vocab_size: int, exit_layers: Sequence[int]) -> None:
        self._loaded = loaded
        self._vocab_size = vocab_size
        self._windows = any(attention_windows(loaded.model))
        # The hook of a layer runs in the thread of the forward pass: this finds its session.
        self._pass = threading.local()
        layers = decoder_parts(loaded.model).layers
        self._hooks = [
            layers[layer - 1].register_forward_hook(self._hook(layer)) for layer in exit_layers
        ]

    def side_by_side(self, new: int, end: int) -> bool:
        return False  # there is one chunk in a pass

    def new_cache(self) -> DynamicCache:
        # Without a config all layers keep all positions, also those with a sliding window (the
        # mask applies it), so every rollback is possible.
        return DynamicCache()

    def forward(
        self, chunks: Sequence[Chunk], embedded: Tensor, after_layer: AfterLayer | None
    ) -> list[Tensor]:
        (chunk,) = chunks
        before = [copy.copy(layer) for layer in chunk.cache.layers]  # tensors are never written to
        self._pass.after_layer = after_layer
        try:
            output = self._loaded.model(
                inputs_embeds=embedded[None],
                position_ids=_positions(chunk, embedded.device),
                attention_mask=self._mask(chunk, embedded),
                past_key_values=chunk.cache,
                use_cache=True,
                logits_to_keep=chunk.keep or 1,  # 0 would mean all
            )
        except BaseException:  # whatever ends the pass, the cache is as it was before it
            chunk.cache.layers = before
            raise
        finally:
            self._pass.after_layer = None
        logits: Tensor = output.logits[0, : chunk.keep, : self._vocab_size]
        return [logits]

    def move(self, cache: DynamicCache, kept: Sequence[int]) -> None:
        _pick(cache, torch.tensor(kept))

    def cut(self, cache: DynamicCache, columns: int) -> None:
        _pick(cache, slice(columns))

    def close(self) -> None:
        """Take the hooks off the model, which others may go on using."""
        for hook in self._hooks:
            hook.remove()

    def _mask(self, chunk: Chunk, like: Tensor) -> Tensor | None:
        """Additive [1, 1, k, end]; None lets transformers make the causal one."""
        if chunk.mask is None:
            return None
        if self._windows:
            raise ModelError(
                "token trees with sliding-window attention", remedy="draft one continuation only"
            )
        hidden = ~chunk.mask.to(like.device)
        mask = like.new_zeros(hidden.shape)
        return mask.masked_fill_(hidden, torch.finfo(like.dtype).min)[None, None]

    def _hook(self, layer: int) -> Callable[[nn.Module, object, Tensor], None]:
        def fire(module: nn.Module, args: object, hidden: Tensor) -> None:
            after_layer: AfterLayer | None = getattr(self._pass, "after_layer", None)
            if after_layer is not None:
                after_layer(layer, hidden[0])

        return fire


def _positions(chunk: Chunk, device: torch.device) -> Tensor:
    """[1, k], with M-RoPE [3, 1, k]."""
    if isinstance(chunk.positions, int):
        return torch.arange(chunk.positions, chunk.positions + chunk.new, device=device)[None]
    return chunk.positions.to(device)[..., None, :]


def _pick(cache: DynamicCache, columns: Tensor | slice) -> None:
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer)
        if layer.keys is not None and layer.values is not None:
            layer.keys = layer.keys[..., columns, :]
            layer.values = layer.values[..., columns, :]
