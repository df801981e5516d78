"""Edge-cloud speculation over a real link but without ROS, for benchmarks and checks.

It runs the protocol like its server, with a client in this process as the carrier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.interface import DecodingEngine
from collab_llm_nodes.models.guide import Guide
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.base import Control, Request, Resources
from collab_llm_nodes.protocols.edge_cloud.ahead import AheadConfig
from collab_llm_nodes.protocols.edge_cloud.carrier import VerifierCarrier
from collab_llm_nodes.protocols.edge_cloud.client import EdgeClientConfig, Source
from collab_llm_nodes.protocols.edge_cloud.metrics import EdgeCloudMetrics
from collab_llm_nodes.protocols.edge_cloud.planner import Planner, PlannerConfig
from collab_llm_nodes.protocols.edge_cloud.predraft import PreDraftConfig
from collab_llm_nodes.protocols.edge_cloud.runner import Generation
from collab_llm_nodes.protocols.edge_cloud.running import EdgeCloud, EdgeCloudConfig
from collab_llm_nodes.protocols.edge_cloud.sessions import SessionClient
from collab_llm_nodes.protocols.guides import AnswerConfig


class RemoteRunner:
    """Decodes against a verifier on the network. One answer per call; calls may run in parallel
    (what the planner learns of them, and ``Generation.mode``, are then approximate).

    Args:
        draft: the draft model.
        verifier: the link; the caller closes it.
        gamma: draft tokens per round; 0: the verifier decodes alone.
        predraft, ahead: settings of the work while the verifier is busy.
        planner: chooses the mode of decoding for each answer, if enabled.
        encode: turns prompts into the draft model's ids; by default as ``draft.loaded`` does.
        others: draft models that vote with ``draft`` on each token.
        drafted_by: as ``client.drafted_by``.
    """

    def __init__(
        self,
        draft: DecodingEngine,
        verifier: SessionClient[Any],
        *,
        gamma: int = 4,
        predraft: PreDraftConfig | None = None,
        ahead: AheadConfig | None = None,
        planner: PlannerConfig | None = None,
        encode: Callable[[Prompt], EncodedPrompt] | None = None,
        others: Sequence[DecodingEngine] = (),
        drafted_by: str = "robot",
    ) -> None:
        self._config = EdgeCloudConfig(
            client=EdgeClientConfig(gamma, drafted_by=drafted_by),
            predraft=predraft or PreDraftConfig(),
            ahead=ahead or AheadConfig(),
            planner=planner or PlannerConfig(),
        )
        carrier = VerifierCarrier(verifier)
        self._edge = EdgeCloud(draft, self._config, Resources(carrier), encode, others)

    @property
    def planner(self) -> Planner:
        """The planner, with its measurements."""
        return self._edge.planner

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingConfig | None = None,
        max_tokens: int = 64,
        deadline_s: float = 60.0,
        on_tokens: Callable[[tuple[int, ...]], None] = lambda tokens: None,
        guide: Guide | None = None,
    ) -> Generation:
        """Decode one answer; its law is the target's alone, whatever the draft and the link.

        Args:
            on_tokens: called with each verdict's new tokens.
            guide: limits the text.

        Raises:
            CollabError: bad input, the verifier's typed failure, or no answer in time.
        """
        limit = AnswerConfig(guide.kind, guide.source) if guide else AnswerConfig("none")
        request = Request(
            id="",
            config=replace(self._config, answer=limit),
            turns=(*prompt.turns, Turn("user", prompt.text)),
            images=prompt.images,
            sampling=sampling or SamplingConfig(),
            max_tokens=max_tokens,
            raw=prompt.raw,
        )
        control = Control(time.monotonic() + deadline_s)
        answer = self._edge.run(request, lambda progress: None, control, on_tokens)
        if answer.error is not None:
            raise answer.error
        sources = tuple(Source(source) for source in answer.sources)
        metrics = cast(EdgeCloudMetrics, answer.metrics)
        return Generation(answer.tokens, sources, answer.text, metrics, self._edge.mode)
