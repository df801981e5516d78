"""Attention of one pass: short sessions together, forks over their common prefix, others alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from operator import attrgetter, itemgetter

import torch
from torch import Tensor
from torch.nn import functional

from collab_llm_nodes.engine.backend import Chunk, Heads
from collab_llm_nodes.engine.blocks import Blocks
from collab_llm_nodes.engine.cache import Copy, StaticCache
from collab_llm_nodes.engine.device import OnDevice, Upload, round_up
from collab_llm_nodes.engine.masks import SHORT, Masks

GATHERED = 2 << 20  # bytes of keys and values of one session up to which it is in a block
TOGETHER = 32 << 20  # bytes of those of all sessions up to which they are in blocks
PIECE = 8  # short sessions from which on they may attend apart from longer ones
HIDDEN = 4 << 20  # bytes of columns that are read though masks hide them, worth another call
FEW = 4  # query rows of a head for which products may cost less than the fused attention

_SHORT = (0,)

Parts = tuple[Tensor, ...]


def arrange(chunks: Sequence[Chunk], *, by_length: bool = True) -> list[int]:
    """Set each chunk's ``group``; return the chunks' numbers, those of a group side by side.

    Args:
        by_length: short sessions attend with others of about their length.
    """
    for chunk in chunks:
        chunk.group = _group(chunk)
    if by_length:
        _divide([chunk for chunk in chunks if chunk.group == _SHORT])
    return sorted(
        range(len(chunks)), key=lambda i: (chunks[i].group, chunks[i].new, _seat(chunks[i]))
    )


def _divide(chunks: list[Chunk]) -> None:
    """Put short sessions into groups by their length, of about ``PIECE`` or more.

    Each attends over as many columns as the longest of its group has. With 16 sessions of 70 to
    270 columns, a pass of the embedded target takes 0.95 of the time, with 32 of them 0.87.
    """
    chunks.sort(key=attrgetter("end"))
    count = round(len(chunks) / PIECE)  # as many if one of 16 is absent: blocks need not move
    ends = [number * len(chunks) // count for number in range(1, count)]
    group = begin = 0
    for end, next_end in pairwise([*ends, len(chunks)]):
        hidden = (chunks[next_end - 1].end - chunks[end - 1].end) * (end - begin)
        if hidden * chunks[0].cache.column_bytes >= HIDDEN:
            for chunk in chunks[end:]:
                chunk.group = (group + 1,)
            group, begin = group + 1, end


def _seat(chunk: Chunk) -> int:
    """Return the slot that the chunk had last: in the order of slots, rows need no moving."""
    copy: Copy | None = chunk.cache.copy
    return 0 if copy is None else copy.slot


def _group(chunk: Chunk) -> tuple[int, ...]:
    """Return the key of the chunks that a chunk attends together with.

    Short chunks have one key, of one number, and forks with few columns of their own have that of
    their prefix. The empty key is that of a chunk that attends alone.

    One call costs less than many: 16 short sessions of the embedded target need 1.7 times the time
    one by one. Long ones gain nothing, since reading them takes the time: with one thread 4
    to 16 sessions of 2 to 3 MB take as long either way. And a block holds their columns twice.
    """
    cache: StaticCache = chunk.cache
    end = chunk.end
    if chunk.new > SHORT:
        return ()
    if end * cache.column_bytes <= GATHERED:
        return _SHORT
    if cache.shared and (end - cache.offset) * cache.column_bytes <= GATHERED:
        last = cache.shared[-1]  # sessions that share it share all before it
        return id(last.part), last.columns
    return ()


def _streams(chunk: Chunk, heads: Heads) -> bool:
    """Return True where two products read a cache faster than the fused attention does.

    Measured for one new token and 12 heads: a cache that the processor does not hold is read in
    four fifths of the time; a short one, which it does hold, in up to 1.6 times the time.
    """
    own = chunk.cache.own
    return (
        chunk.end * chunk.cache.column_bytes > GATHERED
        and chunk.new * heads.shared <= FEW
        and own.dtype == torch.float32
        and own.device.type == "cpu"
    )


def group_chunks(
    chunks: Sequence[Chunk], heads: Heads, masks: Masks, blocks: Blocks, upload: Upload
) -> list[GatheredAttention | InPlaceAttention]:
    """Divide the chunks of a pass, which ``arrange`` has ordered; their caches get room."""
    for chunk in chunks:
        chunk.cache.reserve(chunk.end)
    if len(chunks) == 1:
        return [InPlaceAttention(chunks, 0, heads, masks, upload)]
    groups: list[GatheredAttention | InPlaceAttention] = []
    row, room = 0, TOGETHER
    for key, found in groupby(chunks, attrgetter("group")):
        several, forks = list(found), len(key) > 1
        count = _fitting(several, room, heads, forks=forks) if key else 0
        if count > 1:
            together = GatheredAttention(
                several[:count], row, heads, masks, blocks, upload, forks=forks
            )
            groups.append(together)
            row, room = together.rows.stop, room - together.bytes
            del several[:count]
        for alike in _alike(several):
            apart = InPlaceAttention(alike, row, heads, masks, upload)
            groups.append(apart)
            row = apart.rows.stop
    return groups


def _alike(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Divide chunks, in order, into lists with equally many new tokens; long ones stay alone."""
    found: list[list[Chunk]] = []
    for chunk in chunks:
        if found and chunk.new == found[-1][0].new <= SHORT:
            found[-1].append(chunk)
        else:
            found.append([chunk])
    return found


