"""The router: what goes through it unchanged, and the errors it gives in a server's place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from action_msgs.msg import GoalStatus
from generate_server import GenerateServer
from rclpy.action import ActionClient
from rclpy.parameter import Parameter
from sensor_msgs.msg import CompressedImage

from collab_llm.action import Generate
from collab_llm.msg import Status
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.nodes.generate_router import (
    GenerateRouter,
    GenerateRouterConfig,
    _Passage,
    _Server,
)
from collab_llm_nodes.protocols import registry
from collab_llm_nodes.ros.health import Level
from collab_llm_nodes.ros.protocol_server import ProtocolServer

pytestmark = pytest.mark.ros

PATIENT = {"discovery_s": 30.0, "grace_s": 30.0, "silence_s": 60.0}
"""Waits that no machine is too slow for; a test names the one that it is about."""


class Caller:
    """A router and a client of it."""

    def __init__(self, graph: Any, **parameters: Any) -> None:
        values = {"protocols": ["first", "second"], **PATIENT, **parameters}
        self.graph = graph
        self.router = GenerateRouter(
            context=graph.context,
            parameter_overrides=[Parameter(name, value=value) for name, value in values.items()],
        )
        graph.add(self.router)
        self.router.start()
        self.action = ActionClient(graph.node("caller"), Generate, "generate")
        graph.wait_for(self.action.server_is_ready)

    def send(self, prompt: str, protocol: str = "first", **fields: Any) -> Sent:
        return Sent(self, Generate.Goal(prompt=prompt, protocol=protocol, **fields))

    def ask(self, prompt: str, protocol: str = "first", **fields: Any) -> tuple[int, Any]:
        """The goal's status and result."""
        return self.send(prompt, protocol, **fields).end()


class Sent:
    """A goal under way."""

    def __init__(self, caller: Caller, goal: Generate.Goal) -> None:
        self.graph, self.feedback = caller.graph, list[Any]()
        take = self.feedback.append
        self.handle = self.graph.ask(caller.action.send_goal_async, goal, take)
        assert self.handle.accepted

    def heard(self, text: str) -> None:
        """Return when feedback has told ``text``."""
        self.graph.wait_for(lambda: [f for f in self.feedback if f.feedback.text == text])

    def end(self) -> tuple[int, Any]:
        response = self.graph.ask(self.handle.get_result_async, timeout=60.0)
        return response.status, response.result

    def cancel(self) -> None:
        self.graph.ask(self.handle.cancel_goal_async)


@pytest.fixture
def caller(ros_graph: Any) -> Iterator[Callable[..., Caller]]:
    made: list[Caller] = []

    def make(**parameters: Any) -> Caller:
        made.append(Caller(ros_graph, **parameters))
        return made[-1]

    yield make
    for each in made:
        ros_graph.do(each.router.stop)


def serve(graph: Any, protocol: str) -> GenerateServer:
    return GenerateServer(graph.node(f"{protocol}_server"), protocol)


class ServerProcess:
    """A server in a process of its own, which signals reach."""

    def __init__(self, protocol: str) -> None:
        support = Path(__file__).parents[1] / "support"
        command = [sys.executable, str(support / "generate_server.py"), protocol]
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.child.stdout is not None
        assert self.child.stdout.readline() == "ready\n"

    def send(self, number: int) -> None:
        os.kill(self.child.pid, number)

    def end(self) -> None:
        self.child.kill()
        self.child.wait(60.0)
        assert self.child.stdout is not None
        self.child.stdout.close()


@pytest.fixture
def process(ros_graph: Any) -> Iterator[Callable[[str], ServerProcess]]:
    started: list[ServerProcess] = []

    def start(protocol: str) -> ServerProcess:
        started.append(ServerProcess(protocol))
        return started[-1]

    yield start
    for each in started:
        each.end()


# What goes through.


