"""Executors of whole steps outside this package: the ``StepOutput`` of ``robot/steps.py``, by ROS.

Their packages are imported only when chosen (parameter ``output`` of the navigator).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from action_msgs.msg import GoalStatus
from rclpy.duration import Duration
from rclpy.node import Node

from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.robot.executor import Outcome
from collab_llm_nodes.robot.go2.increments import Increments
from collab_llm_nodes.robot.go2.sport import AVOIDANCE, Answer, Api
from collab_llm_nodes.robot.grammar import Kind, ParsedAction
from collab_llm_nodes.robot.steps import StepOutput
from collab_llm_nodes.ros.clock import STEADY, wall
from collab_llm_nodes.ros.goals import SentGoal, action_client
from collab_llm_nodes.ros.unitree import Services


class Output(StepOutput, Protocol):
    """A step output that a node owns."""

    def close(self) -> None:
        """Stop, and free the clients and topics."""


class Nav2Output:
    """nav2's behaviours ``drive_on_heading`` and ``spin``, which stop before obstacles.

    Their error codes become the step's outcome.

    Raises:
        ConfigError: there is no package nav2_msgs.
    """

    def __init__(self, node: Node) -> None:
        try:
            from nav2_msgs.action import DriveOnHeading, Spin
        except ImportError as error:
            raise ConfigError(
                f"nav2 needs the package nav2_msgs ({error})",
                field="output",
                remedy="apt install ros-$ROS_DISTRO-nav2-msgs, or output: velocity",
            ) from error
        self.outcome, self.message = Outcome.IDLE, ""
        self.reports_the_end = True
        self._forward, self._turn = DriveOnHeading, Spin
        self._node = node
        self._clients = {
            Kind.FORWARD: action_client(node, DriveOnHeading, "drive_on_heading"),
            Kind.TURN: action_client(node, Spin, "spin"),
        }
        self._goals: dict[int, SentGoal] = {}  # not over yet, by number
        self._number = 0  # of the goal sent last
        self._closed = False

    def start(self, action: ParsedAction, speed: float, allowance: float) -> None:
        """Start a step like ``StepOutput.start``; nav2 decides how fast ``spin`` turns."""
        self.cancel()
        client = self._clients[action.kind]
        if not client.server_is_ready():
            self._end(Outcome.FAILED, "nav2's behaviors are not there: is behavior_server active?")
            return
        time_allowance = Duration(seconds=allowance).to_msg()
        if action.kind is Kind.FORWARD:
            goal = self._forward.Goal(speed=speed, time_allowance=time_allowance)
            goal.target.x = action.value
        else:
            goal = self._turn.Goal(target_yaw=action.value, time_allowance=time_allowance)
        self._number = number = self._number + 1
        self._goals[number] = SentGoal(self._node, client, goal, partial(self._on_end, number))
        self.outcome, self.message = Outcome.RUNNING, ""

    def cancel(self) -> None:
        """Cancel like ``StepOutput.cancel``, even a goal whose acceptance was lost."""
        if self.outcome is Outcome.RUNNING:
            self._goals[self._number].cancel()
            self._end(Outcome.CANCELLED)

    def close(self) -> None:
        """Stop; the clients are freed once every goal is over."""
        self.cancel()
        self._closed = True
        self._free_clients()

    def _on_end(self, number: int, result: Any | None) -> None:
        goal = self._goals.pop(number)
        if self.outcome is Outcome.RUNNING and number == self._number:
            if result is None:
                self._end(Outcome.FAILED, f"nav2 {goal.loss}")
            else:
                outcome = _outcome(goal.status, result)
                self._end(outcome, "" if outcome is Outcome.DONE else _words(result))
        self._free_clients()

    def _free_clients(self) -> None:
        if self._closed and not self._goals:
            for client in self._clients.values():
                client.destroy()

    def _end(self, outcome: Outcome, message: str = "") -> None:
        self.outcome, self.message = outcome, message


_ERRORS = {
    "TIMEOUT": Outcome.TIMEOUT,
    "COLLISION_AHEAD": Outcome.BLOCKED,
    "TF_ERROR": Outcome.FAILED,
    "INVALID_INPUT": Outcome.FAILED,
    "UNKNOWN": Outcome.FAILED,
}
"""nav2's error codes by name; the numbers differ between the two actions."""


def _outcome(status: int, result: Any) -> Outcome:
    if status == GoalStatus.STATUS_SUCCEEDED and not getattr(result, "error_code", 0):
        return Outcome.DONE
    return _ERRORS.get(_name(result), Outcome.FAILED)


def _name(result: Any) -> str:
    codes = {getattr(result, name): name for name in _ERRORS if hasattr(result, name)}
    return codes.get(getattr(result, "error_code", None), "UNKNOWN")  # Humble has no codes


def _words(result: Any) -> str:
    said = getattr(result, "error_msg", "")  # not on Humble
    return f"nav2: {_name(result)}" + (f", {said}" if said else "")


class IncrementsOutput:
    """The Go2's obstacle avoidance; see ``robot/go2/increments.py``.

    Raises:
        ConfigError: the robot's package unitree_api is missing.
    """

    reports_the_end = False

    def __init__(self, node: Node) -> None:
        self._node = node
        self._machine = Increments()
        functions = (*AVOIDANCE, Api.STOP_MOVE)
        self._services = Services(node, self._machine.requests, functions, self._on_answer)
        self._ticker = node.create_timer(0.05, self._tick, clock=STEADY)

    @property
    def outcome(self) -> Outcome:
        return self._machine.outcome

    @property
    def message(self) -> str:
        return self._machine.message

    def start(self, action: ParsedAction, speed: float, allowance: float) -> None:
        """Start a step like ``StepOutput.start``; the robot decides how fast it goes."""
        self._services.send(self._machine.start(action, wall()))

    def cancel(self) -> None:
        """Cancel like ``StepOutput.cancel``."""
        self._services.send(self._machine.cancel(wall()))

    def close(self) -> None:
        """Stop, and free the topics."""
        self.cancel()
        self._node.destroy_timer(self._ticker)
        self._services.destroy()

    def _tick(self) -> None:
        self._services.send(self._machine.tick(wall()))

    def _on_answer(self, answer: Answer, binary: bytes) -> None:
        self._services.send(self._machine.on_answer(answer, wall()))


OUTPUTS: dict[str, Callable[[Node], Output]] = {
    "nav2": Nav2Output,
    "increments": IncrementsOutput,
}
"""The outputs by the value of the parameter ``output``."""


def make_output(name: str, node: Node) -> Output | None:
    """Return the output of that name; None for "velocity", which the navigator is itself."""
    return OUTPUTS[name](node) if name in OUTPUTS else None
