"""Nodes that turn text into motion, with scripted answers in place of a model."""

from __future__ import annotations

import io
import math
import subprocess
from array import array
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from geometry_msgs.msg import Twist
from nav_msgs.msg import Odometry
from PIL import Image as Pil
from rclpy.action import ActionClient, ActionServer, CancelResponse
from rclpy.task import Future
from sensor_msgs.msg import CompressedImage
from started_nodes import start, stopped_at_the_end

from collab_llm.action import Generate, Navigate
from collab_llm.msg import GeneratedText, MotionState, NavigationAction, Observation, Status
from collab_llm_nodes.nodes.navigation_action_parser import NavigationActionParser
from collab_llm_nodes.nodes.navigator import Navigator
from collab_llm_nodes.ros.qos import COMMAND, RESULT, STATE


@pytest.fixture
def graph(ros_graph: Any) -> Iterator[Any]:
    """The running graph; nodes started in it are stopped in the thread that ran them."""
    with stopped_at_the_end(ros_graph):
        yield ros_graph


LINEAR, ANGULAR = 0.5, 0.8
"""The executor's top speeds [m/s, rad/s]."""
_STALL_S = 0.5


def reached(moved: float, wanted: float, tolerance: float, speed: float) -> bool:
    """Tell whether a robot has moved as far as asked, by the clock of a busy machine.

    A robot goes on while the nodes that would stop it wait for a processor.
    """
    return wanted - tolerance <= moved <= wanted + tolerance + speed * _STALL_S


def jpeg(width: int = 16, height: int = 8, format: str = "JPEG") -> bytes:
    """A small picture."""
    buffer = io.BytesIO()
    Pil.fromarray(np.full((height, width, 3), 90, np.uint8)).save(buffer, format)
    return buffer.getvalue()


# navigation_action_parser.


class Reader:
    """A parser node, fed with the growing text of answers."""

    def __init__(self, graph: Any, **parameters: Any) -> None:
        self.graph = graph
        self.node = start(graph, NavigationActionParser, **parameters)
        self.user = graph.node("user")
        self.texts = self.user.create_publisher(GeneratedText, "generated_text", RESULT)
        self.actions: list[NavigationAction] = graph.collect(
            self.user, NavigationAction, "navigation_action", RESULT
        )
        graph.wait_for(lambda: self.user.count_subscribers("generated_text"))
        graph.wait_for(lambda: self.user.count_publishers("navigation_action"))

    def say(self, session: str, text: str, *, age: float = 0.0, **fields: Any) -> None:
        message = GeneratedText(session_id=session, text=text)
        for name, value in {"for_motion": True, "verified": True, **fields}.items():
            setattr(message, name, value)
        captured = self.user.get_clock().now().nanoseconds - int(age * 1e9)
        message.header.stamp.sec = captured // 10**9
        message.header.stamp.nanosec = captured % 10**9
        self.texts.publish(message)

    def read(self, session: str, text: str, **fields: Any) -> NavigationAction:
        self.say(session, text, final=True, **fields)
        return self.graph.wait_for(lambda: [a for a in self.actions if a.session_id == session])[-1]


PATIENT = {
    "mission.answer_timeout": 5.0,
    "mission.executor.watchdog": 2.0,
    "mission.executor.progress_window": 5.0,
    "odometry_max_age": 5.0,
    "mission.retries": 1,
    "mission.executor.linear_speed": 1.0,
    "mission.executor.angular_speed": 2.0,
}
"""Parameters of a navigator that a busy machine does not make impatient, and that is quick."""


COMMANDS = "cmd_vel_nav"
"""Topic on which the navigator publishes velocities."""


