"""Random checkpoints of any causal language model of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from collab_llm_lab.random_models import SPREAD, random_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "initializer_range": SPREAD,
    "max_position_embeddings": 256,
}


def write_other_model(folder: Path, model_type: str, **sizes: Any) -> Path:
    """Write a random checkpoint with ``SIZES``, or with others for some of them."""
    tokenizer = random_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(
        model_type, vocab_size=len(tokenizer), bos_token_id=None, **ids, **{**SIZES, **sizes}
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
