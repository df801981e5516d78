"""Keys and values of one session in tensors of their own; a shared prefix is held once.

A rollback, or the close of a session, gives memory back: if more than half of a tensor is unused,
the columns in use are copied, and the tensor is freed. That copies less than has been written, and
a rollback by a few tokens copies nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakSet

import torch
from torch import Tensor

from collab_llm_nodes.engine.device import round_up

BLOCK = 128  # columns by which a cache grows, and below which a fork copies instead of sharing


def _blocks(columns: int) -> int:
    """Return the columns that are allocated where ``columns`` are wanted."""
    return round_up(columns, BLOCK)


def _shrunk(columns: Tensor, used: int) -> Tensor:
    """Return the tensor; or a copy of its first ``used`` columns, if more than half are unused.

    Two blocks are never too many, so that a rollback to a shared prefix allocates nothing.
    """
    capacity = columns.shape[2]
    if capacity <= 2 * BLOCK or capacity <= 2 * _blocks(used):
        return columns
    try:
        return _resized(columns, used, _blocks(used))
    except RuntimeError:  # no memory, on any device: a rollback needs none, and tries again later
        return columns


def _resized(columns: Tensor, used: int, capacity: int) -> Tensor:
    """Return the first ``used`` columns in a tensor with room for ``capacity``."""
    layers, heads, _, head_dim = columns.shape
    # Accelerators read whole blocks and hide unused columns: 0 times NaN would be NaN.
    make = columns.new_empty if columns.device.type == "cpu" else columns.new_zeros
    resized = make(layers, heads, capacity, head_dim)
    resized[:, :, :used] = columns[:, :, :used]
    return resized


class Part:
    """Columns that several sessions read and none writes.

    Attributes:
        columns: [layers, 2 * kv_heads, columns, head_dim]; a shorter copy takes their place when
            no session reads the others.
    """

    def __init__(self, columns: Tensor) -> None:
        self.columns = columns
        self._shares: WeakSet[Share] = WeakSet()
        self._lock = threading.Lock()  # the sessions may belong to several threads

    def share(self, columns: int) -> Share:
        """Return the first ``columns`` columns for one more session."""
        share = Share(self, columns)
        with self._lock:
            self._shares.add(share)
        return share

    def cut(self, share: Share, columns: int) -> None:
        """Shorten ``share`` to ``columns`` columns; 0 gives it up."""
        with self._lock:
            share.columns = columns
            self.columns = _shrunk(self.columns, max(s.columns for s in self._shares))


@dataclass(eq=False)
class Share:
    """The first ``columns`` columns of a part, as one session reads them."""

    part: Part
    columns: int


@dataclass(eq=False)
class Copy:
    """A copy of a cache's first columns in a block (``blocks.py``).

    Attributes:
        slot: of the block.
        columns: leading ones that equal the cache's.
    """

    slot: int
    columns: int


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
        shared: columns that forks read together.
        own: this session's part; its column 0 is column ``offset`` of the session.
        expected: columns that the session will have at most, if that is known. They are allocated
            together: to grow holds old and new columns for a moment.
        copy: of the columns, in the block of the last pass that had one.
        member: of an ensemble, the model that reads and writes it.
    """

    shared: list[Share]
    own: Tensor
    expected: int = 0
    copy: Copy | None = None
    member: int = 0

    @classmethod
    def empty(
        cls, layers: int, heads: int, head_dim: int, like: Tensor, expected: int = 0
    ) -> StaticCache:
        """Return a cache without columns; ``heads`` counts those of keys and values."""
        return cls([], like.new_empty(layers, heads, 0, head_dim), expected)

    @property
    def offset(self) -> int:
        """Shared columns."""
        return sum(share.columns for share in self.shared) if self.shared else 0

    @cached_property
    def column_bytes(self) -> int:
        """Bytes of one column."""
        layers, heads, _, head_dim = self.own.shape
        return layers * heads * head_dim * self.own.itemsize

    @property
    def own_bytes(self) -> int:
        """Bytes that this session holds alone."""
        return self.own.nbytes

    @property
    def shared_bytes(self) -> int:
        """Bytes that other sessions may hold, too."""
        return sum(share.part.columns.nbytes for share in self.shared)

    def reserve(self, columns: int) -> None:
        """Make room for ``columns`` columns, in whole blocks; at once for all that are expected."""
        capacity = self.own.size(2)
        if _blocks(columns - self.offset) > capacity:
            wanted = max(columns, self.expected) - self.offset
            self.own = _resized(self.own, capacity, _blocks(wanted))

    def parts(self, columns: int, skip: int = 0) -> list[Tensor]:
        """Return views of the columns from ``skip`` to ``columns``, in order."""
        found = []
        begin = 0
        for share in self.shared:
            first, last = max(skip, begin), min(columns, begin + share.columns)
            if first < last:
                found.append(share.part.columns.narrow(2, first - begin, last - first))
            begin += share.columns
        first = max(skip, begin)
        if first < columns:
            found.append(self.own.narrow(2, first - begin, columns - first))
        return found

    def written(self, start: int, end: int) -> Tensor:
        """Return a view of own columns, to be written to."""
        return self.own.narrow(2, start - self.offset, end - start)

    def cut(self, columns: int) -> None:
        """Free the columns from ``columns`` on."""
        if self.copy is not None and self.copy.columns > columns:
            self.copy.columns = columns
        used = max(0, columns - self.offset)
        while self.shared and self.offset > columns:
            last = self.shared.pop()
            kept = max(0, columns - self.offset)
            if kept:
                self.shared.append(last)
            last.part.cut(last, kept)
        if columns:  # else it is closed, and nothing is expected any more
            used = max(used, min(self.own.shape[2], self.expected - self.offset))
        self.own = _shrunk(self.own, used)

    def move(self, kept: Sequence[int]) -> None:
        """Make column ``kept[i]`` column ``i``; free the others."""
        first = next((i for i, column in enumerate(kept) if column != i), len(kept))
        if first == len(kept):
            self.cut(first)
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
            part = Part(self.own)
            self.own = self.written(columns, used).clone()
            self.shared.append(part.share(own))
            part.cut(self.shared[-1], own)
            own = 0
        twin = StaticCache([], self.own[:, :, : max(0, own)].clone(), member=self.member)
        twin.shared = [share.part.share(share.columns) for share in self.shared]
        twin.cut(columns)
        return twin
