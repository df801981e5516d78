"""A client that takes the place of camera and navigator, and measures the graph.

Not a node of the robot: it publishes a picture, asks the model about the resulting observation, and
records when each message up to the action arrives.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray
from rcl_interfaces.srv import SetParameters
from rclpy.parameter import Parameter
from rclpy.time import Time
from sensor_msgs.msg import CompressedImage

from collab_llm.action import Generate
from collab_llm.msg import GeneratedText, NavigationAction, Observation
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.ros.client import AskingClient
from collab_llm_nodes.ros.goals import action_client
from collab_llm_nodes.ros.qos import CAMERA, RESULT

ANSWER_DEADLINE_S = 20.0


@dataclass(frozen=True)
class Asked:
    """One answer as the caller sees it. Ages are from the picture's capture stamp [s].

    Attributes:
        round_s: of each round in draft_vlm's loop, the first counted from the request [s].
        answer_s: from sending the goal to the arrival of its result.
        observed, first_text, final_text, action: age when these messages arrive here.
    """

    tokens: tuple[int, ...]
    round_s: tuple[float, ...]
    answer_s: float
    observed: float
    first_text: float
    final_text: float
    action: float


class BenchClient(AskingClient):
    """See the module docstring."""

    def __init__(self) -> None:
        super().__init__("bench_client", CAMERA)
        self._router = action_client(self.node, Generate, "generate")
        self._totals: list[float] = []  # metrics.total_s after each round of the present answer
        self._ages: dict[str, float] = {}
        self._health: dict[str, dict[str, str]] = {}
        self._setters: dict[str, Any] = {}
        subscribe = self.node.create_subscription
        subscribe(GeneratedText, "generated_text", self._on_text, RESULT)
        subscribe(NavigationAction, "navigation_action", self._on_action, RESULT)
        subscribe(DiagnosticArray, "/diagnostics", self._on_diagnostics, RESULT)

    def wait_for_graph(self, deadline_s: float, alive: Callable[[], None]) -> None:
        """Wait until all nodes are connected; ``alive`` raises if one of them has ended."""
        node = self.node

        def ready() -> bool:
            alive()
            return (
                self.connected()
                and self._router.server_is_ready()
                and node.count_subscribers("generated_text") >= 3  # cache, parser, this one
                and node.count_publishers("verdict") > 0
            )

        self.wait(ready, deadline_s, "the graph to come up")

    def set_parameters(self, node: str, values: Mapping[str, Any]) -> None:
        """Set parameters of another node. Raises CollabError when it refuses."""
        if node not in self._setters:
            self._setters[node] = self.node.create_client(SetParameters, f"{node}/set_parameters")
        setter = self._setters[node]
        self.wait(setter.service_is_ready, 10.0, node)
        parameters = [Parameter(name, value=v).to_parameter_msg() for name, v in values.items()]
        request = SetParameters.Request(parameters=parameters)
        for answer in self.result(lambda: setter.call_async(request), 10.0, node).results:
            if not answer.successful:
                raise CollabError(answer.reason, field=node)

    def health(self, node: str) -> dict[str, str]:
        """Return the values of the node's last diagnostics; empty before the first."""
        with self.changed:
            return self._health.get(node, {})

    def ask(self, prompt: Prompt, max_tokens: int) -> Asked:
        """Show the prompt's picture to the camera node and return the answer to it.

        Raises:
            DeadlineExceeded: a message did not come.
            CollabError: the answer failed.
        """
        observation = self.show(prompt.images[0], ANSWER_DEADLINE_S)
        goal = Generate.Goal(
            header=observation.header,
            prompt=prompt.text,
            images=[observation.image],
            max_tokens=max_tokens,
            deadline_s=ANSWER_DEADLINE_S,
            for_motion=True,  # up to the action
        )
        started = time.monotonic()
        result = self.answer(goal, ANSWER_DEADLINE_S)
        answer_s = time.monotonic() - started
        rounds = result.metrics.rounds
        self.wait(lambda: len(self._totals) == rounds, ANSWER_DEADLINE_S, f"{rounds} texts")
        self.wait(lambda: len(self._ages) == 4, ANSWER_DEADLINE_S, "the action")
        with self.changed:
            totals = [0.0, *self._totals]
            round_s = tuple(b - a for a, b in zip(totals, totals[1:], strict=False))
            return Asked(tuple(result.tokens), round_s, answer_s, **self._ages)

    def time_answer(
        self, prompt: Prompt, max_tokens: int, *, routed: bool
    ) -> tuple[tuple[int, ...], float]:
        """Ask ``draft_vlm``, or ``generate_router``, without camera and parser.

        Returns:
            Tokens, and the time from sending the goal to the arrival of its result [s].

        Raises:
            DeadlineExceeded: there is no result.
        """
        goal = Generate.Goal(
            prompt=prompt.text,
            images=[CompressedImage(format="jpeg", data=array("B", prompt.images[0]))],
            max_tokens=max_tokens,
            deadline_s=ANSWER_DEADLINE_S,
        )
        client = self._router if routed else self._generate
        started = time.monotonic()
        result = self.carry_out(client, goal, 2 * ANSWER_DEADLINE_S, "the answer")
        return tuple(result.tokens), time.monotonic() - started

    def forget(self) -> None:
        self._totals.clear()
        self._ages.clear()

    def observed(self, msg: Observation) -> None:
        self._note("observed", msg)

    # Callbacks, in the executor's thread.

    def _on_text(self, msg: GeneratedText) -> None:
        with self.changed:
            if not self.about_it(msg):
                return
            if msg.final:
                self._note("final_text", msg)
                return
            self._totals.append(msg.metrics.total_s)
            if len(self._totals) == 1:
                self._note("first_text", msg)
            self.changed.notify_all()

    def _on_action(self, msg: NavigationAction) -> None:
        with self.changed:
            if self.about_it(msg):
                self._note("action", msg)

    def _on_diagnostics(self, msg: DiagnosticArray) -> None:
        with self.changed:
            for status in msg.status:
                node = status.name.partition(": ")[0]
                self._health.setdefault(node, {}).update((v.key, v.value) for v in status.values)

    def _note(self, what: str, msg: Any) -> None:
        age = self.node.get_clock().now() - Time.from_msg(msg.header.stamp)
        self._ages[what] = age.nanoseconds * 1e-9
        self.changed.notify_all()
