"""Chats in rows for training: a passage once, then many tasks on it that do not see each other.

    ids      | passage | task a, reply a | task b, reply b |  passage 2 | ...
    text     |   1           1                 1           |     2
    branch   |   0           1                 2           |     0
    position | 0 .. n-1 |  n ..          |  n ..           |  0 ..

A token sees the tokens before it in its text that are of branch 0 or of its own branch, as in a
prompt with one task. So a passage of 300 tokens is computed once for a dozen tasks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from collab_llm_lab.training.minions.chats import Group
from collab_llm_lab.training.text.rendering import (
    ANSWERED,
    ASKED,
    PAD,
    SHORT,
    Renderer,
    pack,
    prompt_text,
)
from collab_llm_lab.training.text.shards import Document

CLASSES = np.array([0.0, 0.0, 1.0, 4.0], np.float32)
"""Weight of a token by its class of ``rendering``: only replies are learnt. Tokens of class SHORT,
which are the answer or say whether there is one, count most."""
NUMBERS_OF_A_STEP = 20
"""A step draws groups of the numbers from step << this on."""
IDS, POSITION, TEXT, BRANCH, CLASS, SOURCE = range(6)
_TURN = "<|im_end|>\n<|im_start|>assistant\n"
"""End of each prompt."""
_LEADING = 2
"""First tokens of a reply, which say whether there is an answer."""
Row = NDArray[np.int32]
"""[6, length]: ids, positions, texts from 1 (0: padding), branches, classes, and sources.

