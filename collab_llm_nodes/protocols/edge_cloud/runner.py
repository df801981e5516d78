"""Edge and cloud in one process: the reference driver of the state machines.

It is synchronous and deterministic. Early exits are pre-drafted in the order in which the verifier
would send them, as if drafting were as fast as the exits arrive.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.interface import DecodingEngine
from collab_llm_nodes.models.guide import Guide
from collab_llm_nodes.models.prompt import Prompt, encode
from collab_llm_nodes.protocols.edge_cloud.ahead import AheadConfig
from collab_llm_nodes.protocols.edge_cloud.client import EdgeClient, EdgeClientConfig, Source
from collab_llm_nodes.protocols.edge_cloud.drafter import Drafter
from collab_llm_nodes.protocols.edge_cloud.loop import EdgeLoop
from collab_llm_nodes.protocols.edge_cloud.messages import Draft, open_message
from collab_llm_nodes.protocols.edge_cloud.metrics import EdgeCloudMetrics
from collab_llm_nodes.protocols.edge_cloud.planner import Mode, Profile
from collab_llm_nodes.protocols.edge_cloud.predraft import PreDraftConfig
from collab_llm_nodes.protocols.edge_cloud.server import EarlyExitQueue, ExitConfig
from collab_llm_nodes.protocols.edge_cloud.target import TargetSession


@dataclass(frozen=True)
class Generation:
    """An answer: token ids (end token included), the source of each, text and cost."""

    tokens: tuple[int, ...]
    sources: tuple[Source, ...]
    text: str
    metrics: EdgeCloudMetrics
    mode: Mode | None = None  # chosen by a planner


class InProcessRunner:
    """Runs Algorithms 1 and 2 of paper 003 against each other.

    Args:
        others: draft models that vote with ``draft`` on each token.
        profile: takes in the durations of passes, and how often predictions are right.
    """

    def __init__(
        self,
        draft: DecodingEngine,
        target: DecodingEngine,
        *,
        gamma: int = 4,
        predraft: PreDraftConfig | None = None,
        ahead: AheadConfig | None = None,
        exits: ExitConfig | None = None,
        others: Sequence[DecodingEngine] = (),
        profile: Profile | None = None,
    ) -> None:
        self._draft = draft
        self._others = others
        self._target = target
        self._gamma = gamma
        self._predraft = predraft
        self._ahead = ahead
        self._exits = exits or ExitConfig()
        self._profile = profile

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingConfig | None = None,
        max_tokens: int = 64,
        deadline_s: float = 600.0,
        guide: Guide | None = None,
    ) -> Generation:
        """Decode one answer; its law is the target's alone within ``guide``, whatever the draft."""
        sampling = sampling or SamplingConfig()
        started = time.perf_counter()
        opened = open_message(prompt, sampling, max_tokens, vocabulary="", guide=guide)
        target = TargetSession(
            self._target,
            encode(prompt, self._target.loaded),
            opened,
            self._exits,
            shared=min(self._draft.vocab_size, self._target.vocab_size),
        )
        models = [(each, encode(prompt, each.loaded)) for each in (self._draft, *self._others)]
        guided = self._draft.loaded.guides.open(guide) if guide is not None else None
        drafter = Drafter(*models[0], sampling, models[1:], guided)
        config = EdgeClientConfig(self._gamma, max_tokens)
        client = EdgeClient(config, drafter.room, filled=guided is not None)
        exits = EarlyExitQueue(self._exits)

        def verify(draft: Draft) -> None:
            target.offer(draft)
            while (verdict := target.verify_next(exits.push)) is not None:
                while (exit_ := exits.pop()) is not None:
                    loop.post(exit_)
                exits.reset()
                loop.post(verdict)

        loop = EdgeLoop(
            client,
            drafter,
            verify,
            predraft=self._predraft,
            ahead=self._ahead,
            profile=self._profile,
            preempt=False,
        )
        try:
            target.prefill()
            loop.run(deadline_s)
        finally:
            target.close()
            drafter.close()
        client.metrics.total_s = time.perf_counter() - started
        text = self._target.decode(client.generated)
        return Generation(tuple(client.generated), tuple(client.sources), text, client.metrics)
