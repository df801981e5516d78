"""Parser, navigator and simulator as real nodes, against scripted answers and bad input."""

from __future__ import annotations

import io
import math
import signal
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pil

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from action_msgs.msg import GoalStatus
from geometry_msgs.msg import PoseStamped, Twist
from nav_msgs.msg import Odometry
from rclpy.action import ActionClient, ActionServer, CancelResponse, GoalResponse
from rclpy.action.server import ServerGoalHandle
from rclpy.parameter import Parameter
from rclpy.task import Future
from sensor_msgs.msg import CompressedImage
from std_srvs.srv import Trigger

from collab_llm.action import Generate, Navigate
from collab_llm.msg import GeneratedText, MotionState, NavigationAction, Observation, Status
from collab_llm.msg import Room as RoomMsg
from collab_llm_nodes.nodes import navigator
from collab_llm_nodes.nodes.camera_ingest import CameraIngest
from collab_llm_nodes.nodes.motion_guard import MotionGuard
from collab_llm_nodes.nodes.navigation_action_parser import NavigationActionParser
from collab_llm_nodes.nodes.navigator import Navigator
from collab_llm_nodes.robot.grammar import Code, Kind
from collab_llm_nodes.ros.qos import COMMAND, RESULT, STATE

pytestmark = pytest.mark.ros


@pytest.fixture
def graph(ros_graph: Any) -> Iterator[Any]:
    """The running graph; nodes started in it are stopped in the thread that ran them."""
    ros_graph.started = []
    yield ros_graph
    for node in ros_graph.started:
        node.post(node.stop)
    ros_graph.wait_for(lambda: not any(node.active for node in ros_graph.started))


def start(graph: Any, node_type: type, **parameters: Any) -> Any:
    """Start a node in the graph's own thread; ``__`` stands for the dot of a nested parameter."""
    overrides = [Parameter(name.replace("__", "."), value=v) for name, v in parameters.items()]
    node = node_type(context=graph.context, parameter_overrides=overrides)
    graph.add(node)
    graph.started.append(node)
    node.post(node.start)
    graph.wait_for(lambda: node.active)
    return node


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


def test_parser_waits_for_the_whole_answer(graph: Any) -> None:
    reader = Reader(graph)
    order = "the next action is move forward 75 cm."
    reader.say("a", order)
    action = reader.read("a", order + " actually no, stop.")
    assert (action.kind, action.code) == (NavigationAction.NONE, NavigationAction.NEGATED)
    assert len(reader.actions) == 1  # nothing was said before the end
    reader.say("b", order)
    assert reader.read("b", order).distance == 0.75


def test_parser_reads_streams_and_takes_back(graph: Any) -> None:
    reader = Reader(graph, streaming=True)
    action = reader.read("a", "the ball is left. the next action is turn left 30 degree.")
    assert (action.kind, action.code) == (NavigationAction.TURN, NavigationAction.OK)
    assert action.angle == pytest.approx(math.radians(30))
    assert action.distance == 0.0
    assert action.text[action.span_begin : action.span_end] == "turn left 30 degree"
    assert action.verified
    # A motion is reported before the last token ...
    reader.say("b", "the next action is move forward 75")
    reader.say("b", "the next action is move forward 75 cm.")
    streamed = graph.wait_for(lambda: [a for a in reader.actions if a.session_id == "b"])
    assert streamed[0].distance == 0.75
    # ... once ...
    reader.say("b", "the next action is move forward 75 cm.", final=True)
    # ... and taken back if the text goes on; a stop is never early.
    reader.say("c", "the next action is move forward 75 cm.")
    assert reader.read("c", "the next action is move forward 75 cm. no").kind >= 0
    taken_back = graph.wait_for(
        lambda: [a for a in reader.actions if a.session_id == "c" and a.code]
    )
    assert taken_back[0].kind == NavigationAction.NONE
    reader.say("d", "the next action is stop.")
    assert reader.read("d", "the next action is stop.").kind == NavigationAction.STOP
    counts = [sum(a.session_id == s for a in reader.actions) for s in "abcd"]
    assert counts == [1, 1, 2, 1]


