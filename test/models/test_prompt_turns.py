"""Prompts of several turns and raw text: their form, their limits, and what is refused."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
from hostile_pictures import progressive_jpeg
from tiny_models import VISION, scene, tiny_folder, tiny_model
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.models.architectures import ARCHITECTURES
from collab_llm_nodes.models.loading import LoadedModel, ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt, PromptLimits, encode
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.models.vocabulary import control_tokens

SYSTEM = Turn("system", "You steer a robot.")
ASKED, ANSWERED = Turn("user", "where is the ball"), Turn("assistant", "far left")


def spelled(prompt: Prompt, loaded: LoadedModel) -> str:
    """Return the text that the model reads, image features as none."""
    ids = list(encode(prompt, loaded).ids)
    return str(loaded.tokenizer.decode(ids)).replace("<|image_pad|>", "")


@pytest.fixture
def base_model(tmp_path: Path) -> LoadedModel:
    """An OPT as it is published: no chat template, and a token that begins every text."""
    folder = shutil.copytree(tiny_folder("opt"), tmp_path / "opt")
    (folder / "chat_template.jinja").unlink()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", end)]
    )
    tokenizer.save_pretrained(folder)
    return load(ModelConfig(str(folder)))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_turns_take_the_form_of_the_chat(architecture: str) -> None:
    shown = (scene(0),) if architecture in VISION else ()
    prompt = Prompt("go there", shown, turns=(SYSTEM, ASKED, ANSWERED))
    image = "<|vision_start|><|vision_end|>" if shown else ""
    assert spelled(prompt, tiny_model(architecture)) == (
        "<|im_start|>system\nYou steer a robot.<|im_end|>\n"
        "<|im_start|>user\nwhere is the ball<|im_end|>\n"
        "<|im_start|>assistant\nfar left<|im_end|>\n"
        f"<|im_start|>user\n{image}go there<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_raw_text_is_read_as_it_is(architecture: str) -> None:
    loaded = tiny_model(architecture)
    assert spelled(Prompt("the red ball is", raw=True), loaded) == "the red ball is"


def test_a_base_model_reads_raw_text_only(base_model: LoadedModel) -> None:
    prompt = Prompt("the red ball is", raw=True)
    ids = encode(prompt, base_model).ids
    assert list(ids) == base_model.tokenizer("the red ball is")["input_ids"]
    assert spelled(prompt, base_model) == "<|endoftext|>the red ball is"
    with pytest.raises(InvalidInput, match="no chat template.*raw text") as caught:
        encode(Prompt("go there"), base_model)
    assert caught.value.field == "raw"


@pytest.mark.parametrize(
    ("prompt", "field", "message"),
    [
        (Prompt("go", turns=(ASKED,)), "turns[0].role", "no answer"),
        (Prompt("go", turns=(ANSWERED,)), "turns[0].role", "'assistant' where 'user'"),
        (Prompt("go", turns=(ASKED, ANSWERED, SYSTEM)), "turns[2].role", "'system' where 'user'"),
        (Prompt("go", turns=(SYSTEM, SYSTEM)), "turns[1].role", "'system' where 'user'"),
        (Prompt("go", turns=(SYSTEM, ASKED, ASKED)), "turns[2].role", "where 'assistant'"),
        (Prompt("go", turns=(Turn("tool", "x"),)), "turns[0].role", "'tool' where 'user'"),
        (Prompt("go", turns=(Turn("system", " "),)), "turns[0].content", "empty"),
        (Prompt(" ", turns=(SYSTEM,)), "text", "empty"),
        (Prompt("", raw=True), "text", "empty"),
        (Prompt("go", turns=(SYSTEM,), raw=True), "turns", "raw text has no turns"),
        (Prompt("go", (scene(0),), raw=True), "images", "no place for images"),
        (Prompt("go", turns=(SYSTEM, *(ASKED, ANSWERED) * 2)), "turns", "5 turns.*at most 4"),
        (Prompt("go", turns=(Turn("system", "x" * 99),)), "turns", "101 characters.*at most 100"),
        (Prompt("x" * 101, turns=(SYSTEM,)), "text", "119 characters.*at most 100"),
        (Prompt("x" * 101, raw=True), "text", "101 characters.*at most 100"),
    ],
)
def test_unusable_turns_are_typed_errors(prompt: Prompt, field: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        encode(prompt, tiny_model("qwen2_vl"), PromptLimits(max_characters=100, max_turns=4))
    assert caught.value.field == field
    assert caught.value.remedy


@pytest.mark.parametrize("token", ["<|im_end|>", "<|im_start|>", "<|image_pad|>", "<|endoftext|>"])
@pytest.mark.parametrize("place", range(5))
def test_control_tokens_are_refused_wherever_they_are(token: str, place: int) -> None:
    """Spelled out in a turn they would end it, and pose as another's."""
    contents = ["be kind", "hello", "hi", "go"]
    if place == 4:
        prompt, field = Prompt(f"go {token}", raw=True), "text"
    else:
        contents[place] += token
        roles = ("system", "user", "assistant")
        turns = tuple(Turn(r, c) for r, c in zip(roles, contents[:3], strict=True))
        prompt = Prompt(contents[3], turns=turns)
        field = "text" if place == 3 else f"turns[{place}].content"
    with pytest.raises(InvalidInput, match="control token") as caught:
        encode(prompt, tiny_model("qwen2_vl"))
    assert caught.value.field == field


