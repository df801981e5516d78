"""EMULATION of slower draft models and of drafts that are right less often. Benchmarks only."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.interface import Feed
from collab_llm_nodes.engine.session import Session
from collab_llm_nodes.models.loading import LoadedModel

# Paper 003, Table 9: milliseconds of a pass of Vicuna-68M on a Jetson by batch size (but for 3 and
# 4, which took less time than 2).
_BATCH = (1, 2, 8, 12, 16, 32)
_CLIENT_MS = (7.76, 8.02, 8.97, 9.71, 10.63, 14.49)


def batch_factor(tokens: int) -> float:
    """Return the time of a draft model's pass over ``tokens`` tokens, in passes over one."""
    return float(np.interp(tokens, _BATCH, _CLIENT_MS)) / _CLIENT_MS[0]


class PacedEngine(Engine):
    """An engine whose passes take the time of a larger model's, or their own if that is longer.

    Args:
        pace: gives the least seconds of a pass over some feeds.
    """

    def __init__(self, engine: Engine, pace: Callable[[Sequence[Feed[Session]]], float]) -> None:
        vars(self).update(vars(engine))
        self._pace = pace

    def run(self, feeds: Sequence[Feed[Session]], **options: Any) -> list[Tensor | Exception]:
        """Return the engine's results when the time is over."""
        due = time.perf_counter() + self._pace(feeds)
        results = super().run(feeds, **options)
        time.sleep(max(0.0, due - time.perf_counter()))
        return results


def paced_draft(engine: Engine, t_p_s: float) -> PacedEngine:
    """Return a draft model whose passes over tree nodes take ``t_p_s`` times ``batch_factor``."""

    def pace(feeds: Sequence[Feed[Session]]) -> float:
        nodes = sum(len(feed.ids) for feed in feeds if feed.parents is not None)
        return t_p_s * batch_factor(nodes) if nodes else 0.0

    return PacedEngine(engine, pace)


def blur(loaded: LoadedModel, noise: float, seed: int = 0, tokens: int | None = None) -> None:
    """Add noise to the LM head, ``noise`` times its spread: a draft model that is right less often.

    All else of the model stays, so its mistakes look like those of a weaker model: the right token
    is often among its next guesses.

    Args:
        tokens: of the model as it was trained: rows that ``widen`` has added stay as they are.
    """
    head = loaded.model.get_output_embeddings()
    weight = head.weight.detach().clone()  # it may be tied to the embedding, which stays
    random = torch.Generator().manual_seed(seed)
    trained = weight[:tokens]
    trained += noise * trained.std() * torch.randn(trained.shape, generator=random)
    head.weight = nn.Parameter(weight, requires_grad=False)
