"""One session of an engine: its tokens, columns and tree; feeding and rolling back.

What a session asks of the model goes through its :class:`~collab_llm_nodes.engine.engine.Engine`,
so that several can share a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from collab_llm_nodes.engine.backend import Chunk
from collab_llm_nodes.engine.pictures import encode_pictures, features_within, show
from collab_llm_nodes.engine.saved import SavedSession
from collab_llm_nodes.engine.tree import TokenTree
from collab_llm_nodes.errors import InvalidInput, ModelError, ProtocolError, Unavailable
from collab_llm_nodes.models.devices import lacks_memory
from collab_llm_nodes.models.prompt import EncodedPrompt

if TYPE_CHECKING:
    from collab_llm_nodes.engine.engine import Engine

OnExit = Callable[[int, Tensor], None]
AfterExit = Callable[[int, Callable[[], float]], None]
OnStates = Callable[[Tensor], None]
Check = Callable[[], None]


@dataclass(frozen=True)
class Feed:
    """New tokens for one session in a pass of several.

    Attributes:
        ids: token ids.
        on_exit: called as ``on_exit(layer, logits [last, V])`` DURING the forward pass, at each of
            the engine's exit layers.
        last: logits are wanted after this many of the last tokens; None: after all; 0: the cache
            is filled only.
        parents: the tokens become nodes of the session's tree, each behind the column named here,
            see ``Session.grow``. None: they follow the trunk.
        on_states: called as ``on_states(states [last, width])`` when the pass is done, with the
            hidden states that the LM head has read (behind the final norm).
    """

    session: Session
    ids: Sequence[int]
    on_exit: OnExit | None = None
    last: int | None = None
    parents: Sequence[int] | None = None
    on_states: OnStates | None = None

    @property
    def keep(self) -> int:
        """Rows of logits."""
        return len(self.ids) if self.last is None else self.last


class Session:
    """One prompt's KV cache. Not for two threads at a time.

    ``session.length = n`` is the only rollback: what was fed after the first n tokens is forgotten.
    Tokens within the prompt's length must be the prompt's own (its images belong to them).

    Several continuations can stand side by side as a tree: ``grow`` adds nodes behind the trunk,
    ``retain`` makes the path to one of them the trunk. ``feed`` and ``length`` know the trunk only
    and drop all nodes.
    """

    def __init__(self, engine: Engine, prompt: EncodedPrompt, cache: Any) -> None:
        self._engine = engine
        self._prompt = prompt
        self._tree = TokenTree()
        self._cache = cache
        self._closed = False
        self._image_features: Tensor | None = None

    @property
    def prompt(self) -> EncodedPrompt:
        """The prompt that the session was opened with, or saved with."""
        return self._prompt

    @property
    def length(self) -> int:
        """Tokens held in the KV cache's trunk."""
        return self._tree.length

    @length.setter
    def length(self, n: int) -> None:
        if not 0 <= n <= self._tree.length:
            raise ProtocolError(f"cannot roll back from {self._tree.length} to {n}", field="length")
        self._check_open()
        self._engine._backend.cut(self._cache, n)
        self._tree.cut(n)

    @property
    def columns(self) -> int:
        """Trunk and nodes."""
        return self._tree.columns

    def keys_values(self) -> list[Tensor]:
        """Return views of the cached keys and values.

        Returns:
            One or more tensors [layers, 2 * kv_heads, some columns, head_dim], in the order of the
            columns, the keys' heads first.
        """
        self._check_open()
        return self._engine._backend.parts(self._cache, self.columns)

    @property
    def own_bytes(self) -> int:
        """Bytes of the KV cache that this session holds alone."""
        return 0 if self._closed else self._engine._backend.sizes(self._cache)[0]

    @property
    def shared_bytes(self) -> int:
        """Bytes of the KV cache that are held once for this session and its forks."""
        return 0 if self._closed else self._engine._backend.sizes(self._cache)[1]

    @torch.inference_mode()
    def fork(self) -> Session:
        """Return a session that goes on from the same trunk; nodes stay with this one.

        The common prefix is held once (but for at most 127 columns), however many forks there are,
        until the last of them is closed, in any order. (The eager backend copies it at the next
        feed.)

        Raises:
            ProtocolError: the session is closed.
        """
        self._check_open()
        cache = self._engine._backend.fork(self._cache, self.length, self.columns)
        twin = Session(self._engine, self._prompt, cache)
        twin._image_features = self._image_features
        twin._tree.cut(self.length)
        return twin

    @torch.inference_mode()
    def save(self, file: str | Path) -> None:
        """Write the trunk to a safetensors file, for ``Engine.restore``; nodes are left out.

        The file names the model by a hash of its configuration and weights.

        Raises:
            InvalidInput: the session is empty, or the file cannot be written.
            ProtocolError: the session is closed.
        """
        self._check_open()
        if not self.length:
            raise InvalidInput("nothing has been fed", field="file", remedy="feed prompt.ids first")
        self.encode_images()  # whoever feeds the prompt from an earlier length needs them
        keys_values = torch.cat(self._engine._backend.parts(self._cache, self.length), dim=2)
        saved = SavedSession(keys_values, self._prompt, self._image_features)
        saved.write(file, self._engine._fit)

    def feed(
        self, ids: Sequence[int], on_exit: OnExit | None = None, last: int | None = None
    ) -> Tensor:
        """Append ``ids`` and return the logits after each of the last ``last`` (default: all).

        Args:
            ids: token ids.
            on_exit: as in :class:`Feed`. An exception it raises ends the pass.
            last: 0 to only fill the cache.

        Returns:
            [last, V] logits. If anything raises, the trunk is as it was before.

        Raises:
            InvalidInput: ids outside the vocabulary, not the prompt's, or more than fit.
            ProtocolError: the session is closed.
        """
        (result,) = self._engine.run([Feed(self, ids, on_exit, last)])
        if isinstance(result, Exception):
            raise result
        return result

    def grow(self, ids: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Append tree nodes in one pass and return the logits after each.

        A node attends to itself and its ancestors only, as if they alone had been fed.

        Args:
            ids: n token ids.
            parents: for each the column it follows: one of the trunk, or an earlier node, also of
                this call. New nodes are columns ``columns``, ``columns + 1``, ...

        Returns:
            [n, V] logits. If anything raises, the session is as it was before.

        Raises:
            InvalidInput: ids outside the vocabulary, bad parents, or more than fit.
            ProtocolError: the session is closed, or its prompt has not been fed to its end.
        """
        (result,) = self._engine.run([Feed(self, ids, parents=parents)])
        if isinstance(result, Exception):
            raise result
        return result

    def retain(self, column: int) -> dict[int, int]:
        """Make the path from the root to ``column`` the trunk; its descendants stay as nodes.

        Everything else is dropped.

        Returns:
            New columns by old ones, of all that is kept.

        Raises:
            ProtocolError: no such column, or its path leaves the prompt before the prompt's end.
        """
        self._check_open()
        path = self._tree.path(column)
        common = min(len(path), len(self._prompt.ids))
        if path[:common] != list(range(common)) or self.length < common:
            raise ProtocolError(
                f"column {column} does not continue the prompt",
                field="column",
                remedy="retain columns that branch off behind the prompt",
            )
        trunk_positions = [self._position(c) for c in range(column + 1, self.length)]
        kept = self._tree.retain(column, trunk_positions)
        with torch.inference_mode():
            self._engine._backend.move(self._cache, kept)
        return {old: new for new, old in enumerate(kept)}

    def close(self) -> None:
        """Free the KV cache, and of what forks share the columns that only this session reads."""
        if self._closed:
            return
        self._engine._backend.cut(self._cache, 0)
        self._cache = None
        self._closed = True
        self._image_features = None
        self._tree.cut(0)

    def _check(self, feed: Feed, engine: Engine, again: bool) -> None:
        """Refuse a feed that cannot run; the session is not changed."""
        if self._engine is not engine or again:
            raise ProtocolError("a session takes part once in a pass of its own engine")
        self._check_open()
        if not 0 <= feed.keep <= len(feed.ids):
            raise ValueError(f"last={feed.last} of {len(feed.ids)} ids")
        self._check_ids(feed.ids)
        if feed.parents is not None:
            self._check_growth(feed.ids, feed.parents)
            return
        self._check_room(self.length + len(feed.ids))
        self._prompt.check_tokens(self.length, feed.ids)

    def _check_growth(self, ids: Sequence[int], parents: Sequence[int]) -> None:
        if len(ids) != len(parents):
            raise InvalidInput(f"{len(ids)} ids and {len(parents)} parents", field="parents")
        if self._engine.windowed:
            raise ModelError(
                "token trees with sliding-window attention", remedy="draft one continuation only"
            )
        if self.length < len(self._prompt.ids):
            raise ProtocolError(
                f"{self.length} of the prompt's {len(self._prompt.ids)} tokens have been fed",
                field="parents",
                remedy="feed prompt.ids first",
            )
        self._tree.check(parents)
        if parents:
            self._check_room(max(self._tree.depths(parents)))  # of a path: columns may be more

    def _check_open(self) -> None:
        if self._closed:
            raise ProtocolError("the session is closed", remedy="open a new one")

    def _check_ids(self, ids: Sequence[int]) -> None:
        for token in ids:
            if not 0 <= token < self._engine.vocab_size:
                raise InvalidInput(
                    f"token {token} is outside the vocabulary of {self._engine.vocab_size}",
                    field="ids",
                )

    def _check_room(self, tokens: int) -> None:
        if tokens > self._engine.context:
            raise InvalidInput(
                f"{tokens} tokens, the model reads {self._engine.context}",
                field="ids",
                remedy="lower max_tokens or shorten the prompt",
            )

    def _begin(self, feed: Feed) -> Chunk:
        """Turn a (checked) feed into the backend's chunk.

        Behind the trunk it drops all nodes; nodes are added to the tree.
        """
        if feed.parents is not None:
            return self._begin_growth(feed.parents, feed.keep)
        start, new = self._tree.length, len(feed.ids)
        if self._tree.columns > start:
            self._engine._backend.cut(self._cache, start)
            self._tree.cut(start)
        return Chunk(self._cache, start, new, self._prompt.positions(start, new), None, feed.keep)

    def _begin_growth(self, parents: Sequence[int], keep: int) -> Chunk:
        before = self._tree.columns
        positions = self._tree.positions(parents, self._position)
        mask = torch.from_numpy(self._tree.grow(parents, positions))
        return Chunk(self._cache, before, len(parents), torch.tensor(positions), mask, keep)

    def _undo(self, length: int, columns: int) -> None:
        """Go back to ``length`` tokens, or to the nodes before ``columns``: a pass has failed."""
        if self._tree.length > length:
            self._tree.cut(length)
        else:
            self._tree.shrink(columns)
        self._engine._backend.cut(self._cache, self._tree.columns)

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
        """Read the prompt's images now; else the first ``feed`` that comes to them does.

        For a thread of its own beside the passes of other sessions.

        Raises:
            Unavailable: there is no memory for that.
        """
        try:
            self._encode_images()
        except Exception as error:
            if not lacks_memory(error):
                raise
            raise no_memory(error) from None

    def _encode_images(self) -> None:
        if self._prompt.pixel_values is None or self._image_features is not None:
            return
        engine = self._engine
        self._image_features = encode_pictures(engine.loaded, self._prompt, engine._embedding)
        self._prompt = replace(self._prompt, pixel_values=None)  # ten times the features' memory

    def _show_images(self, ids: Sequence[int], embedded: Tensor, row: int) -> None:
        """Put image features into the rows of ``ids``, from ``row``, of ``embedded`` [k, hidden].

        The tokens stand behind the trunk.
        """
        if self._prompt.image_grid_thw is None or self.length >= len(self._prompt.ids):
            return  # nodes stand behind the whole prompt
        self._encode_images()
        assert self._image_features is not None
        placeholder: int = self._engine.loaded.model.config.image_token_id
        within = features_within(self._prompt, placeholder, self.length, len(ids))
        features = self._image_features[within]
        show(features, ids, placeholder, embedded[row : row + len(ids)])


def no_memory(error: Exception) -> Unavailable:
    """Return the error for a session that ran out of memory, as ``error`` says."""
    return Unavailable(
        f"no memory for this session: {str(error)[:200]}",
        field="session",
        remedy="shorten the prompt, lower max_tokens, or let the server hold fewer sessions",
    )
