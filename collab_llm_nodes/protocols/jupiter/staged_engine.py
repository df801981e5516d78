"""A model over stage workers: a ``ServingEngine`` whose sessions are lanes of a pipeline.

A verifier's target may be too large for one machine. A pass over several sessions is one pass
through the stages. When a worker is lost, the sessions are fed again on the chain that takes its
place, within the pass that noticed the loss.

Of a vision model, this process holds the vision encoder, and no worker does. It encodes the
pictures of each prompt once. Their features go to the first worker with their placeholders:

    pictures ──▶ vision encoder ──features──▶ embedding, layers ══states══▶ layers, LM head
                 (this process)               (first worker)                (last worker)
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from collab_llm_nodes.engine.interface import AfterExit, Feed, OnExit
from collab_llm_nodes.errors import (
    CollabError,
    ConfigError,
    InvalidInput,
    ModelError,
    ProtocolError,
)
from collab_llm_nodes.models.architectures import first_layers
from collab_llm_nodes.models.loading import ModelConfig, TargetConfig
from collab_llm_nodes.models.partial import load_vision, read_facts
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.protocols.jupiter.chain import Chain, WorkerLost
from collab_llm_nodes.protocols.jupiter.generation import MOST_LOSSES
from collab_llm_nodes.protocols.jupiter.messages import Result, Step, Want
from collab_llm_nodes.protocols.jupiter.pictures import ShownPrompt, show
from collab_llm_nodes.protocols.jupiter.pipeline import (
    Pipeline,
    PipelineConfig,
    Plan,
    check_model,
    equal_parts,
)

_PASS_S = 60.0  # deadline of a pass, including the arrangement of another chain
_PIECE = 512
"""Tokens per pass that feeds a session again: hidden states of more could exceed a message."""


class StagedEngine:
    """See the module docstring. ``run`` is for one thread at a time.

    Args:
        model: folder with the tokenizer and the vision encoder; no layer is loaded.
        stages: the workers.
        sessions: most sessions that hold a cache at a time.

    Attributes:
        bytes: of the weights held here, those of the vision encoder.
        placeholder: id of the tokens that stand for pictures; None for a text model.

    Raises:
        ConfigError: fewer lanes than sessions, early exits, or workers with another model.
        ModelError: the model cannot be divided, or its files cannot be read.
        CollabError: as ``Pipeline.chain``.
    """

    exit_layers: tuple[int, ...] = ()
    grows_trees = False
    device = torch.device("cpu")  # of logits

    def __init__(
        self,
        model: ModelConfig,
        stages: PipelineConfig,
        *,
        sessions: int,
        plan: Plan | None = None,
    ) -> None:
        _check_settings(model, stages, sessions)
        facts = read_facts(model)
        self.loaded, self.bytes = load_vision(facts)
        self.placeholder = facts.placeholder
        self.vocab_size, self.vocabulary = facts.vocab_size, facts.vocabulary
        self.eos, self.num_layers, self.context = facts.eos, facts.num_layers, facts.context
        equal = partial(equal_parts, first=first_layers(facts.architecture))
        self.pipeline = Pipeline(stages, plan or equal)
        try:
            check_model(self.pipeline.chain(time.monotonic() + _PASS_S).info, facts)
        except BaseException:
            self.pipeline.close()
            raise

    def open(self, prompt: EncodedPrompt, expected: int = 0) -> StagedSession:
        """Start a session, which takes a lane when it is first fed."""
        return StagedSession(self, prompt)

    def warm_up(self, on_exit: OnExit | None = None) -> None:
        """Do nothing: each chain has run trial passes."""

    def cache_bytes(self, tokens: int) -> int:
        """Return 0: the workers hold the caches."""
        return 0

    def cache_room(self, *, rows: int, logits: int, pixels: int, share: float = 1.0) -> float:
        """Return infinity: the number of lanes is the limit."""
        return math.inf

    def run(
        self,
        feeds: Sequence[Feed[StagedSession]],
        *,
        exits_until: float = math.inf,
        after_exit: AfterExit = lambda layer, took: None,
    ) -> list[Tensor | Exception]:
        """Run one pass over several sessions, as ``Engine.run``; there are no exits."""
        results: dict[int, Tensor | Exception] = {}
        running: dict[int, Feed[StagedSession]] = {}
        for number, feed in enumerate(feeds):
            try:
                feed.session._check(feed)
                running[number] = feed
            except CollabError as error:
                results[number] = error
        outcomes = self._pass(list(running.values())).outcomes
        for (number, feed), outcome in zip(running.items(), outcomes, strict=True):
            feed.session._ids += feed.ids
            rows = np.frombuffer(outcome.logits, "<f4").reshape(-1, self.vocab_size)
            results[number] = torch.from_numpy(rows.copy())
        return [results[number] for number in range(len(feeds))]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens`` without special ones."""
        return self.loaded.decode(tokens)

    def close(self) -> None:
        """Release the workers."""
        self.pipeline.close()

    def _pass(self, feeds: Sequence[Feed[StagedSession]]) -> Result:
        """Run a pass; a chain that is lost is replaced."""
        if not feeds:
            return Result(0, ())
        due = time.monotonic() + _PASS_S
        losses = 0
        while True:
            chain = self.pipeline.chain(due)
            try:
                for feed in feeds:
                    feed.session._feed_again(chain, due)
                parts = [
                    feed.session._part(feed.session.length, feed.ids, feed.keep) for feed in feeds
                ]
                steps = [step for step, _ in parts]
                return chain.run(steps, due, torch.cat([features for _, features in parts]))
            except WorkerLost:
                losses += 1
                if losses > MOST_LOSSES:
                    raise


