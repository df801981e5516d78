"""Files of a checkpoint that hold the model, and the tensors in their headers."""

from __future__ import annotations

import json
import math
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers import AutoHfQuantizer

from collab_llm_nodes.errors import ModelError, translate_errors
from collab_llm_nodes.models.architectures import decoder_parts

_FLOATS = {"F64", "F32", "F16", "BF16"}
"""Types of numbers that are weights as they stand; others need scales that belong to them."""
_DAMAGED = "copy or download it again"


@dataclass(frozen=True)
class Stored:
    """One tensor, as the header of its file describes it.

    Attributes:
        dtype: safetensors' name of its type, such as "BF16" or "F8_E4M3".
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> float:
        """Bytes of the tensor in its file."""
        bits = re.search(r"\d+", self.dtype)  # none in BOOL
        return math.prod(self.shape) * (int(bits[0]) / 8 if bits else 1)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the model in ``folder``, as transformers chooses them.

    These are ``model.safetensors``, or else those that the index names. Others in the folder, such
    as a second, consolidated copy, are no part of the model.

    Raises:
        ModelError: the index cannot be read.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    with translate_errors(ModelError, f"cannot read {index}", field="path", remedy=_DAMAGED):
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({folder / name for name in places})


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Return the tensors of the model in ``folder`` by name; only headers are read.

    Raises:
        ModelError: there is none, or a file cannot be read.
    """
    found: dict[str, Stored] = {}
    for file in weight_files(folder):
        with readable(file), safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  it is no dictionary
                header = tensors.get_slice(name)
                found[name] = Stored(file, tuple(header.get_shape()), header.get_dtype())
    if not found:
        raise ModelError(
            f"{folder} holds no safetensors file named model.safetensors or in an index",
            field="path",
            remedy="pickled weights are not loaded; convert them to safetensors",
        )
    return found


def readable(file: Path) -> AbstractContextManager[None]:
    """Raise ModelError where the safetensors file cannot be read."""
    message = f"{file} is not a readable safetensors file"
    return translate_errors(ModelError, message, field="path", remedy=_DAMAGED)


def quantisation_of(config: Any) -> Any:
    """Return the entry ``quantization_config`` of a model's configuration; None: it has none.

    Raises:
        ModelError: transformers does not know the method, and would read the weights as plain ones.
    """
    text = config.get_text_config()
    found = getattr(config, "quantization_config", None) or getattr(
        text, "quantization_config", None
    )
    if not found:
        return None
    with translate_errors(
        ModelError,
        "cannot read quantization_config in config.json",
        field="path",
        remedy="take the checkpoint that is not quantised",
    ):
        if not AutoHfQuantizer.supports_quant_method(found):
            raise ValueError(f"no method {found.get('quant_method')!r} in transformers")
    return found


def check_quantiser(found: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a quantised checkpoint that cannot be read here; no weight is read.

    Args:
        found: as ``quantisation_of`` returns it.

    Raises:
        ModelError: its package is missing, or does not fit this device.
    """
    with translate_errors(
        ModelError,
        "the checkpoint is quantised, and cannot be read here",
        field="path",
        remedy="install the package of its quantization_config, or take another checkpoint",
    ):
        quantiser = AutoHfQuantizer.from_config(found, pre_quantized=True)
        quantiser.validate_environment(dtype=dtype, device_map={"": device}, weights_only=True)


@dataclass(frozen=True)
class Match:
    """A stored tensor and its place in a model.

    Attributes:
        name: the tensor's name in the model, which may not have it.
        whole: it is stored as it is; else transformers converts it, or makes it of several.
    """

    stored: str
    name: str
    whole: bool


def match_tensors(model: Any, stored: dict[str, Stored]) -> list[Match]:
    """Return the place of each stored tensor in ``model``, by transformers' own rules for names.

    Raises:
        ModelError: a weight is of integers or of short floating-point numbers, which mean nothing
            without their scales.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    own, prefix = model.state_dict(), model.base_model_prefix
    matches = []
    for name, tensor in stored.items():
        found, converter = rename_source_key(name, renamings, converters, prefix, own)
        if found not in own and name in own:
            found, converter = rename_source_key(name, [], [], prefix, own)
        weight = own.get(found)
        if weight is not None and weight.is_floating_point() and tensor.dtype not in _FLOATS:
            raise ModelError(
                f"{name} is of type {tensor.dtype}, and config.json names no quantisation",
                field="path",
                remedy="take the checkpoint that is not quantised, or its own config.json",
            )
        matches.append(Match(name, found, converter is None))
    return matches


def check_tensors(model: Any, folder: Path) -> None:
    """Refuse the checkpoint in ``folder`` unless its headers describe all weights of ``model``.

    Raises:
        ModelError: as ``stored_tensors`` and ``match_tensors``; or a weight is missing, or has
            another shape.
    """
    stored = stored_tensors(folder)
    own = {name: tuple(w.shape) for name, w in model.named_parameters(remove_duplicate=False)}
    shapes = {
        match.name: stored[match.stored].shape if match.whole else own[match.name]
        for match in match_tensors(model, stored)
        if match.name in own
    }
    for pair in model.all_tied_weights_keys.items():  # either of the two may be stored
        for name, other in (pair, pair[::-1]):
            if other in shapes:
                shapes.setdefault(name, shapes[other])
    missing = sorted(own.keys() - shapes.keys())
    wrong = [
        f"{name} as {shapes[name]}" for name in own if shapes.get(name, own[name]) != own[name]
    ]
    if missing or wrong:
        fault = f"lacks {', '.join(missing[:3])}" if missing else f"holds {', '.join(wrong[:3])}"
        raise ModelError(
            f"cannot load {folder}: it {fault}; config.json says otherwise",
            field="path",
            remedy=_DAMAGED,
        )


def load_head(model: Any, folder: Path) -> None:
    """Read the final norm and the LM head of a model whose weights are on the meta device.

    Raises:
        ModelError: a file cannot be read, or a weight means nothing without its scales.
    """
    parts, stored = decoder_parts(model), stored_tensors(folder)
    wanted = {id(weight) for part in (parts.norm, parts.head) for weight in part.parameters()}
    own = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, torch.Tensor] = {}
    for match in match_tensors(model, stored):
        if id(own.get(match.name)) in wanted:
            file = stored[match.stored].file
            with readable(file), safe_open(file, "pt") as tensors:
                found[match.name] = tensors.get_tensor(match.stored).to(own[match.name].dtype)
    model.load_state_dict(found, strict=False, assign=True)
    model.tie_weights()
