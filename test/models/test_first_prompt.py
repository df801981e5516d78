"""Loading tries what requests need: whatever a library raises is a typed error, raised once."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from folders import PACKAGE, ROOT
from tiny_models import scene, tiny_folder, tiny_model

from collab_llm_nodes.errors import InvalidInput, ModelError
from collab_llm_nodes.models.loading import LOCAL, ModelConfig, load
from collab_llm_nodes.models.partial import load_layers, load_vision, read_facts
from collab_llm_nodes.models.prompt import Prompt, encode
from collab_llm_nodes.models.turns import Turn

Copied = Callable[[str], Path]


@pytest.fixture
def copied(tmp_path: Path) -> Copied:
    """Copies the checkpoint of an architecture."""
    return lambda architecture: shutil.copytree(tiny_folder(architecture), tmp_path / "model")


def edit(file: Path, **changes: Any) -> None:
    found = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in found.items() if value is not ...}))


def refused(folder: Path, words: str) -> None:
    """Check that neither the whole model nor the front of its stages loads."""
    config = ModelConfig(str(folder))
    for way in (lambda: load(config), lambda: load_vision(read_facts(config))):
        with pytest.raises(ModelError, match=words) as caught:
            way()
        assert caught.value.field == "path"
        assert caught.value.remedy


# ---------------------------------------------------------------- tokenizers


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": {"type": "Of next year"}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [{"left": "a", "right": "b"}]}},
        {"model": {"type": "Of next year", "vocab": {}}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},  # Rust panics
        {"version": 3},
    ],
    ids=["normalizer", "merges", "model", "panic", "version"],
)
def test_a_tokenizer_that_does_not_load_is_a_typed_error(
    part: dict[str, Any], copied: Copied
) -> None:
    folder = copied("llama")
    edit(folder / "tokenizer.json", **part)
    refused(folder, "cannot load the tokenizer")


def test_a_tokenizer_that_encodes_nothing_is_a_typed_error(copied: Copied) -> None:
    """tokenizers raises a plain Exception for a word that has no token."""
    folder = copied("llama")
    words = {"type": "WordLevel", "vocab": {"left": 0}, "unk_token": "[UNK]"}
    edit(folder / "tokenizer.json", model=words, added_tokens=[])
    refused(folder, "cannot encode text")


def test_a_text_that_the_tokenizer_cannot_encode_is_the_askers_fault(copied: Copied) -> None:
    folder = copied("llama")
    (folder / "chat_template.jinja").unlink()
    words = {"type": "WordLevel", "vocab": {"Go on.": 0}, "unk_token": "[UNK]"}
    edit(
        folder / "tokenizer.json", model=words, added_tokens=[], normalizer=None, pre_tokenizer=None
    )
    loaded = load(ModelConfig(str(folder)))
    assert encode(Prompt("Go on.", raw=True), loaded).ids == (0,)
    with pytest.raises(InvalidInput, match="cannot encode it") as caught:
        encode(Prompt("Go back.", raw=True), loaded)
    assert caught.value.field == "text"
    with pytest.raises(InvalidInput, match="cannot encode it"):
        encode(Prompt("half a character: \ud800", raw=True), tiny_model("llama"))


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_code_in_a_checkpoint_is_not_run_and_nobody_is_asked(
    file: str, copied: Copied, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied("llama")
    ran = folder / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')")
    code = {"AutoTokenizer": ["own.Own", None], "AutoConfig": "own.Own"}
    edit(folder / file, auto_map=code, tokenizer_class="Own")

    def asked(*_: object) -> str:
        raise AssertionError("asked on the terminal")

    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setattr(sys, "stdin", None)
    if file == "config.json":  # transformers has this class itself
        load(ModelConfig(str(folder)))
    else:
        refused(folder, "cannot load the tokenizer.*custom code")
    assert not ran.exists()


def test_no_class_is_chosen_by_a_checkpoint_that_may_bring_code() -> None:
    """Every call of transformers' Auto classes says so itself: by default they ask."""
    calls = 0
    for file in (*PACKAGE.rglob("*.py"), *(ROOT / "collab_llm_lab").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            called = getattr(node, "func", None)
            if not isinstance(node, ast.Call) or not isinstance(called, ast.Attribute):
                continue
            name = called.value.id if isinstance(called.value, ast.Name) else ""
            chosen = name == "model_class" or name.lower().startswith("auto")
            chosen = chosen and name != "AutoHfQuantizer"  # which knows transformers' own only
            if chosen and called.attr in ("from_pretrained", "from_config"):
                given = {ast.unparse(keyword) for keyword in node.keywords}
                assert given & {"trust_remote_code=False", "**LOCAL"}, f"{file}:{node.lineno}"
                calls += 1
    assert calls >= 10, "or the walk finds nothing"
    assert LOCAL["trust_remote_code"] is False


# ---------------------------------------------------------------- other files


@pytest.mark.parametrize(
    "text",
    [
        "version https://git-lfs.github.com/spec/v1\n",
        '{"eos_token_id": [1,',
        '{"eos_token_id": "2"}',
    ],
    ids=["LFS pointer", "cut off", "a word"],
)
def test_damaged_generation_settings_are_a_typed_error(text: str, copied: Copied) -> None:
    """transformers passes over them, and answers no longer end."""
    folder = copied("llama")
    (folder / "generation_config.json").write_text(text)
    refused(folder, "generation_config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "32"},
        {"num_hidden_layers": None},
        {"rope_parameters": {"rope_type": "of next year"}},
        {"vocab_size": -1},
        {"num_attention_heads": 0},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_configuration_that_makes_no_model_is_a_typed_error(
    changes: dict[str, Any], copied: Copied
) -> None:
    folder = copied("llama")
    edit(folder / "config.json", **changes)
    config = ModelConfig(str(folder))
    for way in (lambda: load(config), lambda: load_layers(config, 0, 2)):
        with pytest.raises(ModelError) as caught:
            way()
        assert caught.value.field == "path"


def test_a_configuration_nested_without_end_is_a_typed_error(copied: Copied) -> None:
    folder = copied("llama")
    (folder / "config.json").write_text('{"a":' * 100_000)
    refused(folder, "config.json")


@pytest.mark.parametrize(
    "size",
    [
        {"min_pixels": 3136, "max_pixels": 12544},
        {"height": 112, "width": 112},
        {"shortest_edge": 784},
        {"longest_edge": None, "shortest_edge": 784},
        {"longest_edge": 12544, "shortest_edge": 784, "max_pixels": 12544, "min_pixels": 784},
        "large",
    ],
    ids=str,
)
def test_a_picture_size_that_no_picture_can_have_is_a_typed_error(
    size: Any, copied: Copied
) -> None:
    folder = copied("qwen2_vl")
    edit(folder / "preprocessor_config.json", size=size)
    refused(folder, "image processor|preprocessor_config.json")


@pytest.mark.parametrize("changes", [{"patch_size": None}, {"image_mean": [0.5]}], ids=str)
def test_an_image_processor_that_reads_no_picture_is_a_typed_error(
    changes: dict[str, Any], copied: Copied
) -> None:
    folder = copied("qwen2_vl")
    edit(folder / "preprocessor_config.json", **changes)
    refused(folder, "image processor|preprocessor_config.json")


@pytest.mark.parametrize("size", [..., {"longest_edge": 12544, "shortest_edge": 784}], ids=str)
def test_picture_sizes_as_they_are_published_are_read(size: Any, copied: Copied) -> None:
    folder = copied("qwen2_vl")
    pixels = {"min_pixels": 784, "max_pixels": 12544} if size is ... else {}
    edit(folder / "preprocessor_config.json", size=size, **pixels)
    shown, expected = (
        encode(Prompt("go", (scene(0),)), loaded)
        for loaded in (load(ModelConfig(str(folder))), tiny_model("qwen2_vl"))
    )
    assert shown.ids == expected.ids


# ---------------------------------------------------------------- chat templates


LINES = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% endfor %}"
FAILING = {
    "syntax": "{% for m in messages %}{{ m['content'] ",
    "type": "{{ messages[0]['content'] / 2 }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "undefined": "{{ messages['x'].y.z }}",
    "division": "{{ 1 // 0 }}",
    "refusal": "{{ raise_exception('ask with documents') }}",
    "unknown filter": "{{ messages | of_next_year }}",
}


@pytest.mark.parametrize("architecture", ["llama", "qwen2_vl"])
@pytest.mark.parametrize("template", FAILING.values(), ids=FAILING)
def test_a_template_that_takes_no_question_is_a_typed_error(
    template: str, architecture: str, copied: Copied
) -> None:
    folder = copied(architecture)
    (folder / "chat_template.jinja").write_text(template)
    refused(folder, "chat template")


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ 'user: ' + m['content'] }}{% endfor %}",
        "{% for m in messages %}{{ m['content'].strip() }}{% endfor %}",
        LINES,  # writes the list down, and places no picture
    ],
)
def test_a_template_for_text_is_refused_where_pictures_are_shown(
    template: str, copied: Copied
) -> None:
    folder = copied("qwen2_vl")
    (folder / "chat_template.jinja").write_text(template)
    refused(folder, "chat template")


