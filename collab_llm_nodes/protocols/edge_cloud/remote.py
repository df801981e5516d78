"""The edge client over a real link but without ROS, for benchmarks and checks.

Same loop, same link, same verifier as the nodes; only the topics between them are missing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt, encode
from collab_llm_nodes.protocols.edge_cloud.ahead import AheadConfig
from collab_llm_nodes.protocols.edge_cloud.client import ClientConfig, EdgeClient
from collab_llm_nodes.protocols.edge_cloud.drafter import Drafter, DrafterConfig
from collab_llm_nodes.protocols.edge_cloud.loop import EdgeLoop
from collab_llm_nodes.protocols.edge_cloud.messages import Opened, ServerMessage, open_message
from collab_llm_nodes.protocols.edge_cloud.planner import Planner, PlannerConfig, settings_of
from collab_llm_nodes.protocols.edge_cloud.predraft import PreDraftConfig
from collab_llm_nodes.protocols.edge_cloud.runner import Generation
from collab_llm_nodes.protocols.edge_cloud.verifier_client import VerifierClient

log = logging.getLogger(__name__)


class RemoteRunner:
    """Decodes against a verifier on the network. One answer per call; calls may run in parallel
    (what the planner learns of them is then approximate).

    Args:
        draft: the draft model.
        verifier: the link; stays the caller's to close.
        gamma: draft tokens per round; 0 lets the verifier decode alone.
        predraft, ahead: what is done while the verifier works.
        planner: chooses the way of decoding for each answer, if enabled.
        encode: prompts to the draft model's ids; by default as ``draft.loaded`` does it.
    """

    def __init__(
        self,
        draft: Engine,
        verifier: VerifierClient,
        *,
        gamma: int = 4,
        predraft: PreDraftConfig | None = None,
        ahead: AheadConfig | None = None,
        planner: PlannerConfig | None = None,
        drafter: DrafterConfig | None = None,
        encode: Callable[[Prompt], EncodedPrompt] | None = None,
    ) -> None:
        self._draft = draft
        self._verifier = verifier
        self._predraft = predraft or PreDraftConfig()
        self._ahead = ahead or AheadConfig()
        self.planner = Planner(planner or PlannerConfig(), gamma, self._ahead.push_depth)
        self._drafter = drafter or DrafterConfig()
        self._encode = encode or self._encode_as_loaded

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingConfig | None = None,
        max_tokens: int = 64,
        deadline_s: float = 60.0,
        on_tokens: Callable[[tuple[int, ...]], None] = lambda tokens: None,
    ) -> Generation:
        """Decode one answer; its law is the target's alone, whatever the draft and the link.

        Raises:
            CollabError: bad input, the verifier's typed failure, or no answer in time.
        """
        sampling = sampling or SamplingConfig()
        encoded = self._encode(prompt)
        drafter = Drafter(self._draft, encoded, sampling, self._drafter)
        mode = self.planner.choose()
        predraft, ahead = settings_of(mode, self._predraft, self._ahead)
        client = EdgeClient(ClientConfig(mode.gamma, max_tokens))
        loop = EdgeLoop(
            client,
            drafter,
            lambda draft: session.send(draft),
            predraft=predraft,
            ahead=ahead,
            profile=self.planner.profile,
            on_tokens=on_tokens,
        )

        def receive(message: ServerMessage) -> None:
            if isinstance(message, Opened) and message.prompt_tokens != len(encoded.ids):
                log.warning(
                    "the prompt is %d tokens here and %d at the verifier: drafts will be poor",
                    len(encoded.ids),
                    message.prompt_tokens,
                )
            loop.post(message)

        opened = open_message(prompt, sampling, max_tokens, self._draft.vocabulary)
        session = self._verifier.open(opened, receive)
        try:
            loop.run(deadline_s)
        finally:
            session.close()
            drafter.close()
        client.metrics.bytes_up = session.bytes_up
        client.metrics.bytes_down = session.bytes_down
        self.planner.on_answer(mode, client.metrics)
        text = self._draft.decode(client.generated)
        return Generation(
            tuple(client.generated), tuple(client.sources), text, client.metrics, mode
        )

    def _encode_as_loaded(self, prompt: Prompt) -> EncodedPrompt:
        return encode(prompt, self._draft.loaded)
