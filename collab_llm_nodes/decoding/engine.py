"""Runs a model for many sessions: feed tokens, read logits, roll back.

An :class:`Engine` owns nothing per session and a :class:`Session` shares nothing with another, so
several threads may each drive their own session on one engine.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from collab_llm_nodes.decoding.exits import ExitScorer
from collab_llm_nodes.errors import InvalidInput, ProtocolError
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.loading import LoadedModel
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.models.vocabulary import vocabulary_hash, vocabulary_size

OnExit = Callable[[int, Tensor], None]


@dataclass(frozen=True)
class Feed:
    """What one session contributes to a pass; see ``Session.feed``."""

    session: Session
    ids: Sequence[int]
    on_exit: OnExit | None = None
    last: int | None = None


class Engine:
    """One loaded model and its early exits.

    Args:
        candidates: score each exit but the first only over the fed tokens and this many best of
            the exit before (other logits are -inf); 0 scores the whole vocabulary. For large
            vocabularies, where the head costs more than the layers between two exits.

    Attributes:
        vocab_size: columns of all logits: the tokenizer's size, without padding rows.
        eos: end tokens.
        num_layers: decoder layers.
        context: tokens a session can hold.
        exit_layers: exits that fire, counted in layers done.
    """

    def __init__(self, loaded: LoadedModel, *, candidates: int = 0) -> None:
        self.loaded = loaded
        self.vocab_size = vocabulary_size(loaded.tokenizer)
        self.vocabulary = vocabulary_hash(loaded.tokenizer)
        self.eos = _end_tokens(loaded, self.vocab_size)
        self.context: int = loaded.model.config.get_text_config().max_position_embeddings
        parts = decoder_parts(loaded.model)
        self.num_layers = len(parts.layers)
        self.exit_layers = loaded.adapters.layers if loaded.adapters is not None else ()
        self._exits = (
            ExitScorer(parts, loaded.adapters, self.vocab_size, candidates)
            if loaded.adapters is not None
            else None
        )
        # The hook of a layer runs in the thread of the forward pass: this finds its session.
        self._pass = threading.local()
        self._hooks = [
            parts.layers[layer - 1].register_forward_hook(self._hook(layer))
            for layer in self.exit_layers
        ]

    def open(self, prompt: EncodedPrompt) -> Session:
        """Start a session; nothing is computed before its first ``feed``."""
        return Session(self, prompt)

    def run(self, feeds: Sequence[Feed]) -> list[Tensor | Exception]:
        """Feed several sessions; an exception in one is its result and leaves the others alone."""
        results: list[Tensor | Exception] = []
        for feed in feeds:
            try:
                results.append(feed.session.feed(feed.ids, feed.on_exit, feed.last))
            except Exception as error:  # noqa: BLE001  whatever it is, it is this session's own
                results.append(error)
        return results

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens`` without special ones."""
        return str(self.loaded.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def close(self) -> None:
        """Take the exits off the model, which others may go on using."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, layer: int) -> Callable[[nn.Module, object, Tensor], None]:
        def fire(module: nn.Module, args: object, hidden: Tensor) -> None:
            on_hidden: OnExit | None = getattr(self._pass, "on_hidden", None)
            if on_hidden is not None:
                on_hidden(layer, hidden)

        return fire

    @torch.inference_mode()
    def _forward(
        self, session: Session, ids: Sequence[int], keep: int, on_exit: OnExit | None
    ) -> Tensor:
        """Run ``ids`` behind the session's cache, which grows; logits [keep, vocab_size]."""
        tokens = torch.tensor([list(ids)], device=self.loaded.device)
        start = session.length
        if on_exit is not None and self._exits is not None and keep:
            self._pass.on_hidden = self._exits.start(tokens[0], keep, on_exit)
        try:
            output = self.loaded.model(
                inputs_embeds=session.embed(tokens, start),
                position_ids=session.positions(start, len(ids)).to(tokens.device),
                past_key_values=session.cache,
                use_cache=True,
                logits_to_keep=keep or 1,  # 0 would mean all
            )
        finally:
            self._pass.on_hidden = None
        logits: Tensor = output.logits[0, :keep, : self.vocab_size]
        return logits


class Session:
    """One prompt's KV cache. Not for two threads at a time.

    ``session.length = n`` is the only rollback: what was fed after the first n tokens is forgotten.
    Tokens within the prompt's length must be the prompt's own (its images belong to them).
    """

    def __init__(self, engine: Engine, prompt: EncodedPrompt) -> None:
        self._engine = engine
        self._prompt = prompt
        self._length = 0
        self._image_features: Tensor | None = None
        # Without a config all layers keep all positions, also those with a sliding window (the
        # mask applies it), so every rollback is possible.
        self.cache: DynamicCache | None = DynamicCache()

    @property
    def length(self) -> int:
        """Tokens held in the KV cache."""
        return self._length

    @length.setter
    def length(self, n: int) -> None:
        if not 0 <= n <= self._length:
            raise ProtocolError(f"cannot roll back from {self._length} to {n}", field="length")
        for layer in self._open_cache().layers:
            assert isinstance(layer, DynamicLayer)
            assert layer.keys is not None
            assert layer.values is not None
            layer.keys = layer.keys[..., :n, :]
            layer.values = layer.values[..., :n, :]
        self._length = n

    def feed(
        self, ids: Sequence[int], on_exit: OnExit | None = None, last: int | None = None
    ) -> Tensor:
        """Append ``ids`` and return the logits after each of the last ``last`` (default: all).

        Args:
            ids: token ids.
            on_exit: called as ``on_exit(layer, logits [last, V])`` DURING the forward pass, at
                each of the engine's exit layers. An exception it raises ends the pass.
            last: 0 to only fill the cache.

        Returns:
            [last, V] logits. If anything raises, the session is as it was before.

        Raises:
            InvalidInput: ids outside the vocabulary, not the prompt's, or more than fit.
            ProtocolError: the session is closed.
        """
        cache = self._open_cache()
        keep = len(ids) if last is None else last
        if not 0 <= keep <= len(ids):
            raise ValueError(f"last={last} of {len(ids)} ids")
        self._check(ids)
        if not ids:
            return torch.empty(0, self._engine.vocab_size, device=self._engine.loaded.device)
        before = [copy.copy(layer) for layer in cache.layers]  # tensors are replaced, not written
        try:
            logits = self._engine._forward(self, ids, keep, on_exit)
        except BaseException:
            cache.layers = before
            raise
        self._length += len(ids)
        return logits

    def close(self) -> None:
        """Free the KV cache."""
        self.cache = None
        self._image_features = None
        self._length = 0

    def positions(self, start: int, count: int) -> Tensor:
        """Position ids of the tokens from ``start``: [1, count], with M-RoPE [3, 1, count]."""
        index = torch.arange(start, start + count)
        own = self._prompt.position_ids
        if own is None:
            return index[None]
        later = index[index >= len(self._prompt.ids)] + self._prompt.position_delta
        return torch.cat([own[:, start : start + count], later.expand(3, -1)], dim=1)[:, None]

    def embed(self, tokens: Tensor, start: int) -> Tensor:
        """Embeddings [1, k, hidden] of ``tokens`` [1, k], image features in their places."""
        model = self._engine.loaded.model
        embedded: Tensor = model.get_input_embeddings()(tokens)
        pixels, prompt_ids = self._prompt.pixel_values, self._prompt.ids
        if pixels is None or start >= len(prompt_ids):
            return embedded
        if self._image_features is None:
            grid = self._prompt.image_grid_thw
            assert grid is not None
            features = model.get_image_features(
                pixels.to(embedded.device), grid.to(embedded.device), return_dict=True
            ).pooler_output
            self._image_features = torch.cat(list(features)).to(embedded.dtype)
        placeholder = model.config.image_token_id
        seen = prompt_ids[:start].count(placeholder)
        here = tokens[0] == placeholder
        here[len(prompt_ids) - start :] = False  # generated: a token like any other
        embedded = embedded.clone()
        embedded[0, here] = self._image_features[seen : seen + int(here.sum())]
        return embedded

    def _open_cache(self) -> DynamicCache:
        if self.cache is None:
            raise ProtocolError("the session is closed", remedy="open a new one")
        return self.cache

    def _check(self, ids: Sequence[int]) -> None:
        for token in ids:
            if not 0 <= token < self._engine.vocab_size:
                raise InvalidInput(
                    f"token {token} is outside the vocabulary of {self._engine.vocab_size}",
                    field="ids",
                )
        own = self._prompt.ids[self._length : self._length + len(ids)]
        if tuple(ids[: len(own)]) != own:
            raise InvalidInput(
                "the first tokens of a session are its prompt's",
                field="ids",
                remedy="feed prompt.ids first",
            )
        if self._length + len(ids) > self._engine.context:
            raise InvalidInput(
                f"{self._length + len(ids)} tokens, the model reads {self._engine.context}",
                field="ids",
                remedy="lower max_tokens or shorten the prompt",
            )


def _end_tokens(loaded: LoadedModel, vocab_size: int) -> frozenset[int]:
    configured = loaded.model.generation_config.eos_token_id
    found = set(configured) if isinstance(configured, list) else {configured}
    found.add(loaded.tokenizer.eos_token_id)
    return frozenset(t for t in found if t is not None and t < vocab_size)
