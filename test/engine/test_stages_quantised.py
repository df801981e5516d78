"""Stages of quantised models: the numbers of the whole quantised model, a part at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_prompt
from torch import Tensor

from collab_llm_lab.random_models import write_random_model
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.stage import Stage
from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.partial import load_vision, read_facts
from collab_llm_nodes.models.prompt import encode
from collab_llm_nodes.protocols.jupiter.profiler import model_facts

torchao = pytest.mark.skipif(not find_spec("torchao"), reason="torchao is not installed")
bitsandbytes = pytest.mark.skipif(
    not (find_spec("bitsandbytes") and find_spec("accelerate")),
    reason="bitsandbytes is not installed",
)
FolderOf = Callable[[str], Path]
LAYERS = 4
TOKENS = 16


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """Writes a checkpoint of an architecture, wide enough for groups of 64, once."""

    @cache
    def write(architecture: str) -> Path:
        folder = tmp_path_factory.mktemp(architecture)
        return write_random_model(folder, architecture, hidden_size=128, layers=LAYERS)

    return write


def stored_quantised(config: ModelConfig, folder: Path) -> ModelConfig:
    """Store the model as it is once it is quantised, with its tokenizer."""
    loaded = load(config)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return ModelConfig(str(folder), dtype=config.dtype)


def greedy_whole(config: ModelConfig, ids: Sequence[int]) -> list[int]:
    """Return the greedy answer of the whole model, by transformers."""
    with torch.inference_mode():
        found = load(config).model.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS
        )
    answer: list[int] = found[0, len(ids) :].tolist()
    return answer


def greedy_divided(stages: Sequence[Stage], ids: Sequence[int]) -> list[int]:
    sessions = [stage.open() for stage in stages]
    answer: list[int] = []
    passed: Sequence[int] | Tensor = ids
    while len(answer) < TOKENS:
        for session in sessions:
            passed = session.feed(passed)
        assert isinstance(passed, Tensor)
        answer.append(int(passed[-1].argmax()))
        passed = answer[-1:]
    return answer


def divided(config: ModelConfig, cuts: Sequence[int] = (1, 3)) -> list[Stage]:
    return [Stage(config, a, b) for a, b in zip((0, *cuts), (*cuts, LAYERS), strict=True)]


@torchao
@pytest.mark.parametrize("stored", [False, True], ids=["while it loads", "in its files"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "opt"])
def test_stages_of_a_quantised_model_answer_as_the_whole_one(
    architecture: str, stored: bool, folder_of: FolderOf, tmp_path: Path
) -> None:
    plain = ModelConfig(str(folder_of(architecture)))
    config = ModelConfig(plain.path, quantization="int8")
    if stored:
        config = stored_quantised(config, tmp_path)
    ids = encode(tiny_prompt(architecture), load(plain)).ids
    stages = divided(config)
    assert greedy_divided(stages, ids) == greedy_whole(config, ids)
    whole = Engine(load(plain)).open(encode(tiny_prompt(architecture), load(plain)))
    exact, found = whole.feed(ids), greedy_logits(stages, ids)
    assert not torch.allclose(found, exact, atol=1e-4), "nothing was quantised"


def greedy_logits(stages: Sequence[Stage], ids: Sequence[int]) -> Tensor:
    passed: Sequence[int] | Tensor = ids
    for stage in stages:
        passed = stage.open().feed(passed)
    assert isinstance(passed, Tensor)
    return passed


@bitsandbytes
@pytest.mark.parametrize("stored", [False, True], ids=["while it loads", "in its files"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_stages_that_bitsandbytes_quantises_answer_as_the_whole_model(
    kind: str, stored: bool, folder_of: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "collab_llm_nodes.models.loading.quantization_package", lambda *facts: "bitsandbytes"
    )
    config = ModelConfig(str(folder_of("llama")), quantization=kind)
    if stored:
        config = stored_quantised(config, tmp_path)
    ids = encode(tiny_prompt("llama"), read_facts(config).without_weights()).ids
    assert greedy_divided(divided(config), ids) == greedy_whole(config, ids)


@torchao
@pytest.mark.parametrize("stored", [False, True], ids=["while it loads", "in its files"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2_vl"])
def test_plans_count_the_bytes_that_quantised_stages_load(
    architecture: str, stored: bool, folder_of: FolderOf, tmp_path: Path
) -> None:
    plain = ModelConfig(str(folder_of(architecture)), dtype="bfloat16")
    config = ModelConfig(plain.path, dtype="bfloat16", quantization="int8")
    if stored:
        config = stored_quantised(config, tmp_path)
        if (images := load(plain).image_processor) is not None:
            images.save_pretrained(tmp_path)
    facts, exact = model_facts(config), model_facts(plain)
    for first, last in ((0, 4), (0, 1), (1, 3), (2, 4)):
        counted = facts.weight_bytes(first, last)
        assert counted == pytest.approx(
            Stage(config, first, last).bytes, rel=0.05
        )  # scales: 5 bytes of 128
        assert counted < exact.weight_bytes(first, last)
    assert facts.layer_bytes < 0.6 * exact.layer_bytes
    assert facts.fingerprint != exact.fingerprint
    assert facts.vision_bytes == exact.vision_bytes
    if architecture == "qwen2_vl":
        _, held = load_vision(read_facts(config))
        assert 0 < held < facts.vision_bytes


@torchao
def test_a_checkpoint_is_not_quantised_twice(folder_of: FolderOf, tmp_path: Path) -> None:
    stored = stored_quantised(ModelConfig(str(folder_of("llama")), quantization="int8"), tmp_path)
    twice = ModelConfig(stored.path, quantization="int8")
    attempts: list[Callable[[], object]] = [
        lambda: load(twice),
        lambda: Stage(twice, 0, 2),
        lambda: read_facts(twice).weights,
    ]
    for attempt in attempts:
        with pytest.raises(ModelError, match="quantised already") as caught:
            attempt()
        assert caught.value.field == "quantization"


@torchao
def test_weights_name_how_they_are_quantised(folder_of: FolderOf) -> None:
    path = str(folder_of("llama"))
    plain, int8 = (
        read_facts(ModelConfig(path, quantization=kind)).weights for kind in ("none", "int8")
    )
    assert int8 == f"{plain} int8 by torchao"