def _check_settings(model: ModelConfig, stages: PipelineConfig, sessions: int) -> None:
    """Refuse settings that stages do not support."""
    if isinstance(model, TargetConfig) and (model.exits is not None or model.exit_layers):
        raise ConfigError(
            "a model over stages has no early exits",
            field="model.exits",
            remedy="leave exits and exit_layers unset, or stages.workers empty",
        )
    if stages.lanes < sessions:
        raise ConfigError(
            f"{stages.lanes} lanes for {sessions} sessions",
            field="stages.lanes",
            remedy="as many as limits.max_sessions",
        )


class StagedSession:
    """One prompt's lane: a ``DecodingSession`` without trees."""

    own_bytes = 0  # the workers hold the caches

    def __init__(self, engine: StagedEngine, prompt: EncodedPrompt) -> None:
        self._engine = engine
        self._prompt = prompt
        self._shown: ShownPrompt | None = None  # the prompt, once its pictures are encoded
        self._ids: list[int] = []
        self._lane: int | None = None
        self._chain: Chain | None = None  # the one that holds the lane's keys and values
        self._closed = False

    @property
    def length(self) -> int:
        """Tokens that the caches hold."""
        return len(self._ids)

    @length.setter
    def length(self, n: int) -> None:
        if not 0 <= n <= len(self._ids):
            raise ProtocolError(f"cannot roll back from {len(self._ids)} to {n}", field="length")
        del self._ids[n:]  # the stages roll back with the next pass

    @property
    def columns(self) -> int:
        """Return ``length``: there are no nodes."""
        return len(self._ids)

    def feed(
        self, ids: Sequence[int], on_exit: OnExit | None = None, last: int | None = None
    ) -> Tensor:
        """Append ``ids`` in a pass of its own, as ``Session.feed``."""
        (result,) = self._engine.run([Feed(self, ids, None, last)])
        if isinstance(result, Exception):
            raise result
        return result

    def grow(self, ids: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Raise ModelError: lanes of servers grow no trees."""
        raise ModelError("token trees over stages", remedy="draft one continuation only")

    def retain(self, column: int) -> dict[int, int]:
        """Raise ModelError: there are no nodes."""
        raise ModelError("token trees over stages", remedy="draft one continuation only")

    def encode_images(self) -> None:
        """Encode the prompt's images now, as ``Session.encode_images``.

        Raises:
            ModelError: the features are not finite, or ``stages.states`` cannot hold them.
        """
        if self._shown is None:
            engine = self._engine
            form = engine.pipeline.config.states
            self._shown = show(engine.loaded, self._prompt, engine.placeholder, form)
            self._prompt = self._shown.prompt

    def close(self) -> None:
        """Give the lane back."""
        self._closed = True
        self._shown = None
        self._ids.clear()
        lane, self._lane = self._lane, None
        if lane is not None:
            self._engine.pipeline.release_lanes([lane])

    def _check(self, feed: Feed[StagedSession]) -> None:
        """Refuse a feed that cannot run; take a lane for one that can, and read its pictures."""
        if self._closed:
            raise ProtocolError("the session is closed", remedy="open a new one")
        engine = self._engine
        if feed.parents is not None or not feed.ids or not 0 <= feed.keep <= len(feed.ids):
            raise InvalidInput("a session over stages takes chains of tokens", field="ids")
        if not all(0 <= token < engine.vocab_size for token in feed.ids):
            raise InvalidInput("a token outside the vocabulary", field="ids")
        self._prompt.check_tokens(self.length, feed.ids)
        if self.length + len(feed.ids) > engine.context:
            raise InvalidInput(
                f"{self.length + len(feed.ids)} tokens, the model reads {engine.context}",
                field="ids",
                remedy="lower max_tokens or shorten the prompt",
            )
        self.encode_images()
        if self._lane is None:
            (self._lane,) = engine.pipeline.acquire_lanes(1, time.monotonic())

    def _feed_again(self, chain: Chain, due: float) -> None:
        """Feed the tokens again if ``chain`` has replaced another one."""
        if self._chain is chain:
            return
        for start in range(0, self.length, _PIECE):
            step, features = self._part(start, self._ids[start : start + _PIECE])
            chain.run([step], due, features)
        self._chain = chain

    def _part(self, start: int, ids: Sequence[int], keep: int = 0) -> tuple[Step, Tensor]:
        """Return the step that feeds ``ids`` at ``start``, and the features of its pictures."""
        assert self._lane is not None
        assert self._shown is not None
        want = Want.LOGITS if keep else Want.NOTHING
        step = self._shown.place(Step(self._lane, start, tuple(ids), want=want, rows=keep))
        return step, self._shown.features_of(step)
