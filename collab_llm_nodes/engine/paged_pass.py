"""The input of attention in a pass over pages: integers in one array that is uploaded once.

The rows of a chunk are cut into tiles of as many tokens as one kernel takes, and the columns of a
tile into items of ``SPLIT``. An item is the work of one program. Its size depends on its own chunk
alone, so that a row's result is the same whatever else is in the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from collab_llm_nodes.engine.backend import Chunk, Heads
from collab_llm_nodes.engine.device import round_up
from collab_llm_nodes.engine.paging import PagedCache

TILE = 64
"""Query rows of a tile, which are the query heads of one key-value head for some tokens."""
SPLIT = 256
"""Columns of an item. More of them occupy a GPU when there are few sessions."""
SHORT = 64
"""New tokens up to which a chunk's columns are split; longer ones have tiles enough."""
NO_TREE = 2**31 - 1
_ALIGNED = 4  # integers, for vector loads
_ITEM, _PART, _WORD = 5, 3, 32  # integers of an item and of a row's part, bits of a word


def tile_tokens(heads: Heads) -> int:
    """Return the tokens of a tile."""
    return max(1, TILE // heads.shared)


@dataclass(frozen=True)
class Layout:
    """Room in the array of a pass: a captured graph reads it at fixed places.

    Attributes:
        rows: at least those of the pass; the rest only fill it up.
        words: of 32 bits for the tree columns that a row sees.
        items: at least those of the pass.
    """

    rows: int
    words: int
    items: int

    @property
    def sizes(self) -> list[int]:
        """Integers that each field of :class:`Batch` has; the pages take what is left."""
        rows = self.rows
        return [1, *[rows] * 5, rows * _PART, rows * self.words, self.items * _ITEM]

    @property
    def begins(self) -> list[int]:
        """Offset of each field, the pages last."""
        return [0, *accumulate(round_up(size, _ALIGNED) for size in self.sizes)]


@dataclass(frozen=True)
class Span:
    """One chunk's rows, its pages among those of the pass, and its columns."""

    rows: slice
    pages: slice
    end: int
    tree: bool


@dataclass(frozen=True)
class Batch:
    """The arrays of a pass on the device, all int32.

    A row sees column c if ``lows <= c`` (in layers with a window) and either ``c < limits``, or the
    bit ``c - bases`` of its words is set: those of a tree's nodes.

    Attributes:
        count: [1] items that are in use.
        positions: [rows] into the table of rotations.
        slots: [rows] page * columns of a page + column in it, where keys and values are written.
        limits, lows, bases: [rows].
        parts: [rows, 3] of each row the first item, the number of its items, and the row's token
            within its tile.
        words: [rows, words].
        items: [items, 5] first row, tokens, place of the chunk's pages, first column, end.
        pages: of all chunks.
        spans: the chunks, for code that reads one at a time.
    """

    count: Tensor
    positions: Tensor
    slots: Tensor
    limits: Tensor
    lows: Tensor
    bases: Tensor
    parts: Tensor
    words: Tensor
    items: Tensor
    pages: Tensor
    spans: Sequence[Span]

    @classmethod
    def of(cls, packed: Tensor, layout: Layout, spans: Sequence[Span]) -> Batch:
        """Return views of an array of ``PagedPass.pack``."""
        begins, rows = layout.begins, layout.rows
        fields = [packed[b : b + n] for b, n in zip(begins, layout.sizes, strict=False)]
        count, positions, slots, limits, lows, bases, parts, words, items = fields
        return cls(
            count,
            positions,
            slots,
            limits,
            lows,
            bases,
            parts.view(rows, _PART),
            words.view(rows, layout.words),
            items.view(layout.items, _ITEM),
            packed[begins[-1] :],
            spans,
        )


class PagedPass:
    """The integers of one pass, chunk by chunk; their caches have room for the new columns.

    Args:
        window: columns that a row sees in layers with a sliding window; None: there are none.

    Attributes:
        spans: of the chunks.
        spatial: some positions are M-RoPE's three; then those here number the rows.
        reads_prompts: a chunk is longer than ``SHORT``.
    """

    def __init__(self, chunks: Sequence[Chunk], heads: Heads, window: int | None) -> None:
        self.spans: list[Span] = []
        self.spatial = any(_is_spatial(chunk.positions) for chunk in chunks)
        self.reads_prompts = any(chunk.new > SHORT for chunk in chunks)
        self._tokens = tile_tokens(heads)
        self._window = NO_TREE if window is None else window
        self._positions: list[int] = []
        self._slots: list[int] = []
        self._limits: list[int] = []
        self._lows: list[int] = []
        self._bases: list[int] = []
        self._parts: list[tuple[int, int, int]] = []
        self._trees: list[tuple[int, NDArray[np.uint8]]] = []  # first row; bytes [rows, some]
        self._items: list[tuple[int, int, int, int, int]] = []
        self._pages: list[int] = []
        for chunk in chunks:
            self._add(chunk)

    @property
    def pages(self) -> int:
        """Pages that the pass reads, those of each chunk counted."""
        return len(self._pages)

    @cached_property
    def smallest(self) -> Layout:
        """The layout without more room than is needed."""
        width = max((bits.shape[1] for _, bits in self._trees), default=1)
        rows = round_up(len(self._slots), 8)
        return Layout(rows, -(-8 * width // _WORD), round_up(len(self._items), _ALIGNED))

    def pack(self, layout: Layout) -> NDArray[np.int32]:
        """Return all integers by ``layout``, which has room for them."""
        begins = layout.begins
        packed = np.zeros(begins[-1] + len(self._pages), dtype=np.int32)
        values = (
            [len(self._items)],
            range(len(self._slots)) if self.spatial else self._positions,
            self._slots,
            self._limits,
            self._lows,
            self._bases,
        )
        for begin, own in zip(begins, values, strict=False):
            packed[begin : begin + len(own)] = own
        packed[begins[5] : begins[6]] = NO_TREE  # of rows that only fill the pass up
        packed[begins[5] : begins[5] + len(self._bases)] = self._bases
        for begin, rows in ((begins[6], self._parts), (begins[8], self._items)):
            flat = np.array(rows, dtype=np.int32).ravel()
            packed[begin : begin + len(flat)] = flat
        words = packed[begins[7] : begins[7] + layout.rows * layout.words]
        by_row = words.view(np.uint8).reshape(layout.rows, -1)
        for row, bits in self._trees:
            by_row[row : row + len(bits), : bits.shape[1]] = bits
        packed[begins[-1] :] = self._pages
        return packed

    def _add(self, chunk: Chunk) -> None:
        cache: PagedCache = chunk.cache
        row, page = len(self._slots), len(self._pages)
        self._slots += cache.slots(chunk.start, chunk.end)
        self._pages += cache.pages
        tree = chunk.mask is not None
        self.spans.append(
            Span(slice(row, row + chunk.new), slice(page, len(self._pages)), chunk.end, tree)
        )
        self._add_positions(chunk)
        if chunk.mask is None:
            self._add_chain(chunk)
        else:
            self._add_tree(row, chunk.mask.numpy())
        for first in range(0, chunk.new, self._tokens):
            tokens = min(self._tokens, chunk.new - first)
            end = chunk.end if tree else chunk.start + first + tokens
            self._add_tile(row + first, tokens, page, end, SPLIT if chunk.new <= SHORT else end)

    def _add_positions(self, chunk: Chunk) -> None:
        if self.spatial:
            return
        positions = chunk.positions
        if isinstance(positions, int):
            self._positions += range(positions, positions + chunk.new)
        else:
            self._positions += positions.tolist()

    def _add_chain(self, chunk: Chunk) -> None:
        limits = range(chunk.start + 1, chunk.end + 1)
        self._limits += limits
        self._lows += [max(0, limit - self._window) for limit in limits]
        self._bases += [NO_TREE] * chunk.new

    def _add_tree(self, row: int, mask: NDArray[np.bool_]) -> None:
        """Add nodes by the columns [new, end] that each sees."""
        whole = mask.all(axis=0)
        base = int(whole.argmin())  # a tree has a column that some node does not see
        self._limits += [base] * len(mask)
        self._bases += [base] * len(mask)
        for seen in mask:
            path = seen.nonzero()[0]
            self._lows.append(int(path[-self._window]) if len(path) > self._window else 0)
        self._trees.append((row, np.packbits(mask[:, base:], axis=1, bitorder="little")))

    def _add_tile(self, row: int, tokens: int, page: int, end: int, step: int) -> None:
        first, begins = len(self._items), range(0, end, step)
        self._items += [(row, tokens, page, begin, min(end, begin + step)) for begin in begins]
        self._parts += [(first, len(begins), token) for token in range(tokens)]


def _is_spatial(positions: int | Tensor) -> bool:
    """Return True for M-RoPE's three rows."""
    return not isinstance(positions, int) and positions.ndim > 1
