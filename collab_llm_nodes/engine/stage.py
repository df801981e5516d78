"""Some layers of a model: token ids or hidden states in, hidden states or logits out.

A model too large for one device is divided into stages, each in a process of its own. Each loads
only its own tensors and holds the keys and values of its own layers. No stage holds a vision
encoder: the process that drives the stages has it, and gives the first one the features of
pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from collab_llm_nodes.engine.backend import Chunk, Rows
from collab_llm_nodes.engine.device import Upload
from collab_llm_nodes.engine.interface import OnStates
from collab_llm_nodes.engine.kernels import Head
from collab_llm_nodes.engine.layer_loop import choose_layer_loop
from collab_llm_nodes.engine.pictures import divided, insert_features, widened
from collab_llm_nodes.engine.session import CachedSession, begin_pass, mark, undo
from collab_llm_nodes.engine.static import StaticBackend
from collab_llm_nodes.errors import InvalidInput, ModelError, ProtocolError
from collab_llm_nodes.models.architectures import (
    context_length,
    decoder_parts,
    deepstack_levels,
    first_layers,
)
from collab_llm_nodes.models.devices import find_device
from collab_llm_nodes.models.loading import LoadedModel, ModelConfig
from collab_llm_nodes.models.partial import CheckpointFacts, load_layers


def check_stages(facts: CheckpointFacts) -> None:
    """Refuse a model whose stages could not be loaded here; no weight is read.

    Raises:
        ModelError: as :class:`Stage`, or there is no such device.
    """
    find_device(facts.config.device)
    _check_attention(facts.without_weights())


def _check_attention(loaded: LoadedModel) -> None:
    if not StaticBackend.supports(loaded):
        raise ModelError(
            "this model's attention cannot be divided into stages",
            field="path",
            remedy="take a model without dynamic rotations and special scores",
        )


def _check_deepstack(levels: int, first: int, last: int) -> None:
    """Refuse a stage that ends before all features of pictures have been added."""
    if first < levels and not (first == 0 and levels <= last):
        raise ModelError(
            f"pictures are added after each of the first {levels} layers (DeepStack), and stages"
            f" hand on hidden states only: layers {first} to {last} cannot be a stage",
            field="layers",
            remedy=f"give the first stage at least {levels} layers",
        )


class Stage:
    """Layers ``first`` to ``last - 1`` of a model, counted from 0.

    On CUDA they run over pages, launched one by one.

    Args:
        paged: as for ``layer_loop.choose_layer_loop``.

    Attributes:
        first, last: as given.
        bytes: of the weights that have been loaded.
        num_layers: of the whole model.
        context: tokens a session can hold.
        parts: its model; those of other stages are missing in it.
        head: LM head; of use in the last stage only.
        width: of a hidden state.
        feature_width: of a row of picture features, longer with DeepStack.
        takes_ids: it is the first stage; the others take hidden states.
        gives_logits: it is the last stage; the others give hidden states.
        placeholder: id of the tokens that stand for pictures; None: the model reads text only.

    Raises:
        ConfigError: there are no such layers.
        ModelError: as ``models.partial.load_layers``; its attention is none that the static backend
            supports; or DeepStack would cross to another stage.
    """

    def __init__(
        self, config: ModelConfig, first: int, last: int, *, paged: bool | None = None
    ) -> None:
        loaded, self.num_layers, self.bytes = load_layers(config, first, last)
        _check_attention(loaded)
        self._levels = deepstack_levels(loaded.model.config)
        _check_deepstack(first_layers(loaded.model.config), first, last)
        self.first, self.last = first, last
        self.takes_ids, self.gives_logits = first == 0, last == self.num_layers
        self.vocab_size = loaded.vocab_size
        model = loaded.model
        self.placeholder: int | None = getattr(model.config, "image_token_id", None)
        self.context = context_length(model.config.get_text_config())
        self.parts = decoder_parts(model)
        self.width = self.parts.hidden_size
        self.feature_width = (1 + self._levels) * self.width
        self.head = Head(self.parts, self.vocab_size)
        self._backend = choose_layer_loop(loaded, self.head, paged=paged)
        if self.takes_ids:
            self._embedding: Tensor = model.get_input_embeddings().weight.detach()
        self.device = self._backend.device

    def open(self) -> StageSession:
        """Start a session; nothing is computed before it is fed."""
        return StageSession(self, self._backend.new_cache())

    @torch.inference_mode()
    def run(self, feeds: Sequence[StageFeed]) -> list[Tensor]:
        """Run one pass over several sessions.

        Returns:
            Of each feed, in order, hidden states [new, hidden_size], or logits [last, V] of the
            last stage.

        Raises:
            InvalidInput: ids outside the vocabulary, states of another shape, or more than fit.
            ProtocolError: a session is closed, is here twice, or belongs to another stage. If
                anything is raised, all sessions are as they were, but that a feed after the trunk
                drops all nodes as soon as layers run.
        """
        if len({id(feed.session) for feed in feeds}) < len(feeds):
            raise ProtocolError("a session takes part once in a pass")
        for feed in feeds:
            feed.session._check(feed, self)
        if not feeds:
            return []
        outputs: dict[int, Tensor] = {}
        before = [mark(feed.session) for feed in feeds]
        try:
            order, chunks = begin_pass(self._backend, feeds)
            upload = Upload(self.device)
            plan = self._backend.plan(chunks, upload)
            rows = self._rows([feeds[i] for i in order], upload)
            hidden = self._backend.hidden(plan, rows, None, enter=self.takes_ids)
            if self.gives_logits:
                found = self._backend.outputs(hidden, chunks)
                for i, output in zip(order, found, strict=True):
                    on_states = feeds[i].on_states
                    if on_states is not None:
                        on_states(output.states)
                    outputs[i] = output.logits
            else:
                outputs.update(zip(order, hidden.split([c.new for c in chunks]), strict=True))
        except BaseException:  # whatever ends the pass, the sessions are as before it
            undo(before)
            raise
        for i, chunk in zip(order, chunks, strict=True):
            if feeds[i].parents is None:
                feeds[i].session._tree.cut(chunk.end)
        return [outputs[i] for i in range(len(feeds))]

    def _rows(self, feeds: Sequence[StageFeed], upload: Upload) -> Rows:
        """Return the input of the layers for all feeds."""
        if not self.takes_ids:
            states = [feed.rows for feed in feeds if isinstance(feed.rows, Tensor)]
            return Rows(torch.cat(states).to(self.device, self._backend.dtype))
        ids = upload.add([token for feed in feeds for token in feed.rows])
        shown = any(feed.features is not None for feed in feeds)
        embedded = functional.embedding(ids(), self._embedding)
        wide = widened(embedded, self._levels if shown else 0)
        for feed, own in zip(feeds, wide.split([len(feed.rows) for feed in feeds]), strict=True):
            if feed.features is not None and not isinstance(feed.rows, Tensor):
                assert self.placeholder is not None
                features = feed.features.to(self.device, self._backend.dtype)
                insert_features(features, feed.rows, self.placeholder, own)
        return divided(wide, self.width)


@dataclass(frozen=True)
class StageFeed:
    """New tokens of one session in a pass of a stage.

    Attributes:
        rows: token ids of the first stage, hidden states [new, hidden_size] of any other.
        last: the last stage gives logits after so many of the last tokens; None: after all.
        parents: as ``session.Feed.parents``.
        on_states: as ``session.Feed.on_states``; of the last stage only.
        positions: of the first token, where the others follow it, or M-RoPE's [3, new]. None: the
            columns. Of a tree: of a node that follows the trunk.
        features: [k, feature_width] of the first k picture placeholders among the ids; of the first
            stage only.
    """

    session: StageSession
    rows: Sequence[int] | Tensor
    last: int | None = None
    parents: Sequence[int] | None = None
    on_states: OnStates | None = None
    positions: int | Tensor | None = None
    features: Tensor | None = None


class StageSession(CachedSession):
    """Keys and values of a stage's layers. Not for two threads at a time.

    ``length``, trees and forks are as those of ``session.Session``, so that the same calls can be
    made on the sessions of all stages.
    """

    def __init__(self, stage: Stage, cache: Any) -> None:
        super().__init__(cache)
        self._stage = stage
        self._shift = 0  # position of a column of the trunk minus its index, after the pictures

    def feed(self, rows: Sequence[int] | Tensor, last: int | None = None) -> Tensor:
        """Append tokens to the trunk, see ``Stage.run``; nodes are dropped."""
        return self._stage.run([StageFeed(self, rows, last)])[0]

    def grow(self, rows: Sequence[int] | Tensor, parents: Sequence[int]) -> Tensor:
        """Append nodes to the tree, see ``session.Session.grow``."""
        return self._stage.run([StageFeed(self, rows, None, parents)])[0]

    @torch.inference_mode()
    def fork(self) -> StageSession:
        """Return a session with the same trunk, which is held once; nodes stay with this one."""
        twin = StageSession(self._stage, self._forked())
        twin._shift = self._shift
        twin._tree.cut(self.length)
        return twin

    def _check(self, feed: StageFeed, stage: Stage) -> None:
        if self._stage is not stage:
            raise ProtocolError("a session takes part in the passes of its own stage")
        self._check_open()
        rows, new = feed.rows, len(feed.rows)
        if not new or not 0 <= (new if feed.last is None else feed.last) <= new:
            raise InvalidInput(f"{new} tokens, logits after {feed.last}", field="ids")
        if stage.takes_ids:
            if isinstance(rows, Tensor) or not all(0 <= i < stage.vocab_size for i in rows):
                raise InvalidInput("the first stage takes ids of the vocabulary", field="ids")
        elif not isinstance(rows, Tensor) or rows.shape != (new, stage.width):
            raise InvalidInput(f"this stage takes states [new, {stage.width}]", field="states")
        if feed.features is not None:
            self._check_features(rows, feed.features, stage)
        if feed.positions is not None:
            if feed.parents is not None and not isinstance(feed.positions, int):
                raise InvalidInput("positions of a tree follow one another", field="positions")
            self._check_positions(feed.positions, new, stage)
        self._check_place(new, feed.parents, stage.context)

    def _check_features(self, rows: Sequence[int] | Tensor, features: Tensor, stage: Stage) -> None:
        if isinstance(rows, Tensor) or stage.placeholder is None:
            raise InvalidInput("features of pictures, where none are shown", field="features")
        places = sum(token == stage.placeholder for token in rows)
        width = stage.feature_width
        if features.shape[1:] != (width,) or len(features) > places:
            raise InvalidInput(
                f"features {list(features.shape)} for {places} placeholders of width {width}",
                field="features",
            )

    def _check_positions(self, positions: int | Tensor, new: int, stage: Stage) -> None:
        if isinstance(positions, int):
            sound = 0 <= positions <= self.length  # pictures take fewer positions than columns
        else:
            sound = (
                stage.placeholder is not None
                and positions.shape == (3, new)
                and 0 <= int(positions.min()) <= int(positions.max()) < stage.context
            )
        if not sound:
            raise InvalidInput(f"no positions of {new} tokens", field="positions")

    def _begin(self, feed: StageFeed) -> Chunk:
        new = len(feed.rows)
        # All rows go on to the next stage; only the last one may leave some out.
        keep = new if feed.last is None or not self._stage.gives_logits else feed.last
        positions = self.length if feed.positions is None else feed.positions
        if isinstance(positions, int):
            self._shift = positions - self.length
        return self._chunk(new, keep, feed.parents, positions)

    def _position(self, column: int) -> int:
        """Return the position of a column after the pictures, which take fewer positions."""
        found = super()._position(column)
        return found + self._shift if column < self.length else found