@pytest.mark.parametrize("architecture", ["llama", "qwen2_vl"])
def test_of_several_templates_one_is_the_default(architecture: str, copied: Copied) -> None:
    folder = copied(architecture)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()

    def name(*names: str) -> None:
        found = [{"name": name, "template": template} for name in names]
        edit(folder / "tokenizer_config.json", chat_template=found)

    name("default", "rag")
    loaded = load(ModelConfig(str(folder)))
    assert encode(Prompt("go"), loaded).ids == encode(Prompt("go"), tiny_model(architecture)).ids
    name("chat", "rag")
    refused(folder, "multiple chat templates with no default.*named default")


@pytest.mark.parametrize(
    "fault",
    [
        "raise_exception('no earlier turns')",
        "messages[0]['content'] / 2",
        "f(1)",
        "messages | sum",
        "messages[0].x.y",
    ],
)
def test_turns_that_a_template_does_not_take_are_the_askers_fault(
    fault: str, copied: Copied
) -> None:
    folder = copied("llama")
    own = folder / "chat_template.jinja"
    guard = "{% if messages | length > 2 %}{{ FAULT }}{% endif %}".replace("FAULT", fault)
    endless = "{% macro f(x) %}{{ f(x) }}{% endmacro %}"
    own.write_text(endless + guard + own.read_text())
    loaded = load(ModelConfig(str(folder)))
    assert encode(Prompt("go"), loaded).ids
    with pytest.raises(InvalidInput, match="chat template refuses") as caught:
        encode(Prompt("go", turns=(Turn("user", "hi"), Turn("assistant", "hello"))), loaded)
    assert caught.value.field == "turns"
