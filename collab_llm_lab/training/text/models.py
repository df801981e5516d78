"""The embedded text models: plain Llama classes with tiny configurations, files and answers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from collab_llm_lab.training.run import replacing
from collab_llm_nodes.chat.batch import Batch, BatchConfig, Job
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.tokenizer import token_id

_GREEDY = SamplingConfig()
_ON_CPU = BatchConfig(max_batch=48, prefill_tokens=256, kept_tokens=0)
_ON_GPU = BatchConfig(max_batch=512, prefill_tokens=8192, kept_tokens=0)
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


def export(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a float16 checkpoint with tokenizer, chat template and generation configuration."""
    copied = copy.deepcopy(model).to("cpu", torch.float16)
    copied.config.dtype = torch.float32  # to compute in; float16 is for the file
    with replacing(folder) as building:
        copied.save_pretrained(building)
        tokenizer.save_pretrained(building)


def read(folder: Path, device: torch.device) -> Any:
    """Return the model in ``folder``, float32, on ``device``."""
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval()


def engine_of(folder: Path, device: torch.device) -> Engine:
    """Return the model in ``folder``, to answer with."""
    return Engine(load(ModelConfig(path=str(folder), device=str(device))))


def answers(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    most: int,
    sampling: SamplingConfig = _GREEDY,
) -> list[list[int]]:
    """Return the answers to ``prompts``, each with the token that ends it.

    Args:
        most: length limit of an answer [tokens].
        sampling: its seed is the first prompt's; each further one has the next.

    Raises:
        ModelError: a pass failed, or logits are not finite.
    """
    batch = Batch(engine, _ON_CPU if engine.device.type == "cpu" else _ON_GPU)
    jobs = [
        Job(None, np.array(ids, np.int32), replace(sampling, seed=sampling.seed + number), most)
        for number, ids in enumerate(prompts)
    ]
    batch.add(jobs)
    try:
        while not batch.idle:
            for ended in batch.step():
                if isinstance(ended.reason, CollabError):
                    raise ended.reason
    finally:
        batch.close()
    return [job.tokens for job in jobs]
