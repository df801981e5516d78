"""The two embedded models: real Qwen2-VL classes with tiny configurations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from collab_llm_lab.training.nav.forward import GRID, MERGE
from collab_llm_nodes.models.tokenizer import SPECIAL, token_id


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


TARGET = Size(128, 5, 320, 4, 2, 96, 4, 3)
DRAFT = Size(64, 2, 160, 2, 1, 48, 2, 3, 2)
MICRO = Size(32, 2, 48, 1, 1, 16, 1, 1, 2)
"""Size for tests."""
SIZES = {"target": TARGET, "draft": DRAFT, "micro": MICRO}


def build(
    size: Size, tokenizer: PreTrainedTokenizerBase, seed: int
) -> Qwen2VLForConditionalGeneration:
    """A freshly initialised model for ``tokenizer``."""
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
    """Ids of the chat up to and with the end of the picture: equal for every question."""
    pads = "<|image_pad|>" * (GRID[0] * GRID[1] // MERGE**2)
    text = f"<|im_start|>user\n<|vision_start|>{pads}<|vision_end|>"
    return list(tokenizer(text, add_special_tokens=False).input_ids)
