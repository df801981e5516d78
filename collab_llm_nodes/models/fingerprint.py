"""A hash by which two processes know that they run the same model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collab_llm_nodes.errors import ModelError, translate_errors
from collab_llm_nodes.models.checkpoint import weight_files

# Facts of a configuration that change with the place or the library, not with the model.
_PASSING = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}


def fingerprint(model: Any) -> str:
    """Return the SHA-256 of a model's configuration and weights, in hexadecimal.

    Weights count with their types, so that a model in another precision is another model. The
    layout in memory does not count. It reads all weights once: keep the result.
    """
    facts = _lasting(model.config.to_dict())
    found = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    for name, value in sorted(model.state_dict().items()):
        for part in plain_tensors(value):
            found.update(f"{name} {part.dtype} {tuple(part.shape)}".encode())
            found.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _lasting(facts: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _lasting(value) if isinstance(value, dict) else value
        for key, value in facts.items()
        if key not in _PASSING
    }


def plain_tensors(value: Any) -> list[Tensor]:
    """Return the tensors that a weight consists of: several for a quantised one."""
    if not isinstance(value, Tensor):
        return []
    value = value.detach()
    if type(value) is not Tensor and hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        return [part for name in names for part in plain_tensors(getattr(value, name))]
    return [value]


def checkpoint_fingerprint(folder: Path) -> str:
    """Return the SHA-256 of a checkpoint's configuration and safetensors files, in hexadecimal.

    The files are read piece by piece, so it takes no memory: processes that hold parts of a model
    can compare the whole. What is trained beside a model (adapters, heads) does not count.

    Raises:
        ModelError: a file cannot be read.
    """
    with translate_errors(
        ModelError,
        f"cannot read the checkpoint in {folder}",
        field="path",
        remedy="copy or download it again",
    ):
        facts = _lasting(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        found = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        for file in weight_files(folder):
            with file.open("rb") as opened:
                found.update(file.name.encode())
                while part := opened.read(1 << 20):
                    found.update(part)
    return found.hexdigest()
