"""Time and memory of one step of ``train draft --lora`` at the true size of Qwen2-VL-2B.

    scripts/with-ros python scripts/full_size_step.py --rank 16

The weights are random: time and memory are those of the real model. The step is that of one sample:
a picture of 448 x 336, 60 tokens of text and an answer of 32 tokens, in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from collab_llm_lab.training.learner import Recipe
from collab_llm_lab.training.pair.draft import DraftLearner, prepare
from collab_llm_lab.training.pair.laws import Law
from collab_llm_lab.training.pair.rows import Batch, Row
from collab_llm_nodes.models.prompt import EncodedPrompt

TEXT: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1_536,
    "intermediate_size": 8_960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
VISION = {"depth": 32, "embed_dim": 1_280, "hidden_size": 1_536, "num_heads": 16, "mlp_ratio": 4}
PATCHES = (24, 32)
"""Patches of 14 x 14 pixels; four of them are one token."""


def main() -> None:
    """Make the model and two steps; print the figures of the second as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    torch.set_default_dtype(torch.bfloat16)
    config = Qwen2VLConfig(
        text_config={**TEXT, "tie_word_embeddings": True},
        vision_config=VISION,
        tie_word_embeddings=True,
    )
    model: Any = Qwen2VLForConditionalGeneration(config)
    torch.set_default_dtype(torch.float32)
    weights = sum(p.numel() for p in model.parameters())
    held = memory()
    prepare(model, options.rank, seed=0)
    learner = DraftLearner(
        model, TEXT["vocab_size"], Recipe(1, 1e-4, steps=10), torch.device("cpu")
    )
    lesson = batch(config)
    seconds = 0.0
    for _ in range(2):
        begun = time.perf_counter()
        learner.learn(*lesson)
        seconds = time.perf_counter() - begun
    moved = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(
        json.dumps(
            {
                "weights": weights,
                "trained": moved,
                "tokens": lesson[0].inputs[0]["input_ids"].numel(),
                "step_s": round(seconds, 1),
                "model_gb": round(held, 1),
                "peak_gb": round(memory(), 1),
                "threads": torch.get_num_threads(),
            }
        )
    )


def batch(config: Any) -> tuple[Batch, Law]:
    """Return one sample with a picture, and random laws of its answer."""
    height, width = PATCHES
    tokens = height * width // 4
    ids = (*range(30), *[config.image_token_id] * tokens, *range(30))
    prompt = EncodedPrompt(
        ids,
        torch.randn(height * width, 3 * 2 * 14 * 14, dtype=torch.bfloat16),
        torch.tensor([[1, height, width]]),
        torch.arange(len(ids)).expand(3, -1),
    )
    answer = tuple(range(100, 132))
    return Batch.of([Row(prompt, answer)]), Law.of(torch.randn(len(answer), TEXT["vocab_size"]))


def memory() -> float:
    """Return the most memory that this process has held [GB]."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    main()
