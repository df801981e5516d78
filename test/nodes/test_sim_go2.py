"""The node ``sim_go2``, and the navigator in its rooms with the expert in place of a model."""

from __future__ import annotations

import io
import math
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
from collab_llm_lab.home import expert
from collab_llm_lab.home.answers import answer
from collab_llm_lab.home.expert import Expert, reached
from collab_llm_lab.home.requests import About, Kind, Request
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.nodes import sim_go2
from collab_llm_nodes.nodes.sim_go2 import SimConfig
from collab_llm_nodes.robot.prompt import SEARCH_TEMPLATE, user_text
from collab_llm_nodes.robot.search import SearchMemory
from collab_llm_nodes.ros.images import view_of
from collab_llm_nodes.ros.qos import COMMAND
from collab_llm_nodes.sim.jpeg import from_jpeg, to_jpeg
from collab_llm_nodes.sim.renderer import Renderer
from collab_llm_nodes.sim.rooms import NAMES, make_room
from collab_llm_nodes.sim.view import look

pytestmark = pytest.mark.ros
__all__ = ["graph"]  # fixture

LATE = 39
"""Seed of a room with a late camera."""
BLOCKED = 31
"""Seed of a room where furniture stands between the robot and the first thing, a blue box."""


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
        assert picture.size == (224, 112)
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
    # Its message ends the first step; in the middle of one the time is still that before it.
    graph.wait_for(lambda: room.odometry[-1].twist.twist.angular.z)
    for _ in range(3):  # each command is one step of 0.05 s
        before = room.node.time
        room.commands.publish(twist)
        # What was published before may still be on its way: the stamp tells whose it is.
        graph.wait_for(lambda: seconds(room.odometry[-1].header.stamp) > before + 0.01)  # noqa: B023
        assert room.node.time - before == pytest.approx(0.05)
    assert room.node._base.turn > 0.0


class Answering:
    """The expert in place of a model; it checks each prompt against its own memory."""

    def __init__(self, request: Request, robot: SimulatedRobot | None = None) -> None:
        self.request, self.robot = request, robot
        self._expert: Expert | None = None
        self._states = [(SearchMemory(), list[str]())]
        """Memory and history if the last action was executed, and if the guard stopped it."""

    def __call__(self, prompt: str) -> str:
        assert self.robot is not None
        room, pose = self.robot.node._room, self.robot.node._base.pose
        self._expert = self._expert or Expert(room, self.request)
        prompts = [
            user_text(self.request.text, history, SEARCH_TEMPLATE, search=memory.text)
            for memory, history in self._states
        ]
        assert prompt in prompts
        memory, history = self._states[prompts.index(prompt)]
        decision = self._expert.decide(look(room, pose), pose, history, memory)
        said = answer(decision)
        after = memory.after(decision.action, said), [*history, decision.action]
        self._states = [after, (memory, history)]
        return said


def drive(graph: Any, request: Request, **parameters: Any) -> tuple[Any, SimulatedRobot]:
    """Return the result of a request and the robot that carried it out."""
    answering = Answering(request)
    robot = SimulatedRobot(graph, answering, **parameters)
    answering.robot = robot
    return robot.navigate(request.text), robot


def test_the_navigator_goes_around_furniture_to_what_is_asked_for(graph: Any) -> None:
    request = Request(Kind.GO, "please go to the blue box", About("blue box"))
    result, robot = drive(graph, request, seed=BLOCKED)
    assert (result.status.code, result.status.message) == (Status.OK, "")
    assert reached(robot.node._room, 0, robot.node._base.pose)
    assert result.steps > 5
    assert "blue box" in result.text


def test_a_question_is_replied_to_and_a_search_in_vain_given_up(
    graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert, "PLACES_TO_LOOK_ROUND", 1)
    question = Request(Kind.IS_THERE, "is there a blue box?", About("blue box"))
    result, robot = drive(graph, question, seed=BLOCKED)
    assert result.status.code == Status.ANSWERED
    assert "yes, a blue box is" in result.text
    assert result.distance_travelled == 0.0

    there = {thing.name for thing in robot.node._room.things}
    absent = next(name for name in NAMES if name not in there)
    robot.answer = Answering(Request(Kind.GO, f"find the {absent}", About(absent)), robot)
    result = robot.navigate(f"find the {absent}")
    assert result.status.code == Status.NOT_FOUND
    assert absent in result.text
    assert result.steps >= 7


def test_the_camera_sways_with_each_motion_and_may_be_one_late(graph: Any) -> None:
    sim = SimulatedRoom(graph, seed=LATE, real_time_factor=5.0)
    room, renderer = make_room(LATE), Renderer()
    renderer.enter(room)
    places = [room.start, room.start]
    for number in range(3):
        shown = to_jpeg(renderer.picture(places[-2], number), room.camera.jpeg_quality)
        graph.wait_for(lambda: sim.frames and bytes(sim.frames[-1].data) == shown)  # noqa: B023
        twist = Twist()
        twist.angular.z = 0.8
        sim.commands.publish(twist)
        graph.wait_for(lambda: sim.node._base.turn)
        graph.wait_for(lambda: not sim.node._base.turn)  # the watchdog
        places.append(sim.node._base.pose)
    assert from_jpeg(bytes(sim.frames[-1].data)).shape == (112, 224, 3)
    camera = sim.cameras[-1]
    assert view_of(camera) == pytest.approx(math.degrees(2 * room.camera.half_fov))
    assert camera.header == sim.frames[-1].header
    renderer.close()


def test_a_room_names_its_parts_and_holds_the_thing_wanted(graph: Any) -> None:
    sim = SimulatedRoom(graph, seed=BLOCKED)
    room = make_room(BLOCKED)
    graph.wait_for(lambda: sim.info)
    assert [thing.name for thing in sim.info[-1].things] == [part.name for part in room.parts]
    assert {thing.colour for thing in sim.info[-1].things[len(room.things) :]} == {""}
    sim.node.post(sim.node.set_parameters, [Parameter("thing", value="red mug")])
    graph.wait_for(lambda: sim.info[-1].things[0].name == "red mug")
    assert (sim.info[-1].things[0].colour, sim.info[-1].things[0].shape) == ("red", "mug")


def test_a_thing_that_cannot_be_placed_is_refused() -> None:
    with pytest.raises(ConfigError, match="thing"):
        SimConfig(thing="red chair")
