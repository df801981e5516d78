"""Runs a model for many sessions: feed tokens, read logits, roll back, grow token trees.

An :class:`Engine` owns nothing per session and a :class:`Session` shares nothing with another, so
several threads may each drive their own sessions on one engine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from collab_llm_nodes.engine.backend import Backend, Chunk
from collab_llm_nodes.engine.eager import EagerBackend
from collab_llm_nodes.engine.exits import ExitScorer, PassExits
from collab_llm_nodes.engine.kernels import Head
from collab_llm_nodes.engine.saved import Fit, SavedSession
from collab_llm_nodes.engine.static import StaticBackend
from collab_llm_nodes.engine.tree import TokenTree
from collab_llm_nodes.errors import ConfigError, InvalidInput, ProtocolError
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.fingerprint import fingerprint
from collab_llm_nodes.models.loading import LoadedModel
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.models.vocabulary import vocabulary_hash, vocabulary_size

OnExit = Callable[[int, Tensor], None]
AfterExit = Callable[[int, float], None]
OnStates = Callable[[Tensor], None]
Check = Callable[[], None]
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
            StaticBackend(loaded, head)
            if self.backend == "static"
            else EagerBackend(loaded, self.vocab_size)
        )
        self._embedding: Tensor = loaded.model.get_input_embeddings().weight.detach()
        self.device = self._embedding.device

    def open(self, prompt: EncodedPrompt) -> Session:
        """Start a session; nothing is computed before its first ``feed``."""
        return Session(self, prompt, self._backend.new_cache())

    @torch.inference_mode()
    def restore(self, file: str | Path) -> Session:
        """Start a session with what ``Session.save`` has written.

        Raises:
            InvalidInput: the file is damaged, or its contents contradict each other.
            ModelError: it was saved with another model, or another type of numbers.
        """
        saved = SavedSession.read(file, self._fit)
        session = Session(self, saved.prompt, self._backend.filled(saved.keys_values))
        session._tree.cut(saved.keys_values.shape[2])
        if saved.image_features is not None:
            session._image_features = saved.image_features.to(self.device)
        return session

    @cached_property
    def _fit(self) -> Fit:
        """Facts a saved session must agree with; the first call reads all weights."""
        model = self.loaded.model
        config = model.config.get_text_config()
        attention: Any = decoder_parts(model).layers[0].self_attn
        keys = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return Fit(
            fingerprint(model),
            self._embedding.dtype,
            (self.num_layers, 2 * keys, int(attention.head_dim)),
            self.context,
            self.vocab_size,
        )

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
        check: Check = lambda: None,
    ) -> list[Tensor | Exception]:
        """One forward pass over several sessions, of any lengths and numbers of new tokens.

        Args:
            exits_until: exits of deeper layers do not fire.
            after_exit: called as ``after_exit(layer, took_s)`` when every ``on_exit`` of the layer
                has been; ``took_s`` is what the exits there have taken. What it raises ends the
                pass and is raised.
            check: called between two layers. What it raises (``Cancelled``, say) ends the pass and
                is raised. On an accelerator, layers that were given to it before still run.

        Returns:
            For each feed, in order, its logits [last, V], or the exception that ended it: those of
            ``Session.feed`` and ``Session.grow``, or what its ``on_exit`` or ``on_states`` raised.
            Its session is then as it was (a feed behind the trunk drops all nodes, even so); the
            other feeds are not disturbed. When none is left, the pass ends early. If the pass is
            ended as a whole, all its sessions are as they were, likewise.
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
                outcomes = self._pass([running[n] for n in group], exits_until, after_exit, check)
                results.update(zip(group, outcomes, strict=True))
        return [results[number] for number in range(len(feeds))]

    def _place(self, feed: Feed) -> tuple[bool, int]:
        """Return where a feed stands in a pass: those whose attention is batched side by side."""
        new, session = len(feed.ids), feed.session
        before = session.length if feed.parents is None else session.columns
        return not self._backend.side_by_side(session._cache, new, before + new), new

    @torch.inference_mode()
    def _pass(
        self, feeds: Sequence[Feed], exits_until: float, after_exit: AfterExit, check: Check
    ) -> list[Tensor | Exception]:
        embedded = self._embed([token for feed in feeds for token in feed.ids])
        watch = None
        if self._exits is not None and any(layer <= exits_until for layer in self.exit_layers):
            watch = _Watch(feeds, self._exits, exits_until, after_exit)

        def after_layer(layer: int, hidden: Tensor) -> None:
            if watch is not None and layer in self.exit_layers:
                watch.after_layer(layer, hidden)
            if layer < self.num_layers:
                check()

        chunks: list[Chunk] = []
        try:
            row = 0
            for feed in feeds:
                chunks.append(feed.session._begin(feed))
                feed.session._show_images(feed.ids, embedded[row : row + len(feed.ids)])
                row += len(feed.ids)
            outputs = self._backend.forward(chunks, embedded, after_layer)
        except BaseException as error:  # whatever ends the pass, the sessions are as before it
            for feed, chunk in zip(feeds, chunks, strict=False):
                feed.session._undo(chunk)
            if isinstance(error, _NoneLeft):
                assert watch is not None
                return [watch.failed[i] for i in range(len(feeds))]
            raise
        failed = {} if watch is None else watch.failed
        results: list[Tensor | Exception] = []
        for i, (feed, chunk, output) in enumerate(zip(feeds, chunks, outputs, strict=True)):
            if feed.on_states is not None and i not in failed:
                try:
                    feed.on_states(output.states)
                except Exception as error:  # noqa: BLE001 - ends this feed only
                    failed[i] = error
            if i in failed:
                feed.session._undo(chunk)
            elif feed.parents is None:
                feed.session._tree.cut(chunk.end)
            results.append(failed.get(i, output.logits))
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
    """Block until the work queued on ``device`` has finished."""
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

    def __init__(self, engine: Engine, prompt: EncodedPrompt, cache: Any) -> None:
        self._engine = engine
        self._prompt = prompt
        self._tree = TokenTree()
        self._cache = cache
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
        features = None
        if self.length < len(self._prompt.ids) and self._prompt.image_grid_thw is not None:
            self.encode_images()  # the rest of the prompt needs them
            features = self._image_features
        keys_values = torch.cat(self._engine._backend.parts(self._cache, self.length), dim=2)
        SavedSession(keys_values, self._prompt, features).write(file, self._engine._fit)

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
        if feed.parents is not None:
            self._check_growth(feed.ids, feed.parents)
            return
        self._check_room(self.length + len(feed.ids))
        own = self._prompt.ids[self.length : self.length + len(feed.ids)]
        if tuple(feed.ids[: len(own)]) != own:
            raise InvalidInput(
                "the first tokens of a session are its prompt's",
                field="ids",
                remedy="feed prompt.ids first",
            )

    def _check_growth(self, ids: Sequence[int], parents: Sequence[int]) -> None:
        if len(ids) != len(parents):
            raise InvalidInput(f"{len(ids)} ids and {len(parents)} parents", field="parents")
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
        return Chunk(self._cache, start, new, self._positions(start, new), None, feed.keep)

    def _begin_growth(self, parents: Sequence[int], keep: int) -> Chunk:
        before = self._tree.columns
        positions: list[int] = []
        for parent in parents:
            new = parent - before
            positions.append(1 + (positions[new] if new >= 0 else self._position(parent)))
        mask = torch.from_numpy(self._tree.grow(parents, positions))
        return Chunk(self._cache, before, len(parents), torch.tensor(positions), mask, keep)

    def _undo(self, chunk: Chunk) -> None:
        """Forget the columns of a chunk whose pass has failed."""
        self._tree.shrink(chunk.start)
        self._engine._backend.cut(self._cache, chunk.start)

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
        """Return the position of a column, the largest of M-RoPE's three."""
        if column >= self.length:
            return self._tree.position(column)
        own = self._prompt.position_ids
        if own is None or column >= len(self._prompt.ids):
            return column + self._prompt.position_delta
        return int(own[:, column].max())

    @torch.inference_mode()
    def encode_images(self) -> None:
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
        prompt_ids, start = self._prompt.ids, self.length  # nodes stand behind the whole prompt
        if self._prompt.image_grid_thw is None or start >= len(prompt_ids):
            return
        self.encode_images()
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
