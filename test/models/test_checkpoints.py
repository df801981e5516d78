"""Checkpoints as others publish them: whole and in stages they are one model, or are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import VISION, tiny_folder, tiny_model
from torch import Tensor
from transformers.quantizers import quantizer_torchao
from transformers.utils import quantization_config

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.stage import Stage
from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.models import quantised
from collab_llm_nodes.models.fingerprint import checkpoint_fingerprint
from collab_llm_nodes.models.footprint import count_weights
from collab_llm_nodes.models.loading import LoadedModel, ModelConfig, load
from collab_llm_nodes.models.partial import load_layers, load_vision, read_facts
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.protocols.jupiter.worker import StageWorker
from collab_llm_nodes.protocols.jupiter.worker_settings import WorkerConfig

IDS = (5, 9, 40, 77, 12, 60)
LAYERS = 4
Tensors = dict[str, Tensor]


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """Copies the checkpoint of an architecture."""
    return lambda architecture: shutil.copytree(tiny_folder(architecture), tmp_path / "model")


def tensors_in(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def store(folder: Path, tensors: Tensors, name: str = "model.safetensors") -> None:
    # Copies: a tied tensor under two names would share its memory, which safetensors refuses.
    save_file({n: t.clone() for n, t in tensors.items()}, folder / name, {"format": "pt"})


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def whole(loaded: LoadedModel) -> Tensor:
    """Return the logits after ``IDS`` of the model in one process."""
    return Engine(loaded).open(EncodedPrompt(IDS)).feed(IDS, last=1)[0]


def divided(folder: Path, cuts: Iterable[int]) -> Tensor:
    """Return the same of the model in stages."""
    passed: Any = IDS
    ends = [0, *cuts, LAYERS]
    for first, last in zip(ends, ends[1:], strict=False):
        passed = Stage(ModelConfig(str(folder)), first, last).open().feed(passed)
    logits: Tensor = passed[-1]
    return logits


# ---------------------------------------------------------------- layouts


def embedding_of(tensors: Tensors) -> str:
    return next(name for name in tensors if name.endswith("embed_tokens.weight"))


def as_saved(folder: Path) -> None:
    """Leave it as today's classes save it."""


def new_names(folder: Path) -> None:
    """Name tensors as the classes that see do today; text models have these names already."""
    named = {}
    for name, tensor in tensors_in(folder).items():
        new = f"model.{name}" if name.startswith("visual.") else name
        if new.startswith("model.") and not new.startswith(("model.visual.", "model.language")):
            new = new.replace("model.", "model.language_model.", 1)
        named[new] = tensor
    store(folder, named)


def no_base_prefix(folder: Path) -> None:
    """Name tensors as a base model saves them, without the head's class around it."""
    if "vision_config" in json.loads((folder / "config.json").read_text()):
        new_names(folder)
    named = {name.removeprefix("model."): t for name, t in tensors_in(folder).items()}
    store(folder, named)


def head_stored_beside_a_tied_one(folder: Path) -> None:
    edit(folder, tie_word_embeddings=True)
    tensors = tensors_in(folder)
    store(folder, {**tensors, "lm_head.weight": tensors[embedding_of(tensors)]})


def another_head_beside_a_tied_one(folder: Path) -> None:
    """Store a head that training has untied, under a configuration that still ties it."""
    edit(folder, tie_word_embeddings=True)
    tensors = tensors_in(folder)
    drawn = torch.Generator().manual_seed(3)
    head = torch.randn(tensors[embedding_of(tensors)].shape, generator=drawn)
    store(folder, {**tensors, "lm_head.weight": head})


def only_the_head_of_a_tied_pair(folder: Path) -> None:
    edit(folder, tie_word_embeddings=True)
    tensors = tensors_in(folder)
    embedding = tensors.pop(embedding_of(tensors))
    store(folder, {**tensors, "lm_head.weight": embedding})


