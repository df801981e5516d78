"""The navigator asks the robot's memory about an instruction, and waits for nobody."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from generate_server import GenerateServer
from motion_graph import Robot, graph

from collab_llm.action import Generate
from collab_llm.msg import Status
from collab_llm_nodes.robot.prompt import SEARCH_TEMPLATE

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


def test_the_search_is_in_the_questions_if_the_prompt_has_a_place_for_it(graph: Any) -> None:
    seen = "the red ball is on the left and distant. the next action is turn left 15 degree."
    robot = Robot(graph, ["turn left 45 degree", seen, "stop"], answer__prompt=SEARCH_TEMPLATE)
    assert robot.navigate().status.code == Status.OK
    asked = "find the red ball. history: "
    turned, again = "turn left 45 degree", "turn left 15 degree"
    prompts = [
        f"{asked}none. search: place 1, turned 0.",
        f"{asked}{turned}. search: place 1, turned 45.",
        f"{asked}{turned}, {again}. search: seen red ball ahead, distant.",
    ]
    assert robot.prompts == prompts
    robot.script, robot.prompts = ["stop"], []
    robot.navigate()
    assert robot.prompts == prompts[:1], "a new instruction, a new search"


def test_a_memory_that_is_silent_or_absent_delays_nothing(graph: Any) -> None:
    robot = Robot(graph, ["stop"], answer__prompt=PROMPT, answer__memory_question="wait")
    assert robot.navigate().status.code == Status.OK
    memory = GenerateServer(graph.node("memory"), "dragon")
    graph.wait_for(robot.navigator._memory.server_is_ready)
    assert robot.navigate().status.code == Status.OK
    assert set(robot.prompts) == {"find the red ball. remembered: nothing."}
    graph.wait_for(lambda: memory.statuses)  # the question was called off with the instruction
