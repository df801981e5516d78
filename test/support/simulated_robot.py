"""The simulator with listeners, and the robot's nodes in its room with an answerer for a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from geometry_msgs.msg import PoseStamped, Twist
from nav_msgs.msg import Odometry
from rclpy.action import ActionClient, ActionServer
from sensor_msgs.msg import CameraInfo, CompressedImage
from started_nodes import start
from std_srvs.srv import Trigger

from collab_llm.action import Generate, Navigate
from collab_llm.msg import GeneratedText
from collab_llm.msg import Room as RoomMsg
from collab_llm_nodes.nodes.camera_ingest import CameraIngest
from collab_llm_nodes.nodes.motion_guard import MotionGuard
from collab_llm_nodes.nodes.navigation_action_parser import NavigationActionParser
from collab_llm_nodes.nodes.navigator import Navigator
from collab_llm_nodes.robot.prompt import SEARCH_TEMPLATE
from collab_llm_nodes.ros.qos import COMMAND, RESULT, STATE


class SimulatedRoom:
    """The simulator with listeners."""

    def __init__(self, graph: Any, **parameters: Any) -> None:
        from collab_llm_nodes.errors import CollabError
        from collab_llm_nodes.sim.renderer import Renderer  # needs EGL

        try:
            Renderer().close()
        except CollabError as error:
            pytest.skip(f"no rendering here: {error}")
        from collab_llm_nodes.nodes.sim_go2 import SimGo2

        self.graph = graph
        self.user = graph.node("user")
        self.odometry: list[Odometry] = graph.collect(self.user, Odometry, "odom", COMMAND)
        self.truth = graph.collect(self.user, PoseStamped, "ground_truth/pose", COMMAND)
        self.frames = graph.collect(self.user, CompressedImage, "image/compressed", COMMAND)
        self.cameras = graph.collect(self.user, CameraInfo, "camera_info", COMMAND)
        self.info = graph.collect(self.user, RoomMsg, "ground_truth/room", STATE)
        self.commands = self.user.create_publisher(Twist, "cmd_vel", COMMAND)
        self.reset = self.user.create_client(Trigger, "reset")
        self.node = start(graph, SimGo2, **parameters)
        graph.wait_for(self.reset.service_is_ready)
        graph.wait_for(lambda: self.user.count_subscribers("cmd_vel"))


class SimulatedRobot(SimulatedRoom):
    """The whole robot side in simulated time; ``answer`` makes a text of a prompt."""

    def __init__(self, graph: Any, answer: Callable[[str], str], **parameters: Any) -> None:
        parameters = {"lockstep": True, "real_time_factor": 1.0, "camera_rate": 4.0} | parameters
        super().__init__(graph, **parameters)
        self.answer = answer
        graph.do(self.user.destroy_publisher, self.commands)  # cmd_vel is the guard's alone
        start(graph, CameraIngest, source="compressed", use_sim_time=True)
        start(graph, NavigationActionParser, use_sim_time=True)
        start(graph, Navigator, use_sim_time=True, answer__prompt=SEARCH_TEMPLATE)
        start(
            graph,
            MotionGuard,
            use_sim_time=True,
            link_policy="ignore",
            freshness__max_age=0.0,
            limits__linear_speed=0.8,
            limits__angular_speed=1.5,
            **{f"freshness__{what}": 0.5 for what in ("command", "odometry", "camera")},
        )
        self._texts = self.user.create_publisher(GeneratedText, "generated_text", RESULT)
        graph.wait_for(lambda: self.user.count_subscribers("generated_text"))
        self._generate = ActionServer(self.user, Generate, "edge_cloud/generate", self._generated)
        self._navigate = ActionClient(self.user, Navigate, "navigate")
        graph.wait_for(self._navigate.server_is_ready)

    def _generated(self, goal: Any) -> Generate.Result:
        text = self.answer(goal.request.prompt)
        session = str(goal.request.header.stamp.nanosec)
        message = GeneratedText(header=goal.request.header, session_id=session, text=text)
        message.final = message.verified = message.for_motion = True
        self._texts.publish(message)
        goal.succeed()
        return Generate.Result(header=goal.request.header, text=text, session_id=session)

    def navigate(self, instruction: str) -> Navigate.Result:
        """Return the result of an instruction."""
        goal = Navigate.Goal(instruction=instruction, max_steps=80)
        handle = self.graph.ask(self._navigate.send_goal_async, goal)
        return self.graph.ask(handle.get_result_async, timeout=90.0).result
