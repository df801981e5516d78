"""Tiny random checkpoints of models that see by transformers' own code, with their processors.

They share the tokenizer of ``random_models``: its picture tokens take the roles that each family
has for them. Tokens that a processor knows by name only are added behind its own, so that any
family can be the target of a draft with the tokenizer itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    Gemma3ImageProcessorPil,
    Gemma4ImageProcessorPil,
    GotOcr2ImageProcessorPil,
    Idefics3ImageProcessorPil,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    SmolVLMImageProcessorPil,
)

PLACE, START, END, VIDEO = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"
_SIDE, _PATCH, _TOKENS = 32, 8, 4  # of a tile: pixels, pixels of a patch, placeholders
_SQUARE = {"height": _SIDE, "width": _SIDE}


@dataclass(frozen=True)
class Family:
    """Parts of a complete checkpoint besides the sizes of its text decoder.

    Attributes:
        text: model type of the decoder, and settings that it needs.
        vision: settings of the encoder; ``config`` those of the whole model.
        tokens: names under which the tokenizer holds the picture tokens; unknown ones are added.
        images: makes the image processor.
        processor: class of the processor, and its settings.
        shown: text that stands for a picture in the chat template.
        place: token that stands for a feature of a picture.
    """

    text: dict[str, Any]
    vision: dict[str, Any]
    config: dict[str, Any]
    tokens: dict[str, str]
    images: Callable[[], Any]
    processor: dict[str, Any]
    shown: str = PLACE
    place: str = PLACE


def _encoder(**others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return {**sizes, "num_attention_heads": 2, "image_size": _SIDE, "patch_size": _PATCH, **others}


_TILES: dict[str, Any] = {
    "size": {"longest_edge": 2 * _SIDE},
    "max_image_size": {"longest_edge": _SIDE},
}
_SPLIT_TOKENS = {
    "image_token": PLACE,
    "fake_image_token": START,
    "global_image_token": END,
    "video_token": VIDEO,
    "end_of_utterance_token": "<|im_end|>",
}
_GEMMA_TOKENS = {"image_token": PLACE, "boi_token": START, "eoi_token": END}
_GEMMA = {"head_dim": 16, "sliding_window": 16}
# Tied and scaled, an embedding of random weights would make each token repeat itself.
_UNTIED = {"tie_word_embeddings": False}

FAMILIES = {
    "smolvlm": Family(
        {"model_type": "llama"},
        _encoder(),
        {"scale_factor": 2},
        _SPLIT_TOKENS,
        lambda: SmolVLMImageProcessorPil(**_TILES),
        {"processor_class": "SmolVLMProcessor", "image_seq_len": _TOKENS},
    ),
    "internvl": Family(
        {"model_type": "qwen2"},
        _encoder(image_size=[_SIDE, _SIDE], patch_size=[_PATCH, _PATCH]),
        {"downsample_ratio": 0.5},
        {
            "context_image_token": PLACE,
            "start_image_token": START,
            "end_image_token": END,
            "video_token": VIDEO,
        },
        lambda: GotOcr2ImageProcessorPil(size=_SQUARE, crop_to_patches=True, max_patches=4),
        {"processor_class": "InternVLProcessor", "image_seq_length": _TOKENS},
    ),
    "llava": Family(
        {"model_type": "llama"},
        _encoder(model_type="clip_vision_model"),
        {"image_seq_length": (_SIDE // _PATCH) ** 2},
        {"image_token": PLACE},
        lambda: CLIPImageProcessorPil(size={"shortest_edge": _SIDE}, crop_size=_SQUARE),
        {
            "processor_class": "LlavaProcessor",
            "patch_size": _PATCH,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "gemma3": Family(
        {
            **_GEMMA,
            "model_type": "gemma3_text",
            "_sliding_window_pattern": 2,
            "query_pre_attn_scalar": 16,
        },
        _encoder(model_type="siglip_vision_model"),
        {**_UNTIED, "mm_tokens_per_image": _TOKENS},
        _GEMMA_TOKENS,
        lambda: Gemma3ImageProcessorPil(size=_SQUARE),
        {"processor_class": "Gemma3Processor", "image_seq_length": _TOKENS},
        shown=START,
    ),
    "gemma4": Family(
        {
            **_GEMMA,
            "model_type": "gemma4_text",
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "use_bidirectional_attention": "vision",
            "final_logit_softcapping": 30.0,
        },
        _encoder(
            head_dim=16, num_key_value_heads=2, pooling_kernel_size=2, position_embedding_size=64
        ),
        {**_UNTIED, "audio_config": None},
        {
            **_GEMMA_TOKENS,
            "video_token": "<|video|>",
            "audio_token": "<|audio|>",
            "boa_token": START,
            "eoa_token": END,
        },
        lambda: Gemma4ImageProcessorPil(
            patch_size=_PATCH, max_soft_tokens=70, pooling_kernel_size=2
        ),
        {"processor_class": "Gemma4Processor", "image_seq_length": 70},
    ),
    "idefics3": Family(
        {"model_type": "llama"},
        _encoder(),
        {"scale_factor": 2},
        {
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
        lambda: Idefics3ImageProcessorPil(**_TILES),
        {"processor_class": "Idefics3Processor", "image_seq_len": _TOKENS},
        shown="<image>",
        place="<image>",
    ),
}


def random_seeing_model(
    name: str, tokenizer: PreTrainedTokenizerBase, sizes: dict[str, Any]
) -> PreTrainedModel:
    """Return a random model of one of ``FAMILIES``.

    Args:
        sizes: settings of the text decoder: its widths, layers, vocabulary and special tokens.
    """
    family = FAMILIES[name]
    names = {"image_token_id": family.place, "boi_token_id": START, "eoi_token_id": END}
    places = {key: tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}
    special = {key: value for key, value in sizes.items() if key.endswith("_token_id")}
    text = {**sizes, **family.text}
    if name == "gemma4":
        layers = sizes["num_hidden_layers"]
        text["layer_types"] = text["layer_types"][-layers:]
        text["num_kv_shared_layers"] = max(0, layers - 2)
        text["vocab_size_per_layer_input"] = text["vocab_size"]
    config = AutoConfig.for_model(
        name, text_config=text, vision_config=family.vision, **places, **special, **family.config
    )
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(
        config, trust_remote_code=False
    )
    return model


def family_tokenizer(name: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return ``tokenizer`` with the names and the chat template of one of ``FAMILIES``."""
    family = FAMILIES[name]
    template = str(tokenizer.chat_template).replace(f"{START}{PLACE}{END}", family.shown)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        bos_token=None,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        extra_special_tokens=family.tokens,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        model_max_length=tokenizer.model_max_length,
    )


def write_processor(name: str, folder: Path) -> None:
    """Write the processor of one of ``FAMILIES`` to ``folder``."""
    family = FAMILIES[name]
    family.images().save_pretrained(folder)
    file = folder / "processor_config.json"
    file.write_text(json.dumps(family.processor), encoding="utf-8")
