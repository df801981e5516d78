"""Configuration of a pair's trainings: the target and how it is loaded, the data, the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from collab_llm_lab.training.learner import pick_device
from collab_llm_lab.training.pair.data import Data
from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.models.loading import ModelConfig

AUTO = "auto"


@dataclass(frozen=True)
class PairConfig:
    """Training on a target's answers.

    Attributes:
        out: folder of the result and the state.
    """

    target: ModelConfig
    data: Path
    out: Path
    epochs: float = setting(3.0, "Passes over the answers.", low=0.01, high=1e4)
    batch: int = setting(8, "Answers per step.", low=1, high=4096)
    learning_rate: float = setting(1e-3, "Peak learning rate.", low=1e-7, high=1.0)
    hours: float = setting(0.0, "Stop after this long; 0: at the end.", low=0.0)
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges(self)

    def lasting(self, data: Data) -> dict[str, object]:
        """Return the options that all calls of a training share, by name without dashes."""
        return {
            "data": data.identity,
            "epochs": self.epochs,
            "batch": self.batch,
            "learning-rate": self.learning_rate,
            "seed": self.seed,
        }


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
