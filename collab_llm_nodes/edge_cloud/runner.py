"""Edge and cloud in one process: the reference driver of the state machines.

Synchronous and deterministic. Early exits are pre-drafted in the order in which the verifier
would send them, as if drafting were as fast as the exits arrive; how a real link and real devices
overlap is the business of the nodes and of the benchmarks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from collab_llm_nodes.decoding.engine import Engine
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.edge_cloud.client import ClientConfig, EdgeClient, Source
from collab_llm_nodes.edge_cloud.drafter import Drafter
from collab_llm_nodes.edge_cloud.messages import Open
from collab_llm_nodes.edge_cloud.predraft import PreDraftCache, PreDraftConfig
from collab_llm_nodes.edge_cloud.server import EarlyExitQueue, ExitConfig
from collab_llm_nodes.edge_cloud.target import TargetSession
from collab_llm_nodes.metrics import GenerationMetrics
from collab_llm_nodes.models.prompt import Prompt, encode


@dataclass(frozen=True)
class Generation:
    """An answer: token ids (end token included), where each came from, text, cost."""

    tokens: tuple[int, ...]
    sources: tuple[Source, ...]
    text: str
    metrics: GenerationMetrics


class InProcessRunner:
    """Runs Algorithms 1 and 2 of paper 003 against each other."""

    def __init__(
        self,
        draft: Engine,
        target: Engine,
        *,
        gamma: int = 4,
        predraft: PreDraftConfig | None = None,
        exits: ExitConfig | None = None,
    ) -> None:
        self._draft = draft
        self._target = target
        self._gamma = gamma
        self._predraft = predraft or PreDraftConfig()
        self._exits = exits or ExitConfig()

    def generate(
        self, prompt: Prompt, sampling: SamplingConfig | None = None, max_tokens: int = 64
    ) -> Generation:
        """Decode one answer; its law is the target's alone, whatever the draft."""
        sampling = sampling or SamplingConfig()
        started = time.perf_counter()
        opened = Open(prompt.text, prompt.images, sampling, max_tokens, vocabulary="")
        target = TargetSession(
            self._target, encode(prompt, self._target.loaded), opened, self._exits
        )
        drafter = Drafter(self._draft, encode(prompt, self._draft.loaded), sampling)
        client = EdgeClient(ClientConfig(self._gamma, max_tokens))
        try:
            target.prefill()
            self._decode(client, drafter, target, started)
        finally:
            target.close()
            drafter.close()
        client.metrics.total_s = time.perf_counter() - started
        text = self._target.decode(client.generated)
        return Generation(tuple(client.generated), tuple(client.sources), text, client.metrics)

    def _decode(
        self, client: EdgeClient, drafter: Drafter, target: TargetSession, started: float
    ) -> None:
        cache = PreDraftCache(self._predraft)
        queue = EarlyExitQueue(self._exits)
        metrics = client.metrics
        draft = None
        while not client.finished:
            if draft is None:
                clock = time.perf_counter()
                draft = drafter.draft(client.next_draft())
                metrics.draft_s += time.perf_counter() - clock
                assert draft is not None
            client.on_sent(draft)
            cache.begin(draft.round)
            verdict = target.verify(draft, queue.push)
            assert verdict is not None
            clock = time.perf_counter()
            while (exit_ := queue.pop()) is not None:
                client.on_early_exit(exit_)
                cache.push(exit_)
            queue.reset()
            while (outcome := cache.pop()) is not None:
                job = client.predraft(*outcome)
                if job is not None:
                    made = drafter.draft(job, cached=True)
                    assert made is not None
                    cache.store(outcome, made)
            metrics.predraft_s += time.perf_counter() - clock
            client.on_verdict(verdict)
            if metrics.rounds == 1:
                metrics.time_to_first_token_s = time.perf_counter() - started
            draft = None
            if not client.finished and self._predraft.max_predrafts > 0:
                metrics.cache_lookups += 1
                draft = cache.lookup(verdict)
                metrics.cache_hits += draft is not None