def test_added_tokens_that_are_mere_text_may_be_said() -> None:
    """Gemma's vocabulary adds line feeds and HTML tags."""
    tokenizer = copy.deepcopy(tiny_model("llama").tokenizer)
    tokenizer.add_tokens(["\n\n", "<b>", "<tool>"])
    tokenizer.chat_template += "{% if false %}<tool>\n\n{% endif %}"
    known = set(tiny_model("llama").control_tokens)
    assert "<|im_end|>" in known
    assert set(control_tokens(tokenizer)) == {*known, "<tool>"}


@pytest.mark.parametrize(
    "template",
    [
        "{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}PLAIN",
        "{% if messages[0]['role'] not in ('user', 'x') %}{{ messages / 2 }}{% endif %}PLAIN",
        "{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}PLAIN",
    ],
    ids=["refused", "failing", "dropped"],
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2_vl"])
def test_without_a_place_for_it_the_system_turn_joins_the_first_question(
    template: str, architecture: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder(architecture), tmp_path / "model")
    file = folder / "chat_template.jinja"
    file.write_text(template.replace("PLAIN", file.read_text()))
    loaded = load(ModelConfig(str(folder)))
    assert tiny_model(architecture).takes_system
    assert not loaded.takes_system

    def ids(text: str, *turns: Turn) -> tuple[int, ...]:
        return encode(Prompt(text, turns=turns), loaded).ids

    assert ids("go", SYSTEM) == ids(f"{SYSTEM.content}\n\ngo")
    asked = Turn("user", f"{SYSTEM.content}\n\n{ASKED.content}")
    assert ids("go", SYSTEM, ASKED, ANSWERED) == ids("go", asked, ANSWERED)
    assert ids("go", ASKED, ANSWERED)


@pytest.mark.parametrize(
    ("pictures", "limits", "field"),
    [
        ((scene(0), scene(1)), PromptLimits(max_images=1), "images"),
        ((scene(0),), PromptLimits(max_images=0), "images"),
        ((progressive_jpeg(64, 5),), PromptLimits(max_scans=4), "images[0]"),
    ],
)
def test_pictures_beyond_the_limits_are_refused(
    pictures: tuple[bytes, ...], limits: PromptLimits, field: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        encode(Prompt("go", pictures), tiny_model("qwen2_vl"), limits)
    assert refused.value.field == field
