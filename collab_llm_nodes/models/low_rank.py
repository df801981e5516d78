"""Low-rank changes of a model's maps (LoRA): a second role of a model in a small file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from collab_llm_nodes.models.architectures import decoder_parts, layer_parts
from collab_llm_nodes.models.heads import head_fingerprint
from collab_llm_nodes.models.trained import read_trained, write_trained


class _Change(nn.Module):
    """The weight ``W + up @ down`` in place of ``W``; it begins as ``W``."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.down = nn.Parameter(torch.randn(rank, columns) / math.sqrt(columns))
        self.up = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up.to(weight.dtype) @ self.down.to(weight.dtype)


class LowRank(nn.Module):
    """Changes of all maps of a decoder's layers.

    Args:
        rank: of each change; half of it would do for a few fixed replies, more for many.
        fingerprint: ``head_fingerprint`` of the model that they belong to.
    """

    def __init__(self, model: Any, rank: int, fingerprint: str = "") -> None:
        super().__init__()
        self.hidden_size = decoder_parts(model).hidden_size
        self.rank, self.fingerprint = rank, fingerprint
        self._maps = list(_maps(model))
        self.layers = nn.ModuleList(_Change(each.weight, rank) for each in self._maps)

    def attach(self) -> None:
        """Let the model compute with the changes; its own weights stay as they are."""
        for each, change in zip(self._maps, self.layers, strict=True):
            parametrize.register_parametrization(each, "weight", change)

    @torch.no_grad()
    def merge(self) -> None:
        """Add the changes to the model's weights, for good."""
        for each, change in zip(self._maps, self.layers, strict=True):
            each.weight.copy_(change(each.weight))

    def save(self, folder: str | Path, name: str) -> None:
        """Write ``<name>.safetensors`` (float16) and its JSON to the subfolder of ``folder``."""
        facts = {
            "hidden_size": self.hidden_size,
            "rank": self.rank,
            "fingerprint": self.fingerprint,
        }
        write_trained(folder, name, self, facts, torch.float16)

    @classmethod
    def load(cls, folder: str | Path, name: str, model: Any) -> LowRank:
        """Read changes of ``model``.

        Raises:
            ModelError: files absent or unreadable, or changes of another model.
        """
        parts = decoder_parts(model)
        return read_trained(
            folder,
            name,
            lambda facts: cls(model, facts["rank"], facts["fingerprint"]),
            parts.hidden_size,
            kind="low-rank changes",
            field="role",
            fingerprint=head_fingerprint(parts),
        )


def _maps(model: Any) -> Iterator[nn.Linear]:
    for layer in decoder_parts(model).layers:
        parts = layer_parts(layer)
        yield from (parts.query, parts.key, parts.value, parts.out, *parts.up, parts.down)
