"""Goals whose acceptance gets lost: they are known, and called off, all the same."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from action_msgs.msg import GoalStatus, GoalStatusArray
from rclpy.action import ActionClient, ActionServer, CancelResponse, GoalResponse
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.task import Future

from collab_llm.action import Navigate
from collab_llm_nodes.ros import goals
from collab_llm_nodes.ros.goals import SentGoal, action_client, action_server
from collab_llm_nodes.ros.qos import STATE

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
        self.told: list[Any] = []
        self.statuses: list[int] = []
        self.node = graph.node("navigator")
        ActionServer(
            self.node,
            Navigate,
            "navigate",
            self._follow,
            goal_callback=lambda goal: accept,
            cancel_callback=self._cancel,
        )
        # In the executor's thread: newer rclpy shows it a client that is not complete yet.
        self.client = graph.do(kind, self.node, Navigate, "navigate")
        graph.wait_for(self.client.server_is_ready)
        self.sent: SentGoal = graph.do(self._send)

    def _send(self) -> SentGoal:
        goal = Navigate.Goal(instruction="find it")
        return SentGoal(self.node, self.client, goal, self.ended.append, self.told.append)

    async def _follow(self, goal: Any) -> Navigate.Result:
        self.followed.append(goal)
        await self.over
        if goal.is_cancel_requested:
            goal.canceled()
        else:
            goal.succeed()
        self.statuses.append(goal.status)
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
    scene.graph.do(lambda: scene.over.set_result(None))
    ros_graph.wait_for(lambda: scene.ended)
    assert scene.statuses == [GoalStatus.STATUS_SUCCEEDED]
    assert scene.ended[0].steps == 3


def test_a_goal_whose_acceptance_is_lost_can_be_called_off(ros_graph: Any, soon: None) -> None:
    scene = Scene(ros_graph, Deaf, GoalResponse.ACCEPT)
    ros_graph.wait_for(lambda: scene.followed)
    scene.graph.do(scene.sent.cancel)
    ros_graph.wait_for(lambda: scene.ended)
    assert scene.statuses == [GoalStatus.STATUS_CANCELED]


def test_a_goal_that_is_refused_has_an_end(ros_graph: Any) -> None:
    scene = Scene(ros_graph, ActionClient, GoalResponse.REJECT)
    ros_graph.wait_for(lambda: scene.ended)
    assert scene.ended == [None]
    assert scene.sent.loss == "refused the goal"
    assert not scene.followed


def test_the_result_is_told_once(ros_graph: Any) -> None:
    """Acceptance and patience both ask for it."""
    scene = Scene(ros_graph, ActionClient, GoalResponse.ACCEPT)
    ros_graph.wait_for(lambda: scene.sent._asked)
    scene.graph.do(scene.sent._ask_once)
    scene.graph.do(lambda: scene.over.set_result(None))
    ros_graph.wait_for(lambda: scene.ended)
    scene.graph.do(lambda: None)  # whatever else was there by then has been taken
    assert len(scene.ended) == 1


def test_a_cancellation_that_comes_before_its_goal_is_repeated(
    ros_graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can on a bad network, and finds nothing; the acceptance may get lost as well."""
    monkeypatch.setattr(goals, "ANSWER_S", 2.0)
    held: list[Callable[[], Future]] = []

    class Slow(Deaf):
        def send_goal_async(self, *args: Any) -> Future:
            held.append(lambda: super(Slow, self).send_goal_async(*args))
            return Future()

    scene = Scene(ros_graph, Slow, GoalResponse.ACCEPT)
    scene.graph.do(scene.sent.cancel)
    assert not scene.followed
    scene.graph.do(held[0])
    ros_graph.wait_for(lambda: scene.statuses == [GoalStatus.STATUS_CANCELED])


def test_a_goal_that_arrives_when_it_was_given_up_is_called_off(ros_graph: Any, soon: None) -> None:
    """It was asked about in vain: nobody waits for it any more."""
    calls = Mock()
    sent = SentGoal(ros_graph.node("client"), Mock(), Navigate.Goal(), calls)
    sent._handle = calls
    sent._on_result(
        Mock(result=lambda: Mock(status=GoalStatus.STATUS_UNKNOWN), cancelled=lambda: False)
    )
    assert calls.mock_calls == [call.cancel_goal_async(), call(None)]
    assert sent.loss == "does not have the goal"
    sent._on_answer(Mock(result=lambda: Mock(accepted=True)))
    assert calls.mock_calls[2] == call.cancel_goal_async(), "it was accepted after all"
    assert sent.loss == "was restarted during the goal"


def test_a_goal_is_forgotten_with_its_client(ros_graph: Any, soon: None) -> None:
    scene = Scene(ros_graph, Deaf, GoalResponse.ACCEPT)
    ros_graph.wait_for(lambda: scene.followed)

    def leave() -> None:
        scene.sent.forget()
        scene.client.destroy()

    scene.graph.do(leave)
    assert not list(scene.node.timers)


def test_a_node_keeps_no_trace_of_goals_that_are_over(ros_graph: Any) -> None:
    scene = Scene(ros_graph, ActionClient, GoalResponse.ACCEPT)
    scene.graph.do(lambda: scene.over.set_result(None))
    ros_graph.wait_for(lambda: scene.ended)
    traces = set(scene.node.default_callback_group.entities)
    scene.graph.do(scene._send)
    ros_graph.wait_for(lambda: len(scene.ended) == 2)
    assert scene.node.default_callback_group.entities == traces


def test_a_burst_of_answers_waits_for_a_busy_client(ros_graph: Any) -> None:
    """rclpy's own queue holds ten answers, and drops the rest without a word."""

    async def follow(goal: Any) -> Navigate.Result:
        goal.succeed()
        return Navigate.Result()

    server = ros_graph.node("navigator")
    action_server(server, Navigate, "navigate", follow, lambda goal: CancelResponse.ACCEPT)
    with contextlib.ExitStack() as stack:
        node = Node("client", context=ros_graph.context)
        stack.callback(node.destroy_node)
        executor = SingleThreadedExecutor(context=ros_graph.context)
        executor.add_node(node)
        stack.callback(executor.shutdown)
        client = action_client(node, Navigate, "navigate")
        statuses = ros_graph.collect(
            ros_graph.node("watcher"), GoalStatusArray, "navigate/_action/status", STATE
        )
        ros_graph.wait_for(client.server_is_ready)
        answers = [client.send_goal_async(Navigate.Goal()) for _ in range(30)]
        ros_graph.wait_for(lambda: statuses and len(statuses[-1].status_list) == 30)
        executor.spin_until_future_complete(answers[-1], 30.0)
        assert all(answer.done() for answer in answers)


def test_every_action_has_queues_for_a_burst() -> None:
    """Clients and servers of actions are made in one place, by one quality of service."""
    root = Path(goals.__file__).parents[2]
    makers = [
        file.name
        for package in ("collab_llm_nodes", "collab_llm_lab")
        for file in (root / package).rglob("*.py")
        if re.search(r"\bAction(?:Client|Server)\(", file.read_text("utf-8"))
    ]
    assert makers == ["goals.py"]
