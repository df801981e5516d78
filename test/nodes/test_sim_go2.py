"""The node ``sim_go2``, and the navigator in its room."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image as Pil

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from builtin_interfaces.msg import Time
from geometry_msgs.msg import Twist
from motion_graph import graph
from rclpy.parameter import Parameter
from simulated_robot import SimulatedRobot, SimulatedRoom
from std_srvs.srv import Trigger

from collab_llm.msg import Status
from collab_llm_nodes.nodes import sim_go2
from collab_llm_nodes.ros.qos import COMMAND

pytestmark = pytest.mark.ros
__all__ = ["graph"]  # fixture


def test_velocities_of_a_stranger_move_nothing(graph: Any) -> None:
    room = SimulatedRoom(graph, seed=3)
    guard = graph.node("motion_guard")
    guard.create_publisher(Twist, "cmd_vel", COMMAND)
    twist = Twist()
    twist.angular.z = 0.5
    room.user.create_timer(0.05, lambda: room.commands.publish(twist))
    graph.wait_for(lambda: room.odometry and room.odometry[-1].twist.twist.angular.z > 0.3)
    graph.wait_for(lambda: room.odometry[-1].twist.twist.angular.z == 0.0)
    seen = len(room.odometry)
    graph.wait_for(lambda: len(room.odometry) > seen + 20)
    assert not any(o.twist.twist.angular.z for o in room.odometry[seen:])
    graph.do(guard.destroy_node)
    graph.wait_for(lambda: room.odometry[-1].twist.twist.angular.z > 0.3)


def seconds(stamp: Time) -> float:
    return float(stamp.sec + stamp.nanosec * 1e-9)


def test_simulator_moves_obeys_its_watchdog_and_resets(graph: Any) -> None:
    room = SimulatedRoom(graph, seed=3, real_time_factor=5.0)
    graph.wait_for(lambda: room.odometry and room.frames and room.info)
    assert room.info[-1].seed == 3
    with Pil.open(io.BytesIO(bytes(room.frames[0].data))) as picture:
        assert picture.size == (168, 84)
    start_yaw = room.truth[0].pose.orientation.z
    twist = Twist()
    twist.angular.z = 0.5
    room.commands.publish(twist)
    graph.wait_for(lambda: room.odometry[-1].twist.twist.angular.z > 0.3)
    graph.wait_for(lambda: room.odometry[-1].twist.twist.angular.z == 0.0)  # the watchdog
    assert room.truth[-1].pose.orientation.z != start_yaw
    stamps = [seconds(o.header.stamp) for o in room.odometry]
    assert stamps == sorted(stamps)
    assert graph.ask(room.reset.call_async, Trigger.Request()).success
    graph.wait_for(lambda: room.truth[-1].pose.orientation.z == start_yaw)
    room.node.post(room.node.set_parameters, [Parameter("seed", value=4)])
    graph.wait_for(lambda: room.info[-1].seed == 4)


def test_a_room_chosen_while_the_simulator_is_inactive_is_entered(graph: Any) -> None:
    room = SimulatedRoom(graph, seed=3)
    room.node.post(room.node.trigger_deactivate)
    graph.wait_for(lambda: not room.node.active)
    room.node.post(room.node.set_parameters, [Parameter("seed", value=4)])
    room.node.post(room.node.set_parameters, [Parameter("real_time_factor", value=5.0)])
    graph.wait_for(lambda: room.node.config.real_time_factor == 5.0)
    assert room.info[-1].seed == 3
    room.node.post(room.node.trigger_activate)
    graph.wait_for(lambda: room.info[-1].seed == 4)
    assert room.node._pacer.timer_period_ns == 10_000_000


def test_simulator_in_lockstep_advances_with_the_commands(
    graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sim_go2, "LOCKSTEP_S", 5.0)
    room = SimulatedRoom(graph, seed=3, lockstep=True)
    graph.wait_for(lambda: room.odometry)
    twist = Twist()
    twist.angular.z = 0.5
    room.commands.publish(twist)
    graph.wait_for(lambda: room.node._base.turn)  # from now on it moves
    for _ in range(3):  # each command is one step of 0.05 s
        before = room.node.time
        room.commands.publish(twist)
        # What was published before may still be on its way: the stamp tells whose it is.
        graph.wait_for(lambda: seconds(room.odometry[-1].header.stamp) > before + 0.01)  # noqa: B023
        assert room.node.time - before == pytest.approx(0.05)
    assert room.node._base.turn > 0.0


def test_the_navigator_reaches_the_target_in_the_simulated_room(graph: Any) -> None:
    """The whole robot side in simulated time, with the geometric expert in place of the model."""
    from collab_llm_nodes.sim.expert import decide, look, reached

    def answer(prompt: str) -> str:
        told = prompt.split("history: ")[1].rstrip(".")
        history = [] if told == "none" else told.split(", ")
        base, world = robot.node._base, robot.node._room
        action = decide(look(world, base.pose)[world.target], history)
        return f"i see a wall. the next action is {action}."

    robot = SimulatedRobot(graph, answer, seed=4)
    result = robot.navigate(f"find the {robot.node._room.goal.name}")
    assert (result.status.code, result.status.message) == (Status.OK, "")
    assert reached(robot.node._room, robot.node._base.pose)
