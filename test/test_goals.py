"""Goals whose acceptance gets lost: they are known, and called off, all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from action_msgs.msg import GoalStatus
from rclpy.action import ActionClient, ActionServer, CancelResponse, GoalResponse
from rclpy.task import Future

from collab_llm.action import Navigate
from collab_llm_nodes.nodes import goals
from collab_llm_nodes.nodes.goals import SentGoal

pytestmark = pytest.mark.ros


class Deaf(ActionClient):
    """A client that hears no answer to its goals."""

    def send_goal_async(self, *args: Any) -> Future:
        super().send_goal_async(*args)
        return Future()


class Scene:
    """A navigator, a client of it, and the goal that it sends."""

    def __init__(self, graph: Any, kind: type[ActionClient], accept: GoalResponse) -> None:
        self.graph, self.over = graph, Future()
        self.followed: list[Any] = []
        self.ended: list[Any] = []
        self.node = graph.node("navigator")
        ActionServer(
            self.node,
            Navigate,
            "navigate",
            self._follow,
            goal_callback=lambda goal: accept,
            cancel_callback=self._cancel,
        )
        self.client = kind(self.node, Navigate, "navigate")
        graph.wait_for(self.client.server_is_ready)
        self.sent: SentGoal = self.do(self._send)

    def do(self, action: Callable[..., Any]) -> Any:
        """In the thread that runs the callbacks."""
        return self.graph.result(self.node.executor.create_task(action))

    def _send(self) -> SentGoal:
        goal = Navigate.Goal(instruction="find it")
        return SentGoal(self.node, self.client, goal, self.ended.append)

    async def _follow(self, goal: Any) -> Navigate.Result:
        self.followed.append(goal)
        await self.over
        if goal.is_cancel_requested:
            goal.canceled()
        else:
            goal.succeed()
        return Navigate.Result(steps=3)

    def _cancel(self, goal: Any) -> CancelResponse:
        self.over.set_result(None)
        return CancelResponse.ACCEPT


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little patience."""
    monkeypatch.setattr(goals, "ANSWER_S", 0.3)


def test_the_result_of_a_goal_whose_acceptance_is_lost_comes(ros_graph: Any, soon: None) -> None:
    scene = Scene(ros_graph, Deaf, GoalResponse.ACCEPT)
    ros_graph.wait_for(lambda: scene.followed)
    scene.do(lambda: scene.over.set_result(None))
    ros_graph.wait_for(lambda: scene.ended)
    assert scene.ended[0].status == GoalStatus.STATUS_SUCCEEDED
    assert scene.ended[0].result.steps == 3


def test_a_goal_whose_acceptance_is_lost_can_be_called_off(ros_graph: Any, soon: None) -> None:
    scene = Scene(ros_graph, Deaf, GoalResponse.ACCEPT)
    ros_graph.wait_for(lambda: scene.followed)
    scene.do(scene.sent.call_off)
    ros_graph.wait_for(lambda: scene.ended)
    assert scene.ended[0].status == GoalStatus.STATUS_CANCELED


def test_a_goal_that_is_refused_has_an_end(ros_graph: Any) -> None:
    scene = Scene(ros_graph, ActionClient, GoalResponse.REJECT)
    ros_graph.wait_for(lambda: scene.ended)
    assert scene.ended[0].status == GoalStatus.STATUS_UNKNOWN
    assert not scene.followed


def test_the_result_is_told_once(ros_graph: Any) -> None:
    """Acceptance and patience both ask for it."""
    scene = Scene(ros_graph, ActionClient, GoalResponse.ACCEPT)
    ros_graph.wait_for(lambda: scene.sent._asked)
    scene.do(scene.sent._ask_once)
    scene.do(lambda: scene.over.set_result(None))
    ros_graph.wait_for(lambda: scene.ended)
    assert len(scene.ended) == 1


def test_a_cancellation_that_came_before_its_goal_is_repeated(
    ros_graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a bad network the request to cancel can come first, and finds nothing."""
    scene = Scene(ros_graph, Deaf, GoalResponse.ACCEPT)
    ros_graph.wait_for(lambda: scene.followed)
    scene.sent._called_off = True  # whoever asked was not heard
    scene.do(lambda: scene.sent._on_answer(Future()))
    ros_graph.wait_for(lambda: scene.ended)
    assert scene.ended[0].status == GoalStatus.STATUS_CANCELED
