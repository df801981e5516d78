"""Keys and values of one session in tensors of their own; a shared prefix is held once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

BLOCK = 128  # columns by which a cache grows, and below which a fork copies instead of sharing


@dataclass
class StaticCache:
    """Columns of keys and values, each part [layers, 2 * kv_heads, columns, head_dim].

    The keys' heads come first. Head by head, the columns of one head lie side by side, so that
    attention reads memory in order::

        column   0 ............ 511   512 ...... 699   700 ....... 740 ... 827
                +------------------+ +--------------+ +---------------+-------+
                | shared[0]        | | shared[1]    | | own           | spare |
                +------------------+ +--------------+ +---------------+-------+
                 other sessions read these, too:       written by this
                 nobody writes them                    session alone

    Attributes:
        shared: parts that forks read together.
        own: this session's part; its column 0 is column ``offset`` of the session.
    """

    shared: list[Tensor]
    own: Tensor

    @classmethod
    def empty(cls, layers: int, heads: int, head_dim: int, like: Tensor) -> StaticCache:
        """Return a cache without columns; ``heads`` counts those of keys and values."""
        return cls([], like.new_empty(layers, heads, 0, head_dim))

    @property
    def offset(self) -> int:
        """Shared columns."""
        return sum(part.shape[2] for part in self.shared)

    @cached_property
    def column_bytes(self) -> int:
        """Bytes of one column."""
        layers, heads, _, head_dim = self.own.shape
        return layers * heads * head_dim * self.own.itemsize

    @property
    def shared_bytes(self) -> int:
        """Bytes that other sessions may hold, too."""
        return self.offset * self.column_bytes

    def reserve(self, columns: int) -> None:
        """Make room for ``columns`` columns."""
        layers, heads, capacity, head_dim = self.own.shape
        wanted = columns - self.offset
        if wanted > capacity:
            grown = self.own.new_empty(layers, heads, -(-wanted // BLOCK) * BLOCK, head_dim)
            grown[:, :, :capacity] = self.own
            self.own = grown

    def parts(self, columns: int) -> list[Tensor]:
        """Return views of the first ``columns`` columns, in order."""
        if not self.shared:
            return [self.own[:, :, :columns]] if columns else []
        found = []
        for part in (*self.shared, self.own):
            taken = min(columns, part.shape[2])
            if taken:
                found.append(part[:, :, :taken])
                columns -= taken
        return found

    def written(self, start: int, end: int) -> Tensor:
        """Return a view of own columns, to be written to."""
        return self.own[:, :, start - self.offset : end - self.offset]

    def cut(self, columns: int) -> None:
        """Free the columns from ``columns`` on."""
        while self.offset > columns:
            last = self.shared.pop()
            if columns > self.offset:
                self.shared.append(last[:, :, : columns - self.offset])

    def move(self, kept: list[int]) -> None:
        """Make column ``kept[i]`` column ``i``; free the others."""
        first = next((i for i, column in enumerate(kept) if column != i), len(kept))
        if first == len(kept):
            return
        index = torch.tensor(kept[first:], device=self.own.device)
        if kept[first] >= self.offset <= first:
            moved = self.own[:, :, index - self.offset]
        else:
            moved = torch.cat(self.parts(max(kept) + 1), dim=2)[:, :, index]
        self.cut(first)
        self.reserve(len(kept))
        self.written(first, len(kept)).copy_(moved)

    def fork(self, columns: int, used: int) -> StaticCache:
        """Return a cache that begins with the same ``columns`` columns.

        Fewer than ``BLOCK`` own columns are copied: the fork allocates as many anyway.

        Args:
            columns: at most ``used``.
            used: columns of this cache that stay in use.
        """
        own = columns - self.offset
        if own >= BLOCK:
            behind = self.written(columns, used).clone()
            self.shared.append(self.own[:, :, :own])
            self.own = behind
            own = 0
        twin = StaticCache([*self.shared], self.own[:, :, : max(0, own)].clone())
        twin.cut(columns)
        return twin
