"""Causal language models that this package has never heard of, through the eager backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine import reference
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.stage import Stage
from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.models.random_init import SPREAD, random_tokenizer

TOKENS = 24
PROMPT = EncodedPrompt(tuple(range(5, 45)))
WINDOW = 16
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "initializer_range": SPREAD,
    "max_position_embeddings": 256,
}
OTHERS = {
    "gemma3_text": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        # Its embedding, scaled and tied, would make each token of random weights repeat itself.
        {
            **SIZES,
            "sliding_window": WINDOW,
            "_sliding_window_pattern": 2,
            "tie_word_embeddings": False,
        },
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {**SIZES, "sliding_window": WINDOW}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, SIZES),
}


def written(folder: Path, model: type[PreTrainedModel], config: Any, **sizes: Any) -> Path:
    """Write a random checkpoint of any architecture."""
    tokenizer = random_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    made = model(config(vocab_size=len(tokenizer), bos_token_id=None, **ids, **sizes))
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", OTHERS)
def test_answers_equal_the_reference_across_rollbacks(name: str, tmp_path: Path) -> None:
    model, config, sizes = OTHERS[name]
    loaded = load(ModelConfig(str(written(tmp_path, model, config, **sizes)), exit_layers=(2,)))
    engine = Engine(loaded)
    assert engine.backend == "eager"
    right = reference.generate(loaded, PROMPT, SamplingConfig(), TOKENS, frozenset())
    assert len(set(right)) > 3, "a constant answer proves nothing"
    exits: dict[int, torch.Tensor] = {}
    session = engine.open(PROMPT)
    answer = [int(session.feed(PROMPT.ids, exits.__setitem__, last=1)[-1].argmax())]
    assert exits[2].isfinite().all()
    while len(answer) < TOKENS:
        wrong = [(token + 1) % engine.vocab_size for token in answer[-3:]]
        session.feed([answer[-1], *wrong])  # a draft that falls
        session.length = len(PROMPT.ids) + len(answer) - 1
        answer.append(int(session.feed(answer[-1:], last=1)[-1].argmax()))
    assert answer == right


def test_trees_are_refused_where_attention_has_windows(tmp_path: Path) -> None:
    model, config, sizes = OTHERS["mistral"]
    session = Engine(load(ModelConfig(str(written(tmp_path, model, config, **sizes))))).open(PROMPT)
    session.feed(PROMPT.ids)
    with pytest.raises(ModelError, match="sliding-window"):
        session.grow([3, 4], parents=[session.length - 1, session.length - 1])


def test_a_model_built_in_another_way_is_a_typed_error(tmp_path: Path) -> None:
    folder = written(tmp_path, GPT2LMHeadModel, GPT2Config, n_embd=32, n_layer=2, n_head=2)
    with pytest.raises(ModelError, match="'gpt2' is built in another way.*self_attn"):
        load(ModelConfig(str(folder)))


def test_only_known_architectures_are_divided(tmp_path: Path) -> None:
    model, config, sizes = OTHERS["qwen3"]
    folder = written(tmp_path, model, config, **sizes)
    with pytest.raises(ModelError, match="known architectures are divided"):
        Stage(ModelConfig(str(folder)), 0, 2)
