"""The package that quantises, by facts of machines that are not here."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_folder

from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.models import loading, quantised
from collab_llm_nodes.models.footprint import weight_bytes
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.quantised import quantization_package, quantized_bytes

BF16, F16 = torch.bfloat16, torch.float16
CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
BNB = ("bitsandbytes", "accelerate")


def machine(
    monkeypatch: pytest.MonkeyPatch, *installed: str, capability: tuple[int, int] = (8, 7)
) -> None:
    monkeypatch.setattr(quantised, "_installed", lambda package: package in installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize(
    ("kind", "dtype", "device", "installed", "package"),
    [
        ("int8", BF16, CUDA, ("torchao", *BNB), "torchao"),
        ("int8", F16, CPU, ("torchao",), "torchao"),
        ("int8", BF16, CUDA, BNB, "bitsandbytes"),
        ("int4", BF16, CUDA, ("torchao", *BNB), "torchao"),
        ("int4", F16, CUDA, ("torchao", *BNB), "bitsandbytes"),
        ("int4", BF16, CPU, ("torchao", *BNB), "bitsandbytes"),
    ],
)
def test_the_package_that_can_is_taken(
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
    installed: tuple[str, ...],
    package: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, *installed)
    assert quantization_package(kind, dtype, device) == package


@pytest.mark.parametrize(
    ("kind", "dtype", "device", "capability", "installed", "message"),
    [
        ("int4", F16, CUDA, (8, 7), ("torchao", "accelerate"), "torchao needs dtype bfloat16,"),
        ("int4", BF16, CUDA, (7, 2), ("torchao", "accelerate"), "capability 8.0"),
        ("int4", BF16, CUDA, (8, 7), ("torchao",), "torchao needs accelerate to be installed,"),
        ("int4", BF16, CPU, (8, 7), ("torchao",), "a CUDA device"),
        ("int8", BF16, CUDA, (8, 7), ("bitsandbytes",), "installed with accelerate"),
        ("int8", BF16, CPU, (8, 7), (), "pip install torchao"),
    ],
)
def test_what_is_missing_is_named_before_a_weight_is_read(
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
    capability: tuple[int, int],
    installed: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_weights(*args: object) -> None:
        raise AssertionError("weights are read")

    machine(monkeypatch, *installed, capability=capability)
    monkeypatch.setattr(loading, "find_device", lambda name: device)
    monkeypatch.setattr(loading, "read_model", no_weights)
    config = ModelConfig(
        str(tiny_folder("llama")), dtype=str(dtype).removeprefix("torch."), quantization=kind
    )
    with pytest.raises(ModelError, match=message) as caught:
        load(config)
    assert caught.value.field == "quantization"
    assert "pip install bitsandbytes accelerate" in caught.value.remedy
    assert ("int8" in caught.value.remedy) == (kind == "int4")


def test_only_maps_of_layers_become_smaller() -> None:
    def sizes(package: str) -> list[float]:
        names = (
            ("model.layers.0.mlp.up_proj.weight", 2),
            ("visual.blocks.0.mlp.fc1.weight", 2),
            ("model.embed_tokens.weight", 2),
            ("model.layers.0.input_layernorm.weight", 1),
        )
        return [quantized_bytes("int4", package, name, n, BF16) for name, n in names]

    assert sizes("torchao") == [0.6, 2, 2, 2]
    assert sizes("bitsandbytes") == [0.6, 0.6, 2, 2]


def test_a_model_must_fit_as_large_as_it_is_once_it_is_quantised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights are quantised as they are read, so nothing ever holds the whole model."""
    folder = tiny_folder("llama")
    whole = weight_bytes(folder, lambda name, dimensions: 4.0)
    seen: list[float] = []
    monkeypatch.setattr(loading, "check_fits", lambda weights, *facts: seen.append(weights))
    for kind in ("none", "int8"):
        load(ModelConfig(str(folder), quantization=kind))
    assert seen[0] == whole
    assert seen[1] < 0.6 * whole


def test_float16_of_qwen_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    load(ModelConfig(str(tiny_folder("qwen2_vl")), dtype="float16"))
    assert "set dtype to bfloat16" in caplog.text
    caplog.clear()
    load(ModelConfig(str(tiny_folder("qwen2_vl")), dtype="bfloat16"))
    load(ModelConfig(str(tiny_folder("llama")), dtype="float16"))
    assert caplog.text == ""
