"""The forward pass of transformers, with which the engine is compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig

from collab_llm_lab import reference
from collab_llm_lab.bench.lossless.check import generate_inputs
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
    options = reference.inputs(peer, prompt, answer)
    output = peer.model.get_decoder()(**options, use_cache=False, output_hidden_states=True)
    head = peer.model.get_output_embeddings()
    logits: Tensor = head(output.last_hidden_state[0, -rows:])[:, : len(peer.tokenizer)]
    return logits, [states[0, -rows:] for states in output.hidden_states[:-1]]


@torch.inference_mode()
def generate(
    peer: LoadedModel, prompt: EncodedPrompt, tokens: int, *, padding: bool = False
) -> list[int]:
    """Decode so many tokens greedily by ``generate``, which no token ends.

    Args:
        padding: rows that only pad the vocabulary may be chosen; it costs a little to forbid them.
    """
    inputs = generate_inputs(peer, prompt)
    rows = peer.model.config.get_text_config().vocab_size
    config = GenerationConfig(
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=peer.tokenizer.pad_token_id,
        suppress_tokens=None if padding else list(range(len(peer.tokenizer), rows)),
    )
    output = peer.model.generate(**inputs, generation_config=config)
    answer: list[int] = output[0, len(prompt.ids) :].tolist()
    return answer