A source is the place in the row of the token that the next one is copied from, -1 if unknown. That
of the last token of a task is the token after the task's words in the passage, 0 if they are not
there. That of the end of a cited line is the same token of the next cited line, 0 if there is none.
"""


@dataclass(frozen=True)
class Branch:
    """A task and its reply: ids, classes, and sources as places in the stem."""

    ids: list[int]
    classes: list[int]
    sources: list[int]


@dataclass(frozen=True)
class Tree:
    """A group as token ids; ``stem`` is the common beginning of all prompts."""

    stem: list[int]
    branches: list[Branch]


def tree(renderer: Renderer, group: Group) -> Tree:
    """Encode a group; the ids equal those of prompts in use."""
    prompts = [prompt_text(chat[:-1]) for chat in group.chats]
    replies = [chat[-1].content + "<|im_end|>" for chat in group.chats]
    asked, said = renderer.encode(prompts), renderer.encode_with_places(replies)
    ((stem, starts),) = renderer.encode_with_places(prompts[:1])
    shared = min(map(len, asked)) - 1  # the last token of a prompt says the reply's first
    for other in asked[1:]:
        shared = next((i for i in range(shared) if other[i] != stem[i]), shared)
    (turn,) = renderer.encode([_TURN])
    passage = _Passage(prompts[0], stem[:shared], starts[:shared])
    branches = []
    for prompt, reply, (ids, at), lines in zip(asked, replies, said, group.sources, strict=True):
        own = prompt[shared:]
        copied = passage.sources(reply, ids, at, [line for line, _ in lines or ()])
        values = {token for line in lines or () for token in passage.values(*line)}
        ends = passage.ends(reply, at, lines or ())
        classes = [
            SHORT
            if lines is not None and (i < _LEADING or i in ends or source in values)
            else ANSWERED
            for i, source in enumerate(copied)
        ]
        for i, source in ends.items():
            copied[i] = source
        sources = (
            [-1] * (len(own) - 1) + copied + [-1]
        )  # a token attends to the source of the next one
        end = len(own) - len(turn) - 1  # at the end of the task the model looks for its line
        if lines is not None and end >= 0:
            sources[end] = passage.token_after(*lines[0]) if lines else 0
        branches.append(Branch([*own, *ids], [ASKED] * len(own) + classes, sources))
    return Tree(stem[:shared], branches)


class _Passage:
    """The common text of a group with the places of its tokens."""

    def __init__(self, text: str, ids: list[int], starts: list[int]) -> None:
        self._text, self._ids = text, ids
        self._token_at = {start: token for token, start in enumerate(starts)}

    def token_after(self, line: str, characters: int) -> int:
        """Return the first token after ``characters`` of ``line``; -1 if it is not here."""
        there = self._text.find(line)
        ends = range(there + characters, there + len(line))
        return next((self._token_at[end] for end in ends if end in self._token_at), -1)

    def values(self, line: str, characters: int) -> range:
        """Return the tokens of ``line`` after its first ``characters``."""
        first, there = self.token_after(line, characters), self._text.find(line)
        last = self._token_at.get(there + len(line), -1)
        return range(first, last) if 0 <= first < last else range(0)

    def sources(
        self, reply: str, ids: list[int], starts: list[int], lines: Sequence[str]
    ) -> list[int]:
        """Return the token of the passage that each token of ``reply`` is copied from, or -1."""
        found = [-1] * len(ids)
        cursor = 0
        for line in lines:
            place, there = reply.find(line, cursor), self._text.find(line)
            if place < 0 or there < 0:
                continue
            cursor = place + len(line)
            for token, start in enumerate(starts):
                if place <= start < cursor:
                    source = self._token_at.get(there + start - place, -1)
                    if source >= 0 and self._ids[source] == ids[token]:
                        found[token] = source
        return found

    def ends(
        self, reply: str, starts: list[int], lines: Sequence[tuple[str, int]]
    ) -> dict[int, int]:
        """Return the tokens of ``reply`` that end a cited line or follow it.

        There the model decides whether to cite another line. Each token has the one to look at
        before it: the first after the task's words in the next line, 0 if no line follows.
        """
        found: dict[int, int] = {}
        cursor = 0
        for number, (line, _) in enumerate(lines):
            place = reply.find(line, cursor)
            if place < 0:
                continue
            cursor = place + len(line)
            following = self.token_after(*lines[number + 1]) if number + 1 < len(lines) else 0
            last = bisect_left(starts, cursor) - 1
            found[last] = following
            if last + 1 < len(starts) and starts[last + 1] == cursor:
                found[last + 1] = following
        return found


def rows(trees: Iterable[Tree], length: int, padding: int) -> Iterator[Row]:
    """Yield rows of ``length`` tokens, each with as much of the next trees as fits."""
    row, used, text = _empty(length, padding), 0, 0
    for found in trees:
        n = len(found.stem)
        smallest = n + min(len(branch.ids) for branch in found.branches)
        if smallest > length:
            continue
        if smallest > length - used:
            yield row
            row, used, text = _empty(length, padding), 0, 0
        text += 1
        begin = used
        _put(row, used, found.stem, 0, text, 0, [ASKED] * n)
        used += n
        for number, branch in enumerate(found.branches, 1):
            end = used + len(branch.ids)
            if end > length:
                break
            _put(row, used, branch.ids, n, text, number, branch.classes)
            sources = np.array(branch.sources)
            row[SOURCE, used:end] = np.where(sources >= 0, begin + sources, -1)
            used = end


def plain_rows(documents: Iterable[Document], length: int, count: int, padding: int) -> list[Row]:
    """Return rows of whole documents in causal order, as the text family is trained."""
    found = []
    for ids, classes, sources in zip(*pack(documents, length, count, padding), strict=True):
        row = _empty(length, padding)
        _put(row, 0, ids.tolist(), 0, 1, 0, classes.tolist())
        row[SOURCE] = sources
        found.append(row)
    return found


def _empty(length: int, padding: int) -> Row:
    row = np.zeros((6, length), np.int32)
    row[IDS] = padding
    row[CLASS] = PAD
    row[SOURCE] = -1
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
    """Return which tokens each token sees, bool [B, T, T], for rows [B, 6, T]."""
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
        replay: returns documents that the model already knows, so that it does not forget them.
        replayed: rows of each batch that hold replayed documents.
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
        """Return rows int64 [size, 6, length] and weights float32 [size, length] of a step."""
        padding = self._renderer.text_end
        numbers = count(step << NUMBERS_OF_A_STEP)
        trees = (tree(self._renderer, self._make(number)) for number in numbers)
        source = rows(trees, self._length, padding)
        found = [next(source) for _ in range(size - self._replayed)]
        if self._replay is not None and self._replayed:
            found += plain_rows(self._replay(step), self._length, self._replayed, padding)
        batch = torch.from_numpy(np.stack(found)).long()
        return batch, torch.from_numpy(CLASSES)[batch[:, CLASS]]
