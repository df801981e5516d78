"""The draft model behind one session: drafts and pre-drafts alike (paper 003, Eq. 1 and 7)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.decoding.engine import Engine
from collab_llm_nodes.decoding.rejection import propose
from collab_llm_nodes.decoding.sampling import SamplingConfig, SparseDistribution, distribution
from collab_llm_nodes.edge_cloud.client import DraftJob
from collab_llm_nodes.edge_cloud.messages import Draft
from collab_llm_nodes.models.prompt import EncodedPrompt


@dataclass(frozen=True)
class DrafterConfig:
    """Knobs of the drafter."""

    max_support: int = setting(
        64, "Entries of each distribution sent upstream at most.", low=1, high=4096
    )

    def __post_init__(self) -> None:
        check_ranges(self)


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
            q_next = distribution(logits, self._sampling)
            token, q = propose(
                q_next, self._sampling, len(job.prefix) + i, self._config.max_support
            )
            tokens.append(token)
            if q is not None:
                probs.append(q)
            if token in self._eos:
                break
        sent = tuple(probs) if self._sampling.sends_probabilities else None
        return Draft(job.round, len(job.prefix), tuple(tokens), sent, cached)

    def close(self) -> None:
        """Free the KV cache."""
        self._kv.close()

    def _extend(self, ids: tuple[int, ...]) -> Tensor:
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
