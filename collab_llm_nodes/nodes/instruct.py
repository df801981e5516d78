"""``ros2 run collab_llm instruct "find the red ball"``: give one instruction and watch it.

A client of the action ``navigate``, for people and launch files. Ctrl-C cancels the mission.
``instruct stop`` cancels any instruction that is being followed, without waiting for models.

Models may take minutes to load, with no one watching the robot at the end. With ``--confirm`` it
announces on ``pending_instruction`` and ``speech`` that all is ready, and sends the goal only once
it is confirmed: by the dashboard, ``instruct --go``, or the service ``confirm_instruction``. One
instruction at a time is announced, so that a confirmation is for the one shown.
"""

from __future__ import annotations

import contextlib
import math
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import rclpy
from rcl_interfaces.srv import GetParameters
from rclpy.action import ActionClient
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.publisher import Publisher
from rclpy.service import Service
from rclpy.task import Future
from std_msgs.msg import String
from std_srvs.srv import Trigger

from collab_llm.action import Generate, Navigate
from collab_llm.msg import LinkState, Status
from collab_llm_nodes.errors import ConfigError, printable
from collab_llm_nodes.robot.stop_words import asks_to_stop
from collab_llm_nodes.ros.clock import STEADY
from collab_llm_nodes.ros.goals import ALL_GOALS, SentGoal, action_client, cancel_client
from collab_llm_nodes.ros.program import (
    argument_parser,
    command_for,
    init_rclpy,
    read_arguments,
)
from collab_llm_nodes.ros.qos import REQUESTS, RESULT, STATE

START_DEADLINE_S = 300.0
"""Longest wait for nodes and verifier, which may have to load models of many gigabytes."""
LOST_S = 5.0
"""A navigator that is gone for so long is lost."""
ASK_AGAIN_S = 1.0
"""Period of requests for parameters, whose answers may get lost (goals.py)."""
CONFIRM_DEADLINE_S = 600.0
"""Longest wait for a confirmation."""
TURN_S = (1.0, 2.0)
"""Time without another pending instruction before one offers its confirmation; random between
these, so that one of several is the first."""
SETTLE_S = 0.5
"""Time from that offer to the announcement, by which others' offers are discovered."""
CANCEL_DEADLINE_S = 5.0
NAVIGATOR_DEADLINE_S = 5.0
"""Longest wait for a navigator that is to stop, and for the answer to a confirmation."""


def _print_news(news: str) -> None:
    print(news, file=sys.stderr, flush=True)


def _print_step(feedback: Navigate.Feedback) -> None:
    print(f"{feedback.step:3d}  {printable(feedback.text)}", flush=True)


