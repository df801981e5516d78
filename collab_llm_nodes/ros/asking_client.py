"""Client in place of camera and navigator: publishes a picture and asks about it."""

from __future__ import annotations

from array import array
from typing import Any

from builtin_interfaces.msg import Time as TimeMsg
from rclpy.qos import QoSProfile
from sensor_msgs.msg import CompressedImage

from collab_llm.action import Generate
from collab_llm.msg import Observation
from collab_llm_nodes.ros.client import GraphClient
from collab_llm_nodes.ros.convert import raise_for
from collab_llm_nodes.ros.goals import action_client
from collab_llm_nodes.ros.qos import RESULT


class AskingClient(GraphClient):
    """Asks one question at a time; messages about other pictures do not count (``about_it``)."""

    def __init__(self, name: str, pictures: QoSProfile) -> None:
        super().__init__(name)
        self._stamp = TimeMsg()  # of the picture asked about
        self._observation: Observation | None = None
        self._pictures = self.node.create_publisher(CompressedImage, "image/compressed", pictures)
        self.node.create_subscription(Observation, "observation", self._on_observation, RESULT)
        self._generate = action_client(self.node, Generate, "edge_cloud/generate")

    def forget(self) -> None:
        """Override to forget the last picture; ``changed`` is held."""

    def observed(self, msg: Observation) -> None:
        """Override to take the observation of the picture; ``changed`` is held."""

    def about_it(self, msg: Any) -> bool:
        """Return True if ``msg`` is about the picture shown last."""
        return bool(msg.header.stamp == self._stamp)

    def connected(self) -> bool:
        """Return True once all nodes between question and action are connected."""
        return (
            self._generate.server_is_ready()
            and self._pictures.get_subscription_count() > 0
            and self.node.count_publishers("observation") > 0
            and self.node.count_publishers("navigation_action") > 0
            and self.node.count_subscribers("draft") >= 2
            and self.node.count_publishers("draft") >= 1
        )

    def show(self, jpeg: bytes, deadline_s: float) -> Observation:
        """Publish a picture stamped now; return its observation.

        Raises:
            DeadlineExceeded: there is none in time.
        """
        picture = CompressedImage(format="jpeg", data=array("B", jpeg))
        picture.header.stamp = self._next_stamp()
        self._pictures.publish(picture)
        self.wait(lambda: self._observation is not None, deadline_s, "the observation")
        observation = self._observation
        assert observation is not None
        return observation

    def answer(self, goal: Generate.Goal, spare_s: float) -> Generate.Result:
        """Return the result of ``goal``, ``spare_s`` after its own deadline at the latest.

        Raises:
            DeadlineExceeded: there is none in time.
            CollabError: the answer failed.
        """
        deadline_s = goal.deadline_s + spare_s
        result: Generate.Result = self.carry_out(self._generate, goal, deadline_s, "the answer")
        raise_for(result.status)
        return result

    def _next_stamp(self) -> TimeMsg:
        """Return the stamp of the next picture, and forget the last one."""
        with self.changed:
            self._observation = None
            self.forget()
            self._stamp = self.node.get_clock().now().to_msg()
            return self._stamp

    def _on_observation(self, msg: Observation) -> None:
        with self.changed:
            if self.about_it(msg):
                self._observation = msg
                self.observed(msg)
                self.changed.notify_all()
