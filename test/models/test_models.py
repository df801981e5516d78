"""Loading, prompts, vocabularies and adapters: what works, and the error for what does not."""

from __future__ import annotations

import copy
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_models import VISION, scene, tiny_folder, tiny_model, tiny_prompt
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import ConfigError, InvalidInput, ModelError, VocabularyMismatch
from collab_llm_nodes.models import loading, prompt
from collab_llm_nodes.models.adapters import ExitAdapters
from collab_llm_nodes.models.architectures import ARCHITECTURES, decoder_parts
from collab_llm_nodes.models.fingerprint import checkpoint_fingerprint
from collab_llm_nodes.models.footprint import count_weights
from collab_llm_nodes.models.heads import head_fingerprint
from collab_llm_nodes.models.loading import ModelConfig, TargetConfig, load, model_folder
from collab_llm_nodes.models.partial import read_facts
from collab_llm_nodes.models.prompt import Prompt, PromptLimits, encode
from collab_llm_nodes.models.tokenizer import train_tokenizer
from collab_llm_nodes.models.trained import trained_files, write_trained
from collab_llm_nodes.models.vocabulary import (
    check_same,
    shared_size,
    shared_sizes,
    vocabulary_hash,
    vocabulary_size,
)
from collab_llm_nodes.protocols.jupiter.profiler import model_facts

# ---------------------------------------------------------------- loading


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_loads(architecture: str) -> None:
    loaded = tiny_model(architecture, exit_layers=(2, 1))
    assert (loaded.image_processor is not None) == (architecture in VISION)
    assert loaded.model.dtype == torch.float32
    assert not loaded.model.training
    assert loaded.adapters is not None
    assert loaded.adapters.layers == (1, 2)
    engine = Engine(loaded)
    assert engine.num_layers == 4
    assert loaded.tokenizer.eos_token_id in engine.eos


def test_dtype_is_converted(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("qwen2_vl"), tmp_path / "half")
    file = folder / "model.safetensors"
    save_file({k: v.half() for k, v in load_file(file).items()}, file, {"format": "pt"})
    for dtype in ("float32", "bfloat16"):
        loaded = load(TargetConfig(str(folder), dtype=dtype, exit_layers=(1,)))
        assert {p.dtype for p in loaded.model.parameters()} == {loading.DTYPES[dtype]}
        assert loaded.adapters is not None
        assert {p.dtype for p in loaded.adapters.parameters()} == {loading.DTYPES[dtype]}
        session = Engine(loaded).open(encode(tiny_prompt("qwen2_vl"), loaded))
        exits: dict[int, torch.Tensor] = {}
        ids = encode(tiny_prompt("qwen2_vl"), loaded).ids
        logits = session.feed(ids, exits.__setitem__, last=1)
        assert torch.isfinite(logits).all()
        assert exits[1].dtype == loading.DTYPES[dtype]


def rewrite(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def unknown_architecture(folder: Path) -> None:
    rewrite(folder / "config.json", lambda c: c.update(model_type="resnet"))


def no_chat_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def broken_legacy_template(folder: Path) -> None:
    no_chat_template(folder)
    (folder / "chat_template.json").write_text('{"chat_template": ')


def empty_legacy_template(folder: Path) -> None:
    no_chat_template(folder)
    (folder / "chat_template.json").write_text("[]")


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def truncated_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def missing_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[next(name for name in tensors if "layers.1.self_attn.q_proj.weight" in name)]
    save_file(tensors, file, {"format": "pt"})


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def no_image_processor(folder: Path) -> None:
    (folder / "preprocessor_config.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (unknown_architecture, "unknown architecture 'resnet'.*qwen2_vl"),
        (no_chat_template, "no chat template"),
        (broken_legacy_template, "chat_template.json: JSONDecodeError"),
        (empty_legacy_template, "chat_template.json: TypeError"),
        (no_config, "config.json"),
        (no_weights, "no safetensors"),
        (truncated_weights, "not a readable safetensors"),
        (missing_tensor, "lacks .*q_proj"),
        (no_tokenizer, "tokenizer"),
        (no_image_processor, "image processor"),
    ],
)
def test_a_spoiled_checkpoint_is_a_typed_error(
    spoil: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder("qwen2_vl"), tmp_path / "model")
    spoil(folder)
    with pytest.raises(ModelError, match=message) as caught:
        load(ModelConfig(str(folder)))
    assert caught.value.field == "path"
    assert caught.value.remedy


