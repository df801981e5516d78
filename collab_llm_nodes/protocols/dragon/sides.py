"""Sides made as their configuration says, and measured before anyone waits for them."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.knowledge.encoders import Encoder
from collab_llm_nodes.knowledge.store import Store
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.protocols.dragon.generation import ModelSide, encoder_of
from collab_llm_nodes.protocols.dragon.index import Index
from collab_llm_nodes.protocols.dragon.messages import Line
from collab_llm_nodes.protocols.dragon.profiler import measure_passes
from collab_llm_nodes.protocols.dragon.side_settings import SideConfig

log = logging.getLogger(__name__)

_OFFLINE_S = 10.0
"""Time for the offline measurement; it may end before a long context is full."""
_LENGTHS = 7


def load_side(model: ModelConfig, config: SideConfig) -> tuple[ModelSide, Index | None]:
    """Load a model and open its documents; those without vectors get them now.

    Returns:
        The side, and the index of its documents; None if it has no store.

    Raises:
        ModelError: the model cannot be loaded.
        ConfigError: the store's vectors are those of another encoder.
        Unavailable: the store cannot be read.
    """
    encoder = encoder_of(config)
    store = Store(Path(config.store).expanduser(), config.limits) if config.store else None
    try:
        if store is not None:
            _check_vectors(store, encoder, config)  # before a model is loaded
        engine = Engine(load(model))
        engine.warm_up()
        side = ModelSide(engine, store, config, encoder)
        if store is None:
            return side, None
        return side, Index(store, side.layout, encoder, config, side.caches)
    except BaseException:
        if store is not None:
            store.close()
        raise


def _check_vectors(store: Store, encoder: Encoder, config: SideConfig) -> None:
    if store.encoder not in ("", encoder.fingerprint):
        name = config.encoder.path or "words"
        raise ConfigError(
            f"the store {config.store} holds vectors of another encoder than {name}",
            field="encoder",
            remedy=f"name that one in encoder.path, or replace the vectors:"
            f" collab-llm knowledge embed {config.store} --encoder {name}",
        )


def measured(side: ModelSide) -> Line:
    """Return the line of the side's passes (offline stage of section 5.2).

    As many documents of random text as are retrieved for a question, each as long as one can be.
    The answer grows until the context is full, or until the time for this is over.

    Raises:
        ConfigError: the context has no room for an answer.
    """
    decoder = side.rehearsal()
    try:
        lengths = sorted({*np.geomspace(1, max(1, decoder.room), _LENGTHS, dtype=int).tolist()})
        if len(lengths) < 2:
            raise ConfigError(
                f"room for {decoder.room} tokens after a document",
                field="side.document_tokens",
                remedy="lower it, or use a model with a longer context",
            )
        line = measure_passes(decoder, lengths, side.info.vocab_size, budget_s=_OFFLINE_S)
    finally:
        decoder.close()
    log.info(
        "a pass takes %.1f ms at the begin of an answer, %.1f ms after %d tokens",
        *(1e3 * line.at(0), 1e3 * line.at(lengths[-1]), lengths[-1]),
    )
    return line.line
