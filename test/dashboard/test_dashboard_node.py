"""The node ``dashboard``, in a graph."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from dashboard_graph import A, B, graph
from dashboard_server import TOKEN
from started_nodes import start

from collab_llm_nodes.dashboard.view import Level

__all__ = ["graph"]  # fixture


class Guard:
    """motion_guard as the dashboard sees it, in an executor of its own."""

    def __init__(self, graph: Any) -> None:
        from std_msgs.msg import Bool
        from std_srvs.srv import Trigger

        from collab_llm.msg import MotionState
        from collab_llm_nodes.ros.qos import COMMAND, STATE

        self.graph = type(graph)(graph.context, graph.domain_id)
        self.node = self.graph.node("motion_guard")
        self.stopped = False
        self.heard: list[bool] = []
        self.resets = 0
        self._states = self.node.create_publisher(MotionState, "motion_state", STATE)
        self.node.create_subscription(Bool, "emergency_stop", self._on_stop, COMMAND)
        self.node.create_service(Trigger, "reset_emergency_stop", self._on_reset)
        self.node.create_timer(0.2, self._tell)

    def _on_stop(self, msg: Any) -> None:
        self.heard.append(msg.data)
        self.stopped = self.stopped or msg.data
        self._tell()

    def _on_reset(self, request: Any, response: Any) -> Any:
        self.resets += 1
        self.stopped, response.success, response.message = False, True, "reset"
        return response

    def _tell(self) -> None:
        from collab_llm.msg import MotionState

        state = MotionState(allowed=not self.stopped, emergency_stop=self.stopped)
        if self.stopped:
            state.reasons, state.text = ["EMERGENCY_STOP"], "the emergency stop is set"
        self._states.publish(state)


@pytest.fixture
def guard(graph: Any) -> Iterator[Guard]:
    """Stands in for motion_guard."""
    guard = Guard(graph)
    yield guard
    guard.graph.close()


def post(node: Any, path: str) -> Any:
    """The JSON that the dashboard answers to a POST."""
    link = http.client.HTTPConnection("127.0.0.1", node.port, timeout=30)
    with contextlib.closing(link):
        link.request("POST", path)
        answer = link.getresponse()
        assert answer.status == 200
        return json.loads(answer.read())


@pytest.mark.ros
def test_an_instruction_that_waits_is_shown_and_confirmed(graph: Any) -> None:
    from std_msgs.msg import String
    from std_srvs.srv import Trigger

    from collab_llm_nodes.nodes.dashboard import Dashboard
    from collab_llm_nodes.ros.qos import STATE

    node, user = start(graph, Dashboard, port=0), graph.node("user")
    confirmed = []

    def on_confirmed(request: Any, response: Any) -> Any:
        confirmed.append(request)
        response.success, response.message = len(confirmed) > 1, "waiting for the link"
        return response

    service = user.create_service(Trigger, "confirm_instruction", on_confirmed)
    pending = user.create_publisher(String, "pending_instruction", STATE)
    pending.publish(String(data="find the red chair"))
    graph.wait_for(lambda: node.shown().pending == "find the red chair")
    node.confirm()
    said = "not confirmed: waiting for the link"
    graph.wait_for(lambda: node.shown().goal.error == said)
    assert node.shown().goal.instruction == "find the red chair"
    node.confirm()
    graph.wait_for(lambda: len(confirmed) == 2)
    graph.wait_for(lambda: not node.shown().goal.error)
    graph.do(user.destroy_service, service)
    graph.wait_for(lambda: not node.shown().pending)  # nobody waits for it any more
    node.confirm()  # by a page that has not heard of that
    graph.wait_for(lambda: "not confirmed: it does not wait" in node.shown().goal.error)


@pytest.mark.ros
def test_what_the_graph_says_is_shown(graph: Any) -> None:
    from array import array

    from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
    from nav_msgs.msg import Odometry
    from rclpy.parameter import Parameter

    from collab_llm.msg import Draft, GeneratedText, LinkState, NavigationAction, Observation
    from collab_llm_nodes.nodes.dashboard import Dashboard
    from collab_llm_nodes.ros.qos import RESULT, STATE

    node, user = start(graph, Dashboard, port=0), graph.node("user")
    publishers = {
        topic: user.create_publisher(kind, topic, STATE if topic == "link_state" else RESULT)
        for topic, kind in {
            "observation": Observation,
            "odom": Odometry,
            "draft": Draft,
            "generated_text": GeneratedText,
            "navigation_action": NavigationAction,
            "link_state": LinkState,
            "/diagnostics": DiagnosticArray,
        }.items()
    }
    graph.wait_for(lambda: all(p.get_subscription_count() for p in publishers.values()), 30.0)
    node.frame()  # somebody looks
    seen = Observation()
    seen.image.data = array("B", b"\xff\xd8jpeg")
    publishers["observation"].publish(seen)
    moved = Odometry()
    moved.pose.pose.position.x, moved.pose.pose.orientation.w = 2.0, 1.0
    publishers["odom"].publish(moved)
    publishers["draft"].publish(Draft(session_id="s", tokens=[1, 2], ahead=True))
    publishers["link_state"].publish(LinkState(state=LinkState.UP, model="big", rtt_s=0.02))
    answer = GeneratedText(session_id="s", text="turn left", final=True)
    answer.ends, answer.sources = array("I", [4, 9]), array("B", [A, B])
    answer.metrics.names, answer.metrics.values = ["tau"], array("d", [2.0])
    graph.wait_for(lambda: node._view._modes, 30.0)
    publishers["generated_text"].publish(answer)
    action = NavigationAction(session_id="s", kind=NavigationAction.TURN, angle=0.5, span_end=9)
    publishers["navigation_action"].publish(action)
    status = DiagnosticStatus(name="x: node", level=DiagnosticStatus.WARN, message="slow")
    publishers["/diagnostics"].publish(DiagnosticArray(status=[status]))

    def complete() -> Any:
        shown = node.shown()
        parts = (shown.answers, shown.action, shown.pose, shown.health, shown.frame_age is not None)
        return shown if all(parts) and shown.link.model else None

    shown = graph.wait_for(complete, 30.0)
    assert node.frame()[1] == b"\xff\xd8jpeg"
    assert [(w.text, w.source, w.matched) for w in shown.words] == [
        ("turn", A, True),
        (" left", B, True),
    ]
    assert "push-ahead" in shown.answer.mode
    assert (shown.pose.x, shown.link.state, shown.answers[0].figures.tau) == (2.0, "UP", 2.0)
    assert shown.direction.angle == pytest.approx(0.5)
    assert shown.direction.inside
    node.set_parameters([Parameter("camera_fov", value=40.0)])
    graph.wait_for(lambda: not node.shown().direction.inside, 30.0)
    assert any(h.name == "x" and h.level is Level.WARN for h in shown.health)

    question = GeneratedText(session_id="d", prompt="how heavy?", stage="execute", for_motion=False)
    question.metrics.names = ["sent_bytes", "jobs.1"]
    question.metrics.values = array("d", [20.0, 12.0])
    publishers["generated_text"].publish(question)
    reading = graph.wait_for(lambda: node.shown().reading, 30.0)
    assert (reading.question, reading.stage, reading.rounds) == (
        "how heavy?",
        "execute",
        ((1, {"jobs": 12.0}),),
    )
    assert node.shown().answer.text == "turn left", "the robot's own answer stays"


@pytest.mark.ros
def test_the_stop_passes_a_busy_node(graph: Any, guard: Guard) -> None:
    """The node's own thread is held; the stop is published and heard all the same."""
    from collab_llm_nodes.nodes.dashboard import Dashboard

    node = start(graph, Dashboard, port=0)
    guard.graph.wait_for(lambda: node.motion()[0] is not None, 30.0)
    held, released = threading.Event(), threading.Event()

    def busy() -> None:
        held.set()
        released.wait(30.0)

    node.post(busy)
    assert held.wait(10.0)
    told = post(node, "/emergency_stop")
    assert guard.graph.wait_for(lambda: guard.stopped, 30.0)
    assert told == {"confirmed": False, "subscribers": 1}, "who would confirm it is held"
    released.set()
    assert post(node, "/emergency_stop") == {"confirmed": True, "subscribers": 1}
    assert post(node, "/reset_emergency_stop") == {"success": True, "message": "reset"}
    assert not guard.stopped
    assert all(guard.heard), "false would mean nothing"


