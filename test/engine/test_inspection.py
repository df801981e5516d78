"""What a model's files say: sizes by hand, the backend, exits, and every fault as a reason."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from other_models import write_other_model
from safetensors.torch import load_file, save_file
from tiny_models import VISION, tiny_folder, tiny_model
from transformers import AutoConfig, Qwen2VLImageProcessorPil

from collab_llm_lab.random_models import random_tokenizer
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.inspection import Inspection, inspect_model
from collab_llm_nodes.models import loading
from collab_llm_nodes.models.adapters import ExitAdapters
from collab_llm_nodes.models.architectures import ARCHITECTURES, decoder_parts
from collab_llm_nodes.models.checkpoint import load_head
from collab_llm_nodes.models.footprint import format_bytes
from collab_llm_nodes.models.heads import head_fingerprint
from collab_llm_nodes.models.loading import ModelConfig, architecture_in
from collab_llm_nodes.models.partial import empty_model
from collab_llm_nodes.models.tokenizer import vision_tokens


def inspected(folder: Path, side: str = "target") -> Inspection:
    return inspect_model(ModelConfig(str(folder)), side)


def write_qwen2_vl(folder: Path, size: str) -> Path:
    """Write the true configuration of Qwen2-VL-2B or -7B, with a small tokenizer and no weights."""
    wide: dict[str, Any] = {
        "2B": {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12}
        | {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
        "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28}
        | {"num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
    }[size]
    tokenizer = random_tokenizer()
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil().save_pretrained(folder)
    facts = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "num_hidden_layers": 28,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "use_sliding_window": False,
        "vision_config": {
            "depth": 32,
            "embed_dim": 1280,
            "hidden_size": wide["hidden_size"],
            "mlp_ratio": 4,
            "num_heads": 16,
            "in_chans": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        **wide,
        **vision_tokens(tokenizer),
    }
    (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("size", "parameters", "column"), [("2B", 2_208_985_600, 28_672), ("7B", 8_291_375_616, 57_344)]
)
def test_the_sizes_of_paper_003s_pair(
    size: str, parameters: int, column: int, tmp_path: Path
) -> None:
    """Those that the model cards and files of Qwen2-VL have: 4.4 GB, and 15.4 GiB."""
    found = inspected(write_qwen2_vl(tmp_path, size))
    assert found.reasons == []
    assert found.parameters == parameters
    memory = found.memory["bfloat16"]
    assert memory.weights == 2 * parameters
    assert memory.kv_per_1000 == 1000 * column
    if size == "7B":  # docs/models.md has these figures
        sizes = (memory.weights, memory.kv_per_1000, memory.largest_pass)
        assert [format_bytes(n) for n in sizes] == ["15.4 GiB", "55 MiB", "840 MiB"]
    assert found.memory["float32"].kv_per_1000 == 2000 * column
    int4, int8 = (found.memory[kind].weights or 0 for kind in ("int4", "int8"))
    assert 0.3 * 2 * parameters < int4 < int8 < 0.75 * 2 * parameters
    assert found.context == 32768
    assert found.picture_tokens == 23 * 17 + 2  # 644 x 476 in squares of 28, and two marks
    assert found.backend is not None
    assert found.backend.name == "layer loop"
    assert found.stored == 0
    assert any("not here" in note for note in found.notes)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_found_is_what_is_loaded(architecture: str) -> None:
    found, loaded = inspected(tiny_folder(architecture)), tiny_model(architecture)
    engine = Engine(loaded)
    assert found.reasons == []
    assert found.parameters == sum(weight.numel() for weight in loaded.model.parameters())
    assert found.vocabulary is not None
    assert (found.vocabulary.hash, found.vocabulary.tokens) == (
        loaded.vocabulary,
        loaded.vocab_size,
    )
    assert (found.layers, found.context) == (engine.num_layers, engine.context)
    assert found.sees == (architecture in VISION)
    assert (found.picture_tokens is not None) == found.sees
    assert found.backend is not None
    assert found.backend.batches == (not engine.eager)
    assert found.backend.trees == engine.grows_trees
    assert found.memory["float32"].weights is not None
    assert found.memory["float32"].weights < found.stored < 2 * found.memory["float32"].weights


def test_another_architecture_runs_eagerly(tmp_path: Path) -> None:
    found = inspected(write_other_model(tmp_path, "gemma"))
    assert found.reasons == []
    assert found.backend is not None
    assert (found.backend.name, found.backend.batches) == ("eager", False)
    assert not found.backend.stages


@pytest.mark.parametrize("model_type", ["gpt2", "mamba", "t5", "clip"])
def test_a_model_built_differently_is_refused_with_a_remedy(
    model_type: str, tmp_path: Path
) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    random_tokenizer().save_pretrained(tmp_path)
    (reason,) = inspected(tmp_path).reasons
    assert reason.field == "target.path"
    assert re.search("built differently|unknown architecture", reason.message)
    assert reason.remedy


def test_trained_exits_are_the_targets(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    ExitAdapters(32, (1, 3), 8).save(folder)
    exits = inspected(folder).exits
    assert exits is not None
    assert (exits.layers, exits.width) == ((1, 3), 8)
    assert inspected(folder, "draft").exits is None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_head_is_known_without_the_other_weights(architecture: str) -> None:
    folder = tiny_folder(architecture)
    empty = empty_model(architecture_in(folder), ModelConfig(dtype="bfloat16"))
    load_head(empty, folder)
    ours, theirs = (decoder_parts(m) for m in (empty, tiny_model(architecture).model))
    assert head_fingerprint(ours) == head_fingerprint(theirs)
    layer: Any = ours.layers[0]
    assert layer.self_attn.q_proj.weight.is_meta


def test_exits_without_their_model_are_not_judged(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    ExitAdapters(32, (1, 3)).save(folder)
    without("model.safetensors")(folder)
    found = inspected(folder)
    assert (found.reasons, found.exits) == ([], None)
    assert any("early exits" in note for note in found.notes)


def test_no_weight_is_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options)
        return str(tiny_folder("llama"))

    monkeypatch.setattr(loading, "snapshot_download", snapshot_download)
    assert inspect_model(ModelConfig("somebody/model"), "target").reasons == []
    assert "*.json" in asked["allow_patterns"]
    assert "*.safetensors" not in asked["allow_patterns"]


def copied(architecture: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder(architecture), tmp_path / "model"))


def edited(**facts: Any) -> Callable[[Path], None]:
    """Return a function that changes config.json."""

    def edit(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **facts}), "utf-8")

    return edit


def written(name: str, text: str) -> Callable[[Path], int]:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def lose_a_shard(folder: Path) -> None:
    names = [f"model-{i}-of-00002.safetensors" for i in ("00001", "00002")]
    (folder / "model.safetensors").rename(folder / names[0])
    places = {"weight_map": {"a": names[0], "b": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(places), "utf-8")


def lose_all_shards(folder: Path) -> None:
    lose_a_shard(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()


def cut_the_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def pickle_the_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def lose_the_head(folder: Path) -> None:
    """Of a tied pair, either would do."""
    edited(tie_word_embeddings=True)(folder)
    file = folder / "model.safetensors"
    ends = ("embed_tokens.weight", "lm_head.weight")
    save_file({k: v for k, v in load_file(file).items() if not k.endswith(ends)}, file)


def take_adapters_of_another_model(folder: Path) -> None:
    ExitAdapters(48, (1,)).save(folder)


def quantise(method: str, **more: Any) -> Callable[[Path], None]:
    return edited(quantization_config={"quant_method": method, **more})


FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no configuration": (without("config.json"), "path", "no readable config.json"),
    "damaged configuration": (written("config.json", "{"), "path", "no readable config.json"),
    "damaged end tokens": (written("generation_config.json", "{"), "path", "generation_config"),
    "unknown architecture": (edited(model_type="nonsense"), "path", "unknown architecture"),
    "no numbers": (edited(num_hidden_layers="many"), "path", ""),
    "no tokenizer": (without("tokenizer.json"), "path", "cannot load the tokenizer"),
    "a tokenizer with more ids than rows": (edited(vocab_size=300), "path", "300 logits"),
    "a chat template that fails": (
        written("chat_template.jinja", "{{ raise_exception('never') }}"),
        "path",
        "chat template .* never",
    ),
    "a lost shard": (lose_a_shard, "path", "00002-of-00002"),
    "all shards lost": (lose_all_shards, "path", "00001-of-00002"),
    "weights that end early": (cut_the_weights, "path", "not a readable safetensors file"),
    "pickled weights": (pickle_the_weights, "path", "holds no safetensors"),
    "weights of another model": (edited(hidden_size=64), "path", "config.json says"),
    "more layers than stored": (edited(num_hidden_layers=5), "path", "lacks .*layers.4"),
    "neither end of a tied pair": (lose_the_head, "path", "lacks .*embed_tokens"),
    "adapters of another model": (take_adapters_of_another_model, "exits", "width 48"),
    "gptq without its package": (quantise("gptq", bits=4, group_size=128), "path", "optimum|GPTQ"),
    "awq without its package": (quantise("awq", bits=4), "path", "gptqmodel"),
    "fp8 of another tool": (quantise("compressed-tensors"), "path", "compressed.tensors"),
    "an unknown method": (quantise("nonsense"), "path", "no method 'nonsense'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_becomes_a_reason_with_a_remedy(fault: str, tmp_path: Path) -> None:
    make, field, message = FAULTS[fault]
    folder = copied("llama", tmp_path)
    make(folder)
    found = inspected(folder)
    reasons = [r for r in found.reasons if re.search(message, r.message)]
    assert [r.field for r in reasons] == [f"target.{field}"], found.reasons
    assert all(r.code == "MODEL_ERROR" and r.remedy for r in found.reasons)


def test_a_quantised_checkpoint_is_as_large_as_its_files(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    quantise("fp8")(folder)
    found = inspected(folder)
    assert found.quantised == "fp8"
    assert found.memory["bfloat16"].weights is None
    assert found.memory["bfloat16"].kv_per_1000 > 0
    assert "int8" not in found.memory
    assert found.stored == (folder / "model.safetensors").stat().st_size


def test_quantisation_that_cannot_be_done_here_is_a_reason() -> None:
    config = ModelConfig(str(tiny_folder("llama")), quantization="int4")  # on a CPU, in float32
    (reason,) = inspect_model(config, "draft").reasons
    assert reason.field == "draft.quantization"
    assert "dtype bfloat16" in reason.message


def test_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a model is computing")

    monkeypatch.setattr(torch.nn.Linear, "forward", refuse)
    assert inspected(tiny_folder("qwen2_vl")).reasons == []