def _fitting(chunks: Sequence[Chunk], room: int, heads: Heads, *, forks: bool) -> int:
    """Return how many of the first chunks fill no more than ``room`` bytes with their columns.

    A block holds twice what the caches hold. And of the scores of forks the C library's allocator
    keeps up to 32 MB that are freed: more would be mapped anew, page by page, in each layer.

    Args:
        forks: the columns of the prefix are left out, and the scores of a layer must fit, too.
    """
    cache: StaticCache = chunks[0].cache
    skip, new, end = cache.offset if forks else 0, 0, 0
    for number, chunk in enumerate(chunks):
        new, end = max(new, chunk.new), max(end, chunk.end)
        copied = (end - skip) * cache.column_bytes
        scores = 4 * heads.query * new * end if forks else 0
        if (number + 1) * copied > room or (number + 1) * scores > TOGETHER:
            return number
    return len(chunks)


class InPlaceAttention:
    """Chunks with equally many new tokens that attend to their caches where these lie.

    What does not depend on the columns is done once for all of them. With 16 sessions of 450
    columns and 2 key heads of 32, a layer's attention takes 37 us a session in place of 51 (one
    thread); 26 in a block.

    Attributes:
        rows: those of the chunks, among those of the pass.
    """

    def __init__(
        self, chunks: Sequence[Chunk], first_row: int, heads: Heads, masks: Masks, upload: Upload
    ) -> None:
        self._new = chunks[0].new
        self.rows = slice(first_row, first_row + len(chunks) * self._new)
        self._heads = heads
        self._caches = [_InPlace(chunk, heads, masks, upload) for chunk in chunks]
        # [layers][chunks], each [new, 2 * kv_heads, head_dim], as a layer computes them
        written = (c.cache.written(c.start, c.end).transpose(1, 2).unbind(0) for c in chunks)
        self._written = list(zip(*written, strict=True))

    def begin(self) -> None:
        """Make the masks on the device."""
        for cache in self._caches:
            cache.begin()

    def attend(self, layer: int, qkv: Tensor, windowed: bool) -> Tensor:
        """[rows, heads, head_dim] of the chunks' rows -> [rows, query heads * head_dim].

        Writes keys and values of ``layer`` (from 0), which has a window or not.
        """
        heads, new = self._heads, self._new
        query, written = qkv.split_with_sizes((heads.query, 2 * heads.key), 1)
        torch._foreach_copy_(self._written[layer], written.split(new))
        if new > SHORT and self._caches[0].is_causal(windowed):  # it is alone here
            return self._caches[0].attend_causally(layer, query)
        queries = _by_key_head(query, len(self._caches), heads).split(1)
        found = [
            cache.attend(layer, query, windowed)
            for cache, query in zip(self._caches, queries, strict=True)
        ]
        return _rows(found[0] if len(found) == 1 else torch.cat(found), new, heads)

    def finish(self) -> None:
        """Do nothing: the caches hold everything."""

    def leave(self) -> None:
        """Do nothing: no block is used."""


