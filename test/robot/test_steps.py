"""Steps that somebody else carries out: measured here, and taken back when something is wrong."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from collab_llm_nodes.robot.executor import ZERO, ExecutorConfig, Outcome, Pose2D
from collab_llm_nodes.robot.go2.increments import ARM_S, REQUEST_S, STOP_S, Increments
from collab_llm_nodes.robot.go2.sport import Api, Call
from collab_llm_nodes.robot.grammar import ParsedAction, parse
from collab_llm_nodes.robot.steps import DelegatedSteps

DT = 0.05
CONFIG = ExecutorConfig(linear_speed=0.5, allowance_base=2.0)


class Output:
    """Notes what it is told."""

    def __init__(self, *, reports_the_end: bool = True) -> None:
        self.reports_the_end = reports_the_end
        self.outcome, self.message = Outcome.IDLE, ""
        self.started: list[tuple[ParsedAction, float, float]] = []
        self.cancelled = 0

    def start(self, action: ParsedAction, speed: float, allowance: float) -> None:
        self.started.append((action, speed, allowance))
        self.outcome = Outcome.RUNNING

    def cancel(self) -> None:
        self.cancelled += 1
        self.outcome = Outcome.CANCELLED


def begun(text: str = "move forward 75 cm", **facts: Any) -> tuple[DelegatedSteps, Output]:
    output = Output(**facts)
    steps = DelegatedSteps(CONFIG, output)
    assert steps.start(parse(text), Pose2D(), 10.0) == ZERO
    assert steps.outcome is Outcome.RUNNING
    return steps, output


def test_a_step_is_handed_over_with_speed_and_time() -> None:
    steps, output = begun()
    action, speed, allowance = output.started[0]
    assert (action.value, speed) == (0.75, 0.5)
    assert allowance == pytest.approx(2.0 + 3.0 * (0.75 / 0.5 + 0.5))
    steps.limit = 0.2
    steps.start(action, Pose2D(), 20.0, 0.5)
    assert output.started[1][1] == 0.2
    steps.start(parse("turn left 30 degree"), Pose2D(), 30.0, 0.5)
    assert output.started[2][1] == pytest.approx(0.5 * CONFIG.angular_speed)


def test_nothing_is_commanded_and_all_is_measured() -> None:
    steps, output = begun("turn right 45 degree")
    for i in range(10):
        pose = Pose2D(yaw=math.remainder(-0.05 * i, math.tau))
        assert steps.on_odometry(pose, 10.0 + i * DT) == ZERO
    assert steps.travelled == pytest.approx(0.45)
    assert steps.time_left == math.inf
    steps, output = begun()
    for i in range(1, 11):
        steps.on_odometry(Pose2D(0.03 * i, 0.04 * i), 10.0 + 0.1 * i)
    assert steps.travelled == pytest.approx(0.3)


@pytest.mark.parametrize("outcome", [Outcome.DONE, Outcome.BLOCKED, Outcome.FAILED])
def test_the_other_sides_outcome_is_the_steps(outcome: Outcome) -> None:
    steps, output = begun()
    output.outcome, output.message = outcome, "so it is"
    steps.tick(10.1)
    assert (steps.outcome, steps.message) == (outcome, "so it is")
    assert output.cancelled == 0


def test_silent_odometry_time_and_cancel_take_the_step_back() -> None:
    steps, output = begun()
    steps.tick(10.0 + CONFIG.watchdog + 0.1)
    assert (steps.outcome, output.cancelled) == (Outcome.STALE, 1)
    steps, output = begun()
    now = 10.0
    while steps.outcome is Outcome.RUNNING:
        now += DT
        steps.on_odometry(Pose2D(), now)
    assert (steps.outcome, output.cancelled) == (Outcome.TIMEOUT, 1)
    assert now == pytest.approx(18.0, abs=0.1)
    steps, output = begun()
    steps.cancel()
    assert (steps.outcome, output.cancelled) == (Outcome.CANCELLED, 1)
    steps.cancel()
    assert output.cancelled == 1


def test_no_motion_is_not_handed_over() -> None:
    output = Output()
    steps = DelegatedSteps(CONFIG, output)
    steps.start(parse("stop"), Pose2D(), 1.0)
    assert (steps.outcome, output.started) == (Outcome.DONE, [])


@pytest.mark.parametrize(
    ("farthest", "outcome"), [(0.75, Outcome.DONE), (0.72, Outcome.DONE), (0.4, Outcome.BLOCKED)]
)
def test_odometry_decides_where_the_other_side_cannot(farthest: float, outcome: Outcome) -> None:
    steps, output = begun(reports_the_end=False)
    now = 10.0
    while steps.outcome is Outcome.RUNNING:
        now += DT
        steps.on_odometry(Pose2D(min(farthest, 0.5 * (now - 10.0))), now)
    assert (steps.outcome, output.cancelled) == (outcome, 1)


# Increments of the Go2's obstacle avoidance.


class Go2:
    """Answers requests as the robot's service does."""

    def __init__(self, *, comes_on: bool = True, code: int = 0) -> None:
        self.machine = Increments()
        self.comes_on, self.code, self.on = comes_on, code, False
        self.deaf = False
        self.calls: list[tuple[Api, Any]] = []
        self.now = 5.0

    def take(self, calls: list[Call]) -> None:
        for call in calls:
            self.calls.append((call.api, json.loads(call.parameter)))
            self.on = self.on or (call.api is Api.AVOID_SWITCH_SET and self.comes_on)
            if call.reply and not self.deaf:
                data = json.dumps({"enable": self.on})
                code = self.code if call.api is Api.AVOID_MOVE else 0
                answer = self.machine.requests.on_response(call.id, call.api.number, code, data)
                assert answer is not None
                self.take(self.machine.on_answer(answer, self.now))

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / DT)):
            self.now += DT
            self.take(self.machine.tick(self.now))

    def names(self) -> list[str]:
        return [api.name for api, _ in self.calls]


