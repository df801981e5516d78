"""``instruct`` as people start it: the end it reports when navigators answer, vanish or dawdle."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from action_msgs.msg import GoalStatus
from rclpy.action import ActionClient, ActionServer, CancelResponse, GoalResponse
from rclpy.parameter import Parameter
from rclpy.task import Future
from std_msgs.msg import String

from collab_llm.action import Generate, Navigate
from collab_llm.msg import LinkState, Status
from collab_llm_nodes.nodes import instruct
from collab_llm_nodes.nodes.instruct import InstructionClient
from collab_llm_nodes.ros.qos import RESULT, STATE

pytestmark = pytest.mark.ros

OTHER = "the end of another instruction that is to be confirmed"
LINK = "the link to the verifier (cloud_verifier_bridge)"


class FakeNavigator:
    """Offers ``navigate``; ends a goal when told to or when it is cancelled.

    By default with all that a goal needs: the action that it asks and a link to the verifier.
    """

    def __init__(
        self, graph: Any, complete: bool = True, action: str = "edge_cloud/generate"
    ) -> None:
        self.node = graph.node("navigator")
        self.action = action
        self.node.declare_parameter("answer.action", action)
        self.node.declare_parameter("answer.protocol", action.split("/")[0])
        self.node.declare_parameter("output", "velocity")
        self.links = self.node.create_publisher(LinkState, "link_state", STATE)
        self.goals: list[Any] = []
        self.over = Future()
        self.reason, self.sees, self.words = "because", "", ""
        self.offer()
        if complete:
            self.load()
            self.link(LinkState.UP)

    def load(self) -> None:
        """Offer the action that it asks, as a server does when its models are there."""
        self.answers = ActionServer(
            self.node, Generate, self.action, lambda goal: Generate.Result()
        )

    def link(self, state: int) -> None:
        self.links.publish(LinkState(state=state))

    def offer(self) -> None:
        self.server = ActionServer(
            self.node,
            Navigate,
            "navigate",
            self._execute,
            cancel_callback=self._on_cancel,
        )

    async def _execute(self, goal: Any) -> Navigate.Result:
        self.goals.append(goal)
        if self.sees:
            goal.publish_feedback(Navigate.Feedback(step=1, text=self.sees))
        status = await self.over
        if goal.is_cancel_requested:
            goal.canceled()
        else:
            goal.succeed()
        told = Status(code=status, message="" if status == Status.OK else self.reason)
        return Navigate.Result(status=told, steps=3, text=self.words)

    def _on_cancel(self, goal: Any) -> CancelResponse:
        self.over.set_result(Status.CANCELLED)
        return CancelResponse.ACCEPT


@contextmanager
def instructed(*words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "collab_llm_nodes.nodes.instruct", *(words or ("find", "it"))]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ending(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The status, and what was said but for what it waited for at first."""
    out, err = process.communicate(timeout=30.0)
    lines = [x for x in err.splitlines(keepends=True) if not x.startswith("waiting for ")]
    return process.returncode, out + "".join(lines)


def test_instruct_reports_the_result(ros_graph: Any) -> None:
    navigator = FakeNavigator(ros_graph)
    navigator.over.set_result(Status.OK)
    with instructed() as process:
        assert ending(process) == (0, "arrived (3 steps, 0.00 m)\n")
    assert navigator.goals[0].request.instruction == "find it"


def test_a_reply_is_no_arrival(ros_graph: Any) -> None:
    navigator = FakeNavigator(ros_graph)
    navigator.words = "two\x1b[2J."
    navigator.over.set_result(Status.ANSWERED)
    with instructed() as process:
        assert ending(process) == (3, "replied: two\\x1b[2J. (3 steps, 0.00 m)\n")


def test_words_of_models_do_not_command_the_terminal(ros_graph: Any) -> None:
    navigator = FakeNavigator(ros_graph)
    navigator.reason = navigator.sees = "no\x1b[2J\u202e\narrived (3 steps, 0.00 m)"
    navigator.over.set_result(Status.UNAVAILABLE)
    with instructed() as process:
        status, said = ending(process)
    assert status == 1
    shown = r"no\x1b[2J\u202e\narrived (3 steps, 0.00 m)"
    *feedback, end = said.splitlines()
    assert end == f"ended: {shown} (3 steps, 0.00 m)"
    assert all(line == f"  1  {shown}" for line in feedback)


