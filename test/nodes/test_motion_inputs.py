"""Messages with numbers that are none, by whoever publishes them: counted, named, no motion."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from geometry_msgs.msg import Quaternion
from motion_graph import Robot, graph
from nav_msgs.msg import Odometry
from rclpy.parameter import Parameter
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import LaserScan, Range
from started_nodes import start

from collab_llm.action import Generate
from collab_llm.msg import MotionState, NavigationAction, Observation, Status
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.nodes.motion_guard import MotionGuard
from collab_llm_nodes.robot.guard import Source
from collab_llm_nodes.ros.motion_inputs import (
    action_from,
    check_range,
    check_scan,
    permission_from,
    pose_from,
    seconds_of,
)
from collab_llm_nodes.ros.qos import COMMAND, RESULT

pytestmark = pytest.mark.ros
__all__ = ["graph"]  # fixture

NAN, INF = math.nan, math.inf


def forward(distance: float, **fields: Any) -> NavigationAction:
    return NavigationAction(kind=NavigationAction.FORWARD, distance=distance, **fields)


def turn(angle: float) -> NavigationAction:
    return NavigationAction(kind=NavigationAction.TURN, angle=angle)


BAD_ACTIONS = [
    *(forward(value) for value in (NAN, INF, -INF, -5.0, 0.0, 1e9)),
    *(turn(value) for value in (NAN, INF, -INF, 0.0, 1e6, -1e6)),
    NavigationAction(kind=77),
    NavigationAction(code=77),
    forward(0.5, code=NavigationAction.STALE),
    NavigationAction(kind=NavigationAction.NONE, code=NavigationAction.OK),
    NavigationAction(kind=NavigationAction.REPLY, code=NavigationAction.UNVERIFIED),
]


@pytest.mark.parametrize("msg", BAD_ACTIONS)
def test_actions_that_no_parser_makes_are_refused(msg: NavigationAction) -> None:
    with pytest.raises(InvalidInput, match=r"navigation_action\.\w+: .*\(.*\)"):
        action_from(msg)


def test_actions_of_the_parser_are_taken() -> None:
    assert action_from(forward(0.75)).value == 0.75
    assert action_from(turn(-0.5)).value == -0.5
    assert action_from(NavigationAction(kind=NavigationAction.STOP, distance=NAN)).value == 0.0
    for kind in (NavigationAction.GIVE_UP, NavigationAction.REPLY):
        action = action_from(NavigationAction(kind=kind, distance=0.5, angle=0.5, words="no"))
        assert (action.kind, action.value, action.words) == (kind, 0.0, "no")
    action_from(NavigationAction(code=NavigationAction.UNREADABLE))


def pose(**fields: float) -> Odometry:
    msg = Odometry()
    for name, value in fields.items():
        part = msg.pose.pose.orientation if name in "zw" else msg.pose.pose.position
        setattr(part, name, value)
    return msg


@pytest.mark.parametrize(
    ("msg", "field"),
    [
        (pose(x=NAN), "position"),
        (pose(y=-INF), "position"),
        (pose(w=NAN), "orientation"),
        (pose(z=INF), "orientation"),
        (pose(w=0.0), "orientation"),
        (pose(w=2.0), "orientation"),
    ],
)
def test_poses_that_are_none_are_refused(msg: Odometry, field: str) -> None:
    with pytest.raises(InvalidInput, match=rf"odom\.pose\.pose\.{field}"):
        pose_from(msg)


def test_other_numbers_are_checked() -> None:
    msg = Odometry()
    msg.pose.pose.orientation = Quaternion(z=math.sin(0.2), w=math.cos(0.2))
    assert pose_from(msg).yaw == pytest.approx(0.4)
    msg.header.stamp.sec, msg.header.stamp.nanosec = 3, 500_000_000
    assert seconds_of(msg.header.stamp) == 3.5
    msg.header.stamp.sec = -1
    with pytest.raises(InvalidInput, match="stamp"):
        seconds_of(msg.header.stamp)
    for limit in (NAN, -0.1, -INF):
        with pytest.raises(InvalidInput, match="speed_limit"):
            permission_from(MotionState(allowed=True, speed_limit=limit))
        assert not permission_from(MotionState(speed_limit=limit)).allowed  # a stop counts
    beams = {"range_max": 10.0, "angle_increment": 0.1}
    check_scan(LaserScan(**beams))
    check_range(Range(max_range=4.0))
    for name in ("angle_min", "angle_increment", "range_min", "range_max"):
        with pytest.raises(InvalidInput, match=name):
            check_scan(LaserScan(**{**beams, name: NAN}))
    with pytest.raises(InvalidInput, match="min_range"):
        check_range(Range(max_range=4.0, min_range=NAN))


def forges(*messages: NavigationAction) -> Callable[..., Any]:
    """An answer that a foreign publisher precedes with actions of the same frame and session."""

    async def answer(robot: Robot, goal: Any) -> Generate.Result:
        session = str(len(robot.prompts))
        publisher = robot.user.create_publisher(NavigationAction, "navigation_action", RESULT)
        await robot.until(publisher.get_subscription_count)
        for message in messages:
            message.header.stamp, message.session_id = goal.request.header.stamp, session
            message.text = "stop"
            publisher.publish(message)
        heard = robot.navigator.callback_errors
        if all(message in BAD_ACTIONS for message in messages):
            await robot.until(lambda: robot.navigator.callback_errors >= len(messages) or heard)
        robot.say(goal, session, "stop")
        goal.succeed()
        return Generate.Result(
            header=goal.request.header, text="stop", session_id=session, status=Status()
        )

    return answer


def test_forged_actions_move_nothing_and_are_named(
    graph: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    robot = Robot(graph, [forges(*BAD_ACTIONS)])
    result = robot.navigate()
    assert (result.status.code, result.status.message) == (Status.OK, ""), "the true one counts"
    assert not robot.moved()
    assert robot.x == robot.yaw == 0.0
    assert "navigation_action." in capfd.readouterr().err


def test_a_step_beyond_the_grammars_limits_is_not_carried_out(graph: Any) -> None:
    robot = Robot(graph, [forges(forward(5.0)), "stop"], mission__retries=0)
    result = robot.navigate()
    assert result.status.code == Status.UNREADABLE
    assert "at most 0.75 m" in result.status.message
    assert not robot.moved()


@pytest.mark.parametrize("limit", [NAN, -1.0])
def test_a_permission_without_a_speed_moves_nothing(graph: Any, limit: float) -> None:
    robot = Robot(graph, ["move forward 50 cm"], mission__refusal_timeout=0.5)
    robot.permit(allowed=True, speed_limit=limit)
    graph.wait_for(lambda: robot.navigator.callback_errors)
    result = robot.navigate()
    assert result.status.code == Status.MOTION_REFUSED
    assert "motion_state.speed_limit" in result.status.message
    assert not robot.moved()


def test_an_emergency_stop_counts_whatever_else_is_said(graph: Any) -> None:
    robot = Robot(graph, ["move forward 50 cm"])
    robot.permit(allowed=True, emergency_stop=True, speed_limit=NAN)
    graph.wait_for(lambda: robot.navigator.callback_errors)
    assert robot.navigate().status.code == Status.EMERGENCY_STOP


@pytest.mark.parametrize(
    ("shift", "named"),
    [(-10.0, "stamped 1"), (10.0, "stamped "), (None, "stamped alike"), (-1e10, "header.stamp")],
)
def test_stamps_are_named_before_the_first_step(
    graph: Any, shift: float | None, named: str
) -> None:
    robot = Robot(graph, ["move forward 50 cm"], odometry_max_age=5.0)
    robot.odometry_on = False
    first = robot.user.get_clock().now().nanoseconds

    def measure() -> None:
        now = robot.user.get_clock().now().nanoseconds
        stamp = first if shift is None else now + int(shift * 1e9)
        message = Odometry()
        message.header.stamp.sec = max(-(2**31), stamp // 10**9)
        message.header.stamp.nanosec = stamp % 10**9
        robot.odometry.publish(message)

    robot.user.create_timer(0.02, measure)

    graph.wait_for(lambda: named in robot.navigator._odometry_trouble)
    robot.navigator._odometry = None  # heard before the clock was wrong
    result = robot.navigate()
    assert result.status.code == Status.NO_ODOMETRY
    assert named in result.status.message
    assert not robot.moved()


def test_a_frame_from_before_the_epoch_ends_no_mission(graph: Any) -> None:
    robot = Robot(graph, ["turn left 30 degree", "stop"])
    bad = Observation()
    bad.header.stamp.sec = -5

    def disturb() -> None:
        robot.observations.publish(bad)

    robot.user.create_timer(0.02, disturb)
    assert robot.navigate().status.code == Status.OK
    assert robot.navigator.callback_errors


def test_a_guard_takes_no_useless_message_for_a_sign_of_life(graph: Any) -> None:
    node = start(graph, MotionGuard, **{"obstacle.scan": "optional", "obstacle.range": "optional"})
    user = graph.node("stranger")
    odometry = user.create_publisher(Odometry, "odom", COMMAND)
    scans = user.create_publisher(LaserScan, "scan", COMMAND)
    ranges = user.create_publisher(Range, "range", COMMAND)
    frames = user.create_publisher(Observation, "observation", RESULT)

    def say() -> None:
        now = user.get_clock().now().to_msg()
        bad = {
            odometry: pose(x=NAN),
            scans: LaserScan(angle_increment=NAN, range_max=10.0, ranges=[1.0]),
            ranges: Range(min_range=NAN, max_range=4.0, range=1.0),
            frames: Observation(),
        }
        for publisher, message in bad.items():
            message.header.stamp = now
            if publisher is frames:
                message.header.stamp.sec = -1
            publisher.publish(message)

    user.create_timer(0.02, say)
    graph.wait_for(lambda: node.callback_errors >= 20)
    silences = {source: node._guard.silence(source, 0.0) for source in Source}
    assert set(silences.values()) == {INF}


def test_a_clock_before_zero_ends_no_node(graph: Any, capfd: pytest.CaptureFixture[str]) -> None:
    node = start(graph, MotionGuard)
    simulated = [Parameter("use_sim_time", value=True)]
    graph.do(node.set_parameters, simulated)
    user = graph.node("stranger")
    clock = user.create_publisher(Clock, "/clock", COMMAND)
    graph.wait_for(clock.get_subscription_count)
    bad, good = Clock(), Clock()
    bad.clock.sec, good.clock.sec = -1, 7
    clock.publish(bad)
    graph.wait_for(lambda: node.callback_errors)
    clock.publish(good)
    graph.wait_for(lambda: node.seconds() == 7.0)
    assert "/clock: -1 s" in capfd.readouterr().err
