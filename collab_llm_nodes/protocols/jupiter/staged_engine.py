"""A model over stage workers, with what servers use of an ``engine.Engine``.

A verifier's target may be too large for one machine: its sessions are lanes of a pipeline, and a
pass over several sessions is one pass through the stages. When a worker is lost, the sessions are
fed again on the chain that takes its place, within the pass that found it out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from collab_llm_nodes.engine.session import AfterExit, Feed, OnExit
from collab_llm_nodes.errors import Busy, ConfigError, InvalidInput, ProtocolError
from collab_llm_nodes.models.loading import ModelConfig, read_facts
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.models.vocabulary import vocabulary_hash, vocabulary_size
from collab_llm_nodes.protocols.jupiter.chain import Chain, WorkerLost
from collab_llm_nodes.protocols.jupiter.generation import MOST_LOSSES
from collab_llm_nodes.protocols.jupiter.messages import Result, Step, Want
from collab_llm_nodes.protocols.jupiter.pipeline import Pipeline, PipelineConfig, Plan, equal_parts

_PASS_S = 60.0  # for a pass, or for a chain that takes the place of a lost one


class StagedEngine:
    """See the module docstring. ``run`` is for one thread at a time.

    Args:
        model: its folder gives the tokenizer; no weight is loaded.
        stages: the workers.
        sessions: that may hold a cache at a time.

    Raises:
        ConfigError: fewer lanes than sessions; early exits, which need the whole model; or the
            workers hold another model.
        CollabError: as ``Pipeline.chain``.
    """

    exit_layers: tuple[int, ...] = ()
    device = torch.device("cpu")

    def __init__(
        self,
        model: ModelConfig,
        stages: PipelineConfig,
        *,
        sessions: int,
        plan: Plan = equal_parts,
    ) -> None:
        if model.exits is not None or model.exit_layers:
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
        facts = read_facts(model)
        self.loaded = facts.without_weights()
        self.vocab_size = vocabulary_size(facts.tokenizer)
        self.vocabulary = vocabulary_hash(facts.tokenizer)
        self.eos, self.num_layers, self.context = facts.eos, facts.num_layers, facts.context
        self.pipeline = Pipeline(stages, plan)
        try:
            info = self.pipeline.chain(time.monotonic() + _PASS_S).info
            if (info.vocabulary, info.num_layers) != (self.vocabulary, self.num_layers):
                raise ConfigError(
                    f"the workers hold {info.model}, this is {model.path}",
                    field="model.path",
                    remedy="name the model that the workers hold",
                )
        except BaseException:
            self.pipeline.close()
            raise

    def open(self, prompt: EncodedPrompt) -> StagedSession:
        """Start a session; it takes a lane when it is first fed."""
        return StagedSession(self, prompt)

    def run(
        self,
        feeds: Sequence[Feed],
        *,
        exits_until: float = math.inf,
        after_exit: AfterExit = lambda layer, took_s: None,
    ) -> list[Tensor | Exception]:
        """Run one pass over several sessions, as ``Engine.run``; there are no exits."""
        results: dict[int, Tensor | Exception] = {}
        running: dict[int, tuple[StagedSession, Feed]] = {}
        for number, feed in enumerate(feeds):
            session = cast(StagedSession, feed.session)  # the only ones that are opened here
            try:
                session._check(feed)
                running[number] = (session, feed)
            except (InvalidInput, ProtocolError, Busy) as error:
                results[number] = error
        fed = list(running.values())
        for number, outcome in zip(running, self._pass(fed).outcomes, strict=True):
            session, feed = running[number]
            session._ids += feed.ids
            rows = np.frombuffer(outcome.logits, "<f4").reshape(-1, self.vocab_size)
            results[number] = torch.from_numpy(rows.copy())
        return [results[number] for number in range(len(feeds))]

    def close(self) -> None:
        """Let the workers go."""
        self.pipeline.close()

    def _pass(self, fed: Sequence[tuple[StagedSession, Feed]]) -> Result:
        """Run a pass; a chain that is lost is replaced."""
        if not fed:
            return Result(0, ())
        due = time.monotonic() + _PASS_S
        losses = 0
        while True:
            chain = self.pipeline.chain(due)
            try:
                again = [step for session, _ in fed for step in session._again(chain)]
                if again:
                    chain.run(again, due)
                return chain.run([session._step(feed) for session, feed in fed], due)
            except WorkerLost:
                losses += 1
                if losses > MOST_LOSSES:
                    raise


class StagedSession:
    """One prompt's lane, with what servers use of an ``engine.session.Session``."""

    def __init__(self, engine: StagedEngine, prompt: EncodedPrompt) -> None:
        self._engine = engine
        self._ids: list[int] = []
        self._lane: int | None = None
        self._chain: Chain | None = None  # which holds the lane's keys and values
        self._closed = False

    @property
    def length(self) -> int:
        """Tokens that the caches hold."""
        return len(self._ids)

    @length.setter
    def length(self, n: int) -> None:
        if not 0 <= n <= len(self._ids):
            raise ProtocolError(f"cannot roll back from {len(self._ids)} to {n}", field="length")
        del self._ids[n:]  # the stages forget with the next pass

    def feed(
        self, ids: Sequence[int], on_exit: OnExit | None = None, last: int | None = None
    ) -> Tensor:
        """Append ``ids`` in a pass of its own, as ``Session.feed``."""
        (result,) = self._engine.run([Feed(self, ids, None, last)])  # type: ignore[arg-type]
        if isinstance(result, Exception):
            raise result
        return result

    def encode_images(self) -> None:
        """Do nothing: the model reads text only."""

    def close(self) -> None:
        """Give the lane back."""
        self._closed = True
        self._ids.clear()
        lane, self._lane = self._lane, None
        if lane is not None:
            self._engine.pipeline.give_back([lane])

    def _check(self, feed: Feed) -> None:
        """Refuse a feed that cannot run; take a lane for one that can."""
        if self._closed:
            raise ProtocolError("the session is closed", remedy="open a new one")
        engine = self._engine
        if feed.parents is not None or not feed.ids or not 0 <= feed.keep <= len(feed.ids):
            raise InvalidInput("a session over stages takes chains of tokens", field="ids")
        if not all(0 <= token < engine.vocab_size for token in feed.ids):
            raise InvalidInput("a token outside the vocabulary", field="ids")
        if self.length + len(feed.ids) > engine.context:
            raise InvalidInput(
                f"{self.length + len(feed.ids)} tokens, the model reads {engine.context}",
                field="ids",
                remedy="lower max_tokens or shorten the prompt",
            )
        if self._lane is None:
            (self._lane,) = engine.pipeline.take_lanes(1, time.monotonic())

    def _again(self, chain: Chain) -> list[Step]:
        """Return the step that feeds a chain what another has lost, if this one is new."""
        if self._chain is chain:
            return []
        self._chain = chain
        assert self._lane is not None
        return [Step(self._lane, 0, tuple(self._ids))] if self._ids else []

    def _step(self, feed: Feed) -> Step:
        assert self._lane is not None
        want = Want.LOGITS if feed.keep else Want.NOTHING
        return Step(self._lane, self.length, tuple(feed.ids), want=want, rows=feed.keep)
