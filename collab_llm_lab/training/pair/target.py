"""The frozen target of a pair's trainings: a checkpoint, and how it is loaded."""

from __future__ import annotations

import torch

from collab_llm_lab.training.text.models import pick_device
from collab_llm_nodes.models.loading import ModelConfig

AUTO = "auto"


def target_config(
    path: str, device: str = AUTO, dtype: str = AUTO, quantization: str = "none"
) -> ModelConfig:
    """Return how to load a target.

    Args:
        path: folder, hub id or name of a shipped model.
        device: cpu, cuda or cuda:N; auto is a GPU where there is one.
        dtype: of the weights; auto is bfloat16 on a GPU, else float32.

    Raises:
        ConfigError: an unknown device, dtype or quantisation.
    """
    if device == AUTO:
        device = pick_device(AUTO).type
    if dtype == AUTO:
        dtype = "float32" if torch.device(device).type == "cpu" else "bfloat16"
    return ModelConfig(path, dtype, device, quantization)
