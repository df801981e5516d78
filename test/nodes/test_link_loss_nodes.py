"""The link is lost during an answer: the real nodes under both policies, and the robot behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from edge_cloud_graph import Edge, expected, target
from motion_graph import Robot, graph
from rclpy.parameter import Parameter
from started_nodes import start

from collab_llm.action import Generate
from collab_llm.msg import GeneratedText, NavigationAction, Status, Verdict
from collab_llm_lab.bench.link import LinkProxy
from collab_llm_lab.bench.scenes import scene_prompts
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.nodes.cloud_verifier_bridge import CloudVerifierBridge
from collab_llm_nodes.nodes.draft_vlm import DraftVlm
from collab_llm_nodes.protocols.edge_cloud.runner import InProcessRunner
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server
from collab_llm_nodes.robot.prompt import SEARCH_TEMPLATE, user_text
from collab_llm_nodes.robot.search import SearchMemory
from collab_llm_nodes.ros.qos import RESULT

__all__ = ["expected", "graph", "target"]  # fixtures

pytestmark = pytest.mark.ros

SLOW = VerifierConfig(address="127.0.0.1:0", emulated_compute_s=0.3)
OK = Status.OK


@pytest.fixture
def link(target: Engine) -> Iterator[LinkProxy]:
    """Return a link to a verifier slow enough to lose it during an answer."""
    with start_server(SLOW, target) as verifier, LinkProxy(f"127.0.0.1:{verifier.port}") as link:
        yield link


def make_edge(ros_graph: Any, link: LinkProxy, **policy: Any) -> Edge:
    edge = Edge(ros_graph, int(link.address.rpartition(":")[2]))
    changes = [Parameter(f"link_loss.{name}", value=value) for name, value in policy.items()]
    edge.graph.do(edge.vlm.set_parameters, changes)
    return edge


def lose_during_an_answer(edge: Edge, link: LinkProxy) -> tuple[Generate.Result, float]:
    """The result, and how long after the loss it came."""
    edge.verdicts.clear()
    handle = edge.graph.ask(edge.action.send_goal_async, edge.goal())
    edge.graph.wait_for(lambda: edge.verdicts)
    link.half_open()
    lost = time.monotonic()
    result = edge.graph.ask(handle.get_result_async).result
    return result, time.monotonic() - lost


def test_draft_only_finishes_the_answer_and_says_so(
    ros_graph: Any, link: LinkProxy, expected: tuple[int, ...]
) -> None:
    """Draft and target are one model here, so even the unverified rest is known."""
    edge = make_edge(ros_graph, link, policy="draft_only", after_s=2.0)
    result, _ = lose_during_an_answer(edge, link)
    assert (result.status.code, result.status.message) == (OK, "")
    assert all(v.status.code == Status.OK for v in edge.verdicts)  # before the link's own deadline
    assert tuple(result.tokens) == expected
    assert not result.verified
    confirmed = [s for s in result.sources if s != GeneratedText.UNVERIFIED]
    assert 0 < len(confirmed) < len(expected)
    assert list(result.sources) == confirmed + [GeneratedText.UNVERIFIED] * (
        len(expected) - len(confirmed)
    )
    final = edge.graph.wait_for(lambda: [t for t in edge.texts if t.final])[0]
    assert (final.status.code, final.verified, final.text) == (OK, False, result.text)
    verified = [t.verified for t in edge.texts if t.session_id == result.session_id]
    assert verified[0]  # as long as only the target spoke
    link.heal()
    again = edge.graph.wait_for(lambda: (r := edge.generate()).verified and r, timeout=10.0)
    assert (again.status.code, tuple(again.tokens)) == (OK, expected)
    edge.stop()


def test_draft_only_answers_when_the_link_was_never_there(
    ros_graph: Any, link: LinkProxy, expected: tuple[int, ...]
) -> None:
    edge = make_edge(ros_graph, link, policy="draft_only", after_s=2.0)
    link.refuse()
    link.cut()
    result = edge.generate()
    assert (result.status.code, tuple(result.tokens)) == (OK, expected)
    assert set(result.sources) == {GeneratedText.UNVERIFIED}
    assert not result.verified
    link.heal()
    edge.graph.wait_for(lambda: edge.generate().verified)
    edge.stop()


def test_draft_only_answers_without_a_bridge(
    ros_graph: Any, link: LinkProxy, expected: tuple[int, ...]
) -> None:
    edge = make_edge(ros_graph, link, policy="draft_only")
    edge.graph.do(edge.bridge.stop)
    result = edge.generate()
    assert (result.status.code, tuple(result.tokens), result.verified) == (OK, expected, False)
    edge.stop()


def test_an_unverified_rest_that_does_not_end_is_an_error(ros_graph: Any, link: LinkProxy) -> None:
    edge = make_edge(ros_graph, link, policy="draft_only", after_s=2.0, max_unverified=1)
    result, _ = lose_during_an_answer(edge, link)
    assert result.status.code == Status.UNAVAILABLE
    assert "link_loss.max_unverified" in result.status.message
    assert not result.verified
    edge.stop()


def test_hold_ends_with_a_status(ros_graph: Any, link: LinkProxy) -> None:
    edge = make_edge(ros_graph, link)
    result, took = lose_during_an_answer(edge, link)
    assert result.status.code in (Status.UNAVAILABLE, Status.DEADLINE_EXCEEDED)
    assert GeneratedText.UNVERIFIED not in result.sources
    assert not result.verified
    assert took < 10.0  # verdict_deadline_s is 3 here, that of the request 20
    link.heal()
    edge.graph.wait_for(lambda: edge.generate().status.code == OK, timeout=20.0)
    edge.stop()


def test_a_policy_is_checked(ros_graph: Any, link: LinkProxy) -> None:
    edge = make_edge(ros_graph, link)
    hope = [Parameter("link_loss.policy", value="hope")]
    answer = edge.graph.do(edge.vlm.set_parameters, hope)[0]
    assert not answer.successful
    assert "policy" in answer.reason
    edge.stop()


# The robot, with the embedded pair.


@pytest.fixture(scope="module")
def pair() -> tuple[Engine, Engine]:
    return Engine(load(ModelConfig(path="nav-draft"))), Engine(load(ModelConfig(path="nav-target")))


@pytest.fixture(scope="module")
def scene(pair: tuple[Engine, Engine]) -> Prompt:
    """One in which draft and target agree, at the first step, on driving ahead."""
    for prompt in scene_prompts(20, seed=3):
        asked = user_text(instruction_of(prompt), [], SEARCH_TEMPLATE, search=SearchMemory().text)
        first = Prompt(asked, prompt.images)
        said = {InProcessRunner(pair[0], m).generate(first, max_tokens=72).text for m in pair}
        if len(said) == 1 and "move forward" in said.pop():
            return first
    pytest.fail("no such scene")


def robot_that_loses_its_link(
    graph: Any, link: LinkProxy, scene: Prompt, policy: str, unverified: str
) -> Robot:
    """All nodes from picture to velocity; the link falls silent after the first verdict."""
    start(
        graph,
        CloudVerifierBridge,
        verifier__address=link.address,
        verifier__link__verdict_deadline_s=1.5,
    )
    start(
        graph,
        DraftVlm,
        model__path="nav-draft",
        answer__guide="none",
        link_loss__policy=policy,
        link_loss__after_s=0.8,
    )
    robot = Robot(
        graph,
        [],
        reading={"unverified": unverified},
        answer__prompt=SEARCH_TEMPLATE,
        mission__max_steps=1,
        mission__outage_timeout=2.0,
        mission__unverified__speed_share=0.25,
        mission__unverified__max_distance=0.2,
    )
    robot.picture = scene.images[0]
    robot.user.create_subscription(Verdict, "verdict", lambda _: link.half_open(), RESULT)
    graph.wait_for(lambda: robot.user.count_publishers("verdict"))
    return robot


def instruction_of(scene: Prompt) -> str:
    return scene.text.partition(". history:")[0]


@pytest.mark.parametrize("unverified", ["slow", "refuse"])
def test_draft_only_moves_the_robot_slowly_or_not_at_all(
    graph: Any, pair: tuple[Engine, Engine], scene: Prompt, unverified: str
) -> None:
    with (
        start_server(SLOW, pair[1]) as verifier,
        LinkProxy(f"127.0.0.1:{verifier.port}") as link,
    ):
        robot = robot_that_loses_its_link(graph, link, scene, "draft_only", unverified)
        result = robot.navigate(instruction_of(scene))
        graph.wait_for(robot.stands)
    if unverified == "refuse":
        assert result.status.code == Status.UNAVAILABLE
        assert not robot.moved()
        return
    assert result.status.code == Status.MAX_STEPS, result.status.message
    action = robot.feedback[0].action
    assert (action.kind, action.verified) == (NavigationAction.FORWARD, False)
    assert robot.moved()
    assert max(c.linear.x for c in robot.commands) <= 0.25 + 1e-9  # of 1.0 m/s
    assert robot.x == pytest.approx(0.2, abs=0.06)


def test_hold_lets_the_robot_stand(graph: Any, pair: tuple[Engine, Engine], scene: Prompt) -> None:
    with (
        start_server(SLOW, pair[1]) as verifier,
        LinkProxy(f"127.0.0.1:{verifier.port}") as link,
    ):
        robot = robot_that_loses_its_link(graph, link, scene, "hold", "slow")
        result = robot.navigate(instruction_of(scene))
        graph.wait_for(robot.stands)
    assert result.status.code in (Status.UNAVAILABLE, Status.DEADLINE_EXCEEDED)
    assert not robot.moved()
