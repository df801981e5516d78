"""Pages that sessions share: the same columns as in tensors of their own, and none is lost."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from collab_llm_nodes.engine.cache import StaticCache
from collab_llm_nodes.engine.paging import OutOfPages, PagedCache, PagePool

PAGE = 4
LIMIT = 12
SHAPE = (2, 2, 3)  # layers, heads, head_dim
LIKE = torch.empty(0)


def pool_of(limit: int | None = None) -> PagePool:
    pool = PagePool(*SHAPE, LIKE, PAGE)
    pool.limit = limit
    return pool


def write(cache: PagedCache, pool: PagePool, start: int, columns: torch.Tensor) -> None:
    """Write columns [layers, heads, some, head_dim] as a pass does, by their slots."""
    slots = torch.tensor(cache.slots(start, start + columns.shape[2]))
    pool.tensor[:, slots // PAGE, :, slots % PAGE] = columns.permute(2, 0, 1, 3)


@dataclass
class Pair:
    """One session in both kinds of caches."""

    paged: PagedCache
    static: StaticCache
    columns: int = 0


class Paging(RuleBasedStateMachine):
    """Sessions that grow, roll back, fork, keep some columns and end, in no order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of(LIMIT)
        self.written = 0.0
        self.pairs = [self.fresh()]

    def fresh(self) -> Pair:
        return Pair(PagedCache(self.pool), StaticCache.empty(*SHAPE, LIKE))

    @rule()
    def open(self) -> None:
        self.pairs.append(self.fresh())

    @rule(data=st.data(), count=st.integers(1, 9))
    def grow(self, data: st.DataObject, count: int) -> None:
        pair = data.draw(st.sampled_from(self.pairs))
        end = pair.columns + count
        before, free = list(pair.paged.pages), self.pool.free
        try:
            pair.paged.reserve(pair.columns, end)
        except OutOfPages:
            assert (pair.paged.pages, self.pool.free) == (before, free)
            return
        layers, heads, dim = SHAPE
        size = layers * heads * count * dim
        columns = torch.arange(self.written, self.written + size).view(layers, heads, count, dim)
        self.written += size
        write(pair.paged, self.pool, pair.columns, columns)
        pair.static.reserve(end)
        pair.static.written(pair.columns, end).copy_(columns)
        pair.columns = end

    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        pair = data.draw(st.sampled_from(self.pairs))
        pair.columns = data.draw(st.integers(0, pair.columns))
        pair.paged.cut(pair.columns)
        pair.static.cut(pair.columns)

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        pair = data.draw(st.sampled_from(self.pairs))
        columns = data.draw(st.integers(0, pair.columns))
        used = (columns, pair.columns)
        self.pairs.append(Pair(pair.paged.fork(*used), pair.static.fork(*used), columns))

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        pair = data.draw(st.sampled_from(self.pairs))
        kept = [c for c in range(pair.columns) if data.draw(st.booleans())]
        if self.pool.pages - self.pool.free + len(kept) // PAGE + 1 > LIMIT:
            return  # columns that are shared are copied before others are freed
        pair.paged.move(kept)
        pair.static.move(kept)
        pair.columns = len(kept)

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(data=st.data(), closes=st.booleans())
    def end(self, data: st.DataObject, closes: bool) -> None:
        """A session that is only dropped gives its pages back as well."""
        pair = self.pairs.pop(data.draw(st.integers(0, len(self.pairs) - 1)))
        if closes:
            pair.paged.cut(0)

    @invariant()
    def columns_are_those_of_the_static_cache(self) -> None:
        for pair in self.pairs:
            found = torch.cat([LIKE.new_empty(2, 2, 0, 3), *pair.paged.parts(pair.columns)], 2)
            expected = [LIKE.new_empty(2, 2, 0, 3), *pair.static.parts(pair.columns)]
            torch.testing.assert_close(found, torch.cat(expected, 2), rtol=0, atol=0)

    @invariant()
    def pages_are_held_or_free(self) -> None:
        gc.collect(0)
        held = {page for pair in self.pairs for page in pair.paged.pages}
        assert 0 not in held
        assert len(held) + self.pool.free == self.pool.pages <= LIMIT
        own = sum(pair.paged.own_bytes for pair in self.pairs)
        assert own <= len(held) * self.pool.page_bytes


TestPaging: Any = Paging.TestCase
TestPaging.settings = settings(max_examples=60, stateful_step_count=25)


def test_a_fork_costs_nothing_until_it_writes() -> None:
    pool = pool_of()
    session = PagedCache(pool)
    session.fill(torch.rand(2, 2, 6, 3))
    held = pool.pages - pool.free
    twin = session.fork(6, 6)
    assert pool.pages - pool.free == held
    assert session.own_bytes == 0
    assert session.shared_bytes == 2 * pool.page_bytes
    twin.reserve(6, 7)
    assert twin.pages[0] == session.pages[0]
    assert twin.pages[1] != session.pages[1]
    assert torch.equal(twin.parts(6)[0], session.parts(6)[0])


def test_pages_of_another_session_are_not_touched_when_the_pool_grows() -> None:
    pool = pool_of()
    session, columns = PagedCache(pool), torch.rand(2, 2, 9, 3)
    session.fill(columns)
    pool.grow(4 * pool.pages)
    assert torch.equal(session.parts(9)[0], columns)


def test_a_full_pool_refuses_whole_requests() -> None:
    pool = pool_of(3)
    first, second = PagedCache(pool), PagedCache(pool)
    first.reserve(0, 2 * PAGE)
    with pytest.raises(OutOfPages, match="1 pages of 4 tokens more than the 3"):
        second.reserve(0, 2 * PAGE)
    assert second.pages == []
    first.cut(PAGE)
    second.reserve(0, 2 * PAGE)