def test_goal_feedback_and_result_go_through_unchanged(ros_graph: Any, caller: Any) -> None:
    first, second = serve(ros_graph, "first"), serve(ros_graph, "second")
    routed = caller()
    fields = {"max_tokens": 7, "temperature": 0.5, "seed": 2**63, "law": "coupled"}
    goal = {**fields, "images": [CompressedImage(format="jpeg", data=b"123")], "for_motion": True}
    sent = routed.send("say far left", "second", **goal)
    status, result = sent.end()
    assert status == GoalStatus.STATUS_SUCCEEDED
    assert (result.text, result.session_id, result.status.message) == ("far left ", "s1", "say")
    sent.heard("far left ")
    assert [f.feedback.delta for f in sent.feedback] == ["far ", "left "]
    (request,) = second.requests
    assert not first.requests
    assert {name: getattr(request, name) for name in fields} == fields
    assert bytes(request.images[0].data) == b"123"
    assert request.for_motion
    assert request.protocol == "second"
    assert request.deadline_s == 0.0, "the server's own default holds"


def test_a_goal_without_a_protocol_gets_the_first(ros_graph: Any, caller: Any) -> None:
    server = serve(ros_graph, "first")
    assert caller().ask("say hello", "")[1].text == "hello "
    assert server.requests[0].protocol == "first"


def test_a_failure_of_the_server_is_told_as_it_is(ros_graph: Any, caller: Any) -> None:
    serve(ros_graph, "first")
    status, result = caller().ask("fail because")
    assert status == GoalStatus.STATUS_ABORTED
    assert (result.text, result.status.message) == ("because ", "fail")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "prompt: is empty (say something)"),
        ({"option_names": ["shuot"], "option_values": ["true"]}, "did you mean shout?"),
        ({"prompt": "hey", "option_names": ["pause_s"], "option_values": ["99"]}, "pause_s: 99.0"),
    ],
)
def test_bad_input_is_told_as_the_server_tells_it(
    ros_graph: Any,
    caller: Any,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    told: str,
) -> None:
    monkeypatch.setitem(registry.PROTOCOLS, "echo", "echo_protocol")
    server = ros_graph.add(ProtocolServer("echo", context=ros_graph.context))
    server.start()
    routed = caller(protocols=["echo"])
    direct = ActionClient(ros_graph.node("user"), Generate, "echo/generate")
    ros_graph.wait_for(direct.server_is_ready)
    handle = ros_graph.ask(direct.send_goal_async, Generate.Goal(**fields))
    status = ros_graph.ask(handle.get_result_async).result.status
    assert status.code == Status.INVALID_INPUT
    assert told in status.message
    assert routed.ask(protocol="echo", **{"prompt": "", **fields})[1].status == status
    ros_graph.do(server.stop)


def test_answers_that_go_past_the_router_are_not_heard_by_it(ros_graph: Any, caller: Any) -> None:
    serve(ros_graph, "first")
    routed = caller()
    heard = "first/generate/_action/feedback"
    ros_graph.wait_for(lambda: routed.router.diagnose()[2]["served"] == "first")
    assert not routed.router.count_subscribers(heard)
    assert routed.ask("say hello", protocol="first")[1].text == "hello "
    ros_graph.wait_for(lambda: routed.router.count_subscribers(heard))


def test_a_cancellation_reaches_the_server(ros_graph: Any, caller: Any) -> None:
    server = serve(ros_graph, "first")
    sent = caller().send("wait far left")
    sent.heard("far left ")
    sent.cancel()
    status, result = sent.end()
    assert status == GoalStatus.STATUS_CANCELED
    assert result.text == "far left "
    assert server.statuses == [GoalStatus.STATUS_CANCELED]


def test_two_goals_at_once(ros_graph: Any, caller: Any) -> None:
    first, second = serve(ros_graph, "first"), serve(ros_graph, "second")
    routed = caller()
    waiting = [routed.send("wait a", "first"), routed.send("wait b", "second")]
    for sent, text in zip(waiting, ("a ", "b "), strict=True):
        sent.heard(text)
    assert routed.ask("say c", "first")[1].text == "c "
    ros_graph.do(second.release)
    assert waiting[1].end()[1].text == "b "
    ros_graph.do(first.release)
    assert waiting[0].end()[1].text == "a "
    told = {"served": "first second", "in_progress": 0, "passed_on": 3, "failed": 0}
    assert routed.router.diagnose()[2] == told