def test_parser_does_not_act_on_old_unverified_failed_or_unreadable_text(graph: Any) -> None:
    reader = Reader(graph, max_age=5.0)
    order = "the next action is move forward 75 cm."
    bad = {
        "old": (reader.read("old", order, age=6.0), NavigationAction.STALE),
        "future": (reader.read("future", order, age=-60.0), NavigationAction.STALE),
        "draft": (reader.read("draft", order, verified=False), NavigationAction.UNVERIFIED),
        "failed": (
            reader.read(
                "failed", order, status=Status(code=Status.UNAVAILABLE, message="link down")
            ),
            NavigationAction.FAILED,
        ),
        "junk": (reader.read("junk", "I cannot see"), NavigationAction.UNREADABLE),
        "empty": (reader.read("empty", ""), NavigationAction.EMPTY),
        "far": (reader.read("far", order.replace("75", "1000")), NavigationAction.OUT_OF_RANGE),
    }
    for name, (action, code) in bad.items():
        assert (action.kind, action.code) == (NavigationAction.NONE, code), name
        assert (action.distance, action.angle) == (0.0, 0.0)
        assert action.reason
    assert "link down" in bad["failed"][0].reason
    assert "older than the age limit" in bad["old"][0].reason
    assert "s in the future (check the clocks)" in bad["future"][0].reason
    # Half a sentence that was never finished moves nothing, nor does unverified streaming.
    reader.say("half", order, verified=False)
    assert reader.read("next", order).kind == NavigationAction.FORWARD
    assert not [a for a in reader.actions if a.session_id == "half"]


def test_parser_reads_no_text_that_is_not_meant_for_motion(graph: Any) -> None:
    """Somebody asked a question; the answer is nobody's order, whatever it says."""
    reader = Reader(graph)
    order = "the next action is move forward 75 cm."
    reader.say("question", order, final=True, for_motion=False)
    assert reader.read("order", order).kind == NavigationAction.FORWARD
    assert [a.session_id for a in reader.actions] == ["order"]


def test_parser_policy_may_allow_unverified_text(graph: Any) -> None:
    reader = Reader(graph, unverified="slow", max_age=5.0)
    order = "the next action is move forward 75 cm."
    action = reader.read("a", order, verified=False)
    assert (action.kind, action.verified) == (NavigationAction.FORWARD, False)
    stale = reader.read("b", order, verified=False, age=6.0)
    assert (stale.kind, stale.code) == (NavigationAction.NONE, NavigationAction.STALE)


def test_the_grammar_and_the_message_use_the_same_numbers() -> None:
    assert {k.name: k.value for k in Kind} == {
        k.name: getattr(NavigationAction, k.name) for k in Kind
    }
    assert {c.name: c.value for c in Code} == {
        c.name: getattr(NavigationAction, c.name) for c in Code
    }


# navigator.


def logged(graph: Any, capfd: pytest.CaptureFixture[str], *wanted: str) -> str:
    """What has been logged since the last call; returns when it holds all that is wanted."""
    told = ""

    def complete() -> bool:
        nonlocal told
        told += capfd.readouterr().err
        return all(words in told for words in wanted)

    graph.wait_for(complete)
    return told


PATIENT = {
    "mission.observation_timeout": 5.0,
    "mission.answer_timeout": 5.0,
    "mission.executor.watchdog": 2.0,
    "mission.executor.progress_window": 5.0,
    "odometry_max_age": 5.0,
    "mission.retry_pause": 0.0,
    "mission.retries": 1,
    "mission.executor.linear_speed": 1.0,
    "mission.executor.angular_speed": 2.0,
}
"""Parameters of a navigator that a busy machine does not make impatient, and that is quick."""


COMMANDS = "cmd_vel_nav"
"""Where the navigator publishes velocities."""


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
        """For answers that go on in the middle of what they cause."""
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
        """Whether the last command is zero, as it must be at every end."""
        return bool(self.commands) and self.commands[-1] == Twist()

    def moved(self) -> bool:
        return any(c != Twist() for c in self.commands)


