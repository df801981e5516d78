"""Answers that are sentences of the documents, and answers that repeat little of them.

    document 1: | At 10:32 ... red ball ... | At 10:33 ... |      answer so far: "At 10:3"
    document 2: | The key hangs ... |                             may follow: {"2", "3"} of
                                                                  document 1; document 2 is out
A small model miscopies names and numbers. Held to the sentences, it only chooses among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

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


class QuoteCap:
    """A limit on what a free answer repeats of documents: a pure function of the answer so far.

    Args:
        documents: token ids of each document, and of its sentences, as an answer has them.
        most: tokens in a row that an answer may share with a document.
    """

    def __init__(self, documents: Iterable[Sequence[int]], most: int) -> None:
        self._most = most
        self._following: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for ids in documents:
            for start in range(len(ids) - most):
                self._following[tuple(ids[start : start + most])].add(ids[start + most])

    def forbidden(self, answer: Sequence[int]) -> list[int]:
        """Return the tokens that would make a run of the documents longer than ``most``."""
        return sorted(self._following.get(tuple(answer[-self._most :]), ()))


def without(rows: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return log-probabilities ``rows`` [documents, V] without ``tokens``, normalised again."""
    if not tokens:
        return rows
    rows = rows.clone()
    rows[:, list(tokens)] = float("-inf")
    return torch.log_softmax(rows, dim=-1)


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
