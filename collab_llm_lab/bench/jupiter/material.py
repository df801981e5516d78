"""The models and questions of the real runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from collab_llm_lab.random_models import random_tokenizer
from collab_llm_lab.training.text.samples import SUB_DOMAINS, make_sample
from collab_llm_nodes.models.loading import ModelConfig, no_progress_bar
from collab_llm_nodes.models.partial import read_facts
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.jupiter.outline import (
    OutlinePrompts,
    chat_text,
    outline_question,
)

Ids = Sequence[int]


def write_wide_model(folder: Path, context: int) -> Path:
    """Write a random model of 50 million weights to ``folder`` and return it.

    Its passes take as long as those of a trained one; what it says means nothing.
    """
    tokenizer = random_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    with no_progress_bar():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def random_ids(model: str, count: int, seed: int = 0) -> list[int]:
    """Return ``count`` random token ids of a model."""
    size = len(read_facts(ModelConfig(model)).tokenizer)
    drawn = random.Random(seed)
    return [drawn.randrange(size - 8) for _ in range(count)]


@dataclass(frozen=True)
class Questions:
    """Questions of the text domain, as one model reads them.

    Args:
        tokenizer: of the model, with a chat template.
    """

    tokenizer: PreTrainedTokenizerBase

    def outlined(self, count: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
        """Return so many questions, each as it is asked, and with the outline directive."""
        found = []
        for number in range(count):
            sample = make_sample(
                random.Random(seed + number), SUB_DOMAINS[number % 3], "plain", held_out=True
            )
            found.append(self.both(sample.turns[:-1]))
        return found

    def both(self, turns: Sequence[Turn]) -> tuple[list[int], list[int]]:
        """Return a question as it is asked, and with the outline directive."""
        *before, last = turns
        asked = Turn(last.role, outline_question(last.content))
        return self._ids(turns), self._ids([*before, asked])

    @cached_property
    def prompts(self) -> OutlinePrompts:
        """Reads outlines, and forms the requests behind them."""
        return OutlinePrompts(self.tokenizer)

    def _ids(self, turns: Sequence[Turn]) -> list[int]:
        text = chat_text(self.tokenizer, turns)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)
