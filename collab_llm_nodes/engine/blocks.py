"""Copies of short sessions' columns side by side, kept from one pass to the next.

Attention reads sessions in one call only if their columns lie in one tensor. To copy them there in
every pass takes a third of its time. So a block stays, and a pass copies only missing columns: all
columns of a session that is new there, and nothing of one that merely goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from collab_llm_nodes.engine.backend import Chunk
from collab_llm_nodes.engine.cache import Copy, StaticCache
from collab_llm_nodes.engine.device import round_up

KEPT_BYTES = 128 << 20
"""Bytes of idle blocks that a backend keeps: enough for the two batches of a pipeline."""
_COLUMNS = 128
_COLUMNS_BYTES = 1 << 20  # of one slot: room to grow, no more
_SLOTS = 8
_SLOTS_BYTES = 32 << 20  # of a block, up to which it has spare slots


class Block:
    """Columns of several sessions, for one pass at a time.

    Two sessions, of 6 columns and of 4::

        columns     0  1  2  3  4  5  6  7
        slot 0    [ a  a  a  a  a  a  .  . ]
        slot 1    [ b  b  b  b  .  .  .  . ]

        .   finite numbers, hidden by masks: they are still multiplied by 0, which NaN would survive

    Args:
        like: a cache of the same shape.
        skip: first columns of each session, which are left out.

    Attributes:
        columns: [layers, slots, 2 * kv_heads, columns, head_dim].
    """

    def __init__(self, like: StaticCache, slots: int, columns: int, skip: int) -> None:
        layers, heads, _, head_dim = like.own.shape
        step = max(1, min(_COLUMNS, _COLUMNS_BYTES // like.column_bytes))
        columns = round_up(columns, step)
        if round_up(slots, _SLOTS) * columns * like.column_bytes <= _SLOTS_BYTES:
            slots = round_up(slots, _SLOTS)
        self.columns = like.own.new_zeros(layers, slots, heads, columns, head_dim)
        self.skip = skip
        self._held: list[Copy | None] = [None] * self.columns.shape[1]
        self._written = [0] * self.columns.shape[1]  # columns of each slot that were ever written

    def fits(self, slots: int, columns: int) -> bool:
        """Return True if there is room."""
        return slots <= self.columns.shape[1] and columns <= self.columns.shape[3]

    def holds(self, chunks: Sequence[Chunk]) -> int:
        """Return how many of the chunks have columns here."""
        return sum(self._holds(chunk.cache.copy) for chunk in chunks)

    def _holds(self, copy: Copy | None) -> bool:
        return copy is not None and copy.slot < len(self._held) and self._held[copy.slot] is copy

    def empty(self, skip: int) -> None:
        """Forget all sessions."""
        self.skip = skip
        self._held = [None] * len(self._held)

    def seat(self, chunks: Sequence[Chunk]) -> list[int]:
        """Return a slot for each chunk, among the first; copy the columns that are missing there.

        Every slot then holds the columns before its chunk's ``start``.
        """
        free = set(range(len(chunks)))
        slots: list[int] = []
        for chunk in chunks:
            copy = chunk.cache.copy
            stays = self._holds(copy) and copy.slot < len(chunks)
            slots.append(copy.slot if stays else -1)
            free.discard(slots[-1])
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        stale: list[Tensor] = []
        for i, chunk in enumerate(chunks):
            if slots[i] < 0:
                slots[i] = free.pop()
                chunk.cache.copy = self._held[slots[i]] = Copy(slots[i], self.skip)
            self._complete(chunk, slots[i], targets, sources, stale)
            chunk.cache.copy.columns = chunk.start
        if targets:
            torch._foreach_copy_(targets, sources)
        if stale:
            torch._foreach_zero_(stale)
        return slots

    def _complete(
        self,
        chunk: Chunk,
        slot: int,
        targets: list[Tensor],
        sources: list[Tensor],
        stale: list[Tensor],
    ) -> None:
        """Collect the copies that a chunk needs, and the columns another session has left there."""
        own = self.columns[:, slot]
        column = max(self.skip, min(chunk.cache.copy.columns, chunk.start))
        for part in chunk.cache.parts(chunk.start, column):
            targets.append(own.narrow(2, column - self.skip, part.shape[2]))
            sources.append(part)
            column += part.shape[2]
        end = chunk.end - self.skip
        if self._written[slot] > end:
            stale.append(own[:, :, end : self._written[slot]])
        self._written[slot] = end


class Blocks:
    """The blocks of a backend that no pass is using."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # several threads may run passes
        self._idle: list[Block] = []  # in the order of their last use

    def take(self, chunks: Sequence[Chunk], skip: int, columns: int) -> Block:
        """Return the block that holds most of the chunks, at least half of them; or an empty one.

        It is the caller's until :meth:`give_back`.
        """
        count = len(chunks)
        with self._lock:
            fitting = [block for block in self._idle if block.fits(count, columns)]
            best = max(fitting, key=lambda b: (b.skip == skip) * b.holds(chunks), default=None)
            if best is not None and best.skip == skip and 2 * best.holds(chunks) >= count:
                self._idle.remove(best)
                return best
            if fitting and self._bytes() + fitting[0].columns.nbytes > KEPT_BYTES:
                oldest = fitting[0]
                self._idle.remove(oldest)
                oldest.empty(skip)
                return oldest
        return Block(chunks[0].cache, count, columns, skip)

    def give_back(self, block: Block) -> None:
        """Keep the block for later passes."""
        with self._lock:
            self._idle.append(block)
            while self._bytes() > KEPT_BYTES:
                del self._idle[0]

    def _bytes(self) -> int:
        return sum(block.columns.nbytes for block in self._idle)