class _InPlace:
    """The columns of one chunk, read where they lie."""

    def __init__(self, chunk: Chunk, heads: Heads, masks: Masks, upload: Upload) -> None:
        # A prompt from its start is causal without a mask, which would be large.
        self._whole = chunk.new > SHORT and chunk.start == 0 and chunk.mask is None
        offset: int = chunk.cache.offset
        width = chunk.end
        if not self._whole:  # ``reserve`` has made room for the multiple
            width = offset + round_up(chunk.end - offset, masks.step)
        narrow = masks.windowed(chunk)
        full = None if self._whole else masks.one(chunk, width, upload)
        self._planned = (full,) if narrow is chunk else (full, masks.one(narrow, width, upload))
        parts = chunk.cache.parts(width)
        self._products = chunk.new <= SHORT and (len(parts) > 1 or _streams(chunk, heads))
        self._parts = _by_layer(parts, heads) if self._products or len(parts) > 1 else None
        if self._parts is None:
            keys, values = parts[0].unsqueeze(1).split_with_sizes((heads.key, heads.key), 2)
            self._keys, self._values = keys.unbind(0), values.unbind(0)
        self._enable_gqa = heads.shared > 1

    def begin(self) -> None:
        """Make the masks on the device: of layers without a window, and of those with one."""
        made = [None if mask is None else mask() for mask in self._planned]
        self._masks = made[0], made[-1]

    def attend(self, layer: int, query: Tensor, windowed: bool) -> Tensor:
        """[1, kv_heads, new * shared, head_dim] -> the same."""
        mask = self._masks[windowed]
        if self._products:
            assert self._parts is not None
            keys, values = (by_layer[layer] for by_layer in self._parts)
            return _by_products(query[0], keys, values, mask)[None]
        key, value = self._columns(layer)
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    def is_causal(self, windowed: bool) -> bool:
        """Return True for a prompt from its start whose layers of this kind need no mask."""
        return self._whole and self._masks[windowed] is None

    def attend_causally(self, layer: int, query: Tensor) -> Tensor:
        """[new, query heads, head_dim] -> [new, query heads * head_dim]."""
        key, value = self._columns(layer)
        output = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None], key, value, is_causal=True, enable_gqa=self._enable_gqa
        )
        return output[0].transpose(0, 1).reshape(query.shape[0], -1)

    def _columns(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values, each [1, kv_heads, columns, head_dim]."""
        if self._parts is None:
            return self._keys[layer], self._values[layer]
        keys, values = (by_layer[layer] for by_layer in self._parts)
        return torch.cat(keys, dim=1)[None], torch.cat(values, dim=1)[None]


class GatheredAttention:
    """Several chunks whose columns lie in a block, to attend in one call.

    Forks leave out the columns that they share: these are read in place, once for all.

    Each chunk has as many places for queries as the one with the most new tokens, and uses its
    first ones. Two chunks, of 6 columns with 3 new ones and of 4 columns with 1 new one::

        columns     0  1  2  3  4  5                places    0   1   2
        chunk A   [ a  a  a  A  A  A ]                        qA  qA  qA
        chunk B   [ b  b  b  B  .  . ]                        qB  -   -

        a, b  in the block before the layers run
        A, B  written by each layer, copied to the caches by ``finish``
        .     hidden by the mask
        -     no query: computed, not read

    Attributes:
        rows: those of all chunks, among those of the pass.
        bytes: of the columns.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        first_row: int,
        heads: Heads,
        masks: Masks,
        blocks: Blocks,
        upload: Upload,
        *,
        forks: bool,
    ) -> None:
        self._chunks = chunks
        self._heads = heads
        self._blocks = blocks
        first = chunks[0].cache
        self._skip = skip = first.offset if forks else 0
        self._prefix = _by_layer(first.parts(skip), heads) if forks else None
        self._new = new = max(chunk.new for chunk in chunks)
        longest = round_up(max(chunk.end for chunk in chunks) - skip, masks.step)
        rows = sum(chunk.new for chunk in chunks)
        self.rows = slice(first_row, first_row + rows)
        self._block = block = blocks.take(chunks, skip, longest)
        self._slots = block.seat(chunks)
        seated = [
            chunk for _, chunk in sorted(zip(self._slots, chunks, strict=True), key=itemgetter(0))
        ]

        def both(own: Sequence[Chunk]) -> tuple[OnDevice | None, OnDevice]:
            prefix = masks.prefix(own, new, skip, upload) if forks else None
            return prefix, masks.several(own, new, skip, longest, upload)

        narrow, full = [masks.windowed(chunk) for chunk in seated], both(seated)
        same = all(a is b for a, b in zip(narrow, seated, strict=True))
        self._planned = (full,) if same else (full, both(narrow))  # the latter: with a window
        used = block.columns[:, : len(chunks), :, :longest]
        self.bytes = used.nbytes
        keys, values = used.split_with_sizes((heads.key, heads.key), 2)
        self._keys, self._values = keys.unbind(0), values.unbind(0)
        layers, _, key_heads, capacity, dim = block.columns.shape
        self._flat = block.columns.view(layers, -1, dim).unbind(0)  # [slots * heads * columns, dim]
        starts = [
            slot * key_heads * capacity + column - skip
            for slot, chunk in zip(self._slots, chunks, strict=True)
            for column in range(chunk.start, chunk.end)
        ]
        self._starts = upload.add(starts)
        self._columns_of_heads = key_heads * capacity, capacity
        places = [
            slot * new + token
            for slot, chunk in zip(self._slots, chunks, strict=True)
            for token in range(chunk.new)
        ]
        in_order = places == list(range(len(chunks) * new))
        self._in_places = None if in_order else upload.add(places)

    def begin(self) -> None:
        """Make masks and indices on the device."""
        both = [(None if prefix is None else prefix(), own()) for prefix, own in self._planned]
        self._masks = both[0], both[-1]
        starts, (end, step) = self._starts(), self._columns_of_heads
        by_head = torch.arange(0, end, step, device=starts.device)
        self._written = (starts[:, None] + by_head).view(-1)
        self._places = None if self._in_places is None else self._in_places()
        if self._places is not None:  # places that nobody uses hold finite numbers
            shape = len(self._chunks) * self._new, self._heads.query, self._heads.dim
            self._queries = self._block.columns.new_zeros(shape)

    def attend(self, layer: int, qkv: Tensor, windowed: bool) -> Tensor:
        """[rows, heads, head_dim] of the group's rows -> [rows, query heads * head_dim].

        Writes keys and values of ``layer`` (from 0), which has a window or not.
        """
        heads, count, new = self._heads, len(self._chunks), self._new
        query, written = qkv.split_with_sizes((heads.query, 2 * heads.key), 1)
        self._flat[layer].index_copy_(0, self._written, written.reshape(-1, heads.dim))
        if self._places is not None:
            query = self._queries.index_copy_(0, self._places, query)
        query = _by_key_head(query, count, heads)
        keys, values = self._keys[layer], self._values[layer]
        prefix_mask, mask = self._masks[windowed]
        if self._prefix is None:
            output = functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        else:
            shared_keys, shared_values = (by_layer[layer] for by_layer in self._prefix)
            output = _after_prefix(
                query, shared_keys, shared_values, prefix_mask, keys, values, mask
            )
        output = _rows(output, new, heads)
        return output if self._places is None else output[self._places]

    def finish(self) -> None:
        """Copy the new columns of each session to its cache."""
        skip, columns = self._skip, self._block.columns.unbind(1)
        torch._foreach_copy_(
            [c.cache.written(c.start, c.end) for c in self._chunks],
            [
                columns[slot][:, :, c.start - skip : c.end - skip]
                for slot, c in zip(self._slots, self._chunks, strict=True)
            ],
        )
        for chunk in self._chunks:
            chunk.cache.copy.columns = chunk.end

    def leave(self) -> None:
        """Give the block back; after a failed pass it holds the columns before that pass."""
        self._blocks.give_back(self._block)