@pytest.mark.ros
def test_a_reset_that_was_given_up_does_not_come_later(graph: Any, guard: Guard) -> None:
    """The page said that it failed; whoever is beside the robot by now relies on that."""
    from collab_llm_nodes.nodes.dashboard import Dashboard

    node = start(graph, Dashboard, port=0)
    guard.graph.wait_for(lambda: node.motion()[0] is not None, 30.0)
    graph.wait_for(node._resets.service_is_ready, 30.0)
    assert post(node, "/emergency_stop")["confirmed"]
    released, passed = threading.Event(), threading.Event()
    node.post(released.wait, 30.0)
    told = post(node, "/reset_emergency_stop")
    assert told == {"success": False, "message": "motion_guard does not answer"}
    released.set()
    node.post(passed.set)
    assert passed.wait(10.0)
    assert post(node, "/emergency_stop")["confirmed"], "the node's thread runs again"
    assert guard.resets == 0
    assert guard.stopped


@pytest.mark.ros
def test_cancel_frees_the_page_when_the_navigator_was_restarted(graph: Any) -> None:
    """The one that took the goal was killed, and another came before the loss was noticed."""
    from rclpy.action import ActionServer
    from rclpy.task import Future as RosFuture
    from std_msgs.msg import String

    from collab_llm.action import Navigate
    from collab_llm_nodes.nodes.dashboard import Dashboard
    from collab_llm_nodes.ros.qos import STATE

    endless = RosFuture()

    async def follow(goal: Any) -> Any:
        return await endless

    node = start(graph, Dashboard, port=0)
    old, new = graph.node("navigator"), graph.node("navigator_new")
    first = ActionServer(old, Navigate, "navigate", follow)
    instructions = old.create_publisher(String, "instruction", STATE)
    graph.wait_for(node._navigate.server_is_ready, 30.0)
    node.instruct("find the cone")
    graph.wait_for(lambda: node.shown().goal.state == "sent", 30.0)
    instructions.publish(String(data="find the cone"))
    graph.wait_for(lambda: node.shown().goal.state == "running", 30.0)
    assert node.shown().goal.followed
    ActionServer(new, Navigate, "navigate", follow)
    graph.wait_for(lambda: node.count_publishers("navigate/_action/status") == 2, 30.0)
    node.post(first.destroy)
    graph.wait_for(lambda: node.count_publishers("navigate/_action/status") == 1, 30.0)
    assert node.shown().goal.busy
    node.cancel()
    graph.wait_for(lambda: not node.shown().goal.busy, 30.0)
    assert node.shown().goal.error