def test_the_server_gets_the_time_that_is_left(ros_graph: Any, caller: Any) -> None:
    routed = caller()
    sent = routed.send("say hello", deadline_s=40.0)
    server = serve(ros_graph, "first")  # found within discovery_s
    assert sent.end()[1].text == "hello "
    assert 0.0 < server.requests[0].deadline_s < 40.0


# What the router says itself.


def test_an_unknown_protocol_names_the_known_ones(caller: Any) -> None:
    status, result = caller().ask("say hello", "telepathy")
    assert status == GoalStatus.STATUS_ABORTED
    assert result.status.code == Status.INVALID_INPUT
    assert "'telepathy' (one of first, second)" in result.status.message


def test_a_misspelt_protocol_names_the_nearest(caller: Any) -> None:
    status = caller().ask("say hello", "secnod")[1].status
    assert status.message == "protocol: unknown protocol 'secnod' (did you mean second?)"


@pytest.mark.parametrize("deadline_s", [-1.0, float("nan"), 1e6])
def test_an_impossible_deadline_is_refused(caller: Any, deadline_s: float) -> None:
    result = caller().ask("say hello", deadline_s=deadline_s)[1]
    assert result.status.code == Status.INVALID_INPUT
    assert "deadline_s" in result.status.message


def test_a_server_that_is_not_there_is_named(ros_graph: Any, caller: Any) -> None:
    serve(ros_graph, "second")
    result = caller(discovery_s=0.2).ask("say hello")[1]
    assert result.status.code == Status.UNAVAILABLE
    assert "first/generate" in result.status.message


def test_a_server_that_has_gone_is_missed(ros_graph: Any, caller: Any) -> None:
    routed = caller(protocols=["first", "second", "third"])
    told = routed.router.diagnose
    assert told()[:2] == (Level.WARN, "not there: first/generate, second/generate, third/generate")
    first, second = serve(ros_graph, "first"), serve(ros_graph, "second")
    ros_graph.wait_for(lambda: told()[2]["served"] == "first second")
    assert told()[:2] == (Level.OK, "active"), "nobody has promised the third"
    ros_graph.do(second.action.destroy)
    ros_graph.wait_for(lambda: told()[:2] == (Level.WARN, "not there: second/generate"))
    assert first.requests == []


def test_the_deadline_holds_while_a_server_is_looked_for(caller: Any) -> None:
    result = caller().ask("say hello", deadline_s=0.2)[1]
    assert result.status.code == Status.UNAVAILABLE


def test_a_goal_is_cancelled_while_its_server_is_looked_for(caller: Any) -> None:
    sent = caller().send("say hello")
    sent.cancel()
    status, result = sent.end()
    assert status == GoalStatus.STATUS_CANCELED
    assert result.status.code == Status.CANCELLED


def test_a_server_that_keeps_no_deadline_does_not_hold_the_caller(
    ros_graph: Any, caller: Any
) -> None:
    server = serve(ros_graph, "first")
    routed = caller(grace_s=0.2)
    assert routed.ask("say hello")[1].text == "hello ", "it is there"
    result = routed.ask("wait far left", deadline_s=3.0)[1]
    assert result.status.code == Status.DEADLINE_EXCEEDED
    assert result.text == "far left "
    ros_graph.wait_for(lambda: GoalStatus.STATUS_CANCELED in server.statuses)


def test_a_refusal_by_somebody_elses_server_is_told(ros_graph: Any, caller: Any) -> None:
    serve(ros_graph, "first")
    result = caller().ask("refuse")[1]
    assert result.status.code == Status.UNAVAILABLE
    assert "refused" in result.status.message


def test_too_many_goals_are_refused(ros_graph: Any, caller: Any) -> None:
    server = serve(ros_graph, "first")
    routed = caller(max_goals=1)
    sent = routed.send("wait a")
    sent.heard("a ")
    assert routed.ask("say b")[1].status.code == Status.BUSY
    assert routed.ask("say c", for_motion=True)[1].text == "c ", "questions take no place of motion"
    ros_graph.do(server.release)
    assert sent.end()[1].text == "a "