def fails(code: int) -> Callable[..., Any]:
    async def answer(robot: Robot, goal: Any) -> Generate.Result:
        goal.abort()
        status = Status(code=code, message="because")
        return Generate.Result(header=goal.request.header, status=status)

    return answer


def drafted(text: str) -> Callable[..., Any]:
    """The draft model alone says ``text``."""

    async def answer(robot: Robot, goal: Any) -> Generate.Result:
        session = str(len(robot.prompts))
        robot.say(goal, session, text, verified=False)
        goal.succeed()
        return Generate.Result(header=goal.request.header, text=text, session_id=session)

    return answer


async def hangs(robot: Robot, goal: Any) -> Generate.Result:
    await robot.until(lambda: goal.is_cancel_requested)
    goal.canceled()
    return Generate.Result(status=Status(code=Status.CANCELLED))


def test_navigator_follows_an_instruction(graph: Any) -> None:
    seen = "the ball is on the left. the next action is turn left 30 degree."
    script = [seen, "Move forward 50 cm", "stop"]
    robot = Robot(graph, script)
    result = robot.navigate()
    assert (result.status.code, result.status.message, result.steps) == (Status.OK, "", 3)
    assert robot.yaw == pytest.approx(math.radians(30), abs=0.1)
    assert math.hypot(robot.x, robot.y) == pytest.approx(0.5, abs=0.08)
    assert result.distance_travelled == pytest.approx(0.5, abs=0.08)
    assert result.angle_turned >= math.radians(25)
    assert result.pose.pose.position.x == pytest.approx(robot.x, abs=0.05)
    assert robot.prompts == [
        "find the red ball. history: none.",
        "find the red ball. history: turn left 30 degree.",
        "find the red ball. history: turn left 30 degree, move forward 50 cm.",
    ]
    graph.wait_for(robot.stands)
    assert [f.step for f in robot.feedback] == [1, 2]
    assert robot.feedback[1].action.distance == 0.5
    assert len(set(robot.seeds)) == 3  # sampling must not repeat itself at each step
    assert max(c.linear.x for c in robot.commands) <= 1.0
    assert max(abs(c.angular.z) for c in robot.commands) <= 2.0


@pytest.mark.parametrize(
    "text",
    ["do not move, stop", "I cannot see", "", "move backward 50 cm", "move forward 1000 cm"],
)
def test_unreadable_answers_never_move_the_robot(graph: Any, text: str) -> None:
    robot = Robot(graph, [text])
    result = robot.navigate()
    assert result.status.code == Status.UNREADABLE
    assert result.status.message
    assert len(robot.prompts) == 2  # asked again once
    assert not robot.moved()
    assert robot.x == robot.yaw == 0.0


def test_unverified_text_does_not_move_the_robot_unless_allowed(graph: Any) -> None:
    robot = Robot(graph, [drafted("move forward 75 cm")])
    result = robot.navigate()
    assert result.status.code == Status.UNAVAILABLE
    assert len(robot.prompts) == 2  # asked again once
    assert not robot.moved()


def test_allowed_unverified_text_moves_the_robot_slowly_and_less(graph: Any) -> None:
    robot = Robot(
        graph,
        [drafted("move forward 75 cm"), drafted("turn left 45 degree"), "stop"],
        reading={"unverified": "slow"},
        mission__unverified__speed_share=0.2,
        mission__unverified__max_distance=0.3,
        mission__unverified__max_angle=10.0,
    )
    result = robot.navigate()
    assert (result.status.code, result.status.message, result.steps) == (Status.OK, "", 3)
    assert robot.moved()
    assert max(c.linear.x for c in robot.commands) <= 0.2 + 1e-9  # of 1.0 m/s
    assert max(abs(c.angular.z) for c in robot.commands) <= 0.4 + 1e-9  # of 2.0 rad/s
    assert math.hypot(robot.x, robot.y) == pytest.approx(0.3, abs=0.06)
    assert robot.yaw == pytest.approx(math.radians(10.0), abs=0.06)
    assert not robot.feedback[0].action.verified
    assert robot.feedback[0].action.distance == pytest.approx(0.3)
    assert robot.feedback[1].action.angle == pytest.approx(math.radians(10.0))


