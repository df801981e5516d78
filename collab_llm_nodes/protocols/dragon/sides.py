"""Sides made as their configuration says, and measured before anyone waits for them."""

from __future__ import annotations

import logging
from pathlib import Path

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.knowledge.store import Store
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.protocols.dragon.generation import ModelSide
from collab_llm_nodes.protocols.dragon.index import Index
from collab_llm_nodes.protocols.dragon.messages import Line
from collab_llm_nodes.protocols.dragon.profiler import measure_passes
from collab_llm_nodes.protocols.dragon.side_settings import SideConfig

log = logging.getLogger(__name__)

_DUMMY = "How long does a pass take?"
_OFFLINE_TOKENS = 8
"""Length of the dummy answer that is timed at the start: enough for a line, and seconds at most."""


def load_side(model: ModelConfig, config: SideConfig) -> tuple[ModelSide, Index | None]:
    """Load a model and open its documents; those without vectors get them now.

    Returns:
        The side, and the index of its documents; None if it has no store.

    Raises:
        ModelError: the model cannot be loaded.
        ConfigError: the store's vectors are those of another encoder.
        Unavailable: the store cannot be read.
    """
    engine = Engine(load(model))
    engine.warm_up()
    store = Store(Path(config.store).expanduser(), config.limits) if config.store else None
    side = ModelSide(engine, store, config)
    if store is None:
        return side, None
    return side, Index(store, side.layout, side.encoder, config, side.caches)


def measured(side: ModelSide) -> Line:
    """Return the line of the side's passes (offline stage of section 5.2).

    The passes end where the context is full.
    """
    decoder = side.decoder(_DUMMY, 2)
    try:
        tokens = min(_OFFLINE_TOKENS, decoder.room)
        line = measure_passes(decoder, tokens, side.info.vocab_size)
    finally:
        decoder.close()
    log.info("a pass takes %.1f ms after %d tokens", 1e3 * line.at(tokens), tokens)
    return line.line
