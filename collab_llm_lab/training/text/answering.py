"""Answers to many prompts by the engine, with continuous batching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from collab_llm_nodes.chat.batch import Batch, BatchConfig, Job
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.models.loading import ModelConfig, load

_GREEDY = SamplingConfig()
_ON_CPU = BatchConfig(max_batch=48, prefill_tokens=256, kept_tokens=0)
_ON_GPU = BatchConfig(max_batch=512, prefill_tokens=8192, kept_tokens=0)


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
