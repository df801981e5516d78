"""Additive attention masks: views of tables on a CPU, computed on accelerators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from collab_llm_nodes.engine.backend import Chunk
from collab_llm_nodes.engine.cache import BLOCK
from collab_llm_nodes.engine.device import OnDevice, Upload, round_up

SHORT = 16
"""New tokens up to which sessions attend together, and masks are views of a table."""


class Masks(ABC):
    """Additive attention masks.

    With grouped heads each row stands ``queries`` times, for the query heads of one key-value head.
    What a pass needs of them is planned first, so that all of it travels in one upload.

    Args:
        window: last columns that a token sees in layers with a sliding window.

    Attributes:
        step: attention reads a multiple of so many columns; masks hide those after a chunk's end.
    """

    step = 1

    def __init__(self, context: int, queries: int, like: Tensor, window: int | None = None) -> None:
        self._window = window
        self._context = context
        self._queries = queries
        self._zero, self._hidden = like.new_zeros(()), like.new_full((), -torch.inf)

    @staticmethod
    def on(context: int, queries: int, like: Tensor, window: int | None = None) -> Masks:
        """Return the masks that suit the device of ``like``."""
        kind = TableMasks if like.device.type == "cpu" else ComputedMasks
        return kind(context, queries, like, window)

    def windowed(self, chunk: Chunk) -> Chunk:
        """Return ``chunk`` as layers with a window see it; the same where they see all of it."""
        if self._window is None or chunk.end <= self._window:
            return chunk
        if chunk.mask is not None:  # of a node: its nearest ancestors, which are the last ones
            nearer = chunk.mask.flip(1).cumsum(1).flip(1)
            return replace(chunk, mask=chunk.mask & (nearer <= self._window))
        seen = torch.ones(chunk.new, chunk.end, dtype=torch.bool).tril_(chunk.start)
        return replace(chunk, mask=seen.triu_(chunk.start - self._window + 1))

    def one(self, chunk: Chunk, width: int, upload: Upload) -> OnDevice | None:
        """Return the mask [new * queries, width]; None where nothing is hidden.

        Args:
            width: columns that are read; at least ``chunk.end``.
        """
        if chunk.mask is not None:
            return self._from(functional.pad(chunk.mask, (0, width - chunk.end)), upload)
        if chunk.new == 1 and width == chunk.end:
            return None
        return lambda: self._causal(chunk.new, chunk.start, width)

    def several(
        self, chunks: Sequence[Chunk], new: int, skip: int, width: int, upload: Upload
    ) -> OnDevice:
        """Return the masks of chunks that begin side by side.

        They broadcast to [chunks, 1, new * queries, width].

        Args:
            new: most new tokens of a chunk.
            skip: first columns, which are left out.
            width: columns that are read after those; at least as many as any chunk has.
        """
        if any(chunk.mask is not None for chunk in chunks):
            seen = torch.stack([_seen(chunk, new, skip, width) for chunk in chunks])
            return self._from(seen[:, None], upload)
        counts = upload.add(
            [min(chunk.start - skip + token + 1, width) for chunk in chunks for token in range(new)]
        )
        return lambda: self._up_to(counts().view(len(chunks), 1, new), width)

    def prefix(
        self, chunks: Sequence[Chunk], new: int, columns: int, upload: Upload
    ) -> OnDevice | None:
        """Return the masks [chunks, 1, new * queries, columns] of the first columns.

        None where no chunk hides any, as is usual: trees grow after a prompt.
        """
        if all(chunk.mask is None or bool(chunk.mask[:, :columns].all()) for chunk in chunks):
            return None
        seen = torch.ones(len(chunks), 1, new, columns, dtype=torch.bool)
        for row, chunk in zip(seen[:, 0], chunks, strict=True):
            if chunk.mask is not None:
                row[: chunk.new] = chunk.mask[:, :columns]
        return self._from(seen, upload)

    def _from(self, seen: Tensor, upload: Upload) -> OnDevice:
        """Return the masks [..., rows * queries, columns] of bool [..., rows, columns]."""
        columns = seen.shape[-1]
        there = upload.add(functional.pad(seen, (0, round_up(columns, self.step) - columns)))
        return lambda: self._by_query(torch.where(there(), self._zero, self._hidden))[..., :columns]

    def _by_query(self, mask: Tensor) -> Tensor:
        return mask if self._queries == 1 else mask.repeat_interleave(self._queries, dim=-2)

    @abstractmethod
    def _causal(self, new: int, start: int, width: int) -> Tensor:
        """Return the mask [new * queries, width] of ``new`` tokens after ``start`` columns."""

    @abstractmethod
    def _up_to(self, counts: Tensor, width: int) -> Tensor:
        """Return masks [..., rows * queries, width] of rows that see ``counts`` [..., rows]."""


class TableMasks(Masks):
    """On CPUs: those of short causal chunks are views of tables, and nothing is computed."""

    def __init__(self, context: int, queries: int, like: Tensor, window: int | None = None) -> None:
        super().__init__(context, queries, like, window)
        # Row i of the causal mask of new tokens after s columns is 0 up to column s + i. The
        # table holds these rows for s = context; for any other s they are a part of it.
        self._table = torch.full((SHORT, context + SHORT), -torch.inf).triu_(context + 1)
        self._table = self._table.repeat_interleave(queries, dim=0).to(like)
        # A window that begins n columns before the middle shows n columns.
        self._edge = torch.zeros(2 * (context + SHORT)).to(like)
        self._edge[context + SHORT :] = -torch.inf

    def _causal(self, new: int, start: int, width: int) -> Tensor:
        if new <= SHORT:
            first = self._context - start
            return self._table[: new * self._queries, first : first + width]
        mask = self._table.new_full((new, width), -torch.inf).triu_(start + 1)
        return self._by_query(mask)

    def _up_to(self, counts: Tensor, width: int) -> Tensor:
        begins = len(self._edge) // 2 - counts
        return self._by_query(self._edge.unfold(0, width, 1)[begins])


class ComputedMasks(Masks):
    """On accelerators: computed, with every row at an aligned address.

    A view of a table begins anywhere, and the memory-efficient attention of torch raises where rows
    are not at multiples of 16 bytes. Since widths are multiples of ``step``, the shapes that
    attention meets while a session grows are few as well.
    """

    step = BLOCK

    def __init__(self, context: int, queries: int, like: Tensor, window: int | None = None) -> None:
        super().__init__(context, queries, like, window)
        self._columns = torch.arange(round_up(context + SHORT, BLOCK) + BLOCK, device=like.device)

    def _causal(self, new: int, start: int, width: int) -> Tensor:
        return self._up_to(self._columns[start + 1 : start + 1 + new], width)

    def _up_to(self, counts: Tensor, width: int) -> Tensor:
        hidden = self._columns[: round_up(width, self.step)] >= counts[..., None]
        mask = torch.where(hidden, self._hidden, self._zero)
        return self._by_query(mask)[..., :width]


def _seen(chunk: Chunk, new: int, skip: int, longest: int) -> Tensor:
    """Return bool [new, longest]: the columns each place sees; the first places are the chunk's."""
    seen = torch.zeros(new, longest, dtype=torch.bool)
    seen[:, 0] = True  # of a place that nobody uses: no softmax over nothing
    own = chunk.mask
    if own is None:
        own = torch.ones(chunk.new, chunk.end, dtype=torch.bool).tril_(chunk.start)
    seen[: chunk.new, : chunk.end - skip] = own[:, skip:]
    return seen
