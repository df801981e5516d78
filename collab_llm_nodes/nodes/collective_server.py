"""Collective speculation (paper 002) as a node: several draft models vote, one target verifies.

Hosts the action ``collective/generate``, and the service ``collective_generate`` for several
prompts at once. All answers under way are decoded side by side. Started by
``protocol_server collective``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rclpy.callback_groups import ReentrantCallbackGroup

from collab_llm.action import Generate
from collab_llm.msg import Status
from collab_llm.srv import CollectiveGenerate
from collab_llm_nodes.config import setting
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.protocols.collective.metrics import CollectiveMetrics
from collab_llm_nodes.protocols.collective.settings import CollectiveConfig
from collab_llm_nodes.ros.convert import figures_from, metrics_to_msg, status_of
from collab_llm_nodes.ros.generation_host import HostConfig
from collab_llm_nodes.ros.protocol_server import ProtocolServer
from collab_llm_nodes.ros.qos import REQUESTS

_COPIED = (
    "header",
    "raw",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "law",
    "max_tokens",
    "deadline_s",
    "option_names",
    "option_values",
)


@dataclass(frozen=True)
class CollectiveServerConfig(CollectiveConfig, HostConfig):
    """Parameters of the node."""

    deadline_s: float = setting(
        60.0, "One answer, when the request names no deadline [s].", low=0.05, high=3600.0
    )
    max_waiting: int = setting(
        320,
        "Answers in progress or waiting; more are refused as BUSY. No more are useful than"
        " schedule.max_active and schedule.max_waiting together.",
        low=1,
        high=4096,
    )


class CollectiveServer(ProtocolServer[CollectiveServerConfig]):
    """See the module docstring."""

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("collective", config_type=CollectiveServerConfig, **node_arguments)

    def enter_process(self) -> None:
        set_threads(self.config.target, *self.config.drafts.models())

    def configure(self) -> None:
        """Load the models and offer the interfaces; the load blocks the transition."""
        super().configure()
        self._service = self.create_service(
            CollectiveGenerate,
            "collective_generate",
            self._serve,
            qos_profile=REQUESTS,
            callback_group=ReentrantCallbackGroup(),
        )

    def cleanup(self) -> None:
        service = self._service

        def release() -> None:
            self.destroy_service(service)

        self.host.close(release)

    async def _serve(
        self, request: CollectiveGenerate.Request, response: CollectiveGenerate.Response
    ) -> CollectiveGenerate.Response:
        response.header = request.header
        if not request.prompts:
            none = InvalidInput("holds no prompt", field="prompts", remedy="send at least one")
            response.status = status_of(none)
            return response
        shared = {name: getattr(request, name) for name in _COPIED}
        goals = [Generate.Goal(prompt=prompt, **shared) for prompt in request.prompts]
        results = await self.host.answer_all(goals, "prompts")
        statuses = [result.status for result in results]
        failed = [status for status in statuses if status.code != Status.OK]
        response.status = failed[0] if failed else Status()
        response.statuses = statuses
        response.texts = [result.text for result in results]
        response.token_counts = [len(result.tokens) for result in results]
        response.metrics = metrics_to_msg(_together(results))
        return response


def _together(results: Sequence[Generate.Result]) -> CollectiveMetrics:
    """Return the counters of all answers; the times are those of the slowest."""
    total = CollectiveMetrics()
    for metrics in (result.metrics for result in results):
        figures = figures_from(metrics)
        total.rounds += metrics.rounds
        total.tokens += metrics.tokens
        total.drafted += int(figures.get("drafted", 0))
        total.accepted += int(figures.get("accepted", 0))
        total.waited_s = max(total.waited_s, figures.get("waited_s", 0.0))
        first_s = metrics.time_to_first_token_s
        total.time_to_first_token_s = max(total.time_to_first_token_s, first_s)
        total.total_s = max(total.total_s, metrics.total_s)
    return total
