"""Sessions over a backend: tokens, columns and tree; feeding and rolling back.

What a session asks of the model goes through its :class:`~collab_llm_nodes.engine.engine.Engine`,
so that several can share a pass.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from collab_llm_nodes.engine.backend import Backend, Chunk
from collab_llm_nodes.engine.eager import EagerBackend
from collab_llm_nodes.engine.interface import Feed, OnExit
from collab_llm_nodes.engine.pictures import encode_pictures, features_within, insert_features
from collab_llm_nodes.engine.saved import SavedSession
from collab_llm_nodes.engine.tree import TokenTree
from collab_llm_nodes.errors import InvalidInput, ModelError, ProtocolError, Unavailable
from collab_llm_nodes.models.devices import lacks_memory
from collab_llm_nodes.models.prompt import EncodedPrompt

if TYPE_CHECKING:
    from collab_llm_nodes.engine.engine import Engine


class CachedSession(abc.ABC):
    """A trunk and a tree in a cache: the common part of sessions of whole models and of stages."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._tree = TokenTree()
        self._closed = False

    @property
    def length(self) -> int:
        """Tokens held in the KV cache's trunk."""
        return self._tree.length

    @length.setter
    def length(self, n: int) -> None:
        if not 0 <= n <= self._tree.length:
            raise ProtocolError(f"cannot roll back from {self._tree.length} to {n}", field="length")
        self._check_open()
        self._cache.cut(n)
        self._tree.cut(n)

    @property
    def columns(self) -> int:
        """Trunk and nodes."""
        return self._tree.columns

    @torch.inference_mode()
    def retain(self, column: int) -> dict[int, int]:
        """Make the path to ``column`` the trunk, as ``DecodingSession.retain``."""
        self._check_open()
        later = [self._position(c) for c in range(column + 1, self.length)]
        kept = self._tree.retain(column, later)
        self._cache.move(kept)
        return {old: new for new, old in enumerate(kept)}

    def close(self) -> None:
        """Free the KV cache, and shared columns that no other session reads."""
        if self._closed:
            return
        self._cache.cut(0)
        self._cache = None
        self._closed = True
        self._tree.cut(0)

    def _check_open(self) -> None:
        if self._closed:
            raise ProtocolError("the session is closed", remedy="open a new one")

    def _check_place(self, new: int, parents: Sequence[int] | None, context: int) -> None:
        """Refuse ``new`` tokens that have no place after their parents, or in the context."""
        tokens = self.length + new
        if parents is not None:
            if len(parents) != new:
                raise InvalidInput(f"{new} tokens and {len(parents)} parents", field="parents")
            self._tree.check(parents)
            tokens = max(self._tree.depths(parents), default=0)  # of a path: columns may be more
        if tokens > context:
            raise InvalidInput(
                f"{tokens} tokens, the model reads {context}",
                field="ids",
                remedy="lower max_tokens or shorten the prompt",
            )

    def _forked(self) -> Any:
        """Return a cache with the same trunk, which is held once."""
        self._check_open()
        return self._cache.fork(self.length, self.columns)

    @abc.abstractmethod
    def _begin(self, feed: Any) -> Chunk:
        """Turn a (checked) feed into the backend's chunk; nodes are added to the tree."""

    def _chunk(
        self, new: int, keep: int, parents: Sequence[int] | None, positions: int | Tensor
    ) -> Chunk:
        """Return the chunk of ``new`` tokens; a tree's have positions of their own."""
        if parents is None:
            return Chunk(self._cache, self.length, new, positions, None, keep)
        start = self.columns
        grown = self._tree.positions(parents, self._position)
        mask = torch.from_numpy(self._tree.grow(parents, grown))
        if self._tree.is_chain():
            return Chunk(self._cache, start, new, grown[0], None, keep)
        return Chunk(self._cache, start, new, torch.tensor(grown), mask, keep)

    def _drop_nodes(self) -> None:
        if self._tree.columns > self._tree.length:
            self._cache.cut(self._tree.length)
            self._tree.cut(self._tree.length)

    def _undo(self, length: int, columns: int) -> None:
        """Go back to ``length`` tokens, or to the nodes before ``columns``: a pass has failed."""
        if self._tree.length > length:
            self._tree.cut(length)
        else:
            self._tree.shrink(columns)
        self._cache.cut(self._tree.columns)

    def _position(self, column: int) -> int:
        """Return the position of a column."""
        return column if column < self.length else self._tree.position(column)


Mark = tuple[CachedSession, int, int]
"""A session, its length and its columns before a pass."""


def mark(session: CachedSession) -> Mark:
    """Return the state of a session before a pass, for :func:`undo`."""
    return session, session.length, session.columns