@pytest.mark.ros
def test_an_instruction_to_stop_is_a_cancel(graph: Any) -> None:
    from action_msgs.msg import GoalStatus
    from rclpy.action import ActionClient, ActionServer, CancelResponse
    from rclpy.task import Future as RosFuture

    from collab_llm.action import Navigate
    from collab_llm.msg import Status
    from collab_llm_nodes.nodes.dashboard import Dashboard

    over, followed = RosFuture(), []

    async def follow(goal: Any) -> Any:
        followed.append(goal)
        await over
        goal.canceled()
        return Navigate.Result(status=Status(code=Status.CANCELLED))

    def cancel(goal: Any) -> CancelResponse:
        over.set_result(None)
        return CancelResponse.ACCEPT

    node = start(graph, Dashboard, port=0)
    user = graph.node("navigator")
    ActionServer(user, Navigate, "navigate", follow, cancel_callback=cancel)
    other = ActionClient(user, Navigate, "navigate")
    graph.wait_for(lambda: other.server_is_ready() and node._cancels.service_is_ready(), 30.0)
    graph.ask(other.send_goal_async, Navigate.Goal(instruction="find the cone"))
    graph.wait_for(lambda: followed, 30.0)
    node.instruct("STOP, please!")
    graph.wait_for(lambda: followed[0].status == GoalStatus.STATUS_CANCELED, 30.0)
    assert len(followed) == 1


