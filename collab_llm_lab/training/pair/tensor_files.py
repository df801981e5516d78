"""Tensors kept for each answer, such as hidden states: a cache on disk."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from collab_llm_lab.training.pair.data import Sample
from collab_llm_nodes.errors import ModelError, translate_errors


class TensorFiles:
    """A file for each answer, which is there as a whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __contains__(self, sample: Sample) -> bool:
        return self._file(sample).exists()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self._folder.glob("*.safetensors"))

    def write(self, sample: Sample, **tensors: Tensor) -> None:
        """Keep the tensors of a sample.

        Raises:
            ModelError: they cannot be written.
        """
        building = self._file(sample).with_suffix(".part")
        with translate_errors(
            ModelError, f"cannot write {building}", field="--out", remedy="make room on the disk"
        ):
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file({n: t.cpu().contiguous() for n, t in tensors.items()}, building)
            os.replace(building, self._file(sample))

    def read(self, sample: Sample, device: torch.device) -> dict[str, Tensor]:
        """Return the tensors of a sample, on ``device``.

        Raises:
            ModelError: the file is missing or damaged.
        """
        with translate_errors(
            ModelError,
            f"cannot read {self._file(sample)}",
            field="--out",
            remedy=f"delete the folder {self._folder}: it is made again",
        ):
            return load_file(self._file(sample), str(device))

    def _file(self, sample: Sample) -> Path:
        return self._folder / f"{sample.key}.safetensors"