def sharded(folder: Path) -> None:
    """Divide it into two files with an index, and leave wrong copies in one file beside them."""
    tensors = tensors_in(folder)
    names = sorted(tensors)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        store(folder, {n: t for n, t in tensors.items() if files[n] == file}, file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    wrong = {n: torch.zeros_like(t) for n, t in tensors.items()}
    for other in ("consolidated", "original"):  # one before, one after the others by name
        store(folder, wrong, f"{other}.safetensors")
    (folder / "model.safetensors").unlink()


def index_beside_a_whole_file(folder: Path) -> None:
    """Leave the index and the shards of another revision beside ``model.safetensors``."""
    tensors = tensors_in(folder)
    other = {n: torch.zeros_like(t) for n, t in tensors.items()}
    store(folder, other, "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(other, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def computed_tensors(folder: Path) -> None:
    """Hold the angles that older classes stored with every layer."""
    angles = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(4)}
    store(folder, {**tensors_in(folder), **angles})


def tensors_of_another(folder: Path) -> None:
    """Hold tensors that are not the model's, which transformers leaves out."""
    names = ("layers.1.self_attn.q_norm.weight", "layers.4.input_layernorm.weight", "lora_A.weight")
    more = {f"model.{name}": torch.ones(32) for name in names}
    store(folder, {**tensors_in(folder), **more})


EVERY = ["llama", "qwen2", "qwen3", "gemma3_text", "opt", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
TIED = [name for name in EVERY if name not in ("llama", "gemma3_text")]
LAYOUTS = [
    *((as_saved, name) for name in EVERY),
    *((new_names, name) for name in VISION),
    *((no_base_prefix, name) for name in EVERY),
    *((head_stored_beside_a_tied_one, name) for name in TIED),
    *((only_the_head_of_a_tied_pair, name) for name in TIED),
    *((sharded, name) for name in EVERY),
    *((index_beside_a_whole_file, name) for name in ("llama", "qwen2_vl")),
    *((computed_tensors, name) for name in ("llama", "qwen2")),
    (tensors_of_another, "llama"),
]


CUTS = (), (2, 3)
"""One stage, and three."""


@pytest.mark.parametrize(("layout", "architecture"), LAYOUTS)
def test_a_layout_changes_neither_the_whole_nor_the_stages(
    layout: Callable[[Path], None], architecture: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(architecture)
    layout(folder)
    expected, loaded = whole(tiny_model(architecture)), load(ModelConfig(str(folder)))
    torch.testing.assert_close(whole(loaded), expected, atol=0, rtol=0)
    for cuts in CUTS:
        torch.testing.assert_close(divided(folder, cuts), expected, atol=5e-5, rtol=1e-4)
    if architecture in VISION:
        front, _ = load_vision(read_facts(ModelConfig(str(folder))))
        other = loaded.model.model.visual.state_dict()
        for name, tensor in front.model.model.visual.state_dict().items():
            assert torch.equal(tensor, other[name])


@pytest.mark.parametrize("architecture", EVERY)
def test_another_head_beside_a_tied_one_is_the_stages_as_well(
    architecture: str, copied: Callable[[str], Path]
) -> None:
    """transformers ties a stored head only if it is the embedding."""
    folder = copied(architecture)
    another_head_beside_a_tied_one(folder)
    expected = whole(load(ModelConfig(str(folder))))
    assert not torch.allclose(expected, whole(tiny_model(architecture)), atol=0.1)
    for cuts in CUTS:
        torch.testing.assert_close(divided(folder, cuts), expected, atol=5e-5, rtol=1e-4)


def test_files_beside_those_of_the_index_are_not_counted(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    weights = count_weights(folder)
    sharded(folder)
    known = checkpoint_fingerprint(folder)
    assert count_weights(folder) == weights
    store(folder, {"weight": torch.ones(8, 8)}, "heads.safetensors")
    assert count_weights(folder) == weights
    assert checkpoint_fingerprint(folder) == known


@pytest.mark.parametrize("text", ["", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "["])
def test_a_damaged_index_is_a_typed_error(text: str, copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    sharded(folder)
    (folder / "model.safetensors.index.json").write_text(text)
    refused(folder, "index.json")


def test_a_missing_shard_is_a_typed_error(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    sharded(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "00002-of-00002.safetensors is not a readable")


# ---------------------------------------------------------------- what is not understood


def refused(folder: Path, words: str, *, also_whole: bool = True) -> None:
    """Check that no process takes the checkpoint; a worker refuses it when it starts."""
    config = ModelConfig(str(folder))

    def worker() -> None:
        StageWorker(WorkerConfig(address="127.0.0.1:0", model=config))

    ways: list[Callable[[], object]] = [worker, lambda: load_layers(config, 1, 2)]
    if also_whole:
        ways.append(lambda: load(config))
    for way in ways:
        with pytest.raises(ModelError, match=words) as caught:
            way()
        assert caught.value.field == "path"
        assert caught.value.remedy


def projections(tensors: Tensors) -> list[str]:
    return [n for n in tensors if "layers." in n and n.endswith("proj.weight")]


def eight_bits(folder: Path, dtype: torch.dtype, scale: str) -> None:
    """Store the maps in 8 bits, each with the scales of its rows."""
    tensors = tensors_in(folder)
    for name in projections(tensors):
        weight = tensors[name]
        largest = weight.abs().amax(1, keepdim=True) / 100
        tensors[name] = (weight / largest).to(dtype)
        tensors[name.replace("weight", scale)] = largest
    store(folder, tensors)


METHODS: dict[str, dict[str, Any]] = {
    "compressed-tensors": {"format": "float-quantized", "config_groups": {}},
    "bitsandbytes": {"load_in_8bit": True},
    "awq": {"bits": 4, "group_size": 32},
    "gptq": {"bits": 4, "group_size": 32},
    "torchao": {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}},
}


@pytest.mark.parametrize("nested", [False, True], ids=["at the top", "of the text part"])
@pytest.mark.parametrize("method", METHODS)
def test_a_quantised_checkpoint_whose_package_is_missing_is_refused(
    method: str,
    nested: bool,
    copied: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = copied("qwen2_vl" if nested else "llama")
    found = {"quant_method": method, **METHODS[method]}
    if nested:
        text = json.loads((folder / "config.json").read_text())["text_config"]
        edit(folder, text_config={**text, "quantization_config": found})
    else:
        edit(folder, quantization_config=found)
    if method == "torchao":  # the one that is installed
        monkeypatch.setattr(quantizer_torchao, "is_torchao_available", lambda: False)
        monkeypatch.setattr(quantization_config, "is_torchao_available", lambda: False)
    refused(folder, "is quantised, and cannot be read here", also_whole=False)


@pytest.mark.parametrize(
    ("method", "package"),
    [
        ("awq", "gptqmodel"),
        ("gptq", "optimum"),
        ("compressed-tensors", "compressed.tensors"),
        ("bitsandbytes", "bitsandbytes|accelerate"),
    ],
)
def test_a_quantised_checkpoint_without_its_package_names_it(
    method: str, package: str, copied: Callable[[str], Path]
) -> None:
    folder = copied("llama")
    eight_bits(folder, torch.float8_e4m3fn, "weight_scale_inv")
    edit(folder, quantization_config={"quant_method": method, **METHODS[method]})
    with pytest.raises(ModelError, match=package) as caught:
        load(ModelConfig(str(folder)))
    assert caught.value.field == "path"
    assert "packages" in caught.value.remedy


@pytest.mark.parametrize("found", [{"quant_method": "of next year"}, {"bits": 4}, "int4"])
def test_an_unknown_quantisation_is_refused(found: object, copied: Callable[[str], Path]) -> None:
    """transformers warns, and reads the weights as if they were plain."""
    folder = copied("llama")
    edit(folder, quantization_config=found)
    refused(folder, "quantization_config|config.json")


@pytest.mark.parametrize(
    ("dtype", "stored"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8")]
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2_5_vl"])
def test_weights_of_eight_bits_without_a_quantisation_are_refused(
    architecture: str, dtype: torch.dtype, stored: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(architecture)
    eight_bits(folder, dtype, "weight_scale")
    refused(folder, f"proj.weight is of type {stored}")


@pytest.mark.parametrize("part", ["layers.0.", "layers.3.", "model.norm.weight", "embed_tokens"])
def test_a_missing_tensor_is_named(part: str, copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    tensors = tensors_in(folder)
    del tensors[next(name for name in tensors if part in name)]
    store(folder, tensors)
    refused(folder, f"lacks .*{part}")


def test_a_tensor_of_another_shape_is_a_typed_error(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    tensors = tensors_in(folder)
    name = projections(tensors)[0].replace(".0.", ".1.")
    store(folder, {**tensors, name: torch.ones(3, 3)})
    refused(folder, "cannot load")


def test_a_worker_that_cannot_quantise_refuses_when_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantised, "_installed", lambda package: False)
    config = ModelConfig(str(tiny_folder("llama")), quantization="int8")
    with pytest.raises(ModelError, match="pip install torchao") as caught:
        StageWorker(WorkerConfig(address="127.0.0.1:0", model=config))
    assert caught.value.field == "quantization"


def test_a_worker_whose_stages_cannot_be_loaded_refuses_when_it_starts(
    copied: Callable[[str], Path],
) -> None:
    capped = copied("gemma3_text")
    edit(capped, final_logit_softcapping=3.0)
    refused_device = ModelConfig(str(tiny_folder("llama")), device="cuda:99")
    for config, field in ((ModelConfig(str(capped)), "path"), (refused_device, "device")):
        with pytest.raises(ModelError) as caught:
            StageWorker(WorkerConfig(address="127.0.0.1:0", model=config))
        assert caught.value.field == field
        assert caught.value.remedy
