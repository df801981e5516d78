"""Prompts for models with processors of their own: the same rules, whoever encodes the pictures."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tiny_models import scene, tiny_folder, tiny_model
from transformers.models.smolvlm import processing_smolvlm

from collab_llm_lab.random_seeing_models import FAMILIES, VIDEO
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import InvalidInput, ModelError
from collab_llm_nodes.models.architectures import ARCHITECTURES
from collab_llm_nodes.models.loading import LoadedModel, ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt, PromptLimits, encode, pixel_limit, scaled_size
from collab_llm_nodes.models.turns import Turn


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_those_of_the_processors_own_chat(name: str) -> None:
    loaded = tiny_model(name)
    pictures = [Image.open(io.BytesIO(scene(seed))) for seed in (1, 2)]
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "go on"}]
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
        {"role": "user", "content": content},
    ]
    text = loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    own = loaded.processor(text=[text], images=pictures, return_tensors="pt")
    prompt = Prompt("go on", (scene(1), scene(2)), turns=(Turn("system", "be brief"),))
    encoded = encode(prompt, loaded)
    assert list(encoded.ids) == own["input_ids"][0].tolist()
    assert encoded.processed is not None
    assert set(encoded.processed) == set(own) - {"input_ids"}
    assert encoded.processed["pixel_values"].equal(own["pixel_values"])
    placeholder = loaded.model.config.image_token_id
    assert encoded.ids[encoded.shown - 1] == placeholder
    assert placeholder not in encoded.ids[encoded.shown :]


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_without_pictures_need_no_processor(name: str) -> None:
    encoded = encode(Prompt("go on"), tiny_model(name))
    assert (encoded.processed, encoded.shown) == (None, 0)
    assert encoded.ids == encode(Prompt("go on"), tiny_model("qwen2_vl")).ids


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_that_place_pictures_are_refused_in_texts(name: str) -> None:
    """The processor would write placeholders for them, or look for a video."""
    loaded = tiny_model(name)
    for token in (*FAMILIES[name].tokens.values(), VIDEO, "<|im_start|>"):
        for prompt in (
            Prompt(f"see {token} there", (scene(1),)),
            Prompt("go on", (scene(1),), turns=(Turn("user", token), Turn("assistant", "ok"))),
        ):
            with pytest.raises(InvalidInput, match="control token"):
                encode(prompt, loaded)


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "grey").save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("name", FAMILIES)
def test_pictures_beyond_the_limits_never_reach_the_processor(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = tiny_model(name)
    limits = PromptLimits(max_images=2, max_pixels=10_000)

    def reached(*_: object, **__: object) -> None:
        raise AssertionError("the processor was given it")

    monkeypatch.setattr(type(loaded.processor), "__call__", reached)
    for images, field in (
        ((png(200, 51),), "images[0]"),
        ((png(40, 40), png(9, 2000)), "images[1]"),  # one side 222 times the other
        ((png(40, 40),) * 3, "images"),
        ((b"no picture",), "images[0]"),
    ):
        with pytest.raises(InvalidInput) as caught:
            encode(Prompt("go on", images), loaded, limits)
        assert caught.value.field == field


def refusal(prompt: Prompt, loaded: LoadedModel) -> str | None:
    """Return the field of the error, if the prompt is refused."""
    try:
        encode(prompt, loaded)
    except InvalidInput as error:
        return error.field
    return None


@pytest.mark.parametrize("size", [(1, 1), (1, 200), (200, 1), (1920, 1080)])
@pytest.mark.parametrize("name", FAMILIES)
def test_sizes_within_the_limits_are_read_or_refused_by_name(
    name: str, size: tuple[int, int]
) -> None:
    loaded = tiny_model(name)
    assert scaled_size(*size, loaded, "images") == size
    assert pixel_limit(0, loaded) == 1920 * 1080
    assert refusal(Prompt("go on", (png(*size),)), loaded) in (None, "images", "text")


def test_a_prompt_of_too_many_tiles_is_refused() -> None:
    images = (scene(1),) * 60
    with pytest.raises(InvalidInput, match="the model reads 1024") as caught:
        encode(Prompt("go on", images), tiny_model("smolvlm"), PromptLimits(max_images=60))
    assert caught.value.field == "text"


# ---------------------------------------------------------------- loading


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def rewritten(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return spoil


def template(text: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / "chat_template.jinja").write_text(text)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without("preprocessor_config.json"), "cannot load the processor"),
        (without("tokenizer.json"), "tokenizer"),
        (without("model.safetensors"), "no safetensors"),
        (without("chat_template.jinja"), "no chat template"),
        (
            rewritten("preprocessor_config.json", lambda c: c.update(image_processor_type="Mine")),
            "cannot load the processor",
        ),
        (
            rewritten("processor_config.json", lambda c: c.update(image_seq_length=3)),
            "does not answer a question about a picture",
        ),
        (
            rewritten("config.json", lambda c: c.update(model_type="mllama")),
            "cannot load the tokenizer",
        ),
        (template("{{ raise_exception('no') }}"), "chat template"),
        (template("{% for m in messages %}{{ m['role'] }}{% endfor %}"), "does not take a picture"),
    ],
)
def test_a_spoiled_checkpoint_is_a_typed_error(
    spoil: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder("internvl"), tmp_path / "model")
    spoil(folder)
    with pytest.raises(ModelError, match=message) as caught:
        Engine(load(ModelConfig(str(folder))))
    assert caught.value.field == "path"
    assert caught.value.remedy


def test_a_prompt_that_ends_with_a_picture_is_refused(tmp_path: Path) -> None:
    """What follows a picture would have no token to follow."""
    folder = shutil.copytree(tiny_folder("llava"), tmp_path / "model")
    template("{% for m in messages %}look: <|image_pad|>{% endfor %}")(folder)
    with pytest.raises(ModelError, match="have to end with text"):
        load(ModelConfig(str(folder)))


def test_a_missing_shard_is_a_typed_error(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_model("gemma3").model.save_pretrained(folder, max_shard_size="100KB")
    for file in tiny_folder("gemma3").iterdir():
        if not file.name.startswith("model"):
            shutil.copy(file, folder)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    load(ModelConfig(str(folder)))
    shards[1].unlink()
    with pytest.raises(ModelError, match=shards[1].name) as caught:
        load(ModelConfig(str(folder)))
    assert caught.value.remedy


def test_a_package_that_a_processor_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processing_smolvlm, "num2words", None)
    with pytest.raises(ModelError, match="num2words") as caught:
        load(ModelConfig(str(tiny_folder("smolvlm"))))
    assert "install" in caught.value.remedy


def test_no_family_is_encoded_here_and_by_a_processor() -> None:
    assert not FAMILIES.keys() & ARCHITECTURES.keys()
