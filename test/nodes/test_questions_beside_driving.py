"""Questions beside driving: the embedded pair in the whole graph, asked by loops and for motion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from edge_cloud_graph import Edge
from rclpy.action import ActionClient
from sensor_msgs.msg import CompressedImage
from tiny_models import scene

from collab_llm.action import Generate
from collab_llm.msg import Status
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server
from collab_llm_nodes.robot.prompt import SEARCH_TEMPLATE, user_text
from collab_llm_nodes.robot.search import SearchMemory

pytestmark = pytest.mark.ros
ASKS = 4
PAIR = {"model.path": "nav-draft", "client.gamma": 4, "answer.guide": "none"}
QUESTION: dict[str, Any] = {"max_tokens": 200, "temperature": 5.0, "deadline_s": 300.0}
"""At this temperature the embedded pair ends no answer early, and agrees on few tokens."""


class Loop:
    """A node that asks a long question, and again when that has ended."""

    def __init__(self, edge: Edge, number: int) -> None:
        self.edge, self.number = edge, number
        self.results: list[Generate.Result] = []
        self.over = False
        self.action = ActionClient(edge.user, Generate, "edge_cloud/generate")
        edge.graph.wait_for(self.action.server_is_ready)
        edge.graph.do(self._ask)

    def _ask(self) -> None:
        seed = 100 * self.number + len(self.results)
        goal = self.edge.goal(prompt="what do you see?", seed=seed, **QUESTION)
        self.action.send_goal_async(goal).add_done_callback(
            lambda sent: sent.result().get_result_async().add_done_callback(self._on_result)
        )

    def _on_result(self, future: Any) -> None:
        result = future.result().result
        self.results.append(result)
        if not self.over and result.status.code == Status.OK:
            self._ask()


@pytest.fixture
def edge(ros_graph: Any) -> Iterator[Edge]:
    target = Engine(load(ModelConfig(path="nav-target")))
    with start_server(VerifierConfig(address="127.0.0.1:0"), target) as verifier:
        graph = Edge(ros_graph, verifier.port, **PAIR)
        yield graph
        graph.stop()


def drive(edge: Edge, number: int) -> tuple[tuple[int, ...], int, int]:
    """Ask as the navigator does; return the answer, its rounds, and those of others meanwhile."""
    asked_at = len(edge.verdicts)
    result = edge.generate(
        prompt=user_text("find the blue cone", (), SEARCH_TEMPLATE, search=SearchMemory().text),
        images=[CompressedImage(format="jpeg", data=scene(number))],
        max_tokens=72,
        for_motion=True,
    )
    assert result.status.code == Status.OK, result.status.message

    def own() -> list[int]:
        return [i for i, v in enumerate(edge.verdicts) if v.session_id == result.session_id]

    edge.graph.wait_for(lambda: own() and edge.verdicts[own()[-1]].finished)
    others = own()[-1] + 1 - asked_at - len(own())
    return tuple(result.tokens), len(own()), others


def at_work(edge: Edge) -> None:
    """Return when a question has had another verdict."""
    heard = len(edge.verdicts)
    edge.graph.wait_for(lambda: len(edge.verdicts) > heard)


@pytest.mark.parametrize("loops", [1, pytest.param(5, marks=pytest.mark.exhaustive)])
def test_motion_waits_for_no_question_and_questions_end(edge: Edge, loops: int) -> None:
    alone = [drive(edge, number) for number in range(ASKS)]
    questions = [Loop(edge, number) for number in range(loops)]
    beside = []
    for number in range(ASKS):
        at_work(edge)
        beside.append(drive(edge, number))
    assert [answer for answer, *_ in beside] == [answer for answer, *_ in alone]
    own, others = sum(r for _, r, _ in beside), sum(o for *_, o in beside)
    assert own + others <= 1.5 * sum(rounds for _, rounds, _ in alone)
    for question in questions:
        question.over = True
    edge.graph.wait_for(lambda: sum(len(q.results) for q in questions) >= loops, timeout=120.0)
    ends = [result.status.code for question in questions for result in question.results]
    assert ends.count(Status.OK) >= min(loops, 4)
