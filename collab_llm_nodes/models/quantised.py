"""Weight-only quantisation: the package that can do it here, and its needs.

| kind | package      | what it needs                          | what is quantised     |
| ---- | ------------ | -------------------------------------- | --------------------- |
| int8 | torchao      |                                        | decoder layers' maps  |
| int4 | torchao      | CUDA of capability 8.0 (A100, Orin),   | decoder layers' maps  |
|      |              | bfloat16, accelerate                   |                       |
| both | bitsandbytes | accelerate                             | maps, but the LM head |

torchao goes first. Its int4 runs in a kernel of torch's own (tinygemm) for any number of rows;
torchao's default layout would need the package mslk. bitsandbytes turns all int4 weights back to
``dtype`` in every pass of more than one row, and most passes here have more.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, TorchAoConfig

from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.models.architectures import decoder_parts

_BYTES = {"int8": 1.0, "int4": 0.6}
"""Bytes of a quantised weight, with its share of scales (and, of int4, of padding)."""
_CAPABILITY = (8, 0)
_OUTSIDE_LAYERS = r"(?!.*layers\.\d).*"
"""Matches the names of all weights but those of decoder layers."""


def quantization_package(kind: str, dtype: torch.dtype, device: torch.device) -> str:
    """Return the package that quantises to ``kind`` here: "torchao" or "bitsandbytes".

    Raises:
        ModelError: none can; ``field`` is ``quantization``.
    """
    lacks = _torchao_lacks(kind, dtype, device)
    if not lacks:
        return "torchao"
    if _installed("bitsandbytes") and _installed("accelerate"):
        return "bitsandbytes"
    other = "" if kind == "int8" else " set quantization to int8,"
    raise ModelError(
        f"quantization {kind!r} cannot be done here: torchao needs {' and '.join(lacks)},"
        " bitsandbytes needs to be installed with accelerate",
        field="quantization",
        remedy=f"give torchao what it needs,{other} or pip install bitsandbytes accelerate",
    )


def _torchao_lacks(kind: str, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Return the needs of torchao for ``kind`` that are not met."""
    lacks = [] if _installed("torchao") else ["to be installed (pip install torchao)"]
    if kind == "int4":
        if dtype != torch.bfloat16:
            lacks.append("dtype bfloat16")
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < _CAPABILITY:
            lacks.append("a CUDA device of compute capability 8.0 or more")
        if not _installed("accelerate"):  # its weights are packed on the device only
            lacks.append("accelerate to be installed")
    return lacks


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def quantized_bytes(
    kind: str, package: str, name: str, dimensions: int, dtype: torch.dtype
) -> float:
    """Return the bytes of each number of a checkpoint's tensor once it is quantised."""
    layers = ("layers.",) if package == "torchao" else ("layers.", "blocks.")  # blocks: of vision
    if dimensions == 2 and any(part in name for part in layers):
        return _BYTES[kind]
    return dtype.itemsize


def quantization_options(
    package: str, kind: str, dtype: torch.dtype
) -> BitsAndBytesConfig | TorchAoConfig:
    """Return the options with which ``from_pretrained`` quantises each weight as it is read."""
    if package == "torchao":
        return _torchao_options(kind)
    return BitsAndBytesConfig(
        load_in_8bit=kind == "int8",
        load_in_4bit=kind == "int4",
        bnb_4bit_quant_type="nf4",  # made for weights, which are about normal; not the default
        bnb_4bit_compute_dtype=dtype,
    )


def _torchao_options(kind: str) -> TorchAoConfig:
    """Return the options for the maps of decoder layers; head and vision stay as they are."""
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig

    scheme = (
        Int8WeightOnlyConfig(set_inductor_config=False)
        if kind == "int8"
        else Int4WeightOnlyConfig(
            int4_packing_format="tile_packed_to_4d", set_inductor_config=False
        )
    )
    return TorchAoConfig(scheme, modules_to_not_convert=[_OUTSIDE_LAYERS])


def check_quantised(model: Any, kind: str) -> None:
    """Refuse a model that torchao has left as large as it was: it passes over maps it cannot group.

    Raises:
        ModelError: no map is quantised.
    """
    from torchao.utils import TorchAOBaseTensor

    maps = [m for m in decoder_parts(model).layers.modules() if isinstance(m, nn.Linear)]
    if maps and not any(isinstance(m.weight, TorchAOBaseTensor) for m in maps):
        raise ModelError(
            f"no map of this model is wide enough for {kind} in groups of 128",
            field="quantization",
            remedy="use int8",
        )