def undo(marks: Iterable[Mark]) -> None:
    """Put sessions back to their marks; nodes that a pass has dropped are not restored."""
    for session, length, columns in marks:
        session._undo(length, columns)


def begin_pass(backend: Backend, feeds: Sequence[Any]) -> tuple[list[int], list[Chunk]]:
    """Return the order in which a pass takes the feeds, and their chunks in that order.

    Feeds that follow a trunk drop its nodes. If anything is raised, undo it.
    """
    chunks = [feed.session._begin(feed) for feed in feeds]
    for feed in feeds:  # all have begun; only now is it known which columns they share
        if feed.parents is None:
            feed.session._drop_nodes()
    order = backend.arrange(chunks) if len(chunks) > 1 else [0]
    return order, [chunks[i] for i in order]


class Session(CachedSession):
    """A ``DecodingSession`` of an ``engine.Engine``, which can be forked and saved as well."""

    def __init__(self, engine: Engine, prompt: EncodedPrompt, cache: Any) -> None:
        super().__init__(cache)
        self._engine = engine
        self._prompt = prompt
        self._image_features: Tensor | None = None

    @property
    def prompt(self) -> EncodedPrompt:
        """The prompt that the session was opened with, or saved with."""
        return self._prompt

    def keys_values(self) -> list[Tensor]:
        """Return the cached keys and values, or views of them.

        Returns:
            One or more tensors [layers, 2 * kv_heads, some columns, head_dim], in the order of the
            columns, the keys' heads first.
        """
        self._check_open()
        return self._cache.parts(self.columns)

    @property
    def own_bytes(self) -> int:
        """Bytes of the KV cache that this session holds alone."""
        return 0 if self._closed else self._cache.own_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of the KV cache that are held once for this session and its forks."""
        return 0 if self._closed else self._cache.shared_bytes

    @torch.inference_mode()
    def fork(self) -> Session:
        """Return a session that goes on from the same trunk; nodes stay with this one.

        The common prefix is held once (but for at most 127 columns), however many forks there are,
        until the last of them is closed, in any order. (The eager backend copies it at the next
        feed.)

        Raises:
            ProtocolError: the session is closed.
        """
        twin = Session(self._engine, self._prompt, self._forked())
        twin._image_features = self._image_features
        twin._tree.cut(self.length)
        return twin

    @torch.inference_mode()
    def save(self, file: str | Path) -> None:
        """Write the trunk to a safetensors file, for ``Engine.restore``; nodes are left out.

        The file names the model by a hash of its configuration and weights.

        Raises:
            InvalidInput: the session is empty, or the file cannot be written.
            ModelError: the model has recurrent states, or encodes pictures by its own code, which
                may keep more than keys and values.
            ProtocolError: the session is closed.
        """
        self._check_open()
        if self._engine.loaded.processor is not None:
            raise ModelError(
                "sessions of this model are not saved", remedy="keep the session, or feed it again"
            )
        if not self.length:
            raise InvalidInput("nothing has been fed", field="file", remedy="feed prompt.ids first")
        self.encode_images()  # needed by a session that is restored and rolled back into the prompt
        keys_values = torch.cat(self._cache.parts(self.length), dim=2)
        saved = SavedSession(keys_values, self._prompt, self._image_features)
        saved.write(file, self._engine._fit)

    def feed(
        self, ids: Sequence[int], on_exit: OnExit | None = None, last: int | None = None
    ) -> Tensor:
        """Append ``ids`` in a pass of its own, see ``DecodingSession.feed``."""
        return self._run(Feed(self, ids, on_exit, last))

    def grow(self, ids: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Append tree nodes in a pass of its own, see ``DecodingSession.grow``."""
        return self._run(Feed(self, ids, parents=parents))

    def _run(self, feed: Feed[Session]) -> Tensor:
        (result,) = self._engine.run([feed])
        if isinstance(result, Exception):
            raise result
        return result

    def retain(self, column: int) -> dict[int, int]:
        """Make the path to ``column`` the trunk, see ``DecodingSession.retain``."""
        self._check_open()
        path = self._tree.path(column)
        common = min(len(path), len(self._prompt.ids))
        if path[:common] != list(range(common)) or self.length < common:
            raise ProtocolError(
                f"column {column} does not continue the prompt",
                field="column",
                remedy="retain columns that branch off after the prompt",
            )
        return super().retain(column)

    def close(self) -> None:
        super().close()
        self._image_features = None

    def _check(self, feed: Feed[Session], engine: Engine, again: bool) -> None:
        """Refuse a feed that cannot run; the session is not changed."""
        if self._engine is not engine or again:
            raise ProtocolError("a session takes part once in a pass of its own engine")
        self._check_open()
        if not 0 <= feed.keep <= len(feed.ids):
            raise ValueError(f"last={feed.last} of {len(feed.ids)} ids")
        for token in feed.ids:
            if not 0 <= token < engine.vocab_size:
                raise InvalidInput(
                    f"token {token} is outside the vocabulary of {engine.vocab_size}", field="ids"
                )
        if feed.parents is not None:
            self._check_tree(feed.parents)
        self._check_place(len(feed.ids), feed.parents, engine.context)
        if feed.parents is None:
            self._prompt.check_tokens(self.length, feed.ids)
        if self.length < self._prompt.shown:
            self._check_shown(feed)
            self.encode_images()  # now, so that only this feed fails with it

    def _check_shown(self, feed: Feed[Session]) -> None:
        """Refuse to give logits of tokens that the model reads in one pass, by its own code."""
        if feed.keep > max(0, self.length + len(feed.ids) - self._prompt.shown):
            raise InvalidInput(
                f"logits before the end of the prompt's pictures at token {self._prompt.shown}",
                field="last",
                remedy="feed the prompt with last=0 or 1",
            )

    def _check_tree(self, parents: Sequence[int]) -> None:
        """Refuse nodes before the prompt's end, and branches of a model that grows no trees."""
        if not self._engine.grows_trees and not self._tree.is_chain(parents):
            raise ModelError(
                "token trees with recurrent states, or with sliding windows in transformers'"
                " forward pass",
                field="parents",
                remedy="draft one continuation only",
            )
        if self.length < len(self._prompt.ids):
            raise ProtocolError(
                f"{self.length} of the prompt's {len(self._prompt.ids)} tokens have been fed",
                field="parents",
                remedy="feed prompt.ids first",
            )

    def _begin(self, feed: Feed[Session]) -> Chunk:
        new = len(feed.ids)
        positions = 0 if feed.parents is not None else self._prompt.positions(self.length, new)
        return self._chunk(new, feed.keep, feed.parents, positions)

    def _position(self, column: int) -> int:
        """Return the position of a column, the largest of M-RoPE's three."""
        if column >= self.length:
            return self._tree.position(column)
        if column < len(self._prompt.ids) and self._prompt.position_ids is not None:
            return self._last_positions[column]
        return column + self._prompt.position_delta

    @cached_property
    def _last_positions(self) -> list[int]:
        """Largest position of each of the prompt's tokens, which has M-RoPE's three."""
        assert self._prompt.position_ids is not None
        found: list[int] = self._prompt.position_ids.amax(0).tolist()
        return found

    @torch.inference_mode()
    def encode_images(self) -> None:
        """Read the prompt's images now, see ``DecodingSession.encode_images``."""
        try:
            self._encode_images()
        except Exception as error:
            if not lacks_memory(error):
                raise
            raise no_memory(error) from None

    def _encode_images(self) -> None:
        if self._prompt.processed is not None:
            backend = self._engine._backend
            assert isinstance(backend, EagerBackend)
            delta = backend.read_pictures(self._prompt, self._cache)
            self._prompt = replace(self._prompt, processed=None, position_delta=delta)
            return
        if self._prompt.pixel_values is None or self._image_features is not None:
            return
        engine = self._engine
        self._image_features = encode_pictures(engine.loaded, self._prompt, engine._embedding)
        self._prompt = replace(self._prompt, pixel_values=None)  # ten times the features' memory

    @property
    def _in_pictures(self) -> bool:
        """Pictures may be among the next tokens; nodes stand after the whole prompt."""
        return self._prompt.image_grid_thw is not None and self.length < len(self._prompt.ids)

    def _show_images(self, ids: Sequence[int], embedded: Tensor, row: int) -> None:
        """Put image features into the rows of ``ids``, from ``row``, of ``embedded`` [k, width].

        The tokens stand after the trunk.
        """
        if not self._in_pictures:
            return
        self._encode_images()
        assert self._image_features is not None
        placeholder: int = self._engine.loaded.model.config.image_token_id
        within = features_within(self._prompt, placeholder, self.length, len(ids))
        insert_features(
            self._image_features[within], ids, placeholder, embedded[row : row + len(ids)]
        )


def no_memory(error: Exception) -> Unavailable:
    """Return the error for a session that ran out of memory, as ``error`` says."""
    return Unavailable(
        f"no memory for this session: {str(error)[:200]}",
        field="session",
        remedy="shorten the prompt, lower max_tokens, or let the server hold fewer sessions",
    )