@pytest.mark.ros
def test_a_goal_that_is_refused_has_not_arrived(graph: Any) -> None:
    from rclpy.action import ActionServer, GoalResponse

    from collab_llm.action import Navigate
    from collab_llm_nodes.nodes.dashboard import Dashboard

    node = start(graph, Dashboard, port=0)
    ActionServer(
        graph.node("navigator"),
        Navigate,
        "navigate",
        print,
        goal_callback=lambda goal: GoalResponse.REJECT,
    )
    graph.wait_for(node._navigate.server_is_ready, 30.0)
    node.instruct("find the cone")
    graph.wait_for(lambda: node.shown().goal.state == "ended", 30.0)
    assert node.shown().goal.error == "the navigator refused the goal; see its log"


@pytest.mark.ros
def test_a_reply_is_shown_and_is_no_arrival(graph: Any) -> None:
    from rclpy.action import ActionServer

    from collab_llm.action import Navigate
    from collab_llm.msg import Status
    from collab_llm_nodes.dashboard.page import goal_text
    from collab_llm_nodes.nodes.dashboard import Dashboard

    def follow(goal: Any) -> Any:
        goal.succeed()
        return Navigate.Result(status=Status(code=Status.ANSWERED), text="two\x1b[2J")

    node = start(graph, Dashboard, port=0)
    ActionServer(graph.node("navigator"), Navigate, "navigate", follow)
    graph.wait_for(node._navigate.server_is_ready, 30.0)
    node.instruct("how many cones are there?")
    graph.wait_for(lambda: node.shown().goal.state == "ended", 30.0)
    assert goal_text(node.shown().goal).endswith('it replied: "two\\x1b[2J"')


@pytest.mark.ros
def test_without_motion_guard_the_page_says_so(graph: Any) -> None:
    from collab_llm_nodes.nodes.dashboard import Dashboard

    node = start(graph, Dashboard, port=0)
    assert post(node, "/emergency_stop") == {"confirmed": False, "subscribers": 0}
    told = post(node, "/reset_emergency_stop")
    assert told == {"success": False, "message": "motion_guard is not there"}
    node.instruct("find the cone")
    graph.wait_for(lambda: node.shown().goal.error == "the navigator is not there", 30.0)


@pytest.mark.ros
def test_the_token_is_no_parameter(
    graph: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from collab_llm_nodes.nodes.dashboard import Dashboard

    monkeypatch.setenv("COLLAB_LLM_DASHBOARD_TOKEN", TOKEN)
    node = start(graph, Dashboard, port=0)
    assert TOKEN not in repr([p.value for p in node.get_parameters(list(node._parameters))])
    link = http.client.HTTPConnection("127.0.0.1", node.port, timeout=30)
    with contextlib.closing(link):
        link.request("GET", "/")
        assert link.getresponse().status == 401
    node.post(node.stop)  # there is one dashboard in a process
    graph.wait_for(lambda: not node.active, 30.0)
    file = tmp_path / "token"
    file.write_text("another token, also long\n")
    file.chmod(0o600)
    other = start(graph, Dashboard, port=0, token_file=str(file))
    link = http.client.HTTPConnection("127.0.0.1", other.port, timeout=30)
    with contextlib.closing(link):
        link.request("GET", "/motion", headers={"authorization": f"Bearer {TOKEN}"})
        answer = link.getresponse()
        assert (answer.status, answer.read()[:6]) == (401, b"log in")
        link.request("GET", "/motion", headers={"authorization": "Bearer another token, also long"})
        assert link.getresponse().status == 200


@pytest.mark.ros
@pytest.mark.parametrize("fault", ["open address", "no nicegui", "port in use", "second one"])
def test_a_dashboard_that_cannot_be_does_not_start(
    graph: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from rclpy.lifecycle import TransitionCallbackReturn
    from rclpy.parameter import Parameter

    from collab_llm_nodes.nodes.dashboard import Dashboard

    parameters: dict[str, Any] = {"port": 0}
    if fault == "open address":
        parameters["host"] = "0.0.0.0"
    elif fault == "no nicegui":
        monkeypatch.setitem(sys.modules, "collab_llm_nodes.dashboard.server", None)
    else:
        port = start(graph, Dashboard, port=0).port
        parameters["port"] = port if fault == "port in use" else 0
    overrides = [Parameter(name, value=value) for name, value in parameters.items()]
    node = Dashboard(context=graph.context, parameter_overrides=overrides)
    assert node.trigger_configure() != TransitionCallbackReturn.SUCCESS
    node.destroy_node()