def test_the_log_tells_when_goals_can_be_sent_and_how_they_end(
    graph: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    robot = Robot(graph, ["turn left 30 degree", "stop"])
    told = logged(graph, capfd, "ready: send a goal")
    for line in ("[navigator]: configured", "[navigator]: active"):
        assert told.count(line) == 1
    instruction = "find the\nred ball \N{RIGHT-TO-LEFT OVERRIDE}" + "x" * 200
    assert robot.navigate(instruction).status.code == Status.OK
    told = logged(graph, capfd, "OK after 2 steps")
    accepted = next(line for line in told.splitlines() if "accepted" in line)
    assert "'find the\\nred ball \\u202exx" in accepted, "escaped"
    assert len(accepted) < 250
    robot.script = [fails(Status.VOCABULARY_MISMATCH)]
    robot.navigate()
    logged(graph, capfd, "VOCABULARY_MISMATCH after 0 steps", ": 'because")


def test_an_idle_navigator_looks_at_no_clock(graph: Any) -> None:
    robot = Robot(graph, ["turn left 30 degree", "stop"])
    clocks = robot.navigator._clocks
    for _ in range(2):
        graph.wait_for(lambda: all(timer.is_canceled() for timer in clocks))
        robot.script = [hangs]
        handle = robot.send()
        graph.wait_for(lambda: not any(timer.is_canceled() for timer in clocks))
        graph.ask(handle.cancel_goal_async)


def test_a_navigator_that_waits_says_for_what(
    graph: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(navigator, "_PATIENCE_S", 0.3)
    node = start(graph, Navigator)
    told = logged(graph, capfd, "not ready, waiting for")
    for missing in ("generate (draft_vlm)", "(motion_guard)", "(camera_ingest)", "odom"):
        assert missing in told
    assert "ready: send" not in told
    node.post(node.trigger_deactivate)
    logged(graph, capfd, "[navigator]: inactive")


@pytest.mark.parametrize(
    ("instruction", "fields", "names"),
    [
        ("", {}, "instruction"),
        (" \n", {}, "instruction"),
        ("go " * 400, {}, "instruction"),
        ("find it", {"deadline_s": -1.0}, "deadline_s"),
        ("find it", {"deadline_s": 0.5}, "deadline_s: 0.5 s (1 to 86400, or 0 for the default)"),
        ("find it", {"deadline_s": 1e6}, "deadline_s"),
        ("find it", {"deadline_s": math.nan}, "deadline_s"),
        ("find it", {"max_steps": 10_001}, "max_steps"),
    ],
)
def test_bad_goals_are_refused_and_the_log_says_why(
    graph: Any,
    instruction: str,
    fields: dict[str, Any],
    names: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    robot = Robot(graph, ["stop"])
    assert not robot.send(instruction, **fields).accepted
    logged(graph, capfd, f"navigate: goal refused: INVALID_INPUT: {names}")
    assert not robot.prompts
    assert robot.navigate().status.code == Status.OK  # and the next one is served


def test_no_frames_end_with_a_status_and_it_recovers(graph: Any) -> None:
    robot = Robot(graph, ["stop"], mission__observation_timeout=0.3)
    robot.camera_on = False
    result = robot.navigate()
    assert result.status.code == Status.NO_OBSERVATION
    assert not robot.moved()
    robot.camera_on = True
    assert robot.navigate().status.code == Status.OK


def test_odometry_that_stops_stops_the_robot(graph: Any) -> None:
    robot = Robot(graph, ["move forward 75 cm"], mission__executor__watchdog=0.5)
    handle = robot.send()
    graph.wait_for(robot.moved)
    robot.odometry_on = False
    result = graph.ask(handle.get_result_async).result
    assert result.status.code == Status.NO_ODOMETRY
    graph.wait_for(robot.stands)


def test_a_robot_that_does_not_obey_is_reported(graph: Any) -> None:
    robot = Robot(
        graph,
        ["move forward 75 cm"],
        mission__max_blocked=2,
        mission__executor__progress_window=0.3,
    )
    robot.obeys = False
    result = robot.navigate()
    assert result.status.code == Status.BLOCKED
    assert result.steps == 2
    graph.wait_for(robot.stands)


def test_a_failed_generation_is_retried_then_reported(graph: Any) -> None:
    robot = Robot(graph, [fails(Status.UNAVAILABLE), "stop"])
    assert robot.navigate().status.code == Status.OK
    robot.script = [fails(Status.UNAVAILABLE)]
    result = robot.navigate()
    assert (result.status.code, result.status.message) == (Status.UNAVAILABLE, "because")
    robot.script = [fails(Status.VOCABULARY_MISMATCH)]
    robot.prompts.clear()
    assert robot.navigate().status.code == Status.VOCABULARY_MISMATCH
    assert len(robot.prompts) == 1  # asking again cannot help
    assert not robot.moved()


def test_a_generation_that_hangs_is_cancelled_and_reported(graph: Any) -> None:
    robot = Robot(graph, [hangs], mission__answer_timeout=0.3, mission__retries=0)
    result = robot.navigate()
    assert result.status.code == Status.DEADLINE_EXCEEDED
    graph.wait_for(lambda: robot.generations_cancelled)
    assert not robot.moved()


def test_a_generation_that_came_too_late_is_cancelled_before_the_next(graph: Any) -> None:
    robot = Robot(graph, [hangs, "stop"], mission__answer_timeout=0.3)
    assert robot.navigate().status.code == Status.OK
    assert robot.generations_cancelled == 1
    assert len(robot.prompts) == 2


def test_a_generation_accepted_after_the_deactivation_is_cancelled(graph: Any) -> None:
    def deactivates(request: Any) -> GoalResponse:
        robot.navigator.trigger_deactivate()  # all run in one thread: its answer comes after this
        return GoalResponse.ACCEPT

    robot = Robot(graph, [hangs])
    robot.generate.register_goal_callback(deactivates)
    assert robot.navigate().status.code == Status.INACTIVE
    graph.wait_for(lambda: robot.generations_cancelled)


def test_actions_of_other_sessions_about_the_same_frame_move_nothing(graph: Any) -> None:
    async def disturbed(robot: Robot, goal: Any) -> Generate.Result:
        robot.say(goal, "other", "the next action is move forward 75 cm.")
        await robot.until(lambda: any(a.session_id == "other" for a in actions))
        goal.publish_feedback(Generate.Feedback(header=goal.request.header, session_id="own"))
        await robot.until(lambda: robot.navigator._run.session == "own")
        robot.say(goal, "another", "the next action is turn left 30 degree.")
        robot.say(goal, "own", "the next action is stop.")
        goal.succeed()
        return Generate.Result(header=goal.request.header, session_id="own")

    robot = Robot(graph, [disturbed])
    actions = graph.collect(robot.user, NavigationAction, "navigation_action", RESULT)
    result = robot.navigate()
    assert (result.status.code, result.steps) == (Status.OK, 1)
    assert not robot.moved()
    assert len(actions) == 3


def test_an_action_before_the_first_feedback_counts_once_its_session_is_known(graph: Any) -> None:
    async def ahead(robot: Robot, goal: Any) -> Generate.Result:
        robot.say(goal, "own", "the next action is turn left 30 degree.")
        await robot.until(lambda: robot.navigator._run.early)
        assert not robot.moved()
        goal.publish_feedback(Generate.Feedback(header=goal.request.header, session_id="own"))
        await robot.until(robot.moved)
        goal.succeed()
        return Generate.Result(header=goal.request.header, session_id="own")

    robot = Robot(graph, [ahead, "stop"])
    assert robot.navigate().steps == 2
    assert robot.yaw == pytest.approx(math.radians(30), abs=0.1)


def test_no_generate_server_is_unavailable(graph: Any) -> None:
    robot = Robot(graph, ["stop"], mission__retries=0)
    robot.navigator.post(robot.generate.destroy)  # in the thread that waits for its events
    graph.wait_for(lambda: not robot.navigator._generate.server_is_ready())
    result = robot.navigate()
    assert result.status.code == Status.UNAVAILABLE
    assert "draft_vlm" in result.status.message


def test_cancel_in_the_middle_of_a_motion_stops_at_once(graph: Any) -> None:
    robot = Robot(graph, ["move forward 75 cm"], mission__executor__linear_speed=0.2)
    handle = robot.send()
    graph.wait_for(robot.moved)
    graph.ask(handle.cancel_goal_async)
    response = graph.ask(handle.get_result_async)
    assert response.status == GoalStatus.STATUS_CANCELED
    assert response.result.status.code == Status.CANCELLED
    graph.wait_for(robot.stands)
    assert robot.x < 0.5


def test_deactivation_in_the_middle_of_a_motion_stops_at_once(graph: Any) -> None:
    robot = Robot(graph, ["move forward 75 cm"], mission__executor__linear_speed=0.2)
    handle = robot.send()
    graph.wait_for(robot.moved)
    robot.navigator.post(robot.navigator.trigger_deactivate)
    result = graph.ask(handle.get_result_async).result
    assert result.status.code == Status.INACTIVE
    graph.wait_for(robot.stands)
    assert not robot.send().accepted
    robot.navigator.post(robot.navigator.trigger_activate)
    graph.wait_for(lambda: robot.navigator.active)
    robot.script = ["stop"]
    assert robot.navigate().status.code == Status.OK


def test_a_cancel_before_the_goal_had_its_first_turn_counts(
    graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted: list[ServerGoalHandle] = []
    execute = ServerGoalHandle.execute
    robot = Robot(graph, ["move forward 75 cm"])
    monkeypatch.setattr(ServerGoalHandle, "execute", lambda goal, *_: accepted.append(goal))
    handle = robot.send()
    graph.ask(handle.cancel_goal_async)
    monkeypatch.undo()
    robot.navigator.post(execute, accepted[0])
    response = graph.ask(handle.get_result_async)
    assert response.status == GoalStatus.STATUS_CANCELED
    assert response.result.status.code == Status.CANCELLED
    assert not robot.prompts


def test_a_result_goes_out_although_the_node_is_cleaned_up_at_once(graph: Any) -> None:
    robot = Robot(graph, ["move forward 75 cm"], mission__executor__linear_speed=0.2)
    handle = robot.send()
    graph.wait_for(robot.moved)
    robot.navigator.post(robot.navigator.stop)
    result = graph.ask(handle.get_result_async).result
    assert result.status.code == Status.INACTIVE
    robot.navigator.post(robot.navigator.start)  # and a second life
    graph.wait_for(lambda: robot.navigator.active)
    robot.script = ["stop"]
    assert robot.navigate().status.code == Status.OK


def test_a_signal_in_the_middle_of_a_motion_stops_before_the_process_ends(graph: Any) -> None:
    slow = {**PATIENT, "mission.executor.linear_speed": 0.2}
    parameters = [word for name, value in slow.items() for word in ("-p", f"{name}:={value}")]
    command = [sys.executable, "-m", "collab_llm_nodes.nodes.navigator", "--ros-args", *parameters]
    with subprocess.Popen(command) as process:
        try:
            robot = Robot(graph, ["stop"], process)
            robot.x = 1.0
            graph.wait_for(
                lambda: robot.navigate().pose.pose.position.x == 1.0, 60.0
            )  # it is heard
            robot.script = ["move forward 75 cm"]
            robot.send()
            graph.wait_for(lambda: robot.x > 1.0, 30.0)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60.0) == 0
            graph.wait_for(robot.stands)
        finally:
            process.kill()


def test_one_instruction_at_a_time(graph: Any) -> None:
    robot = Robot(graph, [hangs, "stop"])
    first = robot.send()
    graph.wait_for(lambda: robot.prompts)
    assert not robot.send().accepted
    graph.ask(first.cancel_goal_async)
    result = graph.ask(first.get_result_async).result
    assert result.status.code == Status.CANCELLED
    assert robot.navigate().status.code == Status.OK


def test_an_instruction_to_stop_ends_the_one_under_way(graph: Any) -> None:
    robot = Robot(graph, ["move forward 75 cm"], mission__executor__linear_speed=0.2)
    first = robot.send()
    graph.wait_for(robot.moved)
    asked = len(robot.prompts)
    stopped = robot.navigate("Please stop!")
    assert (stopped.status.code, stopped.status.message, stopped.steps) == (Status.OK, "", 0)
    response = graph.ask(first.get_result_async)
    assert response.status == GoalStatus.STATUS_ABORTED
    assert response.result.status.code == Status.CANCELLED
    assert response.result.status.message == "the instruction 'Please stop!' was given"
    graph.wait_for(robot.stands)
    assert robot.x < 0.5
    assert robot.navigate("HALT").status.code == Status.OK  # nothing is followed: nothing to do
    assert len(robot.prompts) == asked
    assert robot.navigator._failed.counts == {}
    robot.script = ["stop"]
    assert robot.navigate("find the stop sign").status.code == Status.OK
    assert len(robot.prompts) == asked + 1


def test_words_that_ask_to_stop_can_be_configured(graph: Any) -> None:
    robot = Robot(graph, ["stop"], stop_words=["basta"])
    assert robot.navigate("Basta!").status.code == Status.OK
    assert not robot.prompts
    assert robot.navigate("halt").status.code == Status.OK
    assert robot.prompts == ["halt. history: none."]


def test_every_goal_of_a_burst_is_answered(graph: Any) -> None:
    """More than a service's default queue holds; all but one are refused, or end as BUSY."""
    robot = Robot(graph, [hangs])
    goals = [Navigate.Goal(instruction="find the red ball") for _ in range(60)]
    sent = [graph.do(robot.client.send_goal_async, goal) for goal in goals]
    graph.wait_for(lambda: all(future.done() for future in sent), timeout=20.0)
    accepted = [future.result() for future in sent if future.result().accepted]
    ended = [graph.do(handle.get_result_async) for handle in accepted]
    graph.wait_for(lambda: len(ended) - sum(future.done() for future in ended) == 1, timeout=20.0)
    statuses = {future.result().result.status for future in ended if future.done()}
    assert statuses <= {Status.BUSY}


def test_a_streamed_action_that_is_taken_back_stops_the_robot(graph: Any) -> None:
    async def goes_on(robot: Robot, goal: Any) -> Generate.Result:
        order = "the next action is move forward 75 cm."
        text = GeneratedText(header=goal.request.header, session_id="s", text=order, verified=True)
        text.for_motion = goal.request.for_motion
        robot.texts.publish(text)
        goal.publish_feedback(Generate.Feedback(header=goal.request.header, session_id="s"))
        await robot.until(robot.moved)
        text.text, text.final = order + " and do not stop", True
        robot.texts.publish(text)
        goal.succeed()
        return Generate.Result(header=goal.request.header, text=text.text, session_id="s")

    robot = Robot(
        graph,
        [goes_on, "stop"],
        reading={"streaming": True},
        mission__executor__linear_speed=0.2,
    )
    result = robot.navigate()
    assert result.status.code == Status.OK
    assert robot.moved()
    assert robot.x < 0.5
    assert robot.prompts[1].endswith("history: none.")


# sim_go2.


class Room:
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
        self.info = graph.collect(self.user, RoomMsg, "ground_truth/room", STATE)
        self.commands = self.user.create_publisher(Twist, "cmd_vel", COMMAND)
        self.reset = self.user.create_client(Trigger, "reset")
        self.node = start(graph, SimGo2, **parameters)
        graph.wait_for(self.reset.service_is_ready)
        graph.wait_for(lambda: self.user.count_subscribers("cmd_vel"))


def test_simulator_moves_obeys_its_watchdog_and_resets(graph: Any) -> None:
    room = Room(graph, seed=3, real_time_factor=5.0)
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
    stamps = [o.header.stamp.sec + o.header.stamp.nanosec * 1e-9 for o in room.odometry]
    assert stamps == sorted(stamps)
    assert graph.ask(room.reset.call_async, Trigger.Request()).success
    graph.wait_for(lambda: room.truth[-1].pose.orientation.z == start_yaw)
    room.node.post(room.node.set_parameters, [Parameter("seed", value=4)])
    graph.wait_for(lambda: room.info[-1].seed == 4)


def test_a_room_chosen_while_the_simulator_is_inactive_is_entered(graph: Any) -> None:
    room = Room(graph, seed=3)
    room.node.post(room.node.trigger_deactivate)
    graph.wait_for(lambda: not room.node.active)
    room.node.post(room.node.set_parameters, [Parameter("seed", value=4)])
    room.node.post(room.node.set_parameters, [Parameter("real_time_factor", value=5.0)])
    graph.wait_for(lambda: room.node.config.real_time_factor == 5.0)
    assert room.info[-1].seed == 3
    room.node.post(room.node.trigger_activate)
    graph.wait_for(lambda: room.info[-1].seed == 4)
    assert room.node._pacer.timer_period_ns == 10_000_000


def test_simulator_in_lockstep_advances_with_the_commands(graph: Any) -> None:
    room = Room(graph, seed=3, lockstep=True, lockstep_timeout=5.0)
    graph.wait_for(lambda: room.odometry)
    twist = Twist()
    twist.angular.z = 0.5
    room.commands.publish(twist)
    graph.wait_for(lambda: room.node._base.turn)  # from now on it moves
    for _ in range(3):  # each command is one step of 0.05 s
        count = len(room.odometry)
        before = room.node.time
        room.commands.publish(twist)
        graph.wait_for(lambda: len(room.odometry) > count)  # noqa: B023
        assert room.node.time - before == pytest.approx(0.05)
    assert room.node._base.turn > 0.0


def test_the_navigator_reaches_the_target_in_the_simulated_room(graph: Any) -> None:
    """The whole robot side in simulated time, with the geometric expert in place of the model."""
    from collab_llm_nodes.sim.expert import decide, look, reached

    room = Room(graph, seed=4, lockstep=True, real_time_factor=5.0, camera_rate=4.0)
    start(graph, CameraIngest, source="compressed", use_sim_time=True)
    start(graph, NavigationActionParser, use_sim_time=True)
    start(graph, Navigator, use_sim_time=True)
    start(
        graph,
        MotionGuard,
        use_sim_time=True,
        link_policy="ignore",
        freshness__max_age=0.0,
        **{f"freshness__{what}": 0.5 for what in ("command", "odometry", "camera")},
    )
    texts = room.user.create_publisher(GeneratedText, "generated_text", RESULT)
    graph.wait_for(lambda: room.user.count_subscribers("generated_text"))

    def answer(goal: Any) -> Generate.Result:
        told = goal.request.prompt.split("history: ")[1].rstrip(".")
        history = [] if told == "none" else told.split(", ")
        base, world = room.node._base, room.node._room
        action = decide(look(world, base.pose)[world.target], history)
        text = f"i see a wall. the next action is {action}."
        session = str(goal.request.header.stamp.nanosec)
        message = GeneratedText(header=goal.request.header, session_id=session, text=text)
        message.final = message.verified = message.for_motion = True
        texts.publish(message)
        goal.succeed()
        return Generate.Result(header=goal.request.header, text=text, session_id=session)

    generate = ActionServer(room.user, Generate, "edge_cloud/generate", answer)  # noqa: F841 kept
    client = ActionClient(room.user, Navigate, "navigate")
    graph.wait_for(client.server_is_ready)
    goal = Navigate.Goal(instruction=f"find the {room.node._room.goal.name}")
    handle = graph.ask(client.send_goal_async, goal)
    result = graph.ask(handle.get_result_async, timeout=60.0).result
    assert (result.status.code, result.status.message) == (Status.OK, "")
    assert reached(room.node._room, room.node._base.pose)
