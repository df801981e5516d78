"""Asks the running nodes what was asked in a recording: one picture, one prompt, one action."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

from builtin_interfaces.msg import Time as TimeMsg
from rclpy.action import ActionClient
from sensor_msgs.msg import CompressedImage

from collab_llm.action import Generate
from collab_llm.msg import LinkState, NavigationAction, Observation
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.edge_cloud.messages import Failure, error_of
from collab_llm_nodes.navigation.grammar import Code, Kind
from collab_llm_nodes.nodes.client import GraphClient
from collab_llm_nodes.nodes.convert import code_of
from collab_llm_nodes.nodes.ros import COMMAND, REQUESTS, RESULT, STATE
from collab_llm_nodes.replay.compare import Reply
from collab_llm_nodes.replay.recording import Action, Step
from collab_llm_nodes.replay.replayers import ANSWER_DEADLINE_S

MESSAGE_DEADLINE_S = 30.0


class ReplayClient(GraphClient):
    """Takes the place of the camera and of the navigator."""

    def __init__(self) -> None:
        super().__init__("replay_client")
        self._stamp = TimeMsg()  # of the picture asked about
        self._observation: Observation | None = None
        self._action: NavigationAction | None = None
        self._link_up = False
        self._pictures = self.node.create_publisher(CompressedImage, "image/compressed", COMMAND)
        subscribe = self.node.create_subscription
        subscribe(Observation, "observation", self._on_observation, RESULT)
        subscribe(NavigationAction, "navigation_action", self._on_action, RESULT)
        subscribe(LinkState, "link_state", self._on_link, STATE)
        self._generate = ActionClient(
            self.node, Generate, "generate", goal_service_qos_profile=REQUESTS
        )

    def wait_for_graph(self, deadline_s: float, alive: Callable[[], None]) -> None:
        """Until all nodes are connected to one another; ``alive`` raises if one has ended.

        Raises:
            DeadlineExceeded: they are not in time.
        """
        node = self.node

        def ready() -> bool:
            alive()
            return (
                self._generate.server_is_ready()
                and self._pictures.get_subscription_count() > 0
                and self._link_up
                and node.count_publishers("observation") > 0
                and node.count_publishers("navigation_action") > 0
                and node.count_subscribers("generated_text") >= 2  # cache, parser
                and node.count_subscribers("draft") >= 3
                and node.count_publishers("draft") >= 2
            )

        self.wait(ready, deadline_s, "the graph to come up")

    def ask(self, step: Step, sampling: SamplingConfig, max_tokens: int) -> Reply:
        """Show the picture of ``step`` to the camera node and have its prompt answered.

        The picture gets a stamp of now: its age is judged on the way, and its own is history.

        Raises:
            CollabError: the answer failed, or a message did not come.
        """
        assert step.picture is not None, "such steps are not asked"
        begun = time.monotonic()
        picture = CompressedImage(format="jpeg", data=array("B", step.picture))
        picture.header.stamp = self._start_anew()
        self._pictures.publish(picture)
        self.wait(lambda: self._observation is not None, MESSAGE_DEADLINE_S, "the observation")
        observation = self._observation
        assert observation is not None
        goal = Generate.Goal(
            header=observation.header,
            prompt=step.prompt,
            images=[observation.image],
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=sampling.seed,
            law=sampling.law,
            max_tokens=max_tokens,
            deadline_s=ANSWER_DEADLINE_S,
        )
        handle = self.result(
            lambda: self._generate.send_goal_async(goal), MESSAGE_DEADLINE_S, "generate to accept"
        )
        ended = self.result(handle.get_result_async, ANSWER_DEADLINE_S, "the answer")
        result = ended.result
        if result.status != result.OK:
            raise error_of(Failure(code_of(result.status), result.error_msg))
        self.wait(lambda: self._action is not None, MESSAGE_DEADLINE_S, "the action")
        read = self._action
        assert read is not None
        value = read.distance if read.kind == Kind.FORWARD else read.angle
        return Reply(
            tuple(result.tokens),
            result.text,
            Action(Kind(read.kind), value, Code(read.code)),
            result.metrics.tau,
            time.monotonic() - begun,
        )

    def _start_anew(self) -> TimeMsg:
        """Forget the last step; the stamp of the picture that the next one is about."""
        with self.changed:
            self._observation = self._action = None
            self._stamp = self.node.get_clock().now().to_msg()
            return self._stamp

    # Callbacks, in the executor's thread.

    def _on_observation(self, msg: Observation) -> None:
        with self.changed:
            if msg.header.stamp == self._stamp:
                self._observation = msg
                self.changed.notify_all()

    def _on_action(self, msg: NavigationAction) -> None:
        with self.changed:
            if msg.header.stamp == self._stamp:
                self._action = msg
                self.changed.notify_all()

    def _on_link(self, msg: LinkState) -> None:
        with self.changed:
            self._link_up = msg.state == LinkState.UP
