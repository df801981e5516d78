"""The oracle: the target decodes alone, one token at a time, everything recomputed each time.

Slow on purpose. It shares no code with ``engine``: no KV cache, no hooks, no rollback.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from collab_llm_nodes.decoding.rejection import own_token
from collab_llm_nodes.decoding.sampling import SamplingConfig, distribution
from collab_llm_nodes.models.loading import LoadedModel
from collab_llm_nodes.models.prompt import EncodedPrompt


@torch.inference_mode()
def generate(
    loaded: LoadedModel,
    prompt: EncodedPrompt,
    sampling: SamplingConfig,
    max_tokens: int,
    eos: frozenset[int],
) -> list[int]:
    """Decode up to ``max_tokens`` tokens of the answer; an end token is the last one.

    The answer's token ``t`` uses the random numbers of position ``t``. Under the greedy and the
    coupled law speculation must reproduce this token for token; under the rejection law it
    has the same distribution.
    """
    tokens: list[int] = []
    for position in range(max_tokens):
        logits = next_logits(loaded, prompt, tokens)
        tokens.append(own_token(distribution(logits, sampling), sampling, position))
        if tokens[-1] in eos:
            break
    return tokens


@torch.inference_mode()
def generate_guided(
    loaded: LoadedModel,
    prompt: EncodedPrompt,
    grammar: str,
    sampling: SamplingConfig,
    max_tokens: int,
) -> list[int]:
    """Decode as :func:`generate` within a grammar of llguidance, by its own helpers alone."""
    from llguidance import LLMatcher  # here: a GPU check does without
    from llguidance.hf import from_tokenizer
    from llguidance.numpy import (
        allocate_token_bitmask,
        apply_token_bitmask_inplace,
        fill_next_token_bitmask,
    )

    tokenizer: Any = loaded.tokenizer
    size, eos = len(tokenizer), tokenizer.eos_token_id
    matcher = LLMatcher(from_tokenizer(tokenizer, n_vocab=size, eos_token=eos), grammar)
    mask = allocate_token_bitmask(1, size)
    tokens: list[int] = []
    while len(tokens) < max_tokens and (not tokens or tokens[-1] != eos):
        logits = next_logits(loaded, prompt, tokens)[None].numpy()
        fill_next_token_bitmask(matcher, mask)
        apply_token_bitmask_inplace(logits, mask)
        tokens.append(own_token(distribution(logits[0], sampling), sampling, len(tokens)))
        if tokens[-1] != eos and not matcher.consume_token(tokens[-1]):
            raise RuntimeError(matcher.get_error())
    return tokens


@torch.inference_mode()
def next_logits(loaded: LoadedModel, prompt: EncodedPrompt, answer: Sequence[int]) -> Tensor:
    """Return the logits [V] after the prompt and ``answer``, in one pass over all of it."""
    if prompt.processed is not None:
        return _forced(loaded, prompt, answer)
    given = inputs(loaded, prompt, answer)
    if "inputs_embeds" in given:  # the whole model would look for pictures again
        hidden = loaded.model.get_decoder()(**given, use_cache=False).last_hidden_state
        logits: Tensor = loaded.model.get_output_embeddings()(hidden[:, -1:])
    else:
        logits = loaded.model(**given, use_cache=False).logits
    return logits[0, -1, : len(loaded.tokenizer)]


def _forced(loaded: LoadedModel, prompt: EncodedPrompt, answer: Sequence[int]) -> Tensor:
    """Return the logits [V] after ``answer``, which the model's own ``generate`` is made to say.

    Only that knows which inputs of the processor a model takes again with each token.
    """
    ids = torch.tensor([prompt.ids], device=loaded.device)
    config = GenerationConfig(
        max_new_tokens=len(answer) + 1,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    processors = LogitsProcessorList([_Forced(len(prompt.ids), answer)])
    with no_defaults(loaded.model):
        found = loaded.model.generate(
            input_ids=ids,
            **dict(prompt.processed or {}),
            generation_config=config,
            logits_processor=processors,
        )
    logits: Tensor = found.logits[-1][0, : len(loaded.tokenizer)]
    return logits


class _Forced(LogitsProcessor):
    """Leaves only the tokens of a given answer."""

    def __init__(self, start: int, answer: Sequence[int]) -> None:
        self._start = start
        self._answer = answer

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        position = input_ids.shape[1] - self._start
        if position >= len(self._answer):
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._answer[position]] = 0.0
        return forced


@contextmanager
def no_defaults(model: Any) -> Iterator[None]:
    """Hide the checkpoint's own settings, such as Qwen's repetition penalty."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def inputs(loaded: LoadedModel, prompt: EncodedPrompt, answer: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of transformers' forward for the prompt and ``answer``.

    With pictures they are those of the decoder, which then reads ``inputs_embeds``: an image token
    in the answer stands for no image, so features and positions are computed here.
    """
    model = loaded.model
    ids = torch.tensor([[*prompt.ids, *answer]], device=loaded.device)
    if prompt.pixel_values is not None and prompt.image_grid_thw is not None:
        grid = prompt.image_grid_thw.to(ids.device)
        kinds = (ids == model.config.image_token_id).int()
        kinds[:, len(prompt.ids) :] = 0
        features = model.get_image_features(prompt.pixel_values.to(ids.device), grid)
        embedded = model.get_input_embeddings()(ids)
        levels = getattr(features, "deepstack_features", None)
        deep = (
            {
                "visual_pos_masks": kinds.bool(),
                "deepstack_visual_embeds": [torch.vstack(tuple(level)) for level in levels],
            }
            if levels
            else {}
        )
        return {
            **deep,
            "inputs_embeds": embedded.masked_scatter(
                kinds.bool()[..., None], torch.cat(list(features.pooler_output)).to(embedded)
            ),
            "position_ids": model.model.get_rope_index(ids, kinds, image_grid_thw=grid)[0],
        }
    found: dict[str, Any] = {"input_ids": ids}
    if loaded.image_processor is not None:
        found["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand(3, 1, -1)
    return found
