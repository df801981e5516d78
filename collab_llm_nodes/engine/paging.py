"""Keys and values of all sessions in the pages of one tensor.

A page holds ``PAGE`` columns of all layers. A session is a list of pages: nothing moves when it
grows, a fork shares pages, and a rollback gives them back. Before a session writes to a page that
another one reads, it gets a copy of its own::

    session a   columns 0 ..... 63 64 .... 127 128 .. 140        pages 4, 9, 2
    its fork    the same, at first                               pages 4, 9, 2
    the fork writes column 141: page 2 is copied                 pages 4, 9, 5
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from collab_llm_nodes.engine.device import round_up
from collab_llm_nodes.models.devices import lacks_memory

PAGE = 64
"""Columns of a page: those that attention reads at a time."""
_FIRST = 64
"""Pages of a pool that grows when it is first used."""


class OutOfPages(MemoryError):
    """The pool has too few free pages, and must not grow."""


class PagePool:
    """Pages, each held by as many caches as its reference count says.

    Page 0 belongs to no session: rows that only fill a pass up write there.

    Args:
        layers, heads, head_dim: of the model; ``heads`` counts those of keys and values.
        like: a tensor of the type and the device of the pages.
        page: columns of a page.

    Attributes:
        tensor: [layers, pages, heads, page, head_dim], the keys' heads first. It is replaced when
            the pool grows.
        limit: most pages; None: as many as there is memory for.
        lock: held while the tensor, or a count, is used or changed. Sessions may belong to several
            threads.
    """

    def __init__(
        self, layers: int, heads: int, head_dim: int, like: Tensor, page: int = PAGE
    ) -> None:
        self.page = page
        self.limit: int | None = None
        self.lock = threading.RLock()  # a cache may be collected, and give back, at any time
        self.tensor = like.new_zeros(layers, 1, heads, page, head_dim)
        self._references = [1]
        self._free: list[int] = []

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.tensor[:, 0].numel() * self.tensor.itemsize

    @property
    def pages(self) -> int:
        """Pages there are, in use or free, without page 0."""
        return len(self._references) - 1

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def grow(self, pages: int) -> None:
        """Make ``pages`` pages, at least; for a moment old and new ones are held."""
        with self.lock:
            old = self.tensor
            added = pages - self.pages
            if added <= 0:
                return
            layers, held, *shape = old.shape
            self.tensor = old.new_zeros(layers, held + added, *shape)
            self.tensor[:, :held] = old
            self._references += [0] * added
            self._free += range(held + added - 1, held - 1, -1)  # the lowest is taken first

    def grow_up_to(self, pages: int) -> int:
        """Make ``pages`` pages, or as many as fit; return how many there are.

        Other processes may have taken some of the memory that was free.
        """
        while True:
            try:
                self.grow(pages)
                return self.pages
            except Exception as error:
                if not lacks_memory(error):
                    raise
                pages = (self.pages + pages) // 2

    def take(self, count: int) -> list[int]:
        """Return ``count`` pages for one cache.

        Raises:
            OutOfPages: the pool is full; nothing is taken.
        """
        with self.lock:
            lacking = count - self.free
            if lacking > 0:
                self._grow_by(lacking)
            taken = [self._free.pop() for _ in range(count)]
            for page in taken:
                self._references[page] = 1
            return taken

    def _grow_by(self, count: int) -> None:
        wanted = self.pages + count
        if self.limit is not None and wanted > self.limit:
            raise OutOfPages(f"{count} pages of {self.page} tokens more than the {self.limit}")
        doubled = max(wanted, _FIRST, 2 * self.pages)
        self.grow(doubled if self.limit is None else min(doubled, self.limit))

    def share(self, pages: Sequence[int]) -> list[int]:
        """Return the pages for one more cache."""
        with self.lock:
            for page in pages:
                self._references[page] += 1
            return list(pages)

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back, which are free when no cache holds them."""
        with self.lock:
            for page in pages:
                self._references[page] -= 1
                if not self._references[page]:
                    self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Return True if several caches hold ``page``."""
        return self._references[page] > 1


class PagedCache:
    """A ``backend.Cache`` in pages of a pool.

    Attributes:
        pages: of the columns, in order.
    """

    def __init__(self, pool: PagePool, pages: list[int] | None = None) -> None:
        self._pool = pool
        self.pages: list[int] = [] if pages is None else pages
        # The list is emptied page by page as the session shrinks: what is left goes with it.
        weakref.finalize(self, pool.release, self.pages).atexit = False

    @property
    def own_bytes(self) -> int:
        """Bytes that it holds alone."""
        return sum(not self._pool.is_shared(p) for p in self.pages) * self._pool.page_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes that it shares with forks."""
        return len(self.pages) * self._pool.page_bytes - self.own_bytes

    def reserve(self, start: int, end: int) -> None:
        """Make the columns from ``start`` to ``end`` this session's own, to be written.

        Raises:
            OutOfPages: there is no room; nothing has changed.
        """
        pool = self._pool
        with pool.lock:
            first, held = start // pool.page, len(self.pages)
            shared = [i for i in range(first, held) if pool.is_shared(self.pages[i])]
            fresh = pool.take(max(0, self._count(end) - held) + len(shared))
            for i in shared:
                page, self.pages[i] = self.pages[i], fresh.pop()
                if i * pool.page < start:  # it holds columns that stay
                    pool.tensor[:, self.pages[i]] = pool.tensor[:, page]
                pool.release([page])
            self.pages += fresh

    def cut(self, columns: int) -> None:
        """Free the columns from ``columns`` on."""
        kept = self._count(columns)
        with self._pool.lock:
            self._pool.release(self.pages[kept:])
            del self.pages[kept:]

    def move(self, kept: Sequence[int]) -> None:
        """Move column ``kept[i]`` to column ``i``, and free the others."""
        first = next((i for i, column in enumerate(kept) if column != i), len(kept))
        with self._pool.lock:
            moved = self._pool.tensor[self._places(kept[first:])] if first < len(kept) else None
            self.cut(first)
            if moved is not None:
                self.reserve(first, len(kept))
                self._pool.tensor[self._places(range(first, len(kept)))] = moved

    def fork(self, columns: int, used: int) -> PagedCache:
        """Return a cache that begins with the same ``columns`` of the ``used`` ones."""
        return PagedCache(self._pool, self._pool.share(self.pages[: self._count(columns)]))

    def parts(self, columns: int) -> list[Tensor]:
        """Return a copy of the first columns, one tensor [layers, heads, columns, head_dim]."""
        if not columns:
            return []
        with self._pool.lock:
            tensor = self._pool.tensor
            pages = torch.tensor(self.pages[: self._count(columns)], device=tensor.device)
            return [tensor[:, pages].transpose(1, 2).flatten(2, 3)[:, :, :columns]]

    def fill(self, keys_values: Tensor) -> None:
        """Write the first columns, [layers, heads, columns, head_dim], into an empty cache."""
        columns = keys_values.shape[2]
        self.reserve(0, columns)
        with self._pool.lock:
            tensor = self._pool.tensor
            values = keys_values.to(tensor).permute(2, 0, 1, 3)
            tensor[self._places(range(columns))] = values

    def slots(self, start: int, end: int) -> list[int]:
        """Return page * columns of a page + column in it, for columns ``start`` to ``end``."""
        page, pages = self._pool.page, self.pages
        return [pages[column // page] * page + column % page for column in range(start, end)]

    def _count(self, columns: int) -> int:
        """Return the pages of so many columns."""
        return round_up(columns, self._pool.page) // self._pool.page

    def _places(self, columns: Sequence[int]) -> tuple[slice | Tensor, ...]:
        """Return the index of columns in the pool; it gives [columns, layers, heads, head_dim]."""
        page = self._pool.page
        numbers = [[self.pages[column // page], column % page] for column in columns]
        pages, places = torch.tensor(numbers, device=self._pool.tensor.device).view(-1, 2).unbind(1)
        return slice(None), pages, slice(None), places
