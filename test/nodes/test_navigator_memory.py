"""The navigator asks the robot's memory about an instruction, and waits for nobody."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from generate_server import GenerateServer
from motion_graph import Robot, graph

from collab_llm.action import Generate
from collab_llm.msg import Status

pytestmark = pytest.mark.ros
__all__ = ["graph"]  # fixture

PROMPT = "{instruction}. remembered: {memory}."


async def stop_when_it_remembers(robot: Robot, goal: Any) -> Generate.Result:
    """Turn until the question holds what the memory has said."""
    session = str(len(robot.prompts))
    remembers = "remembered: the red ball." in robot.prompts[-1]
    text = "stop" if remembers else "turn left 10 degree"
    robot.say(goal, session, text)
    goal.succeed()
    return Generate.Result(header=goal.request.header, text=text, session_id=session)


def test_the_memory_is_in_the_questions_after_its_answer(graph: Any) -> None:
    memory = GenerateServer(graph.node("memory"), "dragon")
    robot = Robot(
        graph,
        [stop_when_it_remembers],
        answer__prompt=PROMPT,
        answer__memory_question="say {thing}",
        mission__max_steps=200,
    )
    graph.wait_for(robot.navigator._memory.server_is_ready)
    result = robot.navigate()
    assert result.status.code == Status.OK
    assert robot.prompts[-1] == "find the red ball. remembered: the red ball."
    assert [goal.prompt for goal in memory.requests] == ["say the red ball"]


def test_a_memory_that_is_silent_or_absent_delays_nothing(graph: Any) -> None:
    robot = Robot(graph, ["stop"], answer__prompt=PROMPT, answer__memory_question="wait")
    assert robot.navigate().status.code == Status.OK
    memory = GenerateServer(graph.node("memory"), "dragon")
    graph.wait_for(robot.navigator._memory.server_is_ready)
    assert robot.navigate().status.code == Status.OK
    assert set(robot.prompts) == {"find the red ball. remembered: nothing."}
    graph.wait_for(lambda: memory.statuses)  # the question was called off with the instruction
