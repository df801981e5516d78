"""The transformers forward behind the engine's interface: slow, and right for every model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from collab_llm_nodes.engine.backend import AfterLayer, Chunk, Output
from collab_llm_nodes.engine.device import OnDevice, Upload
from collab_llm_nodes.engine.eager_cache import EagerCache, RecurrentCache, writable
from collab_llm_nodes.models.architectures import cache_argument, decoder_parts, is_recurrent
from collab_llm_nodes.models.loading import LoadedModel


@dataclass(frozen=True)
class Plan:
    """A pass of one chunk.

    Attributes:
        mask: bool [k, end]; None: causal.
        positions: of the first token, which the others follow; or [k] or M-RoPE [3, k].
    """

    chunk: Chunk
    mask: OnDevice | None
    positions: int | OnDevice


class EagerBackend:
    """A ``backend.Backend`` that runs one session at a time."""

    batches = False
    session_bytes = 0

    def __init__(self, loaded: LoadedModel, vocab_size: int) -> None:
        self._loaded = loaded
        self._vocab_size = vocab_size
        # The hook of a layer runs in the thread of the forward pass: this finds its session.
        self._pass = threading.local()
        self._cache_argument = cache_argument(loaded.model)
        self._recurrent = is_recurrent(loaded.model.config.get_text_config())
        parts = decoder_parts(loaded.model)
        self._hooks = [
            layer.register_forward_hook(self._hook(done))
            for done, layer in enumerate(parts.layers[:-1], 1)
        ]
        self._hooks.append(parts.head.register_forward_pre_hook(self._before_head))

    def arrange(self, chunks: Sequence[Chunk]) -> list[int]:
        return list(range(len(chunks)))

    def new_cache(self, expected: int = 0) -> EagerCache:
        if self._recurrent:
            model = self._loaded.model
            like = model.get_input_embeddings().weight[:0].detach()
            return RecurrentCache(model.config, like)
        # Without a config all layers keep all positions, also those with a sliding window (the
        # mask applies it), so every rollback is possible.
        return EagerCache(DynamicCache())

    def plan(self, chunks: Sequence[Chunk], upload: Upload) -> Plan:
        (chunk,) = chunks
        mask = None if chunk.mask is None else upload.add(chunk.mask)
        positions = chunk.positions
        return Plan(chunk, mask, positions if isinstance(positions, int) else upload.add(positions))

    def forward(self, plan: Plan, embedded: Tensor, after_layer: AfterLayer | None) -> list[Output]:
        chunk, cache, held = plan.chunk, plan.chunk.cache, plan.chunk.cache.held
        embedded = cache.begin(embedded)
        before = held.layers  # their tensors never change
        held.layers = [writable(layer) for layer in before]
        self._pass.after_layer, self._pass.new = after_layer, chunk.new
        try:
            output = self._loaded.model(
                inputs_embeds=embedded[None],
                position_ids=_positions(plan, embedded),
                attention_mask=_mask(plan, embedded),
                use_cache=True,
                logits_to_keep=chunk.keep or 1,  # 0 would mean all
                **{self._cache_argument: held},
            )
        except BaseException:  # whatever ends the pass, the cache is as it was before it
            held.layers = before
            raise
        finally:
            self._pass.after_layer = None
        self.session_bytes = cache.state_bytes
        logits: Tensor = output.logits[0, : chunk.keep, : self._vocab_size]
        return [Output(logits, self._pass.states[0, : chunk.keep])]

    def filled(self, keys_values: Tensor) -> EagerCache:
        cache = self.new_cache()
        for number, both in enumerate(keys_values.to(self._loaded.device)):
            keys, values = both[None].chunk(2, dim=1)
            cache.held.update(keys, values, number)
        return cache

    def close(self) -> None:
        """Take the hooks off the model, which others may go on using."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, layer: int) -> Callable[[nn.Module, object, Tensor], None]:
        def fire(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            after_layer: AfterLayer | None = getattr(self._pass, "after_layer", None)
            if after_layer is not None:
                hidden = output[0] if isinstance(output, tuple) else output
                after_layer(layer, hidden[0, -self._pass.new :])

        return fire

    def _before_head(self, module: nn.Module, args: tuple[Tensor]) -> None:
        self._pass.states = args[0]


def _mask(plan: Plan, like: Tensor) -> Tensor | None:
    """Return the additive mask [1, 1, k, end]; None: transformers makes the causal one."""
    if plan.mask is None:
        return None
    hidden = ~plan.mask()
    mask = like.new_zeros(hidden.shape)
    return mask.masked_fill_(hidden, torch.finfo(like.dtype).min)[None, None]


def _positions(plan: Plan, embedded: Tensor) -> Tensor:
    """Return the positions [1, k], with M-RoPE [3, 1, k], of embedded tokens [k, hidden_size].

    Those before the chunk's own, which a model with recurrent states reads again, come before.
    """
    first = plan.positions
    if isinstance(first, int):
        end = first + plan.chunk.new
        return torch.arange(end - len(embedded), end, device=embedded.device)[None]
    return first()[..., None, :]
