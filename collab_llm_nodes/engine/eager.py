"""The transformers forward behind the engine's interface: slow, and right for every model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache

from collab_llm_nodes.engine.backend import AfterLayer, Chunk, Output, Rows
from collab_llm_nodes.engine.cache import BLOCK
from collab_llm_nodes.engine.device import OnDevice, Upload
from collab_llm_nodes.engine.eager_cache import EagerCache, RecurrentCache, writable
from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.models.architectures import cache_argument, decoder_parts, is_recurrent
from collab_llm_nodes.models.devices import lacks_memory
from collab_llm_nodes.models.loading import LoadedModel
from collab_llm_nodes.models.prompt import EncodedPrompt

LayerOutput = Tensor | tuple[Tensor, ...]


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
    block = BLOCK
    scratch_bytes = 0

    def __init__(self, loaded: LoadedModel, vocab_size: int) -> None:
        self._loaded = loaded
        self._vocab_size = vocab_size
        # The hook of a layer runs in the thread of the forward pass: this finds its session.
        self._pass = threading.local()
        self._cache_argument = cache_argument(loaded.model)
        self._recurrent = is_recurrent(loaded.model.config.get_text_config())
        parts = decoder_parts(loaded.model)
        self._num_layers = len(parts.layers)
        self._hooks = [
            layer.register_forward_hook(self._hook(done))
            for done, layer in enumerate(parts.layers, 1)
        ]
        self._hooks.append(parts.head.register_forward_pre_hook(self._before_head))
        self._hooks.append(
            loaded.model.get_decoder().register_forward_pre_hook(
                self._before_decoder, with_kwargs=True
            )
        )

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

    def forward(self, plan: Plan, rows: Rows, after_layer: AfterLayer | None) -> list[Output]:
        chunk, cache, held = plan.chunk, plan.chunk.cache, plan.chunk.cache.held
        skipped = min(max(0, cache.pinned - chunk.start), chunk.new)  # read with the pictures
        if skipped == chunk.new:
            none = rows.embedded[:0]
            return [Output(none.new_empty(0, self._vocab_size), none)]
        embedded = cache.begin(rows.embedded)
        before = held.layers  # their tensors never change
        held.layers = [writable(layer) for layer in before]
        last = chunk.keep or 1  # 0 would mean all
        wanted: int | Tensor = last
        if after_layer is not None:  # as a number, it would have Gemma 4 cut the states themselves
            wanted = torch.arange(-last, 0, device=embedded.device)
        self._pass.after_layer, self._pass.new = _shifted(after_layer, skipped), chunk.new
        self._pass.added = rows.added
        try:
            output = self._loaded.model(
                **self._tokens(rows._replace(embedded=embedded), skipped),
                position_ids=_positions(plan, embedded)[..., skipped:],
                attention_mask=_mask(plan, embedded),
                use_cache=True,
                logits_to_keep=wanted,
                **{self._cache_argument: held},
            )
        except BaseException:  # whatever ends the pass, the cache is as it was before it
            held.layers = before
            raise
        finally:
            self._pass.after_layer, self._pass.added = None, ()
        self.session_bytes = cache.state_bytes
        logits: Tensor = output.logits[0, : chunk.keep, : self._vocab_size]
        return [Output(logits, self._pass.states[0, : chunk.keep])]

    def _tokens(self, rows: Rows, skipped: int) -> dict[str, Tensor]:
        """Return the rows after ``skipped`` ones as the model's own ``generate`` gives them."""
        if self._loaded.processor is None or rows.ids is None:
            return {"inputs_embeds": rows.embedded[None, skipped:]}
        return {"input_ids": rows.ids[None, skipped:]}

    def read_pictures(self, prompt: EncodedPrompt, cache: EagerCache) -> int:
        """Read a prompt up to its last picture, in one pass of the model's own making.

        Whatever the model does with pictures stays within that pass: several layers that take
        features, attention in both directions, positions of its own.

        Args:
            prompt: with ``processed``.
            cache: empty; it holds ``prompt.shown`` columns afterwards.

        Returns:
            The position of a later token minus its index.

        Raises:
            ModelError: the model does not take what its processor has made of the pictures.
        """
        model, device = self._loaded.model, self._loaded.device
        ids = torch.tensor([prompt.ids], device=device)
        inputs = on_device(prompt.processed or {}, device)
        held = DynamicCache()
        try:
            model(
                input_ids=ids[:, : prompt.shown],
                **{name: _cut(value, ids, prompt.shown) for name, value in inputs.items()},
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_argument: held},
            )
        except Exception as error:
            if lacks_memory(error):
                raise
            raise ModelError(
                "the model does not take what its own processor makes of the pictures:"
                f" {str(error)[:300]}",
                field="images",
                remedy="send pictures of usual sizes, and use the processor that came with the"
                " model",
            ) from error
        cache.held, cache.pinned = held, prompt.shown
        positions: Tensor | None = self._pass.positions
        return 0 if positions is None else int(positions.max()) + 1 - prompt.shown

    def filled(self, keys_values: Tensor) -> EagerCache:
        cache = self.new_cache()
        for number, both in enumerate(keys_values.to(self._loaded.device)):
            keys, values = both[None].chunk(2, dim=1)
            cache.held.update(keys, values, number)
        return cache

    def capture(self) -> None:
        """Do nothing: every pass is launched anew."""

    def keep_room(self, room: float) -> float:
        """Return ``room``: each cache allocates its own."""
        return room

    def close(self) -> None:
        """Take the hooks off the model, which others may go on using."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, layer: int) -> Callable[[nn.Module, object, LayerOutput], LayerOutput]:
        def fire(module: nn.Module, args: object, output: LayerOutput) -> LayerOutput:
            hidden, *others = output if isinstance(output, tuple) else (output,)
            added: Sequence[Tensor] = getattr(self._pass, "added", ())
            if layer <= len(added):
                hidden = hidden + added[layer - 1]
            after_layer: AfterLayer | None = getattr(self._pass, "after_layer", None)
            if after_layer is not None and layer < self._num_layers:
                after_layer(layer, hidden[0, -self._pass.new :])
            return (hidden, *others) if isinstance(output, tuple) else hidden

        return fire

    def _before_head(self, module: nn.Module, args: tuple[Tensor]) -> None:
        self._pass.states = args[0]

    def _before_decoder(self, module: nn.Module, args: object, options: dict[str, Any]) -> None:
        self._pass.positions = options.get("position_ids")


def _shifted(after_layer: AfterLayer | None, skipped: int) -> AfterLayer | None:
    """Return ``after_layer`` for passes without the first rows, of which nothing is wanted."""
    if after_layer is None or not skipped:
        return after_layer
    return lambda layer, hidden: after_layer(layer, functional.pad(hidden, (0, 0, skipped, 0)))


def on_device(processed: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return what a processor has made, its tensors on ``device``."""
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in processed.items()}


def _cut(value: Any, ids: Tensor, shown: int) -> Any:
    """Return the part for the first ``shown`` of ``ids`` [1, n], if ``value`` is one by token."""
    by_token = isinstance(value, Tensor) and value.shape == ids.shape
    return value[:, :shown] if by_token and not value.is_floating_point() else value


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
