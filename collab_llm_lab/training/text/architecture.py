"""The embedded text models: plain Llama classes with tiny configurations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from collab_llm_nodes.models.tokenizer import token_id

CONTEXT = 2048
"""Positions of the shipped models; they are trained on 1,024."""


@dataclass(frozen=True)
class Size:
    """Widths and depths of one model."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int


TARGET = Size(256, 6, 640, 8, 4)
WORKER = Size(256, 3, 640, 8, 4)
DRAFT = Size(160, 2, 384, 5, 1)
"""One key-value head: where many requests are drafted for together, KV caches are read most."""
TINY = Size(32, 3, 64, 2, 1)
TINY_DRAFT = Size(16, 1, 32, 1, 1)
"""Size used by tests and by the check of a machine."""


def build(size: Size, tokenizer: PreTrainedTokenizerBase, seed: int) -> LlamaForCausalLM:
    """Return a freshly initialised model for ``tokenizer``; embeddings are the LM head as well."""
    end, text_end = token_id(tokenizer, "<|im_end|>"), token_id(tokenizer, "<|endoftext|>")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.hidden // size.heads,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=text_end,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [end, text_end]  # of an answer, and of raw text
    model.generation_config.pad_token_id = text_end
    return model