def test_an_increment_goes_out_once_the_avoidance_is_on() -> None:
    robot = Go2()
    robot.take(robot.machine.start(parse("move forward 75 cm"), robot.now))
    robot.run(1.0)
    assert robot.names() == [
        "AVOID_SWITCH_GET",
        "AVOID_SWITCH_SET",
        "AVOID_SWITCH_GET",
        "AVOID_REMOTE",
        "AVOID_MOVE",
    ]
    assert robot.calls[3][1] == {"is_remote_commands_from_api": True}
    assert robot.calls[4][1] == {"x": 0.75, "y": 0.0, "yaw": 0.0, "mode": 1}
    assert robot.machine.outcome is Outcome.RUNNING
    robot.calls.clear()
    robot.take(robot.machine.cancel(robot.now))
    assert robot.names() == ["AVOID_MOVE", "STOP_MOVE", "AVOID_REMOTE"]
    assert robot.calls[0][1] == {"x": 0.0, "y": 0.0, "yaw": 0.0, "mode": 0}
    assert robot.calls[2][1] == {"is_remote_commands_from_api": False}
    robot.calls.clear()
    robot.run(3.0)
    assert robot.names() == []


def test_a_stop_that_nobody_answers_is_sent_again_but_not_into_the_next_step() -> None:
    def stopping() -> Go2:
        robot = Go2()
        robot.take(robot.machine.start(parse("move forward 75 cm"), robot.now))
        robot.run(1.0)
        robot.calls.clear()
        robot.deaf = True
        robot.take(robot.machine.cancel(robot.now))
        robot.run(REQUEST_S + 0.1)
        return robot

    robot = stopping()
    assert robot.names() == 2 * ["AVOID_MOVE", "STOP_MOVE", "AVOID_REMOTE"]
    robot.run(STOP_S + 1.0)
    assert 4 <= robot.names().count("STOP_MOVE") <= 5  # not for ever
    robot = stopping()
    robot.deaf = False
    robot.take(robot.machine.start(parse("turn left 30 degree"), robot.now))
    robot.calls.clear()
    robot.run(STOP_S)
    assert "STOP_MOVE" not in robot.names()


def test_a_turn_is_an_increment_of_yaw() -> None:
    robot = Go2()
    robot.take(robot.machine.start(parse("turn right 30 degree"), robot.now))
    robot.run(1.0)
    assert robot.calls[-1][1] == {"x": 0.0, "y": 0.0, "yaw": -math.radians(30), "mode": 1}


@pytest.mark.parametrize(
    ("facts", "words"),
    [({"comes_on": False}, "does not come on"), ({"code": 3205}, "another program")],
)
def test_a_robot_that_refuses_is_stopped_and_said_so(facts: Any, words: str) -> None:
    robot = Go2(**facts)
    robot.take(robot.machine.start(parse("move forward 75 cm"), robot.now))
    robot.run(ARM_S + 0.2)
    assert robot.machine.outcome is Outcome.FAILED
    assert words in robot.machine.message
    assert "STOP_MOVE" in robot.names()
