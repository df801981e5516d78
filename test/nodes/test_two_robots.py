"""Two simulated robots in one ROS domain, each with its own namespace, clock and room."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from rclpy.action import ActionClient, ActionServer
from rclpy.parameter import Parameter

from collab_llm.action import Generate, Navigate
from collab_llm.msg import GeneratedText, Status
from collab_llm_nodes.assets import config_file
from collab_llm_nodes.nodes.camera_ingest import CameraIngest
from collab_llm_nodes.nodes.motion_guard import MotionGuard
from collab_llm_nodes.nodes.navigation_action_parser import NavigationActionParser
from collab_llm_nodes.nodes.navigator import Navigator
from collab_llm_nodes.nodes.sim_go2 import SimGo2
from collab_llm_nodes.ros.qos import RESULT

pytestmark = [pytest.mark.ros, pytest.mark.slow]

ARGUMENTS = ["--ros-args", "-r", "/clock:=clock", "--params-file", str(config_file("sim.yaml"))]
SCRIPT = ["the next action is turn left 30 degree.", "the next action is stop."]
NODES = (SimGo2, CameraIngest, MotionGuard, NavigationActionParser, Navigator)


class Robot:
    """All nodes of a robot but the models, in whose place a script answers."""

    def __init__(self, graph: Any, name: str, pace: float) -> None:
        self._graph = graph
        self._user = graph.node("user", namespace=name)
        self._texts = self._user.create_publisher(GeneratedText, "generated_text", RESULT)
        self._script = list(SCRIPT)
        self._server = ActionServer(self._user, Generate, "edge_cloud/generate", self._answer)
        self.nodes = [self._start(kind, name) for kind in NODES]
        self.nodes[0].set_parameters([Parameter("real_time_factor", value=pace)])
        self._client = ActionClient(self._user, Navigate, "navigate")
        graph.wait_for(self._client.server_is_ready, 60.0)

    @property
    def time(self) -> float:
        """Simulated time [s]."""
        return float(self.nodes[0].time)

    def send(self) -> Any:
        """Give an instruction; the result is to come."""
        goal = Navigate.Goal(instruction="find the red ball")
        return self._graph.ask(self._client.send_goal_async, goal).get_result_async()

    def stop(self) -> None:
        for node in reversed(self.nodes):
            self._graph.do(node.stop)

    def _start(self, kind: type, namespace: str) -> Any:
        own = [Parameter("link_policy", value="ignore")] if kind is MotionGuard else []
        node = kind(
            context=self._graph.context,
            namespace=namespace,
            cli_args=ARGUMENTS,
            parameter_overrides=own,
        )
        self._graph.add(node)
        self._graph.do(node.start)
        return node

    async def _answer(self, goal: Any) -> Generate.Result:
        said, header = self._script.pop(0), goal.request.header
        message = GeneratedText(header=header, session_id=said, text=said)
        message.verified = message.final = True
        message.for_motion = goal.request.for_motion
        self._texts.publish(message)
        goal.succeed()
        return Generate.Result(header=header, text=said, session_id=said)


@pytest.mark.timeout(300)
def test_both_finish_a_mission_though_their_clocks_run_apart(ros_graph: Any) -> None:
    robots = [Robot(ros_graph, "robot1", 0.5), Robot(ros_graph, "robot2", 4.0)]
    ros_graph.wait_for(lambda: robots[1].time > robots[0].time + 5.0, 100.0)
    results = [ros_graph.result(robot.send(), 100.0).result for robot in robots]
    for robot in robots:
        robot.stop()
    for result in results:
        assert result.status.code == Status.OK, result.status.message
        assert abs(result.angle_turned) > 0.3
