"""CPU threads of a process's forward passes: set once, where the process begins."""

from __future__ import annotations

import torch

from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.models.footprint import count_weights
from collab_llm_nodes.models.loading import ModelConfig, model_folder

# Below it one thread computes a step faster than several can be woken; and where other processes
# compete for the cores, OpenMP's spinning threads made a step 50 times slower.
SMALL = 20_000_000


def set_threads(*models: ModelConfig) -> None:
    """Set the CPU threads of this process for the models that it is to run.

    Loading a model changes nothing process-wide: a library must not decide for the process that
    uses it. Call this where a process begins, before models are loaded. The largest ``threads``
    counts; if none is given, one thread serves small models on the CPU, else torch chooses. A model
    that is not here yet (not downloaded, or wrongly named) counts as large; loading it reports the
    error.
    """
    threads = max(model.threads for model in models)
    if threads or all(model.device == "cpu" and _is_small(model) for model in models):
        torch.set_num_threads(threads or 1)


def _is_small(config: ModelConfig) -> bool:
    try:
        return count_weights(model_folder(config, offline=True)) < SMALL
    except ModelError:
        return False
