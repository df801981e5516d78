"""The draft model behind one session: drafts and pre-drafts alike (paper 003, Eq. 1 and 7)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from collab_llm_nodes.decoding.engine import Engine
from collab_llm_nodes.decoding.randomness import gumbel, sample, uniform
from collab_llm_nodes.decoding.sampling import (
    SamplingConfig,
    SparseDistribution,
    distribution,
    to_wire,
)
from collab_llm_nodes.edge_cloud.client import DraftJob
from collab_llm_nodes.edge_cloud.messages import Draft
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.models.prompt import EncodedPrompt


@dataclass(frozen=True)
class DrafterConfig:
    """Attributes: max_support: entries of each distribution sent upstream at most."""

    max_support: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.max_support <= 4096:
            raise ConfigError("must be in 1..4096", field="max_support")


class Drafter:
    """Draws drafts for any prefix; the KV cache rolls back to what the prefix shares with it."""

    def __init__(
        self,
        engine: Engine,
        prompt: EncodedPrompt,
        sampling: SamplingConfig,
        config: DrafterConfig | None = None,
    ) -> None:
        self._kv = engine.open(prompt)
        self._eos = engine.eos
        self._prompt_ids = tuple(prompt.ids)
        self._sampling = sampling
        self._config = config or DrafterConfig()
        self._fed: tuple[int, ...] = ()  # ids held in the KV cache

    def draft(
        self, job: DraftJob, *, cached: bool = False, stop: Callable[[], bool] = lambda: False
    ) -> Draft | None:
        """Draft up to ``job.gamma`` tokens; ends early at an end token.

        ``stop`` is asked before each forward pass; None when it said so (a verdict or a cached
        draft made the work needless).
        """
        tokens: list[int] = []
        probs: list[SparseDistribution] = []
        context = self._prompt_ids + job.prefix
        for i in range(job.gamma):
            if stop():
                return None
            logits = self._extend((*context, *tokens))
            token, q = self._draw(distribution(logits, self._sampling), len(job.prefix) + i)
            tokens.append(token)
            if q is not None:
                probs.append(q)
            if token in self._eos:
                break
        return Draft(job.round, len(job.prefix), tuple(tokens), tuple(probs) or None, cached)

    def close(self) -> None:
        """Free the KV cache."""
        self._kv.close()

    def _extend(self, ids: tuple[int, ...]):  # type: ignore[no-untyped-def]
        """Logits [vocabulary] after ``ids``, feeding only what the cache does not hold yet."""
        shared = 0
        for a, b in zip(ids[:-1], self._fed, strict=False):
            if a != b:
                break
            shared += 1
        self._kv.length = shared
        logits = self._kv.feed(ids[shared:], last=1)
        self._fed = ids
        return logits[-1]

    def _draw(self, q: np.ndarray, position: int) -> tuple[int, SparseDistribution | None]:
        s = self._sampling
        if s.temperature == 0:
            return int(q.argmax()), None
        if s.law == "coupled":
            with np.errstate(divide="ignore"):
                return int((np.log(q) + gumbel(s.seed, position, len(q))).argmax()), None
        wire = to_wire(q, self._config.max_support)
        return int(wire.ids[sample(wire.probs, uniform(s.seed, position, "draft"))]), wire
