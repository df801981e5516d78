"""The forward pass of transformers, with which the engine is compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from collab_llm_nodes.models.loading import LoadedModel
from collab_llm_nodes.models.prompt import EncodedPrompt


@torch.inference_mode()
def full_pass(
    peer: LoadedModel, prompt: EncodedPrompt, answer: Sequence[int], rows: int
) -> tuple[Tensor, list[Tensor]]:
    """Compute the prompt and ``answer`` in one pass without a cache.

    Returns:
        Logits [rows, vocabulary] after the last ``rows`` tokens, and the hidden states
        [rows, hidden] after each layer but the last, those before the first layer first.
    """
    model = peer.model
    ids = torch.tensor([[*prompt.ids, *answer]], device=peer.device)
    inputs: dict[str, Any] = {"input_ids": ids}
    if prompt.pixel_values is None or prompt.image_grid_thw is None:
        inputs["position_ids"] = torch.arange(ids.shape[1], device=peer.device).expand(3, 1, -1)
    else:  # a picture token in the answer stands for no picture, which transformers does not know
        grid = prompt.image_grid_thw.to(peer.device)
        kinds = (ids == model.config.image_token_id).int()
        kinds[:, len(prompt.ids) :] = 0
        features = model.get_image_features(prompt.pixel_values.to(peer.device), grid)
        embedded = model.get_input_embeddings()(ids)
        shown = torch.cat(list(features.pooler_output)).to(embedded)
        inputs = {
            "inputs_embeds": embedded.masked_scatter(kinds.bool()[..., None], shown),
            "position_ids": model.model.get_rope_index(ids, kinds, image_grid_thw=grid)[0],
        }
    output = model(**inputs, use_cache=False, logits_to_keep=rows, output_hidden_states=True)
    logits: Tensor = output.logits[0, :, : len(peer.tokenizer)]
    return logits, [states[0, -rows:] for states in output.hidden_states[:-1]]


@torch.inference_mode()
def generate(
    peer: LoadedModel, prompt: EncodedPrompt, tokens: int, *, padding: bool = False
) -> list[int]:
    """Decode so many tokens greedily by ``generate``, which no token ends.

    Args:
        padding: rows that only pad the vocabulary may be chosen; it costs a little to forbid them.
    """
    ids = torch.tensor([prompt.ids], device=peer.device)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if prompt.pixel_values is not None and prompt.image_grid_thw is not None:
        inputs["pixel_values"] = prompt.pixel_values.to(peer.device)
        inputs["image_grid_thw"] = prompt.image_grid_thw.to(peer.device)
        inputs["mm_token_type_ids"] = (ids == peer.model.config.image_token_id).int()
    rows = peer.model.config.get_text_config().vocab_size
    config = GenerationConfig(
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=peer.tokenizer.pad_token_id,
        suppress_tokens=None if padding else list(range(len(peer.tokenizer), rows)),
    )
    output = peer.model.generate(**inputs, generation_config=config)
    answer: list[int] = output[0, ids.shape[1] :].tolist()
    return answer
