"""A model in this process for many sessions: feed, read logits, roll back, grow token trees.

An :class:`Engine` owns nothing per session and a :class:`Session` shares nothing with another, so
several threads may each drive their own sessions on one engine.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from collab_llm_nodes.engine.backend import Backend, Heads, Output, Rows
from collab_llm_nodes.engine.device import Upload, round_up, stopwatch, synchronize
from collab_llm_nodes.engine.eager import EagerBackend
from collab_llm_nodes.engine.eager_cache import refuse_saving
from collab_llm_nodes.engine.exits import ExitScorer, PassExits
from collab_llm_nodes.engine.interface import AfterExit, Check, Feed, OnExit
from collab_llm_nodes.engine.kernels import Head
from collab_llm_nodes.engine.layer_loop import choose_layer_loop
from collab_llm_nodes.engine.pictures import divided, widened
from collab_llm_nodes.engine.saved import Fit, SavedSession
from collab_llm_nodes.engine.self_check import check_steps
from collab_llm_nodes.engine.session import Session, begin_pass, mark, no_memory, undo
from collab_llm_nodes.engine.static import StaticBackend
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.models.architectures import (
    attention_windows,
    context_length,
    decoder_parts,
    deepstack_levels,
    is_recurrent,
)
from collab_llm_nodes.models.devices import free_bytes, lacks_memory
from collab_llm_nodes.models.fingerprint import fingerprint
from collab_llm_nodes.models.footprint import column_bytes, pass_bytes
from collab_llm_nodes.models.loading import LoadedModel
from collab_llm_nodes.models.pictures import Picture
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt, encode, scaled_size
from collab_llm_nodes.models.vocabulary import end_tokens

log = logging.getLogger(__name__)

_WARM_PROMPT = 64
_WARM_ROWS = (1, 2, 5, 9)  # of drafts of 0, 1, 4 and 8 tokens
_CACHES_SHARE = 0.9  # of the free memory, which comes in pieces, and others use the device as well


def grows_trees(loaded: LoadedModel, *, eager: bool) -> bool:
    """Return True if a session's nodes may branch.

    Recurrent states do not, and transformers' forward pass only without sliding windows.
    """
    narrow = eager and any(attention_windows(loaded.model))
    return not (narrow or is_recurrent(loaded.model.config.get_text_config()))


class Engine:
    """One loaded model and its early exits.

    Args:
        candidates: score exits only over candidates (see ``exits``), of which so many per position
            are kept from exit to exit; other logits are -inf. 0 scores the whole vocabulary. For
            large vocabularies, where the head costs more than the layers between two exits.
        eager: run the transformers forward, also where the hand-written loop supports the model.
        paged: as for ``layer_loop.choose_layer_loop``.

    Raises:
        ModelError: a model that encodes pictures by its own code answers otherwise in steps.

    Attributes:
        vocab_size: columns of all logits: the tokenizer's size, without padding rows, and without
            tokens that the model has no rows for.
        eos: end tokens.
        num_layers: decoder layers.
        context: tokens a session can hold.
        exit_layers: exits that fire, counted in layers done.
        eager: the transformers forward runs the model.
        recurrent: some layers have recurrent states, see ``eager_cache.RecurrentCache``.
        grows_trees: nodes may branch. Recurrent states do not, and transformers' forward pass only
            where no layer has a sliding window.
        device: the model's.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        candidates: int = 0,
        eager: bool = False,
        paged: bool | None = None,
    ) -> None:
        self.loaded = loaded
        self.vocab_size = loaded.vocab_size
        self.vocabulary = loaded.vocabulary
        self.eos = end_tokens(loaded.model.generation_config, loaded.tokenizer, self.vocab_size)
        self.context = context_length(loaded.model.config.get_text_config())
        parts = decoder_parts(loaded.model)
        head = Head(parts, self.vocab_size)
        self.num_layers = len(parts.layers)
        self.exit_layers = loaded.adapters.layers if loaded.adapters is not None else ()
        self._exits = (
            ExitScorer(head, loaded.adapters, candidates) if loaded.adapters is not None else None
        )
        self.eager = eager or not StaticBackend.supports(loaded)
        self.recurrent = is_recurrent(loaded.model.config.get_text_config())
        self.grows_trees = grows_trees(loaded, eager=self.eager)
        self._backend = self._make_backend(head, paged)
        self._embedding: Tensor = loaded.model.get_input_embeddings().weight.detach()
        self.device = self._embedding.device
        self._levels = deepstack_levels(loaded.model.config)
        text = loaded.model.config.get_text_config()
        self._column_bytes = column_bytes(text, self._embedding.dtype)
        if loaded.processor is not None:
            check_steps(self)
            log.warning(
                "%s sees by transformers' own code: one session at a time, none of them saved; no"
                " stages%s",
                loaded.config.path,
                "" if self.grows_trees else "; no token trees",
            )

    def _make_backend(self, head: Head, paged: bool | None) -> Backend:
        if self.eager:
            return EagerBackend(self.loaded, self.vocab_size)
        return choose_layer_loop(self.loaded, head, self.exit_layers, paged)

    def open(self, prompt: EncodedPrompt, expected: int = 0) -> Session:
        """Start a session, see ``DecodingEngine.open``."""
        return Session(self, prompt, self._backend.new_cache(expected))

    @torch.inference_mode()
    def restore(self, file: str | Path) -> Session:
        """Start a session from a file of ``Session.save``.

        Raises:
            InvalidInput: the file is damaged, or its contents contradict each other.
            ModelError: it was saved with another model, or another type of numbers; or the model
                has recurrent states.
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
        if self.recurrent:
            refuse_saving()
        heads = Heads.of(self.loaded.model)
        return Fit(
            fingerprint(self.loaded.model),
            self._embedding.dtype,
            (self.num_layers, 2 * heads.key, heads.dim),
            (1 + self._levels) * self._embedding.shape[1],
            self.context,
            self.vocab_size,
            self.loaded,
        )

    def warm_up(self, on_exit: OnExit = lambda layer, logits: None) -> None:
        """Run passes of the usual shapes, see ``ServingEngine.warm_up``."""
        self._backend.capture()
        sessions = [self.open(self._sample()) for _ in range(2)]
        first = list(sessions[0].prompt.ids) or [0] * _WARM_PROMPT
        passes = [[Feed(session, first, on_exit, 1) for session in sessions]]
        for rows in _WARM_ROWS:
            feeds = [Feed(session, [0] * rows, on_exit) for session in sessions]
            passes += [feeds[:1], feeds]
        for feeds in passes:
            for result in self.run(feeds):
                if isinstance(result, Exception):
                    raise result
        if self.grows_trees:
            last = sessions[0].length - 1
            sessions[0].grow([0, 0, 0], [last, last, last + 1])
        for session in sessions:
            session.close()
        synchronize(self.device)

    def _sample(self) -> EncodedPrompt:
        """Return a prompt with a camera's picture; an empty one for a model that sees none."""
        if not self.loaded.sees:
            return EncodedPrompt(())
        width, height = scaled_size(640, 480, self.loaded, "images")
        picture = Picture(width, height, bytes(3 * width * height))
        prompt = encode(Prompt("Go on.", (b"",), (picture,)), self.loaded)
        room = self.context - len(prompt.ids)
        return prompt if room > 2 * sum(_WARM_ROWS) else EncodedPrompt(())

    def cache_bytes(self, tokens: int) -> int:
        """Return the bytes that a session of so many tokens takes."""
        return (
            round_up(tokens, self._backend.block) * self._column_bytes + self._backend.session_bytes
        )

    def cache_room(self, *, rows: int, logits: int, pixels: int, share: float = 1.0) -> float:
        """Return the bytes that are free for sessions, see ``ServingEngine.cache_room``."""
        config, dtype = self.loaded.model.config, self._embedding.dtype
        used = pass_bytes(
            config, dtype, rows=rows, logits=logits, columns=self.context, pixels=pixels
        )
        free = free_bytes(self.device) - used - self._backend.scratch_bytes
        return self._backend.keep_room(max(0.0, share * _CACHES_SHARE * free))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens`` without special ones."""
        return self.loaded.decode(tokens)

    def close(self) -> None:
        """Take the exits off the model, which others may go on using."""
        self._exits = None
        self._backend.close()

    def run(
        self,
        feeds: Sequence[Feed[Session]],
        *,
        exits_until: float = math.inf,
        after_exit: AfterExit = lambda layer, took: None,
        check: Check | None = None,
    ) -> list[Tensor | Exception]:
        """Run one forward pass over several sessions, of any lengths and numbers of new tokens.

        Args:
            exits_until: exits of deeper layers do not fire.
            after_exit: called as ``after_exit(layer, took)`` when every ``on_exit`` of the layer
                has been called; ``took()`` waits until their logits are there, and returns the
                seconds that they have taken. An exception it raises ends the pass and is raised.
            check: called between two layers, in a captured pass (``cuda.py``) at its exits only.
                An exception it raises (such as ``Cancelled``) ends the pass and is raised. On an
                accelerator, layers queued before still run.

        Returns:
            For each feed, in order, its logits [last, V], or the exception that ended it: those of
            ``Session.feed`` and ``Session.grow``, or one of its ``on_exit`` or ``on_states``.
            Its session is then as it was (a feed after the trunk drops all nodes, even so); the
            other feeds are not disturbed. When none is left, the pass ends early. If the pass is
            ended as a whole, all its sessions are as they were, likewise.

            A pass for which there is no memory is divided into halves, so that only a session that
            does not even fit alone has no result but an ``Unavailable``.
        """
        results: dict[int, Tensor | Exception] = {}
        running: list[int] = []
        sessions: set[int] = set()
        for number, feed in enumerate(feeds):
            try:
                feed.session._check(feed, self, again=id(feed.session) in sessions)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is its feed's result
                results[number] = error
                continue
            sessions.add(id(feed.session))
            if feed.ids:
                running.append(number)
            else:
                results[number] = torch.empty(0, self.vocab_size, device=self.device)
        before = {number: mark(feeds[number].session) for number in running}
        waiting = [running] if self._backend.batches else [[number] for number in running]
        try:
            while waiting:
                group = waiting.pop(0)
                if not group:
                    continue
                try:
                    outcomes = self._pass([feeds[n] for n in group], exits_until, after_exit, check)
                    results.update(zip(group, outcomes, strict=True))
                    continue
                except Exception as error:
                    if not lacks_memory(error):
                        raise
                    lack = no_memory(error)
                gc.collect()  # only now does nothing refer to the failed pass any more,
                undo(
                    before[n] for n in group
                )  # and there is memory to shrink the caches that had grown for it
                half = len(group) // 2
                if half:
                    waiting[:0] = [group[:half], group[half:]]
                else:
                    results[group[0]] = lack
        except BaseException:  # whatever ends one pass undoes those before it, too
            undo(before.values())
            raise
        return [results[number] for number in range(len(feeds))]

    @torch.inference_mode()
    def _pass(
        self,
        feeds: Sequence[Feed[Session]],
        exits_until: float,
        after_exit: AfterExit,
        check: Check | None,
    ) -> list[Tensor | Exception]:
        order, chunks = begin_pass(self._backend, feeds)
        feeds = [feeds[i] for i in order]
        upload = Upload(self.device)
        ids = upload.add([token for feed in feeds for token in feed.ids])
        plan = self._backend.plan(chunks, upload)
        watch: _Watch | None = None
        if self._exits is not None and any(layer <= exits_until for layer in self.exit_layers):
            watch = _Watch(feeds, self._exits, exits_until, after_exit, upload)

        def after_layer(layer: int, hidden: Tensor) -> None:
            if watch is not None and layer in self.exit_layers:
                watch.after_layer(layer, hidden)
            if check is not None:
                check()

        rows = self._rows(feeds, ids())
        watched = check is not None or (watch is not None and watch.listening)
        failed: dict[int, Exception] = {} if watch is None else watch.failed
        try:
            outputs = self._backend.forward(plan, rows, after_layer if watched else None)
        except _NoneLeft:
            none = rows.embedded[:0]
            outputs = [Output(none, none)] * len(feeds)  # all have failed
        results: dict[int, Tensor | Exception] = {}
        for i, (feed, chunk, output) in enumerate(zip(feeds, chunks, outputs, strict=True)):
            if feed.on_states is not None and i not in failed:
                try:
                    feed.on_states(output.states)
                except Exception as error:  # noqa: BLE001 - ends this feed only
                    failed[i] = error
            if i in failed:
                feed.session._undo(feed.session.length, chunk.start)
            elif feed.parents is None:
                feed.session._tree.cut(chunk.end)
            results[order[i]] = failed.get(i, output.logits)
        return [results[i] for i in range(len(feeds))]

    def _rows(self, feeds: Sequence[Feed[Session]], ids: Tensor) -> Rows:
        """Return the rows of ids [rows] of all feeds, with their pictures."""
        embedded = self._embed(feeds, ids)
        shown = any(feed.session._in_pictures for feed in feeds)
        wide = widened(embedded, self._levels if shown else 0)
        row = 0
        for feed in feeds:
            feed.session._show_images(feed.ids, wide, row)
            row += len(feed.ids)
        return divided(wide, embedded.shape[1])._replace(ids=ids)

    def _embed(self, feeds: Sequence[Feed[Session]], ids: Tensor) -> Tensor:
        """Return the embeddings [rows, hidden] of ids [rows] of all feeds."""
        if not self.eager:
            return torch.embedding(self._embedding, ids)
        embedded: Tensor = self.loaded.model.get_input_embeddings()(ids)  # some scale them
        return embedded


class _NoneLeft(Exception):
    """All feeds of the pass have failed."""


class _Watch:
    """Calls the feeds' ``on_exit`` during a pass and keeps their exceptions.

    Attributes:
        listening: feeds whose ``on_exit`` is still called.
        failed: exceptions by feed.
    """

    def __init__(
        self,
        feeds: Sequence[Feed[Session]],
        scorer: ExitScorer,
        until: float,
        after_exit: AfterExit,
        upload: Upload,
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
                upload,
            )

    def after_layer(self, layer: int, hidden: Tensor) -> None:
        if not self.listening or layer > self._until:
            return
        took = stopwatch(hidden.device)
        logits = self._exits.logits(layer, hidden, self.listening)
        for i, own in zip(tuple(self.listening), logits, strict=True):
            on_exit = self._feeds[i].on_exit
            assert on_exit is not None
            try:
                on_exit(layer, own)
            except Exception as error:  # noqa: BLE001 - ends this feed only
                # Its traceback would keep this pass's tensors until garbage is collected.
                expected = isinstance(error, CollabError)
                self.failed[i] = error.with_traceback(None) if expected else error
                self.listening.remove(i)
        self._after_exit(layer, took())
        if len(self.failed) == len(self._feeds):
            raise _NoneLeft