def test_a_chat_template_beside_the_processor_is_found(tmp_path: Path) -> None:
    """Qwen2-VL checkpoints of 2024 may hold it in chat_template.json."""
    folder = shutil.copytree(tiny_folder("qwen2_vl"), tmp_path / "model")
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    loaded, whole = load(ModelConfig(str(folder))), tiny_model("qwen2_vl")
    assert encode(tiny_prompt("qwen2_vl"), loaded).ids == encode(tiny_prompt("qwen2_vl"), whole).ids


@pytest.mark.parametrize("path", ["/nowhere/at/all", "nowhere", "a/b/c", "~/nowhere-at-all"])
def test_a_wrong_path_is_a_typed_error(path: str) -> None:
    with pytest.raises(ModelError, match="no such folder|no shipped model"):
        load(ModelConfig(path))


def test_without_a_path_the_settings_that_name_one_are_named() -> None:
    with pytest.raises(ModelError, match=r"no model is named .*model\.path.*--model"):
        load(ModelConfig())


def test_a_hub_id_that_is_not_here_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="copy the checkpoint here") as caught:
        model_folder(ModelConfig("nobody/no-such-model"), offline=True)
    assert caught.value.field == "path"


def test_what_is_trained_beside_a_model_is_no_part_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("llama"), folder)
    weights, known = count_weights(folder), checkpoint_fingerprint(folder)
    for name in ("adapters", "medusa"):
        write_trained(folder, name, torch.nn.Linear(8, 8), {"hidden_size": 8})
    assert count_weights(folder) == weights
    assert checkpoint_fingerprint(folder) == known
    trained_files(folder, "medusa")[1].unlink()
    assert count_weights(folder) == weights, "whatever it is"
    assert checkpoint_fingerprint(folder) == known


@pytest.mark.parametrize("name", ["verifier_qwen2_vl_7b.yaml", "qwen2_vl_2b_7b.yaml"])
def test_shipped_configurations_of_qwen_do_not_overflow(name: str) -> None:
    file = Path(__file__).parents[2] / "config" / name
    models = list(_models(yaml.safe_load(file.read_text(encoding="utf-8"))))
    assert [model["dtype"] for model in models] == ["bfloat16"]


def _models(found: object) -> Iterator[dict[str, str]]:
    if isinstance(found, dict):
        if str(found.get("path", "")).startswith("Qwen"):
            yield found
        for inner in found.values():
            yield from _models(inner)


def test_an_absent_device_is_a_typed_error() -> None:
    for device in ("warp", "cuda:99"):
        with pytest.raises(ModelError) as caught:
            load(ModelConfig(str(tiny_folder("llama")), device=device))
        assert caught.value.field == "device"


@pytest.mark.skipif(not find_spec("torchao"), reason="torchao is not installed")
def test_int8_with_torchao_stays_close() -> None:
    quantised = load(ModelConfig(str(tiny_folder("qwen2_vl")), quantization="int8"))
    original = tiny_model("qwen2_vl")
    ids = encode(tiny_prompt("qwen2_vl"), original).ids
    logits = [
        Engine(m).open(encode(tiny_prompt("qwen2_vl"), m)).feed(ids, last=1)[0]
        for m in (quantised, original)
    ]
    correlation = torch.corrcoef(torch.stack(logits))[0, 1]
    assert 0.99 < correlation < 1.0


def test_configuration_is_checked() -> None:
    for key, value in (("dtype", "float8"), ("quantization", "int3"), ("pth", "x")):
        with pytest.raises(ConfigError) as caught:
            from_mapping(ModelConfig, {"path": "x", key: value})
        assert caught.value.field == key
    config = from_mapping(TargetConfig, {"path": "x", "exit_layers": [1, 3], "exits": "beside"})
    assert config.exit_layers == (1, 3)


# ---------------------------------------------------------------- adapters


