"""The pair's models: a forward pass equal to transformers', files that transformers reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen2VLForConditionalGeneration,
)

from collab_llm_lab.training.nav import models
from collab_llm_lab.training.nav.encoding import Encoder
from collab_llm_lab.training.nav.forward import GRID, LONGEST_TEXT, FastForward
from collab_llm_lab.training.nav.models import SIZES, answers, build, export, patches, prefix_ids
from collab_llm_lab.training.nav.plans import CPU

PACKED = Path(models.__file__).parent / "weights"
PROMPTS = ("find the red ball. history: none. search: place 1, turned 0.", "stop", "is there a mug")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(PACKED / "tokenizer")


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerBase) -> Qwen2VLForConditionalGeneration:
    """A micro model whose every parameter matters."""
    made = build(SIZES["micro"], tokenizer, seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made.eval()


def images(count: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(256, size=(count, 112, 224, 3), dtype=np.uint8)


def test_chat_template_and_prefix_agree(tokenizer: PreTrainedTokenizerBase) -> None:
    content: Any = [{"type": "image"}, {"type": "text", "text": PROMPTS[0]}]
    messages: Any = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(str(text).replace("<|image_pad|>", "<|image_pad|>" * GRID.tokens)).input_ids
    assert ids == [*prefix_ids(tokenizer), *Encoder(tokenizer).question_ids(PROMPTS[0])]


def test_the_rows_of_every_stage_fit() -> None:
    assert all(stage.lengths.text <= LONGEST_TEXT for stage in CPU.stages.values())


def test_fast_forward_equals_transformers(
    model: Qwen2VLForConditionalGeneration, tokenizer: PreTrainedTokenizerBase
) -> None:
    prefix, pictures = prefix_ids(tokenizer), images(2)
    fast = FastForward(model, prefix)
    texts = torch.randint(10, 400, (4, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = fast.logits(fast(torch.from_numpy(pictures), texts, 2).layers[-1])
        ids = torch.cat([torch.tensor(prefix).expand(4, -1), texts], dim=1)
        theirs = model(
            input_ids=ids,
            mm_token_type_ids=(ids == model.config.image_token_id).int(),
            pixel_values=patches(pictures[[0, 0, 1, 1]]),
            image_grid_thw=torch.tensor([[1, 8, 16]]).repeat(4, 1),
        ).logits[:, len(prefix) :]
    torch.testing.assert_close(ours.flatten(0, 1), theirs, atol=1e-5, rtol=1e-5)


def test_exported_checkpoint_is_read_by_transformers(
    model: Qwen2VLForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    export(model, tokenizer, tmp_path / "model", torch.float32)
    read = Qwen2VLForConditionalGeneration.from_pretrained(tmp_path / "model")
    again = AutoTokenizer.from_pretrained(tmp_path / "model")
    pictures = images(3)
    together = answers(model, tokenizer, pictures, PROMPTS, max_tokens=20)
    assert len(set(together)) == 3
    assert answers(read, again, pictures, PROMPTS, max_tokens=20) == together
    # left padding and batching change nothing
    alone = [answers(read, again, pictures[k : k + 1], PROMPTS[k : k + 1], 20)[0] for k in range(3)]
    assert alone == together
    processor = AutoImageProcessor.from_pretrained(tmp_path / "model", use_fast=False)
    made = processor(images=[Image.fromarray(i) for i in pictures], return_tensors="pt")
    torch.testing.assert_close(made["pixel_values"], patches(pictures))
    assert made["image_grid_thw"].tolist() == [[1, 8, 16]] * 3
