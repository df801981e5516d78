"""Clients of a running graph, with deadlines; demo, benchmarks and replay share them.

The caller's thread waits; callbacks run in the executor's.
"""

from __future__ import annotations

import contextlib
import threading
import time
from array import array
from collections.abc import Callable
from typing import Any, TypeVar

import rclpy
from builtin_interfaces.msg import Time as TimeMsg
from rclpy.action import ActionClient
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import QoSProfile
from sensor_msgs.msg import CompressedImage

from collab_llm.action import Generate
from collab_llm.msg import Observation
from collab_llm_nodes.errors import DeadlineExceeded, Unavailable
from collab_llm_nodes.ros.convert import raise_for
from collab_llm_nodes.ros.goals import SentGoal, action_client
from collab_llm_nodes.ros.qos import RESULT

Self = TypeVar("Self", bound="GraphClient")
_CANCEL_S = 10.0


class GraphClient:
    """Use as a context manager; every wait has a deadline.

    Attributes:
        node: for publishers, subscriptions and clients; made in the constructor of a subclass.
        changed: lock and condition of the state that ``wait`` checks; callbacks notify it.
    """

    def __init__(self, name: str, namespace: str = "") -> None:
        self._context = rclpy.Context()
        self._context.init()
        self.node = Node(name, context=self._context, namespace=namespace)
        self.changed = threading.Condition()
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self.node)
        self._thread = threading.Thread(target=self._spin, name=name)

    def __enter__(self: Self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._executor.shutdown()
        self._thread.join()
        self.node.destroy_node()
        self._context.try_shutdown()

    def result(self, call: Callable[[], Any], deadline_s: float, what: str) -> Any:
        """Return the result of the future that ``call`` makes.

        ``call`` runs in the executor's thread: rclpy's action client has no lock, and would miss an
        answer that arrives at once.

        Raises:
            DeadlineExceeded: ``what`` did not arrive in time.
        """
        results: list[Any] = []

        def take(future: Any) -> None:
            with self.changed:
                results.append(future.result())
                self.changed.notify_all()

        self._executor.create_task(lambda: call().add_done_callback(take))
        self.wait(lambda: results, deadline_s, what)
        return results[0]

    def carry_out(self, client: ActionClient, goal: Any, deadline_s: float, what: str) -> Any:
        """Return the result of ``goal``, which is cancelled if it is late.

        Raises:
            DeadlineExceeded: ``what`` did not arrive in time.
            Unavailable: the server refused the goal, or lost it.
        """
        ended: list[Any] = []
        sent: list[SentGoal] = []
        given_up = threading.Event()

        def take(result: Any) -> None:
            with self.changed:
                ended.append(result)
                self.changed.notify_all()

        def send() -> None:
            if not given_up.is_set():
                sent.append(SentGoal(self.node, client, goal, take))

        def cancel() -> None:
            given_up.set()  # tasks may run in another order
            for each in sent:
                each.cancel()

        self._executor.create_task(send)
        try:
            self.wait(lambda: ended, deadline_s, what)
        except DeadlineExceeded:
            self._executor.create_task(cancel)
            with contextlib.suppress(DeadlineExceeded):
                self.wait(lambda: ended, _CANCEL_S, "the cancellation")
            raise
        if ended[0] is None:
            words = f"no {what}: {type(goal).__qualname__}: the server {sent[0].loss}"
            raise Unavailable(words, remedy="see the log of the node")
        return ended[0]

    def wait(self, condition: Callable[[], Any], deadline_s: float, what: str) -> None:
        """Wait until ``condition()`` is true.

        Raises:
            DeadlineExceeded: ``what`` did not arrive in time.
        """
        due = time.monotonic() + deadline_s
        with self.changed:
            while not condition():
                left = due - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded(
                        f"waited {deadline_s:g} s for {what}", remedy="see the graph's log"
                    )
                self.changed.wait(min(left, 0.1))  # discovery notifies nothing

    def _spin(self) -> None:
        with contextlib.suppress(ExternalShutdownException):
            self._executor.spin()


class AskingClient(GraphClient):
    """Client in place of camera and navigator: publishes a picture and asks about it.

    One question at a time; messages about other pictures do not count (``about_it``).
    """

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