@pytest.mark.parametrize("width", [0, 8])
def test_adapters_survive_saving(width: int, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("qwen2_vl"), tmp_path / "model")
    adapters = ExitAdapters(32, (3, 1, 2), width)
    hidden = torch.randn(5, 32)
    assert torch.equal(adapters(2, hidden), hidden)
    for parameter in adapters.parameters():
        torch.nn.init.normal_(parameter)
    adapters.save(folder)
    loaded = load(TargetConfig(str(folder), exits="beside", exit_layers=(3, 1)))
    assert loaded.adapters is not None
    assert loaded.adapters.layers == (1, 3)
    torch.testing.assert_close(loaded.adapters(3, hidden), adapters(3, hidden))
    elsewhere = load(TargetConfig(str(tiny_folder("qwen2_vl")), exits=str(folder)))
    assert elsewhere.adapters is not None
    assert elsewhere.adapters.layers == (1, 2, 3)


def test_adapters_that_do_not_fit_are_typed_errors(tmp_path: Path) -> None:
    folder, parts = tiny_folder("qwen2_vl"), decoder_parts(tiny_model("qwen2_vl").model)
    with pytest.raises(ModelError, match="cannot read"):
        load(TargetConfig(str(folder), exits="beside"))
    for layers in ((0,), (4,), (1, 9)):
        with pytest.raises(ModelError, match="1 to 3"):
            load(TargetConfig(str(folder), exit_layers=layers))
    ExitAdapters(32, (1, 2)).save(tmp_path)
    with pytest.raises(ModelError, match=r"no adapter was trained for layers \[3\]"):
        ExitAdapters.load(tmp_path, parts, (1, 3))
    ExitAdapters(16, (1, 2)).save(tmp_path)
    with pytest.raises(ModelError, match="width 16"):
        ExitAdapters.load(tmp_path, parts)
    ExitAdapters(32, (7,)).save(tmp_path)
    with pytest.raises(ModelError, match="1 to 3"):
        ExitAdapters.load(tmp_path, parts)
    trained_files(tmp_path, "adapters")[0].write_bytes(b"x")
    with pytest.raises(ModelError, match="cannot read"):
        ExitAdapters.load(tmp_path, parts)