class InstructionClient:
    """One goal, followed to its end by callbacks in the spinning thread.

    Args:
        goal: the instruction and its limits.
        confirm: send it only once it is confirmed.
        on_news: called with what the goal waits for, for people to read.
        on_step: called with the feedback of each action.

    Attributes:
        ended: set when there is a result, or none is to be expected.
        result: of the goal; None if it has none.
        goal: None until it is sent.
        missing: requirements of the goal that are not met yet.
        seen_at: when the navigator was there last; until the goal is sent, the start, or the
            announcement [s, time.monotonic].
        announced: the confirmation was asked for.
    """

    def __init__(
        self,
        goal: Navigate.Goal,
        *,
        confirm: bool = False,
        on_news: Callable[[str], None] = _print_news,
        on_step: Callable[[Navigate.Feedback], None] = _print_step,
        **node_arguments: Any,
    ) -> None:
        self.ended = threading.Event()
        self.result: Navigate.Result | None = None
        self.goal: SentGoal | None = None
        self.missing: list[str] = []
        self.seen_at = time.monotonic()
        self.node = Node("instruct", **node_arguments)
        self._action = action_client(self.node, Navigate, "navigate")
        self._parameters = self.node.create_client(GetParameters, "navigator/get_parameters")
        self._asked_at = -math.inf
        self._action_asked = ""
        self._answers: ActionClient | None = None  # of that action, only to see that it is there
        self._link_up, self._needs_link = False, True
        self._dry = False
        self.node.create_subscription(LinkState, "link_state", self._on_link, STATE)
        self._wanted, self._on_news, self._on_step = goal, on_news, on_step
        self._instruction: str = goal.instruction
        self._confirm = self._unconfirmed = confirm
        self.announced = False
        self._pending: Publisher | None = None  # while the confirmation is offered
        self._offer: Service | None = None
        self._next_at = self.seen_at + random.uniform(*TURN_S)  # the next step towards that
        if confirm:
            self._speech = self.node.create_publisher(String, "speech", RESULT)
        self._present = self._given_up = False
        self.node.create_timer(0.1, self._look, clock=STEADY)

    def give_up(self) -> None:
        """Cancel the goal, or do not send it."""
        self._given_up = True
        if self.goal is None:
            self.ended.set()
        else:
            self.goal.cancel()

    def _look(self) -> None:
        """Send the goal once all is there; request the result again from a restarted navigator."""
        was, self._present = self._present, self._action.server_is_ready()
        if self.goal is None:
            self._send_when_complete()
            return
        if self._present:
            self.seen_at = time.monotonic()
        if self._present and not was and not self._given_up:
            self.goal.ask_again()

    def _send_when_complete(self) -> None:
        """Send the goal once the whole graph is there, which may be long after the navigator."""
        there = {"the action navigate (navigator)": self._present}
        if self._answers is None:
            there["the navigator's parameter answer.action"] = False
            self._ask_navigator()
        else:
            there[f"the action {self._action_asked}"] = self._answers.server_is_ready()
        if self._confirm:
            there["the end of another instruction that is to be confirmed"] = self._is_alone()
        if self._needs_link:
            there["the link to the verifier (cloud_verifier_bridge)"] = self._link_up
        before, self.missing = self.missing, [name for name, ready in there.items() if not ready]
        if self.missing:
            if self.missing != before:
                self._on_news(f"waiting for {', '.join(self.missing)}")
        elif self._unconfirmed:
            self._announce()
        elif not self._given_up:
            self.seen_at = time.monotonic()  # before `goal`, which makes the limit a short one
            self.goal = SentGoal(
                self.node, self._action, self._wanted, self._on_end, self._on_feedback
            )

    def _is_alone(self) -> bool:
        """Offer the confirmation unless another instruction does; return True if none does.

        A confirmation does not name its instruction. Those that offer it at the same time all
        withdraw their offer, and try again after a random time.
        """
        now, offers = time.monotonic(), self._pending is not None
        others = self.node.count_publishers("pending_instruction") > offers
        if others:
            self._next_at = now + random.uniform(*TURN_S)
            if self._pending is not None and self._offer is not None and not self.announced:
                self.node.destroy_service(self._offer)
                self.node.destroy_publisher(self._pending)
                self._pending = None
        elif not offers and now > self._next_at:
            self._next_at = now + SETTLE_S
            self._pending = self.node.create_publisher(String, "pending_instruction", STATE)
            self._offer = self.node.create_service(
                Trigger, "confirm_instruction", self._on_confirmed, qos_profile=REQUESTS
            )
        return not others

    def _announce(self) -> None:
        """Ask people to confirm the instruction, once."""
        if self.announced or self._pending is None or time.monotonic() < self._next_at:
            return
        self.announced, self.seen_at = True, time.monotonic()
        service = self.node.resolve_service_name("confirm_instruction")
        go = command_for(self.node, "ros2 run collab_llm instruct --go")
        ready, will = "ready, and NOT moving before this is confirmed", "will move"
        if self._dry:
            ready = "ready for a dry run, in which nothing moves; it begins when this is confirmed"
            will = "will show what I would do, without moving,"
        self._on_news(
            f"{ready}: {printable(self._instruction)}\n"
            f"confirm: the dashboard's button, `{go}`, or"
            f" `ros2 service call {service} std_srvs/srv/Trigger`"
        )
        self._pending.publish(String(data=self._instruction))
        said = f"I am ready, and {will} once you confirm: {self._instruction}"
        self._speech.publish(String(data=said))

    def _on_confirmed(self, _: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        """Send the goal now; a later confirmation is needed if that is impossible."""
        if self.announced and self._unconfirmed:
            self._unconfirmed = False
            self._send_when_complete()
            self._unconfirmed = self.goal is None
        response.success = self.goal is not None
        if self.goal is not None:
            if self._pending is not None:
                self._pending.publish(String())
            response.message = self._instruction
        elif self._given_up:
            response.message = "the instruction was given up"
        else:
            response.message = f"not ready, waiting for {', '.join(self.missing) or 'its turn'}"
        return response

    def _ask_navigator(self) -> None:
        """Request the names of the model's action and protocol; repeat until answered."""
        now = time.monotonic()
        if self._parameters.service_is_ready() and now - self._asked_at > ASK_AGAIN_S:
            self._asked_at = now
            for names, callback in (
                (["output"], self._on_output),  # first: an announcement depends on it
                (["answer.action", "answer.protocol"], self._on_parameters),
            ):
                wanted = GetParameters.Request(names=names)
                self._parameters.call_async(wanted).add_done_callback(callback)

    def _on_output(self, asked: Future) -> None:
        self._dry = [value.string_value for value in asked.result().values] == ["none"]

    def _on_parameters(self, asked: Future) -> None:
        values = [value.string_value for value in asked.result().values]
        if self._answers is None and len(values) == 2 and values[0]:  # else another navigator
            action, protocol = values
            self._action_asked = printable(action)
            self._answers = action_client(self.node, Generate, action)
            self._needs_link = "edge_cloud" in (protocol, *action.split("/"))

    def _on_link(self, link: LinkState) -> None:
        self._link_up = link.state == LinkState.UP

    def _on_feedback(self, message: Any) -> None:
        self._on_step(message.feedback)

    def _on_end(self, result: Navigate.Result | None) -> None:
        self.result = result
        self.ended.set()


def instruct(instruction: str, *, confirm: bool = False) -> int:
    """Send ``instruction`` and wait: return 0 arrived, 1 ended otherwise, 2 not sent, 3 replied."""
    interrupted, finished = threading.Event(), threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interrupted.set())
    client = InstructionClient(Navigate.Goal(instruction=instruction), confirm=confirm)
    executor = SingleThreadedExecutor()
    executor.add_node(client.node)
    spinner = threading.Thread(target=_spin, args=(executor, finished), name="ros-spin")
    spinner.start()
    while not client.ended.wait(0.2) and not interrupted.is_set():
        waiting = CONFIRM_DEADLINE_S if client.announced else START_DEADLINE_S
        limit = LOST_S if client.goal else waiting
        if time.monotonic() - client.seen_at > limit:
            break
    if interrupted.is_set():
        executor.create_task(client.give_up)
        client.ended.wait(CANCEL_DEADLINE_S)
    finished.set()
    executor.create_task(lambda: None)  # wakes it
    spinner.join()
    executor.shutdown()
    client.node.destroy_node()
    return _report(client, interrupted.is_set())


