"""The models and questions of the real runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from collab_llm_nodes.models.loading import ModelConfig, no_progress_bar, read_facts
from collab_llm_nodes.models.random_init import random_tokenizer
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.jupiter.outline import outline_question, read_outline
from collab_llm_nodes.training.text.samples import SUB_DOMAINS, make_sample

Ids = Sequence[int]

_MARK = "the-answer-before"


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

    def requests(self, outline: Ids) -> list[list[int]]:
        """Return what is read behind an outline, for each of its points; none for fewer than 3."""
        text = str(self.tokenizer.decode(list(outline), skip_special_tokens=True))
        ended = bool(outline) and outline[-1] == self.tokenizer.eos_token_id
        read = read_outline(text, complete=True)
        return [self._behind(point.request, ended) for point in read.points if read.usable]

    def _behind(self, content: str, ended: bool) -> list[int]:
        """Return the ids of a user's turn behind an answer, up to where the next answer begins.

        Args:
            ended: the answer's tokens include its end.
        """
        text = self._text([Turn("user", "x"), Turn("assistant", _MARK), Turn("user", content)])
        rest = text.partition(_MARK)[2]
        if ended:
            rest = rest.removeprefix(str(self.tokenizer.eos_token))
        return list(self.tokenizer(rest, add_special_tokens=False).input_ids)

    def _ids(self, turns: Sequence[Turn]) -> list[int]:
        return list(self.tokenizer(self._text(turns), add_special_tokens=False).input_ids)

    def _text(self, turns: Sequence[Turn]) -> str:
        chat = [{"role": turn.role, "content": turn.content} for turn in turns]
        found = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return str(found)