def test_the_instruction_waits_for_the_models_and_the_link(
    ros_graph: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    navigator = FakeNavigator(ros_graph, complete=False)
    navigator.link(LinkState.DOWN)
    client = InstructionClient(Navigate.Goal(instruction="find it"), context=ros_graph.context)
    ros_graph.add(client.node)
    ros_graph.wait_for(lambda: client.missing == ["the action edge_cloud/generate", LINK])
    ros_graph.do(navigator.load)
    ros_graph.wait_for(lambda: client.missing == [LINK])
    assert client.goal is None
    navigator.link(LinkState.UP)
    ros_graph.wait_for(lambda: navigator.goals)
    assert client.missing == []
    said = capfd.readouterr().err
    assert f"waiting for the action edge_cloud/generate, {LINK}\n" in said
    assert said.endswith(f"waiting for {LINK}\n")


def test_the_instruction_waits_for_the_action_that_the_navigator_asks(ros_graph: Any) -> None:
    """The protocol has no use for the link to the verifier."""
    navigator = FakeNavigator(ros_graph, complete=False, action="echo/generate")
    client = InstructionClient(Navigate.Goal(instruction="find it"), context=ros_graph.context)
    ros_graph.add(client.node)
    ros_graph.wait_for(lambda: client.missing == ["the action echo/generate"])
    assert client.goal is None
    ros_graph.do(navigator.load)
    ros_graph.wait_for(lambda: navigator.goals)


def test_the_wait_for_the_models_has_a_deadline(
    ros_graph: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    navigator = FakeNavigator(ros_graph, complete=False)
    navigator.load()
    client = InstructionClient(Navigate.Goal(instruction="find it"), context=ros_graph.context)
    ros_graph.add(client.node)
    since = client.seen_at
    ros_graph.wait_for(lambda: client.missing == [LINK])
    assert client.seen_at == since  # a navigator that is there does not put the deadline off
    assert instruct._report(client, interrupted=False) == 2
    assert f"not there within 300 s: {LINK}\n" in capfd.readouterr().err


def confirming(ros_graph: Any) -> tuple[FakeNavigator, InstructionClient, list[str], list[str]]:
    """An instruction that is to be confirmed before a navigator that has no models yet."""
    navigator = FakeNavigator(ros_graph, complete=False)
    user = ros_graph.node("user")
    pending, spoken = list[str](), list[str]()
    user.create_subscription(String, "pending_instruction", lambda m: pending.append(m.data), STATE)
    user.create_subscription(String, "speech", lambda m: spoken.append(m.data), RESULT)
    client = InstructionClient(
        Navigate.Goal(instruction="find it"), confirm=True, context=ros_graph.context
    )
    ros_graph.add(client.node)
    ros_graph.wait_for(lambda: client._speech.get_subscription_count())
    return navigator, client, pending, spoken


def test_an_instruction_waits_to_be_confirmed_and_is_announced(
    ros_graph: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    navigator, client, pending, spoken = confirming(ros_graph)
    context = {"context": ros_graph.context}
    ros_graph.wait_for(lambda: client.missing)
    assert instruct.confirm(**context) == 1  # it cannot be confirmed before it is ready
    assert "not confirmed: not ready, waiting for" in capfd.readouterr().err
    assert not client.announced
    ros_graph.do(navigator.load)
    navigator.link(LinkState.UP)
    ros_graph.wait_for(lambda: pending and spoken)
    assert pending == ["find it"]
    assert spoken == ["I am ready, and will move once you confirm: find it"]
    told = capfd.readouterr().err
    assert "NOT moving before this is confirmed: find it" in told
    assert "instruct --go" in told
    assert client.goal is None
    assert not navigator.goals
    assert instruct.confirm(**context) == 0
    ros_graph.wait_for(lambda: navigator.goals)
    ros_graph.wait_for(lambda: pending == ["find it", ""])
    assert navigator.goals[0].request.instruction == "find it"
    assert instruct.confirm(**context) == 0  # twice is once
    assert len(navigator.goals) == 1


def test_what_is_missing_again_when_it_is_confirmed_is_not_sent_later(ros_graph: Any) -> None:
    navigator, client, pending, _ = confirming(ros_graph)
    ros_graph.do(navigator.load)
    navigator.link(LinkState.UP)
    ros_graph.wait_for(lambda: pending)
    navigator.link(LinkState.DOWN)
    ros_graph.wait_for(lambda: client.missing == [LINK])
    assert instruct.confirm(context=ros_graph.context) == 1
    navigator.link(LinkState.UP)
    ros_graph.wait_for(lambda: not client.missing)
    ros_graph.do(client._look)
    assert client.goal is None
    assert instruct.confirm(context=ros_graph.context) == 0


def test_a_confirmation_is_of_the_instruction_that_was_announced(
    ros_graph: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other one waits for its turn, and says so, whether it came before all was ready or after.

    They begin at the same time: any of them may be the first.
    """
    navigator, first, pending, _ = confirming(ros_graph)
    ros_graph.do(navigator.load)
    navigator.link(LinkState.UP)
    second = InstructionClient(
        Navigate.Goal(instruction="find the ball"), confirm=True, context=ros_graph.context
    )
    ros_graph.add(second.node)
    ros_graph.wait_for(lambda: pending)
    announced, other = (first, second) if first.announced else (second, first)
    ros_graph.wait_for(lambda: other.missing == [OTHER])
    third = InstructionClient(
        Navigate.Goal(instruction="find the box"), confirm=True, context=ros_graph.context
    )
    ros_graph.add(third.node)
    ros_graph.wait_for(lambda: third.missing == [OTHER])
    assert instruct.confirm(context=ros_graph.context) == 0
    ros_graph.wait_for(lambda: navigator.goals)
    assert [goal.request.instruction for goal in navigator.goals] == pending[:1]
    assert announced.goal is not None
    assert not other.announced
    assert not third.announced
    assert f"waiting for {OTHER}\n" in capfd.readouterr().err


def test_the_announcement_says_that_nothing_moves_in_a_dry_run(
    ros_graph: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    navigator, _, _, spoken = confirming(ros_graph)
    navigator.node.set_parameters([Parameter("output", value="none")])
    ros_graph.do(navigator.load)
    navigator.link(LinkState.UP)
    ros_graph.wait_for(lambda: spoken)
    assert "without moving" in spoken[0]
    assert "will move" not in spoken[0]
    assert "in which nothing moves" in capfd.readouterr().err


def test_what_is_to_be_typed_names_the_namespace(
    ros_graph: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = {"namespace": "robot1", "context": ros_graph.context}
    client = InstructionClient(Navigate.Goal(instruction="find it"), confirm=True, **arguments)
    ros_graph.add(client.node)
    ros_graph.wait_for(lambda: client._pending)
    client._next_at = 0.0
    ros_graph.do(client._announce)
    said = capfd.readouterr().err
    assert "`ros2 run collab_llm instruct --go --ros-args -r __ns:=/robot1`" in said
    assert "/robot1/confirm_instruction" in said


def test_an_instruction_that_looks_like_an_option_confirms_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, bool]] = []

    def sent(words: str, *, confirm: bool) -> int:
        asked.append((words, confirm))
        return 0

    monkeypatch.setattr(instruct, "instruct", sent)
    monkeypatch.setattr(instruct, "init_rclpy", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["instruct", "--confirm", "--", "--go"])
    assert instruct.main() == 0
    assert asked == [("--go", True)]


def test_a_confirmation_that_does_not_come_ends_it(
    ros_graph: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    navigator, client, pending, _ = confirming(ros_graph)
    ros_graph.do(navigator.load)
    navigator.link(LinkState.UP)
    ros_graph.wait_for(lambda: pending)
    assert instruct._report(client, interrupted=False) == 2
    assert "not confirmed within 600 s: not followed" in capfd.readouterr().err
    assert not navigator.goals


def test_where_nothing_waits_nothing_is_confirmed(
    ros_graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instruct, "NAVIGATOR_DEADLINE_S", 0.2)
    assert instruct.confirm(context=ros_graph.context) == 2


def test_instruct_ends_when_the_navigator_is_gone(ros_graph: Any) -> None:
    navigator = FakeNavigator(ros_graph)
    with instructed() as process:
        ros_graph.wait_for(lambda: navigator.goals, 30.0)
        ros_graph.do(navigator.server.destroy)
        status, said = ending(process)
    assert status == 1
    assert "UNAVAILABLE" in said


def test_a_navigator_that_was_restarted_has_forgotten_the_goal(ros_graph: Any) -> None:
    navigator = FakeNavigator(ros_graph)
    client = InstructionClient(Navigate.Goal(instruction="find it"), context=ros_graph.context)
    ros_graph.add(client.node)
    ros_graph.wait_for(lambda: navigator.goals)
    ros_graph.do(navigator.server.destroy)
    ros_graph.wait_for(lambda: not client._present)
    assert not client.ended.is_set()
    ros_graph.do(navigator.offer)
    ros_graph.wait_for(client.ended.is_set)
    assert client.result is None


def test_ctrl_c_cancels(ros_graph: Any) -> None:
    navigator = FakeNavigator(ros_graph)
    with instructed() as process:
        ros_graph.wait_for(lambda: navigator.goals, 30.0)
        process.send_signal(signal.SIGINT)
        status, said = ending(process)
    assert (status, said) == (1, "ended: because (3 steps, 0.00 m)\n")
    assert navigator.goals[0].status == GoalStatus.STATUS_CANCELED


def test_an_instruction_to_stop_cancels_what_another_gave(ros_graph: Any) -> None:
    """It does not wait for models and link: it needs neither."""
    navigator = FakeNavigator(ros_graph, complete=False)
    client = ActionClient(ros_graph.node("other"), Navigate, "navigate")
    ros_graph.wait_for(client.server_is_ready)
    ros_graph.ask(client.send_goal_async, Navigate.Goal(instruction="find it"))
    ros_graph.wait_for(lambda: navigator.goals)
    with instructed("Stop,", "please!") as process:
        assert ending(process) == (0, "cancelled: 1\n")
    ros_graph.wait_for(lambda: navigator.goals[0].status == GoalStatus.STATUS_CANCELED)
    with instructed("halt") as process:
        assert ending(process) == (0, "nothing is being followed\n")
    assert len(navigator.goals) == 1


def test_an_instruction_to_stop_does_not_wait_for_a_navigator(
    ros_graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instruct, "NAVIGATOR_DEADLINE_S", 0.2)
    assert instruct.stop(context=ros_graph.context) == 2


def test_a_goal_given_up_before_it_is_accepted_is_cancelled(ros_graph: Any) -> None:
    navigator = FakeNavigator(ros_graph)
    client = InstructionClient(Navigate.Goal(instruction="find it"), context=ros_graph.context)

    def decide(goal: Navigate.Goal) -> GoalResponse:
        client.give_up()  # in the thread that will hear of the acceptance only afterwards
        return GoalResponse.ACCEPT

    navigator.server.register_goal_callback(decide)
    ros_graph.add(client.node)
    ros_graph.wait_for(client.ended.is_set)
    assert client.result is not None
    assert client.result.status.code == Status.CANCELLED


def test_a_goal_given_up_before_it_is_sent_is_never_sent(ros_graph: Any) -> None:
    client = InstructionClient(Navigate.Goal(instruction="find it"), context=ros_graph.context)
    client.give_up()
    assert client.ended.is_set()
    navigator = FakeNavigator(ros_graph)
    ros_graph.add(client.node)
    ros_graph.wait_for(lambda: client._present)
    assert client.goal is None
    assert not navigator.goals
