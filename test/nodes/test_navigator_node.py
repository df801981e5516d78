"""The node ``navigator``: missions, and how they end."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")


from action_msgs.msg import GoalStatus
from motion_graph import ANGULAR, LINEAR, Robot, graph, hangs, reached
from started_nodes import start

from collab_llm.action import Generate
from collab_llm.msg import Status
from collab_llm_nodes.nodes import navigator
from collab_llm_nodes.nodes.navigator import Navigator
from collab_llm_nodes.robot import mission

pytestmark = pytest.mark.ros
__all__ = ["graph"]  # fixture


def logged(graph: Any, capfd: pytest.CaptureFixture[str], *wanted: str) -> str:
    """Return what has been logged since the last call, once it holds all that is wanted."""
    told = ""

    def complete() -> bool:
        nonlocal told
        told += capfd.readouterr().err
        return all(words in told for words in wanted)

    graph.wait_for(complete)
    return told


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


def test_navigator_follows_an_instruction(graph: Any) -> None:
    seen = "the ball is on the left. the next action is turn left 30 degree."
    script = [seen, "Move forward 50 cm", "stop"]
    robot = Robot(graph, script)
    result = robot.navigate()
    assert (result.status.code, result.status.message, result.steps) == (Status.OK, "", 3)
    assert reached(robot.yaw, math.radians(30), 0.1, ANGULAR)
    assert reached(math.hypot(robot.x, robot.y), 0.5, 0.08, LINEAR)
    assert reached(result.distance_travelled, 0.5, 0.08, LINEAR)
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
    robot = Robot(graph, [drafted("move forward 75 cm")], mission__outage_timeout=0.5)
    result = robot.navigate()
    assert result.status.code == Status.UNAVAILABLE
    assert len(robot.prompts) >= 2  # asked again
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
    assert reached(math.hypot(robot.x, robot.y), 0.3, 0.06, LINEAR)
    assert reached(robot.yaw, math.radians(10), 0.06, ANGULAR)
    assert not robot.feedback[0].action.verified
    assert robot.feedback[0].action.distance == pytest.approx(0.3)
    assert robot.feedback[1].action.angle == pytest.approx(math.radians(10.0))


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("it is not here. the next action is give up.", Status.NOT_FOUND, "it is not here."),
        ("if so: turn left. The next action is reply.", Status.ANSWERED, "if so: turn left."),
        ("i stop: it is there. the next action is stop.", Status.OK, "i stop: it is there."),
    ],
)
def test_the_model_ends_a_goal_and_its_words_are_the_result(
    graph: Any, text: str, code: int, words: str
) -> None:
    robot = Robot(graph, [text], reading={"grammar__reason": "lenient"})
    handle = robot.send()
    ended = graph.ask(handle.get_result_async, timeout=20.0)
    assert ended.result.status.code == code
    assert ended.result.text == words
    succeeds = code in (Status.OK, Status.ANSWERED)
    assert (ended.status == GoalStatus.STATUS_SUCCEEDED) == succeeds
    assert (ended.result.status.message == "") == (code == Status.OK)
    assert ended.result.steps == len(robot.prompts) == 1
    assert not robot.moved()
    assert robot.x == robot.yaw == 0.0


@pytest.mark.parametrize("text", ["it is lost. the next action is give up.", "yes. reply", "reply"])
def test_an_end_that_is_not_verified_or_not_anchored_ends_nothing(graph: Any, text: str) -> None:
    robot = Robot(graph, [drafted(text), "stop"], reading={"unverified": "slow"})
    result = robot.navigate()
    assert (result.status.code, result.text) == (Status.OK, "")
    assert len(robot.prompts) == 2
    assert not robot.moved()


@pytest.mark.parametrize("age_s", [86_400, -86_400])
def test_a_dry_run_asks_about_the_pictures_of_a_bag(
    graph: Any, capfd: pytest.CaptureFixture[str], age_s: int
) -> None:
    robot = Robot(graph, ["move forward 25 cm", "stop"], output="none")
    robot.camera_age_s = age_s
    result = robot.navigate()
    assert (result.status.code, result.steps) == (Status.OK, 2)
    logged(graph, capfd, f"dry run: pictures are stamped {str(age_s)[:3]}")
    assert not robot.moved()


def test_old_pictures_move_nothing_and_are_named(graph: Any) -> None:
    robot = Robot(graph, ["move forward 25 cm"], mission__refusal_timeout=0.5)
    robot.camera_age_s = 86_400
    status = robot.navigate().status
    assert status.code == Status.NO_OBSERVATION
    assert "the last is stamped 86400." in status.message
    assert not robot.prompts


def test_an_answer_about_another_thing_moves_nothing_where_that_is_checked(graph: Any) -> None:
    answer = "i see the red cone straight ahead, near. the next action is move forward 50 cm."
    robot = Robot(graph, [answer], mission__check_thing=True)
    status = robot.navigate("find the red chair").status
    assert status.code == Status.NOT_FOUND
    assert "asked for the red chair, the answer names the red cone" in status.message
    assert len(robot.prompts) == 2  # asked again once
    assert not robot.moved()
    robot.script = [
        answer,
        "the red cone is straight ahead and very close. the next action is stop.",
    ]
    assert robot.navigate("find the red cone").status.code == Status.OK
    assert robot.moved()


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
    for missing in ("the action edge_cloud/generate", "(motion_guard)", "(camera_ingest)", "odom"):
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
def test_bad_goals_are_refused_and_caller_and_log_learn_why(
    graph: Any,
    instruction: str,
    fields: dict[str, Any],
    names: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    robot = Robot(graph, ["stop"])
    refused = robot.navigate(instruction, **fields).status
    assert refused.code == Status.INVALID_INPUT
    assert refused.message.startswith(names)
    logged(graph, capfd, f"navigate: goal refused: INVALID_INPUT: {names}")
    assert not robot.prompts
    assert robot.navigate().status.code == Status.OK  # and the next one is served


def test_no_frames_end_with_a_status_and_it_recovers(
    graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    robot = Robot(graph, ["stop"])
    robot.camera_on = False
    with monkeypatch.context() as patch:
        patch.setattr(mission, "OBSERVATION_S", 0.3)
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
    robot = Robot(graph, [fails(Status.UNAVAILABLE), "stop"], mission__outage_timeout=0.5)
    assert robot.navigate().status.code == Status.OK
    robot.script = [fails(Status.UNAVAILABLE)]
    result = robot.navigate()
    assert (result.status.code, result.status.message) == (Status.UNAVAILABLE, "because")
    robot.script = [fails(Status.VOCABULARY_MISMATCH)]
    robot.prompts.clear()
    assert robot.navigate().status.code == Status.VOCABULARY_MISMATCH
    assert len(robot.prompts) == 1  # asking again cannot help
    assert not robot.moved()
