"""The Go2's services over topics: requests out, answers in. All requests are sent here.

``unitree_api`` and ``unitree_go`` are the vendor's packages; they are imported only where a robot
is used, and an error says how to install them.
"""

from __future__ import annotations

import importlib
import math
from array import array
from collections.abc import Callable, Collection, Iterable
from typing import Any

from rclpy.node import Node
from rclpy.qos import HistoryPolicy, QoSProfile, ReliabilityPolicy

from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.robot.go2.sport import Answer, Api, Call, Requests, SportState

_REQUESTS = QoSProfile(
    depth=10, history=HistoryPolicy.KEEP_LAST, reliability=ReliabilityPolicy.RELIABLE
)
"""A stop that follows a velocity must not take its place in the queue before it is delivered."""


def vendor(package: str) -> Any:
    """Return the module ``package.msg`` of the vendor's ROS packages.

    Raises:
        ConfigError: it is not installed, or not sourced.
    """
    try:
        return importlib.import_module(f"{package}.msg")
    except ImportError as error:
        raise ConfigError(
            f"the ROS package {package} of the robot's vendor is missing",
            field="unitree",
            remedy="build github.com/unitreerobotics/unitree_ros2 (cyclonedds_ws/src/unitree) with"
            " colcon and source it before this package: docs/go2.md",
        ) from error


def request_topic(service: str) -> str:
    """Return the topic of requests to ``service``: the robot's own, whatever our namespace."""
    return f"/api/{service}/request"


def response_topic(service: str) -> str:
    """Return the topic of the answers of ``service``."""
    return f"/api/{service}/response"


class Services:
    """Requests for some functions of the robot, and their answers.

    Args:
        node: owner of publishers and subscriptions.
        requests: pairs the answers.
        functions: the only ones that can be sent; other services have no publisher.
        on_answer: called in the node's thread, in any lifecycle state.

    Raises:
        ConfigError: the vendor's package is missing.
    """

    def __init__(
        self,
        node: Node,
        requests: Requests,
        functions: Collection[Api],
        on_answer: Callable[[Answer, bytes], None],
    ) -> None:
        messages = vendor("unitree_api")
        self._node = node
        self._requests = requests
        self._on_answer = on_answer
        self._functions = frozenset(functions)
        self._request_type = messages.Request
        self._publishers = {}
        self._subscriptions = []
        for name in sorted({api.service for api in functions}):
            self._publishers[name] = node.create_publisher(
                messages.Request, request_topic(name), _REQUESTS
            )
            self._subscriptions.append(
                node.create_subscription(
                    messages.Response, response_topic(name), self._on_response, _REQUESTS
                )
            )

    def send(self, calls: Iterable[Call]) -> None:
        """Send ``calls`` in their order. Raises ValueError: one is not among the functions."""
        for call in calls:
            if call.api not in self._functions:
                raise ValueError(f"{call.api.name} is not among the functions of this node")
            request = self._request_type(parameter=call.parameter)
            request.header.identity.id = call.id
            request.header.identity.api_id = call.api.number
            request.header.policy.noreply = not call.reply
            self._publishers[call.api.service].publish(request)

    def destroy(self) -> None:
        for publisher in self._publishers.values():
            self._node.destroy_publisher(publisher)
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)

    def _on_response(self, msg: Any) -> None:
        identity = msg.header.identity
        answer = self._requests.on_response(
            identity.id, identity.api_id, msg.header.status.code, msg.data
        )
        if answer is not None:
            self._on_answer(answer, array("b", msg.binary).tobytes())  # int8[]: signed


STATE_TOPIC = "/sportmodestate"


def sport_state(msg: Any) -> SportState:
    """Return the fields of the vendor's message that matter for motion."""
    speed = math.hypot(float(msg.velocity[0]), float(msg.velocity[1]))
    return SportState(msg.error_code, msg.mode, speed, float(msg.yaw_speed))