class Robot:
    """A navigator with parser, a base that obeys, a camera, and a scripted ``generate``.

    ``script``: what the answers say, one after the other; the last is repeated. A callable is
    given the goal handle and returns a result itself. Without any, real nodes answer.
    ``process``: a navigator that runs already. ``reading``: parameters of the parser. In place of
    motion_guard it says ``allowed`` (None: there is no guard).
    """

    def __init__(
        self,
        graph: Any,
        script: list[Any],
        process: subprocess.Popen[bytes] | None = None,
        reading: Mapping[str, Any] = MappingProxyType({}),
        **parameters: Any,
    ) -> None:
        self.graph, self.script = graph, script
        self.user = graph.node("robot")
        self.prompts: list[str] = []
        self.seeds: list[int] = []
        self.commands: list[Twist] = graph.collect(self.user, Twist, COMMANDS, COMMAND)
        self.odometry = self.user.create_publisher(Odometry, "odom", COMMAND)
        self.observations = self.user.create_publisher(Observation, "observation", RESULT)
        self.texts = self.user.create_publisher(GeneratedText, "generated_text", RESULT)
        self.x = self.y = self.yaw = 0.0
        self.picture = jpeg()
        self.camera_on = self.odometry_on = self.obeys = True
        self.camera_age_s = 0
        self.generations_cancelled = 0
        self.user.create_subscription(Twist, COMMANDS, self._obey, COMMAND)
        self.guard = self.user.create_publisher(MotionState, "motion_state", STATE)
        self.allowed: MotionState | None = MotionState(allowed=True, speed_limit=math.inf)
        self.user.create_timer(0.2, self.permit)
        self.user.create_timer(0.02, self._measure)
        self.user.create_timer(0.05, self._look)
        if script:
            self.generate = ActionServer(
                self.user,
                Generate,
                "edge_cloud/generate",
                self._answer,
                cancel_callback=self._on_cancel,
            )
        if process is None:
            patient = {name.replace(".", "__"): value for name, value in PATIENT.items()}
            self.navigator = start(graph, Navigator, **{**patient, **parameters})
        self.parser = start(graph, NavigationActionParser, **reading)
        self.client = ActionClient(self.user, Navigate, "navigate")
        self.feedback: list[Navigate.Feedback] = []
        graph.wait_for(self.client.server_is_ready, 60.0)
        graph.wait_for(lambda: self.user.count_subscribers("generated_text"))
        graph.wait_for(lambda: self.user.count_publishers("navigation_action"))
        graph.wait_for(lambda: self.user.count_subscribers("odom"))

    def _obey(self, command: Twist) -> None:
        """Each command moves the base by 50 ms, however long the machine takes meanwhile."""
        if self.obeys:
            self.yaw += 0.05 * command.angular.z
            self.x += 0.05 * command.linear.x * math.cos(self.yaw)
            self.y += 0.05 * command.linear.x * math.sin(self.yaw)
        self._measure()

    def permit(self, **fields: Any) -> None:
        """Say what motion_guard would; with ``fields``, from now on."""
        if fields:
            self.allowed = MotionState(**fields)
        if self.allowed is not None:
            self.guard.publish(self.allowed)

    def leave_to_others(self) -> None:
        """Have a driver publish odometry, and motion_guard its state: each has one publisher."""
        self.odometry_on, self.allowed = False, None
        for publisher in (self.odometry, self.guard):
            self.graph.do(self.user.destroy_publisher, publisher)

    def _measure(self) -> None:
        message = Odometry()
        message.header.stamp = self.user.get_clock().now().to_msg()
        message.pose.pose.position.x, message.pose.pose.position.y = self.x, self.y
        message.pose.pose.orientation.z = math.sin(self.yaw / 2)
        message.pose.pose.orientation.w = math.cos(self.yaw / 2)
        if self.odometry_on:
            self.odometry.publish(message)

    def _look(self) -> None:
        message = Observation(width=16, height=8)
        message.header.stamp = self.user.get_clock().now().to_msg()
        message.header.stamp.sec -= self.camera_age_s
        message.image = CompressedImage(header=message.header, format="jpeg")
        message.image.data = array("B", self.picture)
        if self.camera_on:
            self.observations.publish(message)

    async def _answer(self, goal: Any) -> Generate.Result:
        self.prompts.append(goal.request.prompt)
        self.seeds.append(goal.request.seed)
        said = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if callable(said):
            return await said(self, goal)
        session = str(len(self.prompts))
        self.say(goal, session, said)
        goal.succeed()
        return Generate.Result(header=goal.request.header, text=said, session_id=session)

    def say(self, goal: Any, session: str, text: str, verified: bool = True) -> None:
        """A whole answer of ``session`` about the frame of ``goal``."""
        message = GeneratedText(header=goal.request.header, session_id=session, text=text)
        message.verified, message.final = verified, True
        message.for_motion = goal.request.for_motion
        self.texts.publish(message)

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait for ``condition()``, in answers that go on in the middle of what they cause."""
        over = Future()
        timer = self.user.create_timer(0.02, lambda: over.set_result(None) if condition() else None)
        await over
        self.user.destroy_timer(timer)

    def _on_cancel(self, goal: Any) -> CancelResponse:
        self.generations_cancelled += 1
        return CancelResponse.ACCEPT

    def send(self, instruction: str = "find the red ball", **fields: Any) -> Any:
        goal = Navigate.Goal(instruction=instruction, **fields)
        send = self.client.send_goal_async
        return self.graph.ask(send, goal, lambda m: self.feedback.append(m.feedback))

    def navigate(self, instruction: str = "find the red ball", **fields: Any) -> Navigate.Result:
        handle = self.send(instruction, **fields)
        return self.graph.ask(handle.get_result_async, timeout=20.0).result

    def stands(self) -> bool:
        """Return True if the last command is zero, as it must be at every end."""
        return bool(self.commands) and self.commands[-1] == Twist()

    def moved(self) -> bool:
        return any(c != Twist() for c in self.commands)


async def hangs(robot: Robot, goal: Any) -> Generate.Result:
    await robot.until(lambda: goal.is_cancel_requested)
    goal.canceled()
    return Generate.Result(status=Status(code=Status.CANCELLED))
