"""Chats in rows for training: a passage once, then many tasks on it that do not see each other.

    ids      | passage | task a, reply a | task b, reply b |  passage 2 | ...
    text     |   1           1                 1           |     2
    branch   |   0           1                 2           |     0
    position | 0 .. n-1 |  n ..          |  n ..           |  0 ..

A token sees those before it in its text that are of branch 0 or of its own: the same that it sees
in a prompt with one task. So a passage of 300 tokens pays for a dozen tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from collab_llm_nodes.training.minions.chats import Group
from collab_llm_nodes.training.text.packing import pack
from collab_llm_nodes.training.text.rendering import ANSWERED, ASKED, PAD, Renderer, prompt_text
from collab_llm_nodes.training.text.shards import Document

CLASSES = np.array([0.0, 0.0, 1.0, 1.0], np.float32)
"""Weight of a token by its class of ``rendering``: replies alone are learnt here."""
NUMBERS_OF_A_STEP = 20
"""A step draws groups of the numbers from step << this on."""
IDS, POSITION, TEXT, BRANCH, CLASS = range(5)
Row = NDArray[np.int32]
"""[5, length]: ids, positions, texts from 1 (0: padding), branches, classes."""


@dataclass(frozen=True)
class Tree:
    """A group as token ids.

    Attributes:
        stem: the common beginning of all prompts.
        branches: ids and classes of the rest of each chat.
    """

    stem: list[int]
    branches: list[tuple[list[int], list[int]]]


def tree(renderer: Renderer, group: Group) -> Tree:
    """Encode a group; ids are those that a prompt has when the model is used."""
    asked = renderer.encode([prompt_text(chat[:-1]) for chat in group.chats])
    said = renderer.encode([chat[-1].content + "<|im_end|>" for chat in group.chats])
    shared = min(map(len, asked)) - 1  # the last token of a prompt says the reply's first
    first = asked[0]
    for other in asked[1:]:
        shared = next((i for i in range(shared) if other[i] != first[i]), shared)
    branches = [
        ([*prompt[shared:], *reply], [ASKED] * (len(prompt) - shared) + [ANSWERED] * len(reply))
        for prompt, reply in zip(asked, said, strict=True)
    ]
    return Tree(first[:shared], branches)


def rows(trees: Iterable[Tree], length: int, padding: int) -> Iterator[Row]:
    """Yield rows of ``length`` tokens, each with as much of the next trees as fits."""
    row, used, text = _empty(length, padding), 0, 0
    for found in trees:
        smallest = len(found.stem) + min(len(ids) for ids, _ in found.branches)
        if smallest > length:
            continue
        if smallest > length - used:
            yield row
            row, used, text = _empty(length, padding), 0, 0
        text += 1
        n = len(found.stem)
        _put(row, used, found.stem, 0, text, 0, [ASKED] * n)
        used += n
        for branch, (ids, classes) in enumerate(found.branches, 1):
            if used + len(ids) > length:
                break
            _put(row, used, ids, n, text, branch, classes)
            used += len(ids)


def plain_rows(documents: Iterable[Document], length: int, count: int, padding: int) -> list[Row]:
    """Return rows of whole documents in causal order, as the text family is trained."""
    ids, classes = pack(documents, length, count, padding)
    found = []
    for row_ids, row_classes in zip(ids, classes, strict=True):
        row = _empty(length, padding)
        _put(row, 0, row_ids.tolist(), 0, 1, 0, row_classes.tolist())
        found.append(row)
    return found


def _empty(length: int, padding: int) -> Row:
    row = np.zeros((5, length), np.int32)
    row[IDS] = padding
    row[CLASS] = PAD
    return row


def _put(
    row: Row, at: int, ids: list[int], position: int, text: int, branch: int, classes: list[int]
) -> None:
    end = at + len(ids)
    row[IDS, at:end] = ids
    row[POSITION, at:end] = np.arange(position, position + len(ids))
    row[TEXT, at:end] = text
    row[BRANCH, at:end] = branch
    row[CLASS, at:end] = classes


def visible(batch: Tensor) -> Tensor:
    """Return which tokens each token sees, bool [B, T, T], for rows [B, 5, T]."""
    text, branch = batch[:, TEXT], batch[:, BRANCH]
    order = torch.arange(batch.shape[-1], device=batch.device)
    before = order[:, None] >= order
    same = text[:, :, None] == text[:, None, :]
    own = (branch[:, None, :] == 0) | (branch[:, :, None] == branch[:, None, :])
    return before & same & own


class Source:
    """Rows drawn from a seed, batch after batch.

    Args:
        make: returns the group of a number; equal numbers give equal groups.
        replay: returns documents that the model already knows, to keep what it can; None: no such.
        replayed: rows of each batch that are of those.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        make: Callable[[int], Group],
        length: int,
        *,
        replay: Callable[[int], Iterable[Document]] | None = None,
        replayed: int = 0,
    ) -> None:
        self._renderer = Renderer(tokenizer)
        self._make, self._length = make, length
        self._replay, self._replayed = replay, replayed if replay is not None else 0

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Return rows int64 [size, 5, length] and weights float32 [size, length] of a step."""
        padding = self._renderer.text_end
        numbers = count(step << NUMBERS_OF_A_STEP)
        trees = (tree(self._renderer, self._make(number)) for number in numbers)
        source = rows(trees, self._length, padding)
        found = [next(source) for _ in range(size - self._replayed)]
        if self._replay is not None and self._replayed:
            found += plain_rows(self._replay(step), self._length, self._replayed, padding)
        batch = torch.from_numpy(np.stack(found)).long()
        return batch, torch.from_numpy(CLASSES)[batch[:, CLASS]]
