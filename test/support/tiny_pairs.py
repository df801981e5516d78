"""Pairs of random models for edge-cloud decoding: a target with exits, and three drafts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from tiny_models import tiny_model

from collab_llm_nodes.engine.engine import Engine

DRAFTS: dict[str, Callable[[str], Engine]] = {
    "same": lambda name: Engine(tiny_model(name)),
    "noisy": lambda name: Engine(tiny_model(name, head_noise=0.3)),
    "unrelated": lambda name: Engine(tiny_model(name, 7)),
}


@cache
def target_of(architecture: str) -> Engine:
    """Return the target of the drafts of an architecture."""
    return Engine(tiny_model(architecture, exit_layers=(1, 2, 3)))
