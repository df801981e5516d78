"""The shipped checkpoints load where others load them, without this package."""

from io import BytesIO
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

from collab_llm_lab.bench.scenes import scene_prompts
from collab_llm_lab.training.pair.speculation import plain_runner
from collab_llm_nodes.assets import shipped_model
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.loading import ModelConfig, auto_class, load

SHIPPED = sorted(
    folder.name for folder in shipped_model("nav-target").parent.iterdir() if folder.is_dir()
)


@pytest.mark.parametrize("name", SHIPPED)
def test_plain_transformers_load_every_tensor_beside_the_configuration(name: str) -> None:
    """Stock servers such as vLLM read all safetensors of the folder, and refuse unknown tensors."""
    folder = shipped_model(name)
    vision = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
    model, report = auto_class(vision).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    files = list(folder.glob("*.safetensors"))
    assert [file.name for file in files] == ["model.safetensors"]
    rows = len(model.get_input_embeddings().weight)
    assert len(AutoTokenizer.from_pretrained(folder)) <= rows


@pytest.mark.parametrize("name", ["nav-target", "nav-draft"])
def test_plain_transformers_answer_with_a_picture_as_the_engine_does(name: str) -> None:
    """Only the files of the folder are read: template, tokenizer, picture size, weights."""
    folder = shipped_model(name)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (prompt,) = scene_prompts(1, seed=5)
    shown = AutoImageProcessor.from_pretrained(folder)(
        Image.open(BytesIO(prompt.images[0])), return_tensors="pt"
    )
    content: Any = [{"type": "image"}, {"type": "text", "text": prompt.text}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    places = int(shown["image_grid_thw"].prod()) // 4  # four patches are one token
    asked = tokenizer(
        str(text).replace("<|image_pad|>", "<|image_pad|>" * places), return_tensors="pt"
    )
    length = asked["input_ids"].shape[1]
    kinds = (asked["input_ids"] == model.config.image_token_id).int()
    made = model.generate(
        **asked, **shown, mm_token_type_ids=kinds, do_sample=False, max_new_tokens=64
    )
    engine = Engine(load(ModelConfig(name)))
    own = plain_runner(engine, engine, gamma=0).generate(prompt, max_tokens=64)
    assert made[0, length:].tolist() == list(own.tokens)
