"""Answers that are sentences of the documents, token by token.

    document 1: | At 10:32 ... red ball ... | At 10:33 ... |      answer so far: "At 10:3"
    document 2: | The key hangs ... |                             may follow: {"2", "3"} of
                                                                  document 1; document 2 is out
A small model miscopies names and numbers. Held to the sentences, it only chooses among them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor


class Quotes:
    """The sentences that an answer may be: a pure function of the answer so far.

    Args:
        sentences: token ids of each document's sentences.
        ends: tokens that end an answer.

    Attributes:
        ends: the same.
    """

    def __init__(self, sentences: Sequence[Sequence[Sequence[int]]], ends: Collection[int]) -> None:
        self._sentences = [[tuple(ids) for ids in document if ids] for document in sentences]
        self.ends = tuple(ends)

    def next_tokens(self, answer: Sequence[int]) -> list[list[int]]:
        """Return the tokens that may follow ``answer`` by each document; none: it is out."""
        so_far = tuple(answer)
        found = []
        for sentences in self._sentences:
            tokens: set[int] = set()
            for ids in sentences:
                if ids == so_far:
                    tokens.update(self.ends)
                elif ids[: len(so_far)] == so_far:
                    tokens.add(ids[len(so_far)])
            found.append(sorted(tokens))
        return found


def restricted(rows: Tensor, tokens: Sequence[Sequence[int]]) -> Tensor:
    """Return log-probabilities ``rows`` [documents, V] of ``tokens`` alone, normalised again.

    A document without tokens keeps its row.
    """
    mask = torch.zeros_like(rows)
    for row, kept in zip(mask, tokens, strict=True):
        if kept:
            row.fill_(float("-inf"))
            row[list(kept)] = 0.0
    return torch.log_softmax(rows + mask, dim=-1)
