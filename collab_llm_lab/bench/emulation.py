"""EMULATION of slower draft models and of drafts that are right less often. Benchmarks only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.session import Session
from collab_llm_nodes.models.loading import LoadedModel
from collab_llm_nodes.models.prompt import EncodedPrompt

# Paper 003, Table 9: milliseconds of a pass of Vicuna-68M on a Jetson by batch size (but for 3 and
# 4, which took less time than 2).
_BATCH = (1, 2, 8, 12, 16, 32)
_CLIENT_MS = (7.76, 8.02, 8.97, 9.71, 10.63, 14.49)


def batch_factor(tokens: int) -> float:
    """Time of one pass of the draft model over ``tokens`` tokens, in passes over one."""
    return float(np.interp(tokens, _BATCH, _CLIENT_MS)) / _CLIENT_MS[0]


class PacedEngine:
    """An engine whose passes take at least ``t_p_s`` times ``batch_factor``, but for prompts.

    It has what a drafter uses of an engine.
    """

    def __init__(self, engine: Engine, t_p_s: float) -> None:
        self._engine = engine
        self.t_p_s = t_p_s
        self.loaded = engine.loaded
        self.eos = engine.eos
        self.vocabulary = engine.vocabulary
        self.vocab_size = engine.vocab_size
        self.context = engine.context
        self.decode = engine.decode

    def open(self, prompt: EncodedPrompt) -> PacedSession:
        """Open a session, like ``Engine.open``, whose passes take at least ``t_p_s``."""
        return PacedSession(self._engine.open(prompt), self.t_p_s)

    def as_engine(self) -> Engine:
        """Return this engine under the type of the real one."""
        return cast(Engine, self)


class PacedSession:
    """A session that answers as ``engine.session.Session`` does."""

    def __init__(self, session: Session, t_p_s: float) -> None:
        self._session = session
        self._t_p_s = t_p_s
        self.feed = session.feed
        self.retain = session.retain
        self.close = session.close

    @property
    def columns(self) -> int:
        return self._session.columns

    @property
    def length(self) -> int:
        return self._session.length

    @length.setter
    def length(self, n: int) -> None:
        self._session.length = n

    def grow(self, ids: Sequence[int], parents: Sequence[int]) -> Tensor:
        due = time.perf_counter() + self._t_p_s * batch_factor(len(ids))
        logits = self._session.grow(ids, parents)
        time.sleep(max(0.0, due - time.perf_counter()))
        return logits


def blur(loaded: LoadedModel, noise: float, seed: int = 0) -> None:
    """Add noise to the LM head, ``noise`` times its spread: a draft model that is right less often.

    All else of the model stays, so its mistakes look like those of a weaker model: the right token
    is often among its next guesses.
    """
    head = loaded.model.get_output_embeddings()
    weight = head.weight.detach().clone()  # it may be tied to the embedding, which stays
    random = torch.Generator().manual_seed(seed)
    weight += noise * weight.std() * torch.randn(weight.shape, generator=random)
    head.weight = nn.Parameter(weight, requires_grad=False)