def test_adapters_beside_the_weights_are_refused_with_the_place_they_belong_to(
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(tiny_folder("qwen2_vl"), tmp_path / "model")
    ExitAdapters(32, (1, 2)).save(folder)
    for file in trained_files(folder, "adapters"):  # as earlier versions wrote them
        file.rename(folder / file.name)
    with pytest.raises(ModelError, match="is not where it is read") as caught:
        load(TargetConfig(str(folder), exits="beside"))
    assert caught.value.field == "exits"
    assert str(folder / "collab_llm") in caught.value.remedy


def test_adapters_know_the_model_they_were_trained_with(tmp_path: Path) -> None:
    own, other = (decoder_parts(tiny_model("llama", seed).model) for seed in (0, 1))
    ExitAdapters(32, (1, 2), fingerprint=head_fingerprint(own)).restrict((2,)).save(tmp_path)
    assert ExitAdapters.load(tmp_path, own).layers == (2,)
    with pytest.raises(ModelError, match="adapters of model") as caught:
        ExitAdapters.load(tmp_path, other)
    assert caught.value.field == "exits"
    _, description = trained_files(tmp_path, "adapters")
    facts = json.loads(description.read_text())
    del facts["fingerprint"]  # as older versions wrote it
    description.write_text(json.dumps(facts))
    assert ExitAdapters.load(tmp_path, other).layers == (2,)


# ---------------------------------------------------------------- vocabulary


def test_the_vocabulary_hash_is_that_of_tokens_and_ids() -> None:
    models = [tiny_model("qwen2_vl", padding=37), tiny_model("opt")]
    hashes = {vocabulary_hash(m.tokenizer) for m in models}
    assert len(hashes) == 1, "padding rows of the logits do not matter"

    def changed(*tokens: str | AddedToken) -> str:
        tokenizer = copy.deepcopy(tiny_model("opt").tokenizer)
        assert tokenizer.add_tokens([*tokens]) == len(tokens)
        return vocabulary_hash(tokenizer)

    assert changed("zebra") == changed(AddedToken("zebra", special=True)), "the ids are the same"
    hashes |= {changed("zebra"), changed("lion"), changed("zebra", "lion")}
    hashes |= {changed("lion", "zebra"), changed("zebra\n442\tlion"), changed("zebra", "lio", "n")}
    assert len(hashes) == 7


def test_a_target_may_have_further_added_tokens_at_its_end() -> None:
    def grown(*tokens: str) -> PreTrainedTokenizerBase:
        tokenizer = copy.deepcopy(tiny_model("opt").tokenizer)
        tokenizer.add_tokens([*tokens])
        return tokenizer

    size = vocabulary_size(tiny_model("opt").tokenizer)
    target = shared_sizes(grown("<call>", "</call>", "<think>"))

    def shared(*tokens: str) -> int:
        return shared_size(vocabulary_hash(grown(*tokens)), target, draft="small", target="large")

    assert shared() == size
    assert shared("<call>") == size + 1
    assert shared("<call>", "</call>", "<think>") == size + 3
    for other in (
        ("</call>",),
        ("<call>", "</call>", "<act>"),  # the same size
        ("<call>", "</call>", "<think>", "<act>"),  # the draft's would be the larger one
    ):
        with pytest.raises(VocabularyMismatch):
            shared(*other)


def test_tokens_that_text_becomes_are_not_added_ones(tmp_path: Path) -> None:
    """A larger BPE may begin with a smaller one's tokens, but reads other text as other tokens."""
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    padding(folder)
    own = tiny_model("llama").tokenizer
    assert vocabulary_hash(own) not in shared_sizes(AutoTokenizer.from_pretrained(folder))
    other = train_tokenizer(["quite other words make other merges"] * 9)
    assert vocabulary_hash(own) not in shared_sizes(other)
    assert vocabulary_hash(other) not in shared_sizes(own)


def test_mismatch_names_both_models() -> None:
    check_same("ab", "ab", draft="small", target="large")
    with pytest.raises(VocabularyMismatch, match="draft small .* target large") as caught:
        check_same("ab", "cd", draft="small", target="large")
    assert caught.value.code == "VOCABULARY_MISMATCH"


def fewer_rows(folder: Path, by: int) -> int:
    """Cut rows off the embedding and the LM head of a Llama; returns those that are left."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    rows = len(tensors["lm_head.weight"]) - by
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        tensors[name] = tensors[name][:rows].contiguous()
    save_file(tensors, file, {"format": "pt"})
    rewrite(folder / "config.json", lambda c: c.update(vocab_size=rows))
    return rows


@pytest.mark.parametrize("read", [load, read_facts], ids=["whole", "stages"])
def test_the_tokenizer_of_a_larger_model_is_refused(
    read: Callable[[ModelConfig], object], tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    fewer_rows(folder, 8)
    with pytest.raises(ModelError, match="logits, and text becomes token") as caught:
        read(ModelConfig(str(folder)))
    assert caught.value.field == "path"
    assert "belongs to another model" in caught.value.remedy


def special_token(folder: Path) -> None:
    """Add one as Gemma 3 1B does, whose tokenizer is that of models which see."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    tokenizer.save_pretrained(folder)


def plain_token(folder: Path) -> None:
    """Add one as Llama 2 does, for padding."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<pad>"])
    tokenizer.save_pretrained(folder)


def padding(folder: Path) -> None:
    """Fill the vocabulary up with entries that no merge makes."""
    file = folder / "tokenizer.json"

    def pad(content: dict[str, Any]) -> None:
        size = max(content["model"]["vocab"].values()) + 1
        content["model"]["vocab"].update({f"unused {i}": size + i for i in range(64)})

    rewrite(file, pad)


@pytest.mark.parametrize("add", [special_token, plain_token, padding])
def test_tokens_beyond_the_models_rows_do_not_count(
    add: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    add(folder)
    loaded, plain = load(ModelConfig(str(folder))), tiny_model("llama")
    rows = plain.model.config.vocab_size
    assert vocabulary_size(loaded.tokenizer) > rows, "or this tests nothing"
    engine, facts = Engine(loaded), read_facts(ModelConfig(str(folder)))
    assert engine.vocab_size == facts.vocab_size == rows
    assert engine.vocabulary == facts.vocabulary == plain.vocabulary, "it speaks to its family"
    prompt = encode(Prompt("turn left"), loaded)
    assert prompt.ids == encode(Prompt("turn left"), plain).ids
    logits = engine.open(prompt).feed(prompt.ids, last=1)
    assert torch.equal(logits, Engine(plain).open(prompt).feed(prompt.ids, last=1))


@pytest.mark.parametrize("raw", [False, True])
def test_a_prompt_of_a_token_beyond_the_rows_is_refused(raw: bool, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    plain_token(folder)
    with pytest.raises(InvalidInput, match="control token '<pad>'") as caught:
        encode(Prompt("turn <pad> left", raw=raw), load(ModelConfig(str(folder))))
    assert caught.value.field == "text"
    assert caught.value.remedy


def test_a_template_that_writes_a_token_beyond_the_rows_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    plain_token(folder)
    template = folder / "chat_template.jinja"
    template.write_text("<pad>" + template.read_text())
    with pytest.raises(ModelError, match="chat template.*'<pad>'") as caught:
        load(ModelConfig(str(folder)))
    assert caught.value.field == "path"


def test_end_tokens_beyond_the_rows_end_nothing(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    rows = tiny_model("llama").model.config.vocab_size
    plain_token(folder)
    rewrite(folder / "generation_config.json", lambda c: c.update(eos_token_id=[2, rows]))
    assert Engine(load(ModelConfig(str(folder)))).eos == read_facts(ModelConfig(str(folder))).eos
    assert rows not in Engine(load(ModelConfig(str(folder)))).eos


# ---------------------------------------------------------------- context


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("rotation", "named", "context"),
    [
        ({"rope_type": "default"}, 1024, 1024),
        (YARN, 1024, 4096),  # as Qwen2.5 is published
        (YARN, 4096, 4096),  # as DeepSeek is
        ({**YARN, "factor": 2.5}, 1024, 2560),
        (
            {  # as Llama 3.1 is: the factor is counted in what is named
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
            1024,
            1024,
        ),
    ],
)
def test_the_context_counts_the_factor_of_yarn(
    rotation: dict[str, Any], named: int, context: int, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    changed = {"max_position_embeddings": named, "rope_parameters": {"rope_theta": 1e4, **rotation}}
    rewrite(folder / "config.json", lambda c: c.update(changed))
    config = ModelConfig(str(folder))
    loaded = load(config)
    assert Engine(loaded).context == read_facts(config).context == model_facts(config).context
    assert Engine(loaded).context == context
    longest = PromptLimits(max_characters=10**6)
    word = len(loaded.tokenizer(" left")["input_ids"])
    text = " left" * ((context - 1) // word)
    assert len(encode(Prompt(text, raw=True), loaded, longest).ids) < context
    with pytest.raises(InvalidInput, match=f"the model reads {context}"):
        encode(Prompt(text + " left" * 2, raw=True), loaded, longest)


# ---------------------------------------------------------------- prompts


def test_prompt_has_the_chat_form_and_a_place_per_image_feature() -> None:
    loaded = tiny_model("qwen2_vl")
    encoded = encode(Prompt("turn left", (scene(0), scene(1, 60, 200))), loaded)
    assert encoded.image_grid_thw is not None
    assert encoded.pixel_values is not None
    features = encoded.image_grid_thw.prod(1) // 4
    assert features[0] != features[1]
    placeholder = loaded.model.config.image_token_id
    assert encoded.ids.count(placeholder) == int(features.sum())
    assert len(encoded.pixel_values) == 4 * int(features.sum())
    text = str(loaded.tokenizer.decode(list(encoded.ids))).replace("<|image_pad|>", "")
    frame = "<|vision_start|><|vision_end|>"
    assert text == f"<|im_start|>user\n{frame * 2}turn left<|im_end|>\n<|im_start|>assistant\n"
    assert encoded.position_ids is not None
    assert encoded.position_ids.shape == (3, len(encoded.ids))
    last = int(encoded.position_ids.max())
    assert encoded.position_delta == last + 1 - len(encoded.ids) < 0


@pytest.mark.parametrize("architecture", ["qwen2_vl", "llama"])
def test_text_alone_has_plain_positions(architecture: str) -> None:
    encoded = encode(Prompt("turn left"), tiny_model(architecture))
    assert encoded.position_delta == 0
    assert (encoded.position_ids is None) == (architecture == "llama")
    assert encoded.pixel_values is None


@pytest.mark.parametrize(
    ("text", "images", "field", "message"),
    [
        ("", 0, "text", "empty"),
        (" \n ", 1, "text", "empty"),
        ("a" * 9000, 0, "text", "9000 characters"),
        ("left right " * 700, 0, "text", "the model reads 1024"),
        ("go <|im_end|> on", 0, "text", "control token"),
        ("see <|image_pad|>", 1, "text", "control token"),
        ("go", 9, "images", "9 images.*at most 8"),
    ],
)
def test_unusable_prompts_are_typed_errors(
    text: str, images: int, field: str, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        encode(Prompt(text, (scene(0),) * images), tiny_model("qwen2_vl"))
    assert caught.value.field == field
    assert caught.value.remedy


def bomb() -> bytes:
    data = bytearray(scene(0))
    start = data.index(b"\xff\xc0")  # start of frame: 5 bytes on, height and width
    data[start + 5 : start + 9] = b"\xff\xff\xff\xff"
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a readable"),
        (b"no image at all", "not a readable"),
        (scene(0)[:200], "not a readable"),
        (scene(0)[:-300], "not a readable"),
        (b"GIF89a" + bytes(50), "not a readable"),
        (bomb(), "pixels"),
    ],
)
def test_corrupt_images_are_typed_errors(data: bytes, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        encode(Prompt("go", (scene(0), data)), tiny_model("qwen2_vl"))
    assert caught.value.field == "images[1]"
    assert "object at" not in str(caught.value)


def test_other_limits_of_images() -> None:
    loaded = tiny_model("qwen2_vl")
    with pytest.raises(InvalidInput, match="at most 100 pixels"):
        encode(Prompt("go", (scene(0),)), loaded, PromptLimits(max_pixels=100))
    with pytest.raises(InvalidInput, match="aspect ratio"):
        encode(Prompt("go", (scene(0, 1000, 4),)), loaded)
    with pytest.raises(InvalidInput, match="reads text only"):
        encode(Prompt("go", (scene(0),)), tiny_model("llama"))
    with pytest.raises(ConfigError):
        PromptLimits(max_pixels=-1)


def test_qwen_vl_utils_gives_the_same_pixels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """qwen-vl-utils imports torchvision for videos only; an empty one lets its image path run."""
    loaded = tiny_model("qwen2_vl")
    shown = Prompt("go", (scene(0), scene(1, 300, 40), scene(2, 20, 20), scene(3, 56, 84)))
    qwen = [name for name in sys.modules if name.startswith("qwen_vl_utils")]
    for name in qwen:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchvision", None)  # as where it is absent
    prompt._qwen_fetch_image.cache_clear()
    with caplog.at_level(logging.DEBUG, logger=prompt.log.name):
        plain = [encode(shown, loaded) for _ in range(2)]
    records = [r for r in caplog.records if "Pillow scales" in r.message]
    assert [r.levelname for r in records] == ["DEBUG"], "logged once, and as no warning"

    for name in ("torchvision", "torchvision.io", "torchvision.transforms"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vision = sys.modules["torchvision"]
    vision.__version__ = "0.28.0"  # type: ignore[attr-defined]
    vision.io = sys.modules["torchvision.io"]  # type: ignore[attr-defined]
    vision.transforms = sys.modules["torchvision.transforms"]  # type: ignore[attr-defined]
    vision.transforms.InterpolationMode = object  # type: ignore[attr-defined]
    prompt._qwen_fetch_image.cache_clear()
    assert prompt._qwen_fetch_image() is not None
    other = encode(shown, loaded)
    prompt._qwen_fetch_image.cache_clear()
    for name in [name for name in sys.modules if name.startswith("qwen_vl_utils")]:
        monkeypatch.delitem(sys.modules, name)
    assert plain[0].ids == other.ids
    assert plain[0].pixel_values is not None
    assert other.pixel_values is not None
    torch.testing.assert_close(plain[0].pixel_values, other.pixel_values, atol=0, rtol=0)


def test_pixels_are_the_image() -> None:
    """The first patch of a plain image is its normalised colour."""
    buffer = Path(tiny_folder("qwen2_vl")) / "plain.png"
    Image.new("RGB", (56, 56), (255, 0, 128)).save(buffer)
    loaded = tiny_model("qwen2_vl")
    encoded = encode(Prompt("go", (buffer.read_bytes(),)), loaded)
    assert encoded.pixel_values is not None
    patch = encoded.pixel_values[0].reshape(3, 2, 14, 14)
    assert loaded.image_processor is not None
    mean = np.array(loaded.image_processor.image_mean)
    std = np.array(loaded.image_processor.image_std)
    expected = (np.array([1.0, 0.0, 128 / 255]) - mean) / std
    np.testing.assert_allclose(patch[:, 1, 5, 5], expected, atol=1e-5)
