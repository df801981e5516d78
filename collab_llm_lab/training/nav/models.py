"""The embedded pair: real Qwen2-VL classes with tiny configurations, their files and answers."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from collab_llm_lab.home.answers import MAX_TOKENS
from collab_llm_lab.home.corpus import corpus
from collab_llm_lab.training.nav.forward import GRID, MEAN, MERGE, PATCH, STD
from collab_llm_lab.training.run import replacing
from collab_llm_nodes.models.tokenizer import SPECIAL, token_id, train_tokenizer

VOCABULARY = 1024
AFTER_PROMPT = "<|im_end|>\n<|im_start|>assistant\n"
"""Text of the chat template between a prompt and its answer."""


@dataclass(frozen=True)
class Size:
    """Widths and depths of one model."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    vision_width: int
    vision_layers: int
    vision_heads: int
    vision_ratio: int = 4


SIZES = {
    "target": Size(160, 5, 432, 5, 1, 128, 5, 4),
    "draft": Size(96, 2, 256, 3, 1, 64, 3, 2, 2),
    "micro": Size(32, 2, 48, 1, 1, 16, 1, 1, 2),
}
"""``micro`` is for tests."""


def tokenizer_in(out: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the training in ``out``, made by its first call.

    Kept there because the words of requests may change: weights belong to one tokenizer.
    """
    folder = out / "tokenizer"
    if not folder.exists():
        made = train_tokenizer(corpus(), VOCABULARY)
        with replacing(folder) as building:
            made.save_pretrained(building)
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def build(
    size: Size, tokenizer: PreTrainedTokenizerBase, seed: int
) -> Qwen2VLForConditionalGeneration:
    """Return a freshly initialised model for ``tokenizer``."""
    half = size.hidden // size.heads // 2
    temporal = half // 4
    height = (half - temporal) // 2
    ids = {t: token_id(tokenizer, t) for t in SPECIAL}
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": size.hidden,
            "intermediate_size": size.intermediate,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.kv_heads,
            "max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [temporal, height, half - temporal - height],
            },
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": size.vision_layers,
            "embed_dim": size.vision_width,
            "hidden_size": size.hidden,
            "mlp_ratio": size.vision_ratio,
            "num_heads": size.vision_heads,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    config.bos_token_id = None
    config.eos_token_id = ids["<|im_end|>"]
    config.pad_token_id = ids["<|endoftext|>"]
    torch.manual_seed(seed)
    return Qwen2VLForConditionalGeneration(config)


def prefix_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of the chat up to the end of the picture: equal for every question."""
    pads = "<|image_pad|>" * GRID.tokens
    text = f"<|im_start|>user\n<|vision_start|>{pads}<|vision_end|>"
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def export(
    model: Qwen2VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype,
) -> None:
    """Write a checkpoint that ``from_pretrained`` reads: weights, tokenizer, picture size."""
    pixels = GRID.patches * PATCH**2
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": MEAN,
        "image_std": STD,
        "merge_size": MERGE,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": pixels, "longest_edge": pixels},
    }
    copied: Any = copy.deepcopy(model)
    with replacing(folder) as building:
        copied.to(dtype).save_pretrained(building)
        tokenizer.save_pretrained(building)
        text = json.dumps(processor, indent=2)
        (building / "preprocessor_config.json").write_text(text + "\n", encoding="utf-8")


def read(folder: str | Path) -> tuple[Qwen2VLForConditionalGeneration, PreTrainedTokenizerBase]:
    """Return the model in ``folder``, float32, and its tokenizer."""
    model = Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def patches(pictures: np.ndarray) -> Tensor:
    """Return ``pixel_values`` [B * patches, 1176] of uint8 [B, height, width, 3].

    They equal those of the processor.
    """
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    x = (torch.from_numpy(np.ascontiguousarray(pictures)).float() / 255.0 - mean) / std
    x = x.view(-1, GRID.rows, MERGE, PATCH, GRID.columns, MERGE, PATCH, 3)
    x = x.permute(0, 1, 4, 2, 5, 7, 3, 6)
    x = x.reshape(-1, 3, 1, PATCH * PATCH).expand(-1, 3, 2, PATCH * PATCH)
    return x.reshape(-1, 3 * 2 * PATCH * PATCH)


@torch.no_grad()
def answers(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    pictures: np.ndarray,
    prompts: Sequence[str],
    max_tokens: int = MAX_TOKENS,
) -> list[str]:
    """Return greedy answers to one prompt (user text) per picture uint8 [B, height, width, 3]."""
    pad, end = (token_id(tokenizer, t) for t in ("<|endoftext|>", "<|im_end|>"))
    prefix = prefix_ids(tokenizer)
    rows = [
        prefix + tokenizer(f"{p}{AFTER_PROMPT}", add_special_tokens=False).input_ids
        for p in prompts
    ]
    longest = max(map(len, rows))
    ids = torch.tensor([[pad] * (longest - len(r)) + r for r in rows])
    mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows])
    was_training = model.training
    model.eval()
    out = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        mm_token_type_ids=(ids == model.config.image_token_id).int().to(model.device),
        pixel_values=patches(pictures).to(model.device),
        image_grid_thw=GRID.thw.repeat(len(rows), 1).to(model.device),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=end,
        pad_token_id=pad,
    )
    model.train(was_training)
    return [str(t) for t in tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)]
