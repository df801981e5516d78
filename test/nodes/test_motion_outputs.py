"""The navigator with what surrounds its steps: motion_guard's word, nav2, overlapping answers."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from geometry_msgs.msg import Twist, TwistStamped
from motion_graph import Reader, Robot, graph
from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.task import Future
from started_nodes import start

from collab_llm.msg import NavigationAction, Status
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.nodes.navigator import Navigator
from collab_llm_nodes.robot.grammar import Kind
from collab_llm_nodes.ros.qos import COMMAND, RESULT
from collab_llm_nodes.ros.step_outputs import make_output

pytestmark = pytest.mark.ros
__all__ = ["graph"]  # a fixture


def allowed(robot: Robot) -> bool | None:
    """Return what the navigator has heard of motion_guard; None if nothing."""
    heard = robot.navigator._permission
    return heard and heard[0].allowed


# Phrases.


def test_phrases_are_parameters(graph: Any) -> None:
    reader = Reader(graph, grammar__forward=["walk {distance}"], grammar__json=True)
    assert reader.read("a", "the next action is walk 0.5 m.").distance == 0.5
    assert reader.read("b", '{"action": "walk 25 cm"}').distance == 0.25
    assert reader.read("c", "move forward 25 cm").kind == NavigationAction.NONE
    with pytest.raises(ConfigError, match="is no phrase"):
        Reader(graph, grammar__forward=["(a+)+ {distance}"])


# motion_guard.


def test_the_emergency_stop_ends_the_goal(graph: Any) -> None:
    robot = Robot(graph, ["move forward 75 cm"], mission__executor__linear_speed=0.2)
    handle = robot.send()
    graph.wait_for(robot.moved)
    robot.permit(emergency_stop=True, reasons=["EMERGENCY_STOP"], text="pressed by me")
    result = graph.ask(handle.get_result_async, timeout=30).result
    assert (result.status.code, result.status.message) == (Status.EMERGENCY_STOP, "pressed by me")
    graph.wait_for(robot.stands)
    assert robot.x < 0.7
    # A goal that comes while it is set ends as well, and moves nothing.
    asked, count = len(robot.prompts), len(robot.commands)
    assert robot.navigate().status.code == Status.EMERGENCY_STOP
    assert len(robot.prompts) == asked
    assert all(c == Twist() for c in robot.commands[count:])
    robot.permit(allowed=True, speed_limit=1.0)
    graph.wait_for(lambda: allowed(robot))
    robot.script = ["stop"]
    assert robot.navigate().status.code == Status.OK


def test_refused_motion_is_waited_for_then_done(graph: Any) -> None:
    robot = Robot(
        graph,
        ["move forward 75 cm", "move forward 10 cm", "stop"],
        mission__executor__linear_speed=0.2,
        mission__executor__progress_share=0.0,  # a busy machine's robot is slow, not blocked
    )
    handle = robot.send()
    graph.wait_for(robot.moved)
    robot.permit(reasons=["STALE_CAMERA"], text="no fresh picture")
    graph.wait_for(lambda: robot.navigator._run.mission.phase.value == "observe", 30)
    graph.wait_for(robot.stands)
    stopped = robot.x
    assert len(robot.prompts) == 1
    robot.permit(allowed=True, speed_limit=1.0)
    result = graph.ask(handle.get_result_async, timeout=30).result
    assert (result.status.code, result.steps) == (Status.OK, 3)
    assert robot.x == pytest.approx(stopped + 0.1, abs=0.05)


def test_motion_refused_for_too_long_names_the_reason(graph: Any) -> None:
    robot = Robot(graph, ["move forward 75 cm"], mission__refusal_timeout=0.5)
    robot.permit(reasons=["STALE_ODOMETRY"], text="no fresh odometry")
    graph.wait_for(lambda: allowed(robot) is False)
    result = robot.navigate()
    assert (result.status.code, result.status.message) == (
        Status.MOTION_REFUSED,
        "no fresh odometry",
    )
    assert not robot.moved()


def test_a_required_guard_that_is_not_there_is_an_error(graph: Any) -> None:
    robot = Robot(graph, ["move forward 75 cm"], require_guard=True, mission__guard_timeout=1.0)
    robot.allowed = None
    graph.wait_for(lambda: not robot.user.destroy_publisher(robot.guard) or True)
    robot.navigator._permission = None
    result = robot.navigate()
    assert result.status.code == Status.MOTION_REFUSED
    assert "motion_guard is silent" in result.status.message
    assert "require_guard" in result.status.message


def test_a_guard_need_not_be_there_where_it_is_not_required(graph: Any) -> None:
    robot = Robot(graph, ["move forward 25 cm", "stop"], require_guard=False)
    robot.allowed = None
    robot.navigator._permission = None
    assert robot.navigate().status.code == Status.OK
    assert robot.x == pytest.approx(0.25, abs=0.08)


def test_odometry_from_before_the_goal_counts(graph: Any) -> None:
    """An answer may come sooner than the next odometry."""
    robot = Robot(graph, ["move forward 75 cm"], mission__executor__watchdog=0.3)
    graph.wait_for(lambda: robot.navigator._odometry)
    robot.odometry_on = False
    result = robot.navigate()
    assert (result.status.code, result.steps) == (Status.NO_ODOMETRY, 1)  # it began
    assert "during a step" in result.status.message


def test_an_error_that_nobody_foresaw_stops_the_robot_and_ends_the_goal(graph: Any) -> None:
    robot = Robot(graph, ["move forward 75 cm"], mission__executor__linear_speed=0.2)
    handle = robot.send()
    graph.wait_for(robot.moved)
    robot.navigator._run.mission._executor._limits = None
    result = graph.ask(handle.get_result_async, timeout=30).result
    assert result.status.code == Status.INTERNAL
    assert "TypeError" in result.status.message
    graph.wait_for(robot.stands)
    robot.script = ["stop"]
    assert robot.navigate().status.code == Status.OK


@pytest.mark.parametrize("stamped", [False, True])
def test_commands_are_stamped_where_wanted(graph: Any, stamped: bool) -> None:
    kind = TwistStamped if stamped else Twist
    node = start(graph, Navigator, stamped=stamped, base_frame="trunk")
    user = graph.node("driver")
    commands = graph.collect(user, kind, "cmd_vel_nav", COMMAND)
    graph.wait_for(lambda: user.count_publishers("cmd_vel_nav"))
    node.post(node.trigger_deactivate)
    stop = graph.wait_for(lambda: commands)[-1]
    twist = stop.twist if stamped else stop
    assert twist == Twist()
    if stamped:
        assert stop.header.frame_id == "trunk"
        assert stop.header.stamp.sec > 0


# Answers asked for on the way.


def test_steps_follow_one_another_without_a_pause(graph: Any) -> None:
    script = ["move forward 75 cm", "move forward 75 cm", "move forward 50 cm", "stop"]
    robot = Robot(graph, script, mission__overlap=1.0, mission__executor__linear_speed=0.5)
    handle = robot.send(max_steps=3)
    result = graph.ask(handle.get_result_async, timeout=40).result
    assert (result.status.code, result.steps) == (Status.MAX_STEPS, 3)
    speeds = [c.linear.x for c in robot.commands]
    first, last = (i for i in (_first(speeds), len(speeds) - _first(speeds[::-1]) - 1))
    assert min(speeds[first:last]) > 0.0  # never at rest in between
    assert 0.75 < robot.x < 2.0  # of 2 m, less what was left when it looked
    assert "move forward 75 cm, move forward 75 cm" in robot.prompts[2]
    assert [f.step for f in robot.feedback] == [1, 2, 3]


def _first(speeds: list[float]) -> int:
    return next(i for i, speed in enumerate(speeds) if speed)


# nav2.


class Behaviors:
    """nav2's behavior_server: moves the robot and answers as told.

    ``codes``: error codes to return, one after the other; the last is repeated.
    """

    def __init__(self, graph: Any, robot: Robot, codes: list[str]) -> None:
        nav2 = pytest.importorskip("nav2_msgs.action", reason="not built: scripts/setup.sh tests")
        self.robot, self.codes = robot, codes
        self.goals: list[Any] = []
        self.cancelled = 0
        self.servers = [
            ActionServer(
                robot.user,
                kind,
                name,
                self._execute,
                goal_callback=lambda goal: GoalResponse.ACCEPT,
                cancel_callback=self._on_cancel,
            )
            for kind, name in ((nav2.DriveOnHeading, "drive_on_heading"), (nav2.Spin, "spin"))
        ]
        clients = robot.navigator._output._clients.values()
        graph.wait_for(lambda: all(c.server_is_ready() for c in clients), 30)

    def _on_cancel(self, goal: Any) -> CancelResponse:
        self.cancelled += 1
        return CancelResponse.ACCEPT

    async def _execute(self, goal: Any) -> Any:
        request = goal.request
        self.goals.append(request)
        code = self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]
        result = self._result(request)
        if code == "HANG":
            await self.robot.until(lambda: goal.is_cancel_requested)
            goal.canceled()
            return result
        if code != "NONE":
            result.error_code, result.error_msg = getattr(result, code), "so it is"
            goal.abort()
            return result
        await self._move(request)
        goal.succeed()
        return result

    async def _move(self, request: Any) -> None:
        """Carry a step out at a speed of robots: all at once, odometry would show a jump."""
        robot, turns = self.robot, hasattr(request, "target_yaw")
        left = request.target_yaw if turns else request.target.x

        def advance() -> bool:
            nonlocal left
            change = math.copysign(min(abs(left), 0.02), left)
            left -= change
            if turns:
                robot.yaw += change
            else:
                robot.x += change * math.cos(robot.yaw)
                robot.y += change * math.sin(robot.yaw)
            return not left

        await robot.until(advance)

    def _result(self, request: Any) -> Any:
        from nav2_msgs.action import DriveOnHeading, Spin

        return (DriveOnHeading if hasattr(request, "target") else Spin).Result()


def test_nav2_carries_the_steps_out(graph: Any) -> None:
    pytest.importorskip("nav2_msgs", reason="not built: scripts/setup.sh tests")
    robot = Robot(graph, ["turn left 30 degree", "move forward 50 cm", "stop"], output="nav2")
    nav2 = Behaviors(graph, robot, ["NONE"])
    result = robot.navigate()
    assert (result.status.code, result.steps) == (Status.OK, 3)
    turn, drive = nav2.goals
    assert turn.target_yaw == pytest.approx(math.radians(30))
    assert (drive.target.x, drive.speed) == (0.5, 1.0)
    assert drive.time_allowance.sec >= 2
    assert math.hypot(robot.x, robot.y) == pytest.approx(0.5)
    assert not robot.moved()  # not by velocities of ours


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("COLLISION_AHEAD", "BLOCKED", "2 steps in a row"),
        ("TIMEOUT", "TIMEOUT", "longer than its allowance"),
        ("TF_ERROR", "MOTION_REFUSED", "nav2: TF_ERROR, so it is"),
        ("UNKNOWN", "MOTION_REFUSED", "nav2: UNKNOWN, so it is"),
    ],
)
def test_nav2s_errors_are_outcomes(graph: Any, code: str, status: str, words: str) -> None:
    pytest.importorskip("nav2_msgs", reason="not built: scripts/setup.sh tests")
    robot = Robot(graph, ["turn right 30 degree"], output="nav2", mission__max_blocked=2)
    Behaviors(graph, robot, [code])
    result = robot.navigate()
    assert result.status.code == getattr(Status, status)
    assert words in result.status.message


def test_every_way_out_of_a_nav2_step_cancels_it(graph: Any) -> None:
    pytest.importorskip("nav2_msgs", reason="not built: scripts/setup.sh tests")
    robot = Robot(graph, ["move forward 50 cm"], output="nav2")
    nav2 = Behaviors(graph, robot, ["HANG"])

    def cancels(handle: Any) -> None:
        graph.ask(handle.cancel_goal_async)

    def deactivates(handle: Any) -> None:
        robot.navigator.post(robot.navigator.trigger_deactivate)

    def presses(handle: Any) -> None:
        robot.permit(emergency_stop=True, text="pressed")

    ways = {cancels: "CANCELLED", presses: "EMERGENCY_STOP", deactivates: "INACTIVE"}
    for number, (way, status) in enumerate(ways.items(), 1):
        robot.permit(allowed=True, speed_limit=1.0)
        graph.wait_for(lambda: allowed(robot))
        handle = robot.send()
        graph.wait_for(lambda: len(nav2.goals) == number, 30)  # noqa: B023
        way(handle)
        result = graph.ask(handle.get_result_async, timeout=30).result
        assert result.status.code == getattr(Status, status)
        graph.wait_for(lambda: nav2.cancelled == number, 30)  # noqa: B023
        graph.wait_for(robot.stands)


def test_a_nav2_step_whose_acceptance_is_lost_is_cancelled(graph: Any) -> None:
    pytest.importorskip("nav2_msgs", reason="not built: scripts/setup.sh tests")
    robot = Robot(graph, ["move forward 50 cm"], output="nav2")
    nav2 = Behaviors(graph, robot, ["HANG"])
    client = robot.navigator._output._clients[Kind.FORWARD]
    send = client.send_goal_async

    def send_unheard(*args: Any) -> Future:
        send(*args)
        return Future()

    client.send_goal_async = send_unheard
    handle = robot.send()
    graph.wait_for(lambda: nav2.goals)
    graph.ask(handle.cancel_goal_async)
    graph.wait_for(lambda: nav2.cancelled == 1)


def test_nav2_that_is_not_there_is_said_so(graph: Any) -> None:
    pytest.importorskip("nav2_msgs", reason="not built: scripts/setup.sh tests")
    robot = Robot(graph, ["move forward 50 cm"], output="nav2")
    result = robot.navigate()
    assert result.status.code == Status.MOTION_REFUSED
    assert "behavior_server" in result.status.message


def test_without_nav2s_package_the_error_says_what_to_install(
    graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nav2_msgs.action", None)
    with pytest.raises(ConfigError, match="apt install") as caught:
        make_output("nav2", graph.node("user"))
    assert caught.value.field == "output"


# The Go2's obstacle avoidance.


def test_increments_go_to_the_robots_obstacle_avoidance(graph: Any) -> None:
    api = pytest.importorskip("unitree_api.msg", reason="not built: scripts/setup.sh tests")
    robot = Robot(graph, ["turn left 30 degree", "move forward 50 cm", "stop"], output="increments")
    answers = robot.user.create_publisher(api.Response, "api/obstacles_avoid/response", RESULT)
    stops = graph.collect(robot.user, api.Request, "api/sport/request", RESULT)
    parts: list[tuple[float, float]] = []  # of the increments: ahead, turn

    def walk() -> None:
        if parts:
            ahead, turn = parts.pop()
            robot.yaw += turn
            robot.x += ahead * math.cos(robot.yaw)
            robot.y += ahead * math.sin(robot.yaw)

    def obey(msg: Any) -> None:
        wish = json.loads(msg.parameter)
        if wish.get("mode") == 1:
            parts.extend([(wish["x"] / 20, wish["yaw"] / 20)] * 20)
        answer = api.Response(data=json.dumps({"enable": True}))
        answer.header.identity = msg.header.identity
        if not msg.header.policy.noreply:
            answers.publish(answer)

    robot.user.create_timer(0.02, walk)
    robot.user.create_subscription(api.Request, "api/obstacles_avoid/request", obey, RESULT)
    graph.wait_for(lambda: robot.user.count_publishers("api/obstacles_avoid/request"))
    graph.wait_for(lambda: robot.user.count_subscribers("api/obstacles_avoid/response"))
    result = graph.ask(robot.send().get_result_async, timeout=40).result
    assert (result.status.code, result.status.message, result.steps) == (Status.OK, "", 3)
    assert robot.yaw == pytest.approx(math.radians(30))
    assert math.hypot(robot.x, robot.y) == pytest.approx(0.5)
    assert [s.header.identity.api_id for s in stops][:2] == [1003, 1003]  # after each step
    assert not robot.moved()
