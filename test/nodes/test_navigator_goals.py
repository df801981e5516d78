"""The node ``navigator``: answers that come late, cancels, bursts of goals."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from action_msgs.msg import GoalStatus
from motion_graph import ANGULAR, PATIENT, Robot, graph, hangs, reached
from rclpy.action import ActionServer, GoalResponse
from rclpy.action.server import ServerGoalHandle

from collab_llm.action import Generate, Navigate
from collab_llm.msg import GeneratedText, NavigationAction, Status
from collab_llm_nodes.ros.qos import RESULT

pytestmark = pytest.mark.ros
__all__ = ["graph"]  # fixture


def test_a_generation_that_hangs_is_cancelled_and_reported(graph: Any) -> None:
    robot = Robot(graph, [hangs], mission__answer_timeout=0.3, mission__outage_timeout=0.0)
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
        await robot.until(lambda: robot.navigator._run.texts)
        robot.say(goal, "another", "the next action is turn left 30 degree.")
        robot.say(goal, "own", stop)
        goal.succeed()
        return Generate.Result(header=goal.request.header, session_id="own", text=stop)

    stop = "the next action is stop."

    robot = Robot(graph, [disturbed])
    actions = graph.collect(robot.user, NavigationAction, "navigation_action", RESULT)
    result = robot.navigate()
    assert (result.status.code, result.steps) == (Status.OK, 1)
    assert not robot.moved()
    assert len(actions) == 3


def test_a_text_that_our_own_generation_did_not_say_moves_nothing(graph: Any) -> None:
    """Stamp and session of an answer are on ``generated_text``, for everybody to copy."""

    async def preceded(robot: Robot, goal: Any) -> Generate.Result:
        answer = {"header": goal.request.header, "session_id": "own"}
        goal.publish_feedback(Generate.Feedback(**answer, text="the next"))
        await robot.until(lambda: robot.navigator._run.texts)
        robot.say(goal, "own", "move forward 75 cm")
        await robot.until(lambda: actions)
        robot.say(goal, "own", "stop")
        await robot.until(lambda: len(actions) == 2)
        goal.succeed()
        return Generate.Result(**answer, text="stop")

    robot = Robot(graph, [preceded])
    actions = graph.collect(robot.user, NavigationAction, "navigation_action", RESULT)
    assert robot.navigate().status.code == Status.OK
    assert [action.kind for action in actions] == [NavigationAction.FORWARD, NavigationAction.STOP]
    assert not robot.moved()


def test_an_action_before_the_first_feedback_counts_once_its_text_is_known(graph: Any) -> None:
    async def ahead(robot: Robot, goal: Any) -> Generate.Result:
        said = {"session_id": "own", "text": "the next action is turn left 30 degree."}
        robot.say(goal, "own", said["text"])
        await robot.until(lambda: robot.navigator._run.early)
        assert not robot.moved()
        goal.publish_feedback(Generate.Feedback(header=goal.request.header, **said))
        await robot.until(robot.moved)
        goal.succeed()
        return Generate.Result(header=goal.request.header, **said)

    robot = Robot(graph, [ahead, "stop"])
    assert robot.navigate().steps == 2
    assert reached(robot.yaw, math.radians(30), 0.1, ANGULAR)


def test_no_generate_server_is_unavailable(graph: Any) -> None:
    robot = Robot(graph, ["stop"], mission__outage_timeout=0.0)
    robot.navigator.post(robot.generate.destroy)  # in the thread that waits for its events
    graph.wait_for(lambda: not robot.navigator._generate.server_is_ready())
    result = robot.navigate()
    assert result.status.code == Status.UNAVAILABLE
    assert "edge_cloud/generate is not there" in result.status.message


def restart(graph: Any, robot: Robot) -> None:
    """Start another server of the model, once the mission knows that the one before is gone."""
    graph.wait_for(lambda: robot.navigator._run.mission._outage)

    def offer() -> None:
        robot.generate = ActionServer(robot.user, Generate, "edge_cloud/generate", robot._answer)

    graph.do(offer)


def test_a_mission_outlives_the_restart_of_a_model_that_was_asked(graph: Any) -> None:
    """Neither does it wait for the lost answer: an answer may take hundreds of times as long."""
    robot = Robot(graph, ["turn left 30 degree", hangs], mission__answer_timeout=600.0)
    handle = robot.send()
    graph.wait_for(lambda: len(robot.prompts) == 2)
    robot.script = ["stop"]
    robot.navigator.post(robot.generate.destroy)
    restart(graph, robot)
    result = graph.ask(handle.get_result_async, timeout=20.0).result
    assert (result.status.code, result.status.message, result.steps) == (Status.OK, "", 2)
    assert robot.prompts[-1].endswith("history: turn left 30 degree.")


def test_a_mission_outlives_a_model_that_is_not_there_between_two_questions(graph: Any) -> None:
    robot = Robot(graph, ["turn left 30 degree"])

    async def ends(robot: Robot, goal: Any) -> Generate.Result:
        goal.abort()
        robot.navigator.post(robot.generate.destroy)
        status = Status(code=Status.CANCELLED, message="shut down")
        return Generate.Result(header=goal.request.header, status=status)

    robot.script = ["turn left 30 degree", ends]
    handle = robot.send()
    graph.wait_for(lambda: len(robot.prompts) == 2)
    robot.script = ["stop"]
    restart(graph, robot)
    result = graph.ask(handle.get_result_async, timeout=20.0).result
    assert (result.status.code, result.steps) == (Status.OK, 2)


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
    refused = robot.navigate().status
    assert (refused.code, refused.message) == (
        Status.INACTIVE,
        "the navigator is not active (activate it (lifecycle))",
    )
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
    refused = robot.navigate().status
    assert refused.code == Status.BUSY
    assert refused.message == "another instruction is being followed (cancel it or wait)"
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
    """More than a service's default queue holds; all but one end as BUSY."""
    robot = Robot(graph, [hangs])
    goals = [Navigate.Goal(instruction="find the red ball") for _ in range(60)]
    sent = [graph.do(robot.client.send_goal_async, goal) for goal in goals]
    graph.wait_for(lambda: all(future.done() for future in sent), timeout=20.0)
    ended = [graph.do(future.result().get_result_async) for future in sent]
    graph.wait_for(lambda: len(ended) - sum(future.done() for future in ended) == 1, timeout=20.0)
    statuses = {future.result().result.status.code for future in ended if future.done()}
    assert statuses <= {Status.BUSY}


def test_a_streamed_action_that_is_taken_back_stops_the_robot(graph: Any) -> None:
    async def goes_on(robot: Robot, goal: Any) -> Generate.Result:
        order = "the next action is move forward 75 cm."
        text = GeneratedText(header=goal.request.header, session_id="s", text=order, verified=True)
        text.for_motion = goal.request.for_motion
        robot.texts.publish(text)
        feedback = Generate.Feedback(header=goal.request.header, session_id="s", text=order)
        goal.publish_feedback(feedback)
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
