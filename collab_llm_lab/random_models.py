"""Tiny random models of every supported architecture, for checks that need no trained weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from collab_llm_lab.random_seeing_models import (
    FAMILIES,
    family_tokenizer,
    random_seeing_model,
    write_processor,
)
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.loading import no_progress_bar
from collab_llm_nodes.models.tokenizer import train_tokenizer, vision_tokens

# Large enough that the logits of a random model spread by about 2.
SPREAD = 0.3
WINDOW = 16
"""Tokens that layers with a sliding window see: fewer than a prompt has."""

SENTENCES = [
    f"the {colour} {shape} is {place}. the next action is {action}."
    for colour in ("red", "green", "blue", "yellow")
    for shape in ("box", "ball", "cone", "lamp")
    for place in ("far left", "ahead", "not in view")
    for action in ("turn left 30 degree", "move forward 50 cm", "stop")
]


def random_tokenizer() -> PreTrainedTokenizerBase:
    """Return a small tokenizer with Qwen2-VL's special tokens and chat form; always the same."""
    return train_tokenizer(SENTENCES)


def write_random_model(
    folder: str | Path,
    architecture: str,
    *,
    seed: int = 0,
    hidden_size: int = 32,
    layers: int = 4,
    padding: int = 0,
    added: Sequence[str] = (),
) -> Path:
    """Write a complete random checkpoint to ``folder`` and return it.

    Args:
        architecture: a key of ``ARCHITECTURES`` or of ``random_seeing_models.FAMILIES``, or
            "qwen3_5_text".
        seed: of the weights; the tokenizer is the same for all, but for tokens that it adds.
        hidden_size: a multiple of 16.
        padding: rows of embeddings and logits beyond the tokenizer's, as real checkpoints have.
        added: tokens at the end of the tokenizer, as later checkpoints of a line have.
    """
    tokenizer = random_tokenizer()
    tokenizer.add_tokens([*added])
    if architecture in FAMILIES:
        tokenizer = family_tokenizer(architecture, tokenizer)
    model = _random_model(architecture, tokenizer, seed, hidden_size, layers, padding)
    with no_progress_bar():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if architecture in FAMILIES:
        write_processor(architecture, Path(folder))
    if architecture in ("qwen2_vl", "qwen2_5_vl"):
        size = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
        Qwen2VLImageProcessorPil(size=size).save_pretrained(folder)
    if architecture == "qwen3_vl":
        size = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}
        grey = [0.5, 0.5, 0.5]
        Qwen2VLImageProcessorPil(
            size=size, patch_size=16, image_mean=grey, image_std=grey
        ).save_pretrained(folder)
    return Path(folder)


def add_head_noise(model: Any, scale: float, seed: int = 0) -> None:
    """Turn ``model`` into a draft that partly agrees with it: noise on the LM head.

    ``scale`` is relative to the head's own spread. (The trick is petals'.)
    """
    head = decoder_parts(model).head
    generator = torch.Generator().manual_seed(seed)
    weight = head.weight.detach()
    noise = torch.randn(weight.shape, generator=generator).to(weight) * weight.std() * scale
    head.weight = torch.nn.Parameter(weight + noise, requires_grad=False)  # unties the embedding


def _random_model(
    architecture: str,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    hidden_size: int,
    layers: int,
    padding: int,
) -> PreTrainedModel:
    vocabulary = len(tokenizer)
    ids: dict[str, Any] = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    sizes: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "vocab_size": vocabulary + padding,
        "initializer_range": SPREAD,
        "max_position_embeddings": 1024,
        **ids,
    }
    gated: dict[str, Any] = {
        "intermediate_size": 2 * hidden_size,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
    }
    half = hidden_size // 4  # of a head's width; shared out over time, height and width
    mrope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8],
    }
    text: dict[str, Any] = {**sizes, **gated, "rope_parameters": mrope}
    torch_state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        if architecture in FAMILIES:
            return random_seeing_model(architecture, tokenizer, {**sizes, **gated})
        if architecture == "llama":
            return LlamaForCausalLM(LlamaConfig(**sizes, **gated))
        if architecture == "qwen2":
            return Qwen2ForCausalLM(Qwen2Config(**sizes, **gated, tie_word_embeddings=True))
        if architecture == "qwen3":
            return Qwen3ForCausalLM(
                Qwen3Config(**sizes, **gated, head_dim=16, tie_word_embeddings=True)
            )
        if architecture == "smollm3":  # its fourth layer has no positions
            return SmolLM3ForCausalLM(SmolLM3Config(**sizes, **gated))
        if architecture == "mistral":
            return MistralForCausalLM(MistralConfig(**sizes, **gated, sliding_window=WINDOW))
        if architecture == "gemma3_text":
            return Gemma3ForCausalLM(
                Gemma3TextConfig(
                    **sizes,
                    **gated,
                    head_dim=16,
                    query_pre_attn_scalar=16,
                    sliding_window=WINDOW,
                    layer_types=(["sliding_attention", "full_attention"] * layers)[:layers],
                    # Scaled and tied, a random embedding would make each token repeat itself.
                    tie_word_embeddings=False,
                )
            )
        if architecture == "qwen3_5_text":
            return Qwen3_5ForCausalLM(
                Qwen3_5TextConfig(
                    **sizes,
                    **gated,
                    head_dim=16,
                    linear_key_head_dim=8,
                    linear_value_head_dim=8,
                    linear_num_key_heads=2,
                    linear_num_value_heads=4,
                    layer_types=(["linear_attention", "full_attention"] * layers)[:layers],
                )
            )
        if architecture == "opt":
            return OPTForCausalLM(
                OPTConfig(
                    **{k: v for k, v in sizes.items() if k != "initializer_range"},
                    init_std=SPREAD,
                    ffn_dim=2 * hidden_size,
                    word_embed_proj_dim=hidden_size,
                )
            )
        if architecture in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
            vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "initializer_range": SPREAD}
            shared: dict[str, Any] = {"text_config": text, "tie_word_embeddings": True}
            shared |= {**vision_tokens(tokenizer), **ids}
            if architecture == "qwen2_vl":
                vision |= {"embed_dim": 32, "hidden_size": hidden_size}
                return Qwen2VLForConditionalGeneration(
                    Qwen2VLConfig(vision_config=vision, **shared)
                )
            vision |= {"hidden_size": 32, "out_hidden_size": hidden_size}
            vision |= {"intermediate_size": 64}
            if architecture == "qwen3_vl":
                vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
                text["head_dim"] = hidden_size // 2
                return Qwen3VLForConditionalGeneration(
                    Qwen3VLConfig(vision_config=vision, **shared)
                )
            vision["fullatt_block_indexes"] = [1]
            return Qwen2_5_VLForConditionalGeneration(
                Qwen2_5_VLConfig(vision_config=vision, **shared)
            )
    finally:
        torch.set_rng_state(torch_state)
    raise ValueError(f"no random {architecture!r}")