def stop(**node_arguments: Any) -> int:
    """Cancel any instruction: return 0 confirmed by the navigator, 1 not, 2 no navigator."""
    with _spinnable(**node_arguments) as (node, executor):
        cancels = cancel_client(node, "navigate")
        if not cancels.wait_for_service(NAVIGATOR_DEADLINE_S):
            print("UNAVAILABLE: no navigator; the emergency stop needs none", file=sys.stderr)
            return 2
        for _ in range(round(CANCEL_DEADLINE_S)):  # an answer may get lost, see goals.py
            asked = cancels.call_async(ALL_GOALS)
            executor.spin_until_future_complete(asked, 1.0)
            if asked.done():
                count = len(asked.result().goals_canceling)
                print(f"cancelled: {count}" if count else "nothing is being followed", flush=True)
                return 0
        print("UNAVAILABLE: the navigator does not answer", file=sys.stderr)
        return 1


def confirm(**node_arguments: Any) -> int:
    """Confirm the pending instruction: return 0 it is followed now, 1 not, 2 none is pending."""
    with _spinnable(**node_arguments) as (node, executor):
        confirms = node.create_client(Trigger, "confirm_instruction", qos_profile=REQUESTS)
        if not confirms.wait_for_service(NAVIGATOR_DEADLINE_S):
            print("no instruction waits for a confirmation", file=sys.stderr)
            return 2
        asked = confirms.call_async(Trigger.Request())
        executor.spin_until_future_complete(asked, NAVIGATOR_DEADLINE_S)
        if asked.done() and asked.result().success:
            print(f"confirmed: {printable(asked.result().message)}", flush=True)
            return 0
        why = asked.result().message if asked.done() else "no answer"
        print(f"not confirmed: {printable(why)}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def _spinnable(**node_arguments: Any) -> Iterator[tuple[Node, SingleThreadedExecutor]]:
    """Yield a node for a single request, and its executor."""
    node = Node("instruct", **node_arguments)
    executor = SingleThreadedExecutor(context=node.context)
    executor.add_node(node)
    try:
        yield node, executor
    finally:
        executor.shutdown()
        node.destroy_node()


def _report(client: InstructionClient, interrupted: bool) -> int:
    """Print how it ended; return the exit status."""
    result = client.result
    if result is not None:
        said = printable(result.status.message)
        verdict, status = f"ended: {said}", 1
        if result.status.code == Status.OK:
            verdict, status = f"arrived{said and f', {said}'}", 0
        elif result.status.code == Status.ANSWERED:
            verdict, status = f"replied: {printable(result.text)}", 3
        print(f"{verdict} ({result.steps} steps, {result.distance_travelled:.2f} m)", flush=True)
        return status
    if client.goal is None and client.announced and not interrupted:
        print(f"not confirmed within {CONFIRM_DEADLINE_S:g} s: not followed", file=sys.stderr)
        return 2
    if client.goal is None and not interrupted:
        missing = ", ".join(client.missing)
        print(f"not there within {START_DEADLINE_S:g} s: {missing}", file=sys.stderr)
        return 2
    if client.goal is not None and client.goal.refused:
        print("REFUSED: the navigator's log says why", file=sys.stderr)
    elif client.goal is not None:
        print("UNAVAILABLE: the navigator is gone, and the result with it", file=sys.stderr)
    return 1


def _spin(executor: SingleThreadedExecutor, finished: threading.Event) -> None:
    while not finished.is_set():
        executor.spin_once()


def main() -> int:
    """Read the instruction from the command line."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("words", nargs="*", help='the instruction: "find the red ball"')
    parser.add_argument(
        "--confirm", action="store_true", help="announce it, and wait until it is confirmed"
    )
    parser.add_argument("--go", action="store_true", help="confirm the instruction that waits")
    try:
        given = read_arguments(parser)
        instruction = " ".join(given.words)
        if given.go == bool(instruction):
            parser.error("give an instruction, or --go alone")
        init_rclpy(None)
    except ConfigError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        return 1
    try:
        if given.go:
            return confirm()
        if asks_to_stop(instruction):
            return stop()
        return instruct(instruction, confirm=given.confirm)
    finally:
        rclpy.try_shutdown()


if __name__ == "__main__":
    raise SystemExit(main())