def _by_layer(parts: Sequence[Tensor], heads: Heads) -> tuple[list[Parts], list[Parts]]:
    """Return keys and values: [layers][parts], each [kv_heads, columns, head_dim]."""
    keys = zip(*(part[:, : heads.key].unbind(0) for part in parts), strict=True)
    values = zip(*(part[:, heads.key :].unbind(0) for part in parts), strict=True)
    return list(keys), list(values)


def _by_key_head(query: Tensor, count: int, heads: Heads) -> Tensor:
    """[count * new, query heads, head_dim] -> [count, kv_heads, new * shared, head_dim].

    The query heads that share a key-value head are rows of one matrix: nothing is repeated.
    """
    new = query.shape[0] // count
    if new > 1:
        query = query.reshape(count, new, heads.key, -1, heads.dim).transpose(1, 2)
    return query.reshape(count, heads.key, -1, heads.dim)


def _rows(output: Tensor, new: int, heads: Heads) -> Tensor:
    """[count, kv_heads, new * shared, head_dim] -> [count * new, query heads * head_dim]."""
    count = output.shape[0]
    if new > 1:
        output = output.view(count, heads.key, new, -1, heads.dim).transpose(1, 2)
    return output.reshape(count * new, -1)


def _by_products(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask: Tensor | None
) -> Tensor:
    """Attend to columns that lie in several tensors, as if they were one.

    Args:
        query: [kv_heads, rows, head_dim].
        keys, values: by part, [kv_heads, columns, head_dim].
        mask: additive [rows, all columns].

    Returns:
        [kv_heads, rows, head_dim].
    """
    query = query * query.shape[-1] ** -0.5
    scores = [torch.bmm(query, key.transpose(1, 2)) for key in keys]
    joined = scores[0] if len(scores) == 1 else torch.cat(scores, dim=-1)
    if mask is not None:
        joined = joined + mask
    weights = joined.softmax(-1, dtype=torch.float32).to(query.dtype)
    output: Tensor | None = None
    for value, weight in zip(values, weights.split([k.shape[1] for k in keys], -1), strict=True):
        if output is None:
            output = torch.bmm(weight, value)
        else:
            output = torch.baddbmm(output, weight, value)
    assert output is not None
    return output


