"""Memory that models need: what is estimated is what they take, and too little is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_folder, tiny_model, tiny_prompt
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, Qwen2_5_VLConfig, Qwen2VLConfig, Qwen3VLConfig

from collab_llm_lab.random_models import write_random_model
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.models import loading
from collab_llm_nodes.models.architectures import ARCHITECTURES
from collab_llm_nodes.models.footprint import (
    check_fits,
    column_bytes,
    count_weights,
    pass_bytes,
    weight_bytes,
)
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import encode

BF16 = torch.bfloat16


def qwen2_vl_7b() -> Qwen2VLConfig:
    return Qwen2VLConfig(
        text_config={
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        }
    )


def test_a_token_of_qwen2_vl_7b_takes_57_kb() -> None:
    assert column_bytes(qwen2_vl_7b().get_text_config(), BF16) == 57_344


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_column_is_what_the_cache_holds_of_a_token(architecture: str) -> None:
    loaded = tiny_model(architecture)
    prompt = encode(tiny_prompt(architecture), loaded)
    session = Engine(loaded, eager=True).open(prompt)
    session.feed(prompt.ids, last=0)
    held = session.own_bytes
    text = loaded.model.config.get_text_config()
    assert held == len(prompt.ids) * column_bytes(text, torch.float32)


class Peak(TorchDispatchMode):
    """Counts the bytes of the tensors that are made and live at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.highest = 0
        self._others: dict[int, StorageWeakRef] = {}  # were there before
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self._made:
                self._others[storage._cdata] = StorageWeakRef(storage)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            other = self._others.get(storage._cdata)
            if other is None or other.expired():
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.highest = max(self.highest, sum(size for _, size in self._made.values()))
        return result


def _storages(tree: object) -> list[torch.UntypedStorage]:
    tensors = [x for x in tree_leaves(tree) if isinstance(x, Tensor)]
    return [x.untyped_storage() for x in tensors if not x.is_mkldnn]  # those are weights


@pytest.mark.parametrize("architecture", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llama"])
def test_a_pass_takes_no_more_than_estimated(architecture: str, tmp_path: Path) -> None:
    """Measured without a GPU, with a new session; weights and what is made once are left out."""
    folder = write_random_model(tmp_path / "model", architecture, hidden_size=256, layers=2)
    loaded = load(ModelConfig(str(folder)))
    engine, config = Engine(loaded), loaded.model.config
    prompt = encode(tiny_prompt(architecture), loaded)
    ids = [*prompt.ids, *[20 + i % 7 for i in range(512 - len(prompt.ids))]]
    engine.open(prompt).feed(ids, last=0)
    with Peak() as peak:
        engine.open(prompt).feed(ids, last=8)
    pixels = 0
    if prompt.image_grid_thw is not None:
        pixels = int(prompt.image_grid_thw.prod()) * config.vision_config.patch_size**2
    size = pass_bytes(config, torch.float32, rows=512, logits=8, columns=512, pixels=pixels)
    size += 512 * column_bytes(config.get_text_config(), torch.float32)
    assert 0.6 * size < peak.highest < size


@pytest.mark.parametrize(
    ("config", "width", "between"),
    [
        (qwen2_vl_7b(), 1280, 4 * 1280),
        (Qwen2_5_VLConfig(vision_config={"hidden_size": 1280}), 1280, 3420),
    ],
    ids=["qwen2_vl", "qwen2_5_vl"],
)
def test_a_picture_adds_its_patches(config: Qwen2VLConfig, width: int, between: int) -> None:
    few, many = (
        pass_bytes(config, BF16, rows=1, logits=1, columns=1, pixels=n * 14 * 14) for n in (0, 100)
    )
    patch = 3 * 2 * 14 * 14
    assert many - few == 100 * (2 * (9 * width + 3 * between + patch) + 4 * patch)


def test_too_little_memory_is_seen_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder("llama")
    weights = count_weights(folder)
    assert weights == sum(p.numel() for p in tiny_model("llama").model.parameters())
    text = AutoConfig.from_pretrained(folder)
    context = text.max_position_embeddings
    beside = {
        dtype: pass_bytes(text, dtype, rows=512, logits=64, columns=context)
        + context * column_bytes(text, dtype)
        for dtype in (torch.float32, BF16)
    }
    free = 4 * weights + beside[torch.float32] - 1
    monkeypatch.setattr(loading, "free_bytes", lambda device: free)
    with pytest.raises(ModelError, match="too little memory on cpu") as caught:
        load(ModelConfig(str(folder)))
    assert "int8" in caught.value.remedy
    free += 1
    load(ModelConfig(str(folder)))
    free = 2 * weights + beside[BF16]
    load(ModelConfig(str(folder), dtype="bfloat16"))  # half the size fits
    free -= 1
    with pytest.raises(ModelError, match="too little memory"):
        load(ModelConfig(str(folder), dtype="bfloat16"))


def test_the_refusal_says_what_is_needed_and_what_is_free() -> None:
    cuda = torch.device("cuda:0")
    with pytest.raises(ModelError) as caught:
        check_fits(15.2e9, qwen2_vl_7b(), BF16, cuda, 15.5e9)
    assert re.search(
        r"cuda:0: 14\.2 GiB for weights, \d{3} MiB for a pass of 512 tokens and 224 MiB for the"
        r" keys and values of 4096 tokens are needed, 14\.4 GiB are free",
        str(caught.value),
    )
    check_fits(15.2e9, qwen2_vl_7b(), BF16, cuda, 17e9)


@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text", "gpt2", "mamba", "mixtral"])
def test_other_configurations_have_an_estimate(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    assert pass_bytes(config, BF16, rows=512, logits=1, columns=512) > 0
    assert column_bytes(config.get_text_config(), BF16) > 0


@pytest.mark.parametrize(
    "model_type", ["smolvlm", "internvl", "gemma3", "gemma4", "gemma3n", "llava", "mistral3"]
)
def test_other_models_that_see_have_an_estimate(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, vision_config={})  # unset, Gemma 4 has none
    small, large = (
        pass_bytes(config, BF16, rows=512, logits=1, columns=512, pixels=n) for n in (0, 1 << 20)
    )
    assert 0 < small < large
    assert column_bytes(config.get_text_config(), BF16) > 0


def test_a_column_of_layers_that_differ_is_counted_layer_by_layer() -> None:
    """Gemma 4's global layers have wider heads."""
    text = AutoConfig.for_model(
        "gemma4_text", num_hidden_layers=6, num_key_value_heads=1, head_dim=16, global_head_dim=64
    )
    assert column_bytes(text, BF16) == 2 * (5 * 16 + 64) * 2


def test_deepstack_adds_its_features_to_a_pass() -> None:
    plain, deep = (
        Qwen3VLConfig(vision_config={"deepstack_visual_indexes": levels})
        for levels in ([], [8, 16])
    )
    few, many = (pass_bytes(c, BF16, rows=512, logits=1, columns=512) for c in (plain, deep))
    assert many - few == 2 * 512 * 2 * plain.get_text_config().hidden_size


def test_weights_are_counted_tensor_by_tensor() -> None:
    folder = tiny_folder("qwen2_vl")
    names = dict(tiny_model("qwen2_vl").model.named_parameters())
    seen: set[str] = set()

    def bytes_of(name: str, dimensions: int) -> float:
        seen.add(name)
        return 2.0 if dimensions > 1 else 0.0

    wide = sum(p.numel() for p in names.values() if p.ndim > 1)
    assert weight_bytes(folder, bytes_of) == 2 * wide
    assert len(seen) == len(names)
