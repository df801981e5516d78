"""Runs a model for many sessions: feed tokens, read logits, roll back, grow token trees.

An :class:`Engine` owns nothing per session and a :class:`Session` shares nothing with another, so
several threads may each drive their own sessions on one engine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from collab_llm_nodes.engine.backend import Backend, Chunk
from collab_llm_nodes.engine.eager import EagerBackend
from collab_llm_nodes.engine.exits import ExitScorer, PassExits
from collab_llm_nodes.engine.kernels import Head
from collab_llm_nodes.engine.static import StaticBackend
from collab_llm_nodes.engine.tree import TokenTree
from collab_llm_nodes.errors import ConfigError, InvalidInput, ProtocolError
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.loading import LoadedModel
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.models.vocabulary import vocabulary_hash, vocabulary_size

OnExit = Callable[[int, Tensor], None]
AfterExit = Callable[[int, float], None]
BACKENDS = ("auto", "static", "eager")


@dataclass(frozen=True)
class Feed:
    """New tokens for one session in a pass of several.

    Attributes:
        ids: token ids.
        on_exit: called as ``on_exit(layer, logits [last, V])`` DURING the forward pass, at each of
            the engine's exit layers.
        last: logits are wanted after this many of the last tokens; None: after all; 0: the cache
            is filled only.
    """

    session: Session
    ids: Sequence[int]
    on_exit: OnExit | None = None
    last: int | None = None

    @property
    def keep(self) -> int:
        """Rows of logits."""
        return len(self.ids) if self.last is None else self.last


class Engine:
    """One loaded model and its early exits.

    Args:
        candidates: score exits only over candidates (see ``exits``), of which so many per position
            are kept from exit to exit; other logits are -inf. 0 scores the whole vocabulary. For
            large vocabularies, where the head costs more than the layers between two exits.
        backend: "static" (the hand-written loop), "eager" (the transformers forward), or "auto":
            static where it supports the model.

    Attributes:
        vocab_size: columns of all logits: the tokenizer's size, without padding rows.
        eos: end tokens.
        num_layers: decoder layers.
        context: tokens a session can hold.
        exit_layers: exits that fire, counted in layers done.
        backend: the one in use, "static" or "eager".
        device: the model's.

    Raises:
        ConfigError: an unknown backend, or a static one for a model it does not support.
    """

    def __init__(self, loaded: LoadedModel, *, candidates: int = 0, backend: str = "auto") -> None:
        self.loaded = loaded
        self.vocab_size = vocabulary_size(loaded.tokenizer)
        self.vocabulary = vocabulary_hash(loaded.tokenizer)
        self.eos = _end_tokens(loaded, self.vocab_size)
        self.context: int = loaded.model.config.get_text_config().max_position_embeddings
        parts = decoder_parts(loaded.model)
        head = Head(parts, self.vocab_size)
        self.num_layers = len(parts.layers)
        self.exit_layers = loaded.adapters.layers if loaded.adapters is not None else ()
        self._exits = (
            ExitScorer(head, loaded.adapters, candidates) if loaded.adapters is not None else None
        )
        self.backend = _choose(backend, loaded)
        self._backend: Backend = (
            StaticBackend(loaded, head, self.exit_layers)
            if self.backend == "static"
            else EagerBackend(loaded, self.vocab_size, self.exit_layers)
        )
        self._embedding: Tensor = loaded.model.get_input_embeddings().weight.detach()
        self.device = self._embedding.device

    def open(self, prompt: EncodedPrompt) -> Session:
        """Start a session; nothing is computed before its first ``feed``."""
        return Session(self, prompt)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens`` without special ones."""
        return str(self.loaded.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def close(self) -> None:
        """Take the exits off the model, which others may go on using."""
        self._exits = None
        self._backend.close()

    def run(
        self,
        feeds: Sequence[Feed],
        *,
        exits_until: float = math.inf,
        after_exit: AfterExit = lambda layer, took_s: None,
    ) -> list[Tensor | Exception]:
        """One forward pass over several sessions, of any lengths and numbers of new tokens.

        Args:
            exits_until: exits of deeper layers do not fire.
            after_exit: called as ``after_exit(layer, took_s)`` when every ``on_exit`` of the layer
                has been; ``took_s`` is what the exits there have taken. What it raises ends the
                pass and is raised.

        Returns:
            For each feed, in order, its logits [last, V], or the exception that ended it: those of
            ``Session.feed``, or what its ``on_exit`` raised. Its session is then as it was (without
            nodes); the other feeds are not disturbed. When none is left, the pass ends early.
        """
        results: dict[int, Tensor | Exception] = {}
        running: dict[int, Feed] = {}
        sessions: set[int] = set()
        for number, feed in enumerate(feeds):
            try:
                feed.session._check(feed, again=id(feed.session) in sessions)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is its feed's result
                results[number] = error
                continue
            sessions.add(id(feed.session))
            if feed.ids:
                running[number] = feed
            else:
                results[number] = torch.empty(0, self.vocab_size, device=self.device)
        numbers = sorted(running, key=lambda number: self._place(running[number]))
        for group in [numbers] if self._backend.batches else [[number] for number in numbers]:
            if group:
                outcomes = self._pass([running[n] for n in group], exits_until, after_exit)
                results.update(zip(group, outcomes, strict=True))
        return [results[number] for number in range(len(feeds))]

    def _place(self, feed: Feed) -> tuple[bool, int]:
        """Where a feed stands in a pass: those whose attention is batched side by side."""
        new = len(feed.ids)
        return not self._backend.side_by_side(new, feed.session.length + new), new

    @torch.inference_mode()
    def _pass(
        self, feeds: Sequence[Feed], exits_until: float, after_exit: AfterExit
    ) -> list[Tensor | Exception]:
        embedded = self._embed([token for feed in feeds for token in feed.ids])
        chunks, row = [], 0
        for feed in feeds:
            chunks.append(feed.session._chunk(feed))
            feed.session._show_images(feed.ids, embedded[row : row + len(feed.ids)])
            row += len(feed.ids)
        watch = None
        if self._exits is not None and any(layer <= exits_until for layer in self.exit_layers):
            watch = _Watch(feeds, self._exits, exits_until, after_exit)
        after_layer = watch.after_layer if watch is not None and watch.listening else None
        try:
            logits = self._backend.forward(chunks, embedded, after_layer)
        except _NoneLeft:
            assert watch is not None
            return [watch.failed[i] for i in range(len(feeds))]
        results: list[Tensor | Exception] = list(logits)
        for i, (feed, chunk) in enumerate(zip(feeds, chunks, strict=True)):
            if watch is not None and i in watch.failed:
                self._backend.cut(chunk.cache, chunk.start)
                results[i] = watch.failed[i]
            else:
                feed.session._tree.cut(chunk.end)
        return results

    def _embed(self, ids: Sequence[int]) -> Tensor:
        """[rows, hidden]."""
        return functional.embedding(torch.tensor(ids, device=self.device), self._embedding)


class _NoneLeft(Exception):
    """No feed of the pass is wanted any more."""


class _Watch:
    """Calls the feeds' ``on_exit`` during a pass and keeps what they raise.

    Attributes:
        listening: feeds whose ``on_exit`` is still called.
        failed: exceptions by feed.
    """

    def __init__(
        self,
        feeds: Sequence[Feed],
        scorer: ExitScorer,
        until: float,
        after_exit: AfterExit,
    ) -> None:
        self._feeds = feeds
        self._until = until
        self._after_exit = after_exit
        self.listening = [i for i, f in enumerate(feeds) if f.on_exit is not None and f.keep]
        self.failed: dict[int, Exception] = {}
        if self.listening:
            self._exits = PassExits(
                scorer,
                [f.ids for f in feeds],
                [f.keep for f in feeds],
                [f.session._prompt.ids for f in feeds],
            )

    def after_layer(self, layer: int, hidden: Tensor) -> None:
        if not self.listening or layer > self._until:
            return
        wait_for(hidden.device)  # the layers before do not count
        begun = time.perf_counter()
        logits = self._exits.logits(layer, hidden, self.listening)
        for i, own in zip(tuple(self.listening), logits, strict=True):
            on_exit = self._feeds[i].on_exit
            assert on_exit is not None
            try:
                on_exit(layer, own)
            except Exception as error:  # noqa: BLE001 - ends this feed only
                self.failed[i] = error
                self.listening.remove(i)
        self._after_exit(layer, time.perf_counter() - begun)
        if len(self.failed) == len(self._feeds):
            raise _NoneLeft


def wait_for(device: torch.device) -> None:
    """Until ``device`` has done what it was given: accelerators work while the host goes on."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


class Session:
    """One prompt's KV cache. Not for two threads at a time.

    ``session.length = n`` is the only rollback: what was fed after the first n tokens is forgotten.
    Tokens within the prompt's length must be the prompt's own (its images belong to them).

    Several continuations can stand side by side as a tree: ``grow`` adds nodes behind the trunk,
    ``retain`` makes the path to one of them the trunk. ``feed`` and ``length`` know the trunk only
    and drop all nodes.
    """

    def __init__(self, engine: Engine, prompt: EncodedPrompt) -> None:
        self._engine = engine
        self._prompt = prompt
        self._tree = TokenTree()
        self._cache = engine._backend.new_cache()
        self._closed = False
        self._image_features: Tensor | None = None

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
        """Return views of the cached keys and values, the tensors in which they lie."""
        return self._cache.parts(self.columns)

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
            ProtocolError: the session is closed, or its prompt has not been fed yet.
        """
        self._check_open()
        if len(ids) != len(parents):
            raise InvalidInput(f"{len(ids)} ids and {len(parents)} parents", field="parents")
        self._check_ids(ids)
        self._tree.check(parents)
        before = self.columns
        if not ids:
            return torch.empty(0, self._engine.vocab_size, device=self._engine.device)
        positions: list[int] = []
        for parent in parents:
            new = parent - before
            positions.append(1 + (positions[new] if new >= 0 else self._position(parent)))
        seen = self._tree.grow(parents, positions)
        engine = self._engine
        try:
            self._check_room(int(seen.sum(axis=1).max()))  # of a path: columns may be more
            with torch.inference_mode():
                mask = torch.from_numpy(seen).to(engine.device)
                chunk = Chunk(
                    self._cache, before, len(ids), torch.tensor(positions), mask, len(ids)
                )
                (logits,) = engine._backend.forward([chunk], engine._embed(ids), None)
        except BaseException:  # whatever ends the pass, the session is as it was before it
            self._tree.shrink(before)
            raise
        return logits

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
        """Free the KV cache."""
        self._cache = None
        self._closed = True
        self._image_features = None
        self._tree.cut(0)

    def _check(self, feed: Feed, again: bool) -> None:
        """Refuse a feed that cannot run; the session is not changed."""
        if feed.session._engine is not self._engine or again:
            raise ProtocolError("a session takes part once in a pass of its own engine")
        self._check_open()
        if not 0 <= feed.keep <= len(feed.ids):
            raise ValueError(f"last={feed.last} of {len(feed.ids)} ids")
        self._check_ids(feed.ids)
        self._check_room(self.length + len(feed.ids))
        own = self._prompt.ids[self.length : self.length + len(feed.ids)]
        if tuple(feed.ids[: len(own)]) != own:
            raise InvalidInput(
                "the first tokens of a session are its prompt's",
                field="ids",
                remedy="feed prompt.ids first",
            )

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

    def _chunk(self, feed: Feed) -> Chunk:
        """A (checked) feed for the backend; drops all nodes."""
        start = self._tree.length
        if self._tree.columns > start:
            self._engine._backend.cut(self._cache, start)
            self._tree.cut(start)
        return Chunk(
            self._cache,
            start,
            len(feed.ids),
            self._positions(start, len(feed.ids)),
            None,
            feed.keep,
        )

    def _positions(self, start: int, count: int) -> int | Tensor:
        """Positions of the trunk's columns from ``start``: the first, or M-RoPE's [3, count]."""
        own = self._prompt.position_ids
        if own is None:
            return start
        if start >= len(self._prompt.ids):
            return start + self._prompt.position_delta
        index = torch.arange(start, start + count)
        later = index[index >= len(self._prompt.ids)] + self._prompt.position_delta
        return torch.cat([own[:, start : start + count], later.expand(3, -1)], dim=1)

    def _position(self, column: int) -> int:
        """Position of a column, the largest of M-RoPE's three."""
        if column >= self.length:
            return self._tree.position(column)
        own = self._prompt.position_ids
        if own is None or column >= len(self._prompt.ids):
            return column + self._prompt.position_delta
        return int(own[:, column].max())

    @torch.inference_mode()
    def look(self) -> None:
        """Read the prompt's images now; else the first ``feed`` that comes to them does.

        For a thread of its own beside the passes of other sessions.
        """
        pixels, grid = self._prompt.pixel_values, self._prompt.image_grid_thw
        if pixels is None or self._image_features is not None:
            return
        assert grid is not None
        like = self._engine._embedding
        features = self._engine.loaded.model.get_image_features(
            pixels.to(like.device), grid.to(like.device), return_dict=True
        ).pooler_output
        self._image_features = torch.cat(list(features)).to(like.dtype)
        self._prompt = replace(self._prompt, pixel_values=None)  # ten times the features' memory

    def _show_images(self, ids: Sequence[int], embedded: Tensor) -> None:
        """Put image features into their places in ``embedded`` [k, hidden], behind the trunk."""
        prompt_ids, start = self._prompt.ids, self.length
        if self._prompt.image_grid_thw is None or start >= len(prompt_ids):
            return
        self.look()
        assert self._image_features is not None
        placeholder = self._engine.loaded.model.config.image_token_id
        seen = prompt_ids[:start].count(placeholder)
        own = ids[: len(prompt_ids) - start]  # later ones were generated: tokens like any other
        here = [i for i, token in enumerate(own) if token == placeholder]
        embedded[here] = self._image_features[seen : seen + len(here)]


def _choose(backend: str, loaded: LoadedModel) -> str:
    if backend not in BACKENDS:
        raise ConfigError(
            f"{backend!r} is unknown", field="backend", remedy=f"one of {', '.join(BACKENDS)}"
        )
    supported = StaticBackend.supports(loaded)
    if backend == "static" and not supported:
        raise ConfigError(
            "the static backend does not run this model", field="backend", remedy="set it to auto"
        )
    if backend == "auto":
        return "static" if supported else "eager"
    return backend


def _end_tokens(loaded: LoadedModel, vocab_size: int) -> frozenset[int]:
    configured = loaded.model.generation_config.eos_token_id
    found = set(configured) if isinstance(configured, list) else {configured}
    found.add(loaded.tokenizer.eos_token_id)
    return frozenset(t for t in found if t is not None and t < vocab_size)
