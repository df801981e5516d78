"""Questions and answers as rows of token ids, for ``FastForward``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from collab_llm_lab.training.nav.models import AFTER_PROMPT
from collab_llm_nodes.models.tokenizer import token_id

CUT = "\0"
"""Parts two tokens of a text that the tokenizer would join; it is no token itself."""


class Encoder:
    """Makes rows of token ids, right padded; equal texts are encoded once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.ids = lru_cache(maxsize=100_000)(self._encode)
        self._end = token_id(tokenizer, "<|im_end|>")
        self._pad = token_id(tokenizer, "<|endoftext|>")

    def _encode(self, text: str) -> tuple[int, ...]:
        parts = self._tokenizer(text.split(CUT), add_special_tokens=False).input_ids
        return tuple(itertools.chain.from_iterable(parts))

    def question_ids(self, prompt: str) -> tuple[int, ...]:
        """Return the ids between the picture and the start of the answer."""
        return self.ids(f"{prompt}{AFTER_PROMPT}")

    def pairs(
        self, asked: Sequence[tuple[str, str]], text_length: int, answer_length: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return texts, answer positions and labels of prompts with their answers.

        Args:
            text_length: ids of a row; longer texts make all rows longer.
            answer_length: ids of the longest answer, its end included.

        Returns:
            int64 [N, L], [N, answer_length] and [N, answer_length]; see ``batches.Batch``.
        """
        rows = [(self.question_ids(p), (*self.ids(answer), self._end)) for p, answer in asked]
        longest = max((len(prompt) + len(said) - 1 for prompt, said in rows), default=0)
        texts = np.full((len(asked), max(longest, text_length)), self._pad, np.int64)
        at = np.zeros((len(asked), answer_length), np.int64)
        labels = np.full((len(asked), answer_length), -100, np.int64)
        for row, (prompt, said) in enumerate(rows):
            both = prompt + said[:-1]
            texts[row, : len(both)] = both
            at[row, : len(said)] = np.arange(len(said)) + len(prompt) - 1
            labels[row, : len(said)] = said
        return torch.from_numpy(texts), torch.from_numpy(at), torch.from_numpy(labels)

    def names(self, texts: Sequence[str], length: int) -> tuple[Tensor, Tensor]:
        """Return int64 [N, length] of texts that end with a name, and where each ends, [N]."""
        rows = [self.ids(text) for text in texts]
        names = np.full((len(rows), length), self._pad, np.int64)
        for row, ids in enumerate(rows):
            names[row, : len(ids)] = ids
        ends = torch.tensor([len(ids) - 1 for ids in rows], dtype=torch.int64)
        return torch.from_numpy(names), ends
