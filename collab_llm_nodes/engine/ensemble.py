"""Several models of one shape whose sessions share passes.

A pass over a few tokens of a small model costs little arithmetic. What it costs beyond that (calls
of attention, masks, rotations, columns side by side) is spent once for all models here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from collab_llm_nodes.engine import attention
from collab_llm_nodes.engine.backend import Chunk
from collab_llm_nodes.engine.blocks import Blocks
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.interface import Feed
from collab_llm_nodes.engine.saved import Fit
from collab_llm_nodes.engine.session import Session
from collab_llm_nodes.engine.static import Layer, StaticBackend
from collab_llm_nodes.errors import ProtocolError
from collab_llm_nodes.models.prompt import EncodedPrompt

_NAMES = ("_name_or_path", "architectures", "dtype", "transformers_version")


def can_share_passes(engines: Sequence[Engine]) -> bool:
    """Return True if the models can share passes: they have one shape and one type of numbers.

    An engine of another kind, such as one that emulates a larger model, makes its own passes.
    """
    if not all(type(e) is Engine and isinstance(e._backend, StaticBackend) for e in engines):
        return False
    shapes = []
    for engine in engines:
        config = engine.loaded.model.config.to_dict()
        if "vision_config" in config:  # pictures are read by the first model alone
            return False
        shape = {name: value for name, value in config.items() if name not in _NAMES}
        shapes.append((shape, engine.vocabulary, engine._embedding.dtype, engine.device))
    return all(shape == shapes[0] for shape in shapes)


class Ensemble(Engine):
    """An engine for several models; each session belongs to one of them.

    Early exits do not fire, and sessions are neither saved nor restored.

    Args:
        engines: of the models; :func:`can_share_passes` is true for them.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        vars(self).update(vars(engines[0]))  # all but the weights is the same for all
        self._exits = None
        self._embeddings = [engine._embedding for engine in engines]
        members = [
            engine._backend for engine in engines if isinstance(engine._backend, StaticBackend)
        ]
        self._backend: _Backend = _Backend(members)

    @property
    def _fit(self) -> Fit:  # type: ignore[override]
        raise ProtocolError("an ensemble has no sessions on disk", remedy="save with one engine")

    def open(self, prompt: EncodedPrompt, expected: int = 0, member: int = 0) -> Session:
        """Start a session of the model ``member``."""
        cache = self._backend.new_cache(expected)
        cache.member = member
        return Session(self, prompt, cache)

    def _embed(self, feeds: Sequence[Feed[Session]], ids: Tensor) -> Tensor:
        rows = _rows_by_member([(feed.session._cache.member, len(feed.ids)) for feed in feeds])
        return torch.cat([torch.embedding(self._embeddings[m], ids[own]) for m, own in rows])


class _Backend(StaticBackend):
    """Layers of all models; masks and rotations are those of the first one."""

    def __init__(self, members: Sequence[StaticBackend]) -> None:
        vars(self).update(vars(members[0]))
        self._members = members
        self._blocks = Blocks()

    def arrange(self, chunks: Sequence[Chunk]) -> list[int]:  # type: ignore[override]
        """Return the chunks' numbers: of those that attend together, each model's side by side.

        They are not divided by length: each model would have its rows in several places.
        """
        order = attention.arrange(chunks, by_length=False)
        return sorted(order, key=lambda i: (chunks[i].group, chunks[i].cache.member))

    def _rows(self, rows: int) -> int:
        return rows  # the maps of each model fill up its own

    def _layers_for(self, chunks: Sequence[Chunk]) -> Sequence[Layer]:
        rows = _rows_by_member([(chunk.cache.member, chunk.new) for chunk in chunks])
        wanted = _rows_by_member([(chunk.cache.member, chunk.keep) for chunk in chunks])

        def layer(number: int, left: Sequence[tuple[int, slice]]) -> _Split:
            parts = [self._members[member]._layers[number] for member, _ in rows]
            return _Split(parts, [own for _, own in rows], [own for _, own in left])

        last = len(self._layers) - 1
        return [
            *(layer(number, rows) for number in range(last)),
            layer(last, wanted),
        ]

    def _read(self, x: Tensor, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
        rows = _rows_by_member([(chunk.cache.member, chunk.keep) for chunk in chunks])
        states, logits = zip(*(self._members[m].read(x[own]) for m, own in rows), strict=True)
        return torch.cat(states), torch.cat(logits)


def _rows_by_member(counts: Sequence[tuple[int, int]]) -> list[tuple[int, slice]]:
    """Return the members and their rows, of (member, rows) in order; neighbours are joined."""
    found: list[tuple[int, slice]] = []
    end = 0
    for member, own in groupby(counts, key=itemgetter(0)):
        begin, end = end, end + sum(rows for _, rows in own)
        found.append((member, slice(begin, end)))
    return found


@dataclass(frozen=True)
class _Split:
    """One layer of several models, each over its own rows.

    Attributes:
        layers: of the models.
        rows: each one's, before attention.
        left: each one's, after attention: in the last layer those that are wanted.
    """

    layers: Sequence[Layer]
    rows: Sequence[slice]
    left: Sequence[slice]

    def before_attention(self, x: Tensor) -> Tensor:
        parts = zip(self.layers, self.rows, strict=True)
        return torch.cat([layer.before_attention(x[own]) for layer, own in parts])

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        parts = zip(self.layers, self.left, strict=True)
        return torch.cat([layer.after_attention(x[own], attended[own]) for layer, own in parts])