def test_an_inactive_router_says_so(ros_graph: Any, caller: Any) -> None:
    server = serve(ros_graph, "first")
    routed = caller()
    sent = routed.send("wait a")
    sent.heard("a ")
    ros_graph.do(routed.router.trigger_deactivate)
    status, result = sent.end()
    assert (status, result.status.code) == (GoalStatus.STATUS_ABORTED, Status.INACTIVE)
    assert result.text == "a "
    ros_graph.wait_for(lambda: server.statuses == [GoalStatus.STATUS_CANCELED])
    assert routed.ask("say b")[1].status.code == Status.INACTIVE


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_during_a_goal_is_noticed(
    caller: Any, process: Callable[[str], ServerProcess], number: int
) -> None:
    """A killed process leaves the graph seconds later only, and one that hangs never does."""
    server = process("first")
    routed = caller(silence_s=1.5)
    sent = routed.send("wait far left")
    sent.heard("far left ")
    server.send(number)
    status, result = sent.end()
    assert status == GoalStatus.STATUS_ABORTED
    assert result.status.code == Status.UNAVAILABLE
    assert "first/generate" in result.status.message
    assert result.text == "far left "


def test_a_restarted_server_has_lost_the_goal(
    caller: Any, process: Callable[[str], ServerProcess]
) -> None:
    """It gives signs of life, but knows nothing of the goal."""
    server = process("first")
    routed = caller(silence_s=4.0)
    sent = routed.send("wait far left")
    sent.heard("far left ")
    server.end()
    process("first")
    result = sent.end()[1]
    assert result.status.code == Status.UNAVAILABLE
    assert result.text == "far left "


def test_a_silent_server_that_lives_is_waited_for(ros_graph: Any, caller: Any) -> None:
    server = serve(ros_graph, "first")
    routed = caller(silence_s=3.0)
    sent = routed.send("wait far left")
    sent.heard("far left ")
    since = routed.router._servers["first"].heard_at
    # Signs of life come although there is no feedback, for longer than its silence may last.
    ros_graph.wait_for(lambda: routed.router._servers["first"].heard_at > since + 4.0)
    ros_graph.do(server.release)
    assert sent.end()[0] == GoalStatus.STATUS_SUCCEEDED


def test_a_stall_of_the_router_is_no_silence_of_the_server() -> None:
    """The graph's process stalls while a model is loaded; nobody is heard meanwhile."""
    client = Mock()
    client.server_is_ready.return_value = True
    server = _Server("first", client, heard_at=100.0, seen_at=100.0)
    assert server.look(104.0, 5.0) == ""
    server.forgive(112.0, 8.0)
    assert server.look(112.0, 5.0) == ""
    assert "no sign of life for 5 s" in server.look(114.0, 5.0)
    client.server_is_ready.return_value = False
    server.expect(200.0)
    assert server.look(200.4, 5.0) == "", "its last result may be on its way"
    assert server.look(200.6, 5.0) == "has gone"


@pytest.mark.parametrize(
    ("answered", "remedy"), [(False, "send the goal again"), (True, "see the log of its server")]
)
def test_a_goal_that_its_server_does_not_know(answered: bool, remedy: str) -> None:
    """The server's process may be another one before the goal arrives, or after."""
    passage = _Passage(Mock(), _Server("first", Mock()), begun=0.0, due=9.0)
    passage.sent = Mock(answered=answered, loss="lost it")
    passage.on_end(None)
    assert str(passage.over.result()) == f"first/generate: it lost it ({remedy})"


def test_every_protocol_of_the_registry_may_be_named() -> None:
    assert GenerateRouterConfig().protocols == tuple(registry.PROTOCOLS)


@pytest.mark.parametrize("protocols", [(), ("a", "a"), ("a/b",), ("",), ("~",)])
def test_protocols_are_names(protocols: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        GenerateRouterConfig(protocols=protocols)
    assert caught.value.field == "protocols"


def test_a_fault_of_the_router_reaches_the_caller(
    caller: Callable[..., Caller], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GenerateRouter, "_admit", Mock(side_effect=ValueError("a bug")))
    status, result = caller().ask("question")
    assert status == GoalStatus.STATUS_ABORTED
    assert (result.status.code, result.status.message) == (Status.INTERNAL, "ValueError: a bug")