def _after_prefix(
    query: Tensor,
    prefix_keys: Parts,
    prefix_values: Parts,
    prefix_mask: Tensor | None,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
) -> Tensor:
    """Attend to a prefix that all chunks share, and to the columns of each after it.

    The queries of all chunks are the rows of one product with the prefix.

    Args:
        query: [chunks, kv_heads, rows, head_dim].
        prefix_keys, prefix_values: by part, [kv_heads, columns, head_dim].
        prefix_mask: additive [chunks, 1, rows, columns of the prefix], None to see all.
        keys, values: [chunks, kv_heads, columns, head_dim].
        mask: additive [chunks, 1, rows, columns].

    Returns:
        [chunks, kv_heads, rows, head_dim].
    """
    count, heads, rows, dim = query.shape
    query = query * dim**-0.5
    flat = query.transpose(0, 1).reshape(heads, count * rows, dim)
    own = torch.matmul(query, keys.transpose(2, 3)).add_(mask).transpose(0, 1)
    scores = [torch.bmm(flat, key.transpose(1, 2)) for key in prefix_keys]
    if prefix_mask is not None:
        hidden = prefix_mask.transpose(0, 1).reshape(1, count * rows, -1)
        sizes = [key.shape[1] for key in prefix_keys]
        scores = [s + h for s, h in zip(scores, hidden.split(sizes, -1), strict=True)]
    joined = torch.cat([*scores, own.reshape(heads, count * rows, -1)], dim=-1)
    weights = joined.softmax(-1, dtype=torch.float32).to(query.dtype)
    *shared, last = weights.split([*(k.shape[1] for k in prefix_keys), keys.shape[2]], -1)
    output = torch.bmm(shared[0], prefix_values[0])
    for weight, value in zip(shared[1:], prefix_values[1:], strict=True):
        output = torch.baddbmm(output, weight, value)
    last = last.reshape(heads, count, rows, -1).transpose(0, 1)
    return torch.matmul(last, values).add_(output.view(heads, count, rows, dim).transpose(0, 1))
