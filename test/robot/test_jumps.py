"""Odometry that jumps ends a step with an outcome of its own; uneven messages are no jump."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from driving import Drive, moving

from collab_llm_nodes.robot.executor import (
    ZERO,
    ExecutorConfig,
    Outcome,
    Pose2D,
    StepExecutor,
)
from collab_llm_nodes.robot.grammar import Code, Kind, ParsedAction
from collab_llm_nodes.robot.steps import DelegatedSteps

DT = 0.02
ORIGIN = Pose2D()


def step(kind: Kind, value: float) -> ParsedAction:
    return ParsedAction(kind, value, Code.OK, (0, 0), "")


def drive(
    value: float,
    kind: Kind = Kind.FORWARD,
    seen: Callable[[Pose2D, float], Pose2D] = lambda pose, now: pose,
    start: Pose2D = ORIGIN,
    arrives: Callable[[float], bool] = lambda now: True,
) -> tuple[StepExecutor, float]:
    """Drive an ideal base whose odometry says ``seen``; the executor and when it ended."""
    executor, pose, now = StepExecutor(), start, 0.0
    velocity = executor.start(step(kind, value), pose, now)
    while executor.outcome is Outcome.RUNNING and now < 30.0:
        now += DT
        yaw = pose.yaw + velocity.angular * DT
        x, y = pose.x + velocity.linear * math.cos(yaw) * DT, pose.y
        pose = Pose2D(x, y + velocity.linear * math.sin(yaw) * DT, math.remainder(yaw, math.tau))
        if arrives(now):
            velocity = executor.on_odometry(seen(pose, now), now)
        else:
            velocity = executor.tick(now)
    assert velocity == ZERO
    return executor, now


@pytest.mark.parametrize(
    ("kind", "jumped"),
    [
        (Kind.FORWARD, lambda p: Pose2D()),  # the driver was started again
        (Kind.FORWARD, lambda p: replace(p, x=p.x + 5.0)),
        (Kind.FORWARD, lambda p: replace(p, x=p.x + 0.3)),
        (Kind.FORWARD, lambda p: replace(p, x=p.x - 0.3)),
        (Kind.FORWARD, lambda p: replace(p, y=p.y + 2.0)),
        (Kind.FORWARD, lambda p: replace(p, yaw=p.yaw + 1.0)),
        (Kind.FORWARD, lambda p: replace(p, yaw=p.yaw - math.pi / 2)),
        (Kind.FORWARD, lambda p: replace(p, x=math.nan)),
        (Kind.FORWARD, lambda p: replace(p, yaw=math.inf)),
        (Kind.TURN, lambda p: replace(p, yaw=p.yaw + 0.4)),
        (Kind.TURN, lambda p: replace(p, yaw=p.yaw - 0.4)),
        (Kind.TURN, lambda p: replace(p, x=p.x + 1.0)),
    ],
)
@pytest.mark.parametrize("at", [0.1, 0.7])
def test_a_jump_ends_the_step_at_once(
    kind: Kind, jumped: Callable[[Pose2D], Pose2D], at: float
) -> None:
    start = Pose2D(-5.0, 1.0, 0.3)
    executor, ended = drive(0.75, kind, lambda p, now: jumped(p) if now >= at else p, start)
    assert executor.outcome is Outcome.JUMPED
    assert ended == pytest.approx(at, abs=1.5 * DT)
    assert "odometry jumped by" in executor.message
    assert executor.on_odometry(start, ended + DT) == ZERO


@pytest.mark.parametrize("scale", [3.0, 10.0, 1000.0])  # 1000: millimetres
def test_a_scale_that_is_too_great_is_a_jump(scale: float) -> None:
    executor, ended = drive(0.75, seen=lambda p, _: Pose2D(scale * p.x, scale * p.y, p.yaw))
    assert executor.outcome in (Outcome.JUMPED, Outcome.DONE)
    assert executor.outcome is Outcome.JUMPED or scale < 5.0
    assert ended < 1.5


def test_creeping_jumps_are_found() -> None:
    executor, ended = drive(0.75, seen=lambda p, now: replace(p, y=0.09 * round(now / DT)))
    assert executor.outcome is Outcome.JUMPED
    assert ended < 0.1


@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.TURN])
@pytest.mark.parametrize(
    "arrives",
    [
        lambda now: True,
        lambda now: round(now / DT) % 10 == 0,  # 5 per second
        lambda now: not 0.5 < now < 0.95,  # none for nearly the time of the watchdog
    ],
)
def test_uneven_messages_are_no_jump(kind: Kind, arrives: Callable[[float], bool]) -> None:
    for yaw in (0.0, 3.1, -3.1):  # across the seam, too
        executor, _ = drive(0.75, kind, start=Pose2D(yaw=yaw), arrives=arrives)
        assert executor.outcome is Outcome.DONE


def test_messages_that_come_late_together_are_no_jump_by_their_stamps() -> None:
    """A process that stood still for 0.4 s finds an old message and a new one."""
    executor = StepExecutor(ExecutorConfig(linear_speed=1.0))
    executor.start(step(Kind.FORWARD, 5.0), Pose2D(), 0.0)
    for k in range(1, 51):
        executor.on_odometry(Pose2D(0.02 * k), 0.02 * k, measured=0.02 * k)
    executor.on_odometry(Pose2D(1.02), 1.4, measured=1.02)
    assert executor.on_odometry(Pose2D(1.4), 1.401, measured=1.4) != ZERO


def test_who_is_given_whole_steps_is_stopped_by_a_jump_as_well() -> None:
    class Output:
        outcome, message, reports_the_end, cancelled = Outcome.IDLE, "", True, False

        def start(self, action: ParsedAction, speed: float, allowance: float) -> None:
            self.outcome = Outcome.RUNNING

        def cancel(self) -> None:
            self.cancelled = self.outcome is Outcome.RUNNING

    output = Output()
    steps = DelegatedSteps(ExecutorConfig(), output)
    steps.start(step(Kind.FORWARD, 0.5), Pose2D(), 1.0)
    outcomes = []
    for x, now in ((0.01, 1.02), (0.6, 1.04)):
        steps.on_odometry(Pose2D(x), now)
        outcomes.append(steps.outcome)
    assert outcomes == [Outcome.RUNNING, Outcome.JUMPED]
    assert output.cancelled


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e9, 0.0, -5.0])
@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.TURN])
def test_a_step_that_is_none_moves_nothing(kind: Kind, value: float) -> None:
    if kind is Kind.TURN and value == -5.0:
        value = 3.2  # a turn may be to either side, but not around
    executor = StepExecutor()
    assert executor.start(step(kind, value), Pose2D(), 0.0) == ZERO
    assert executor.outcome is Outcome.FAILED
    assert "navigation_action." in executor.message
    assert executor.on_odometry(Pose2D(), 0.02) == ZERO


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Kind.FORWARD, math.nan),
        (Kind.FORWARD, -5.0),
        (Kind.FORWARD, 0.76),
        (Kind.TURN, 1e6),
        (Kind.TURN, math.nan),
        (Kind.TURN, math.radians(46.0)),
    ],
)
def test_a_mission_asks_again_about_a_step_beyond_its_limits(kind: Kind, value: float) -> None:
    world = Drive()
    world.run(0.2)
    assert world.observe()
    assert not world.mission.on_action(step(kind, value), world.now, world.now)
    assert world.fastest(1.0) == 0.0
    assert world.mission.steps == 0
    world.mission.on_answer_ended(world.now)
    assert world.step("move forward 75 cm")  # the next answer counts


def test_a_mission_ends_where_odometry_jumps_and_does_not_count_the_jump() -> None:
    world = moving()
    before = world.mission.distance
    world.pose = replace(world.pose, x=world.pose.x + 5.0)
    world.run(0.1)
    assert world.code() == "NO_ODOMETRY"
    assert "odometry jumped by 5.0" in world.message()
    assert world.mission.velocity == ZERO
    assert world.mission.distance == before


def test_a_mission_names_what_is_wrong_with_odometry_before_its_first_step() -> None:
    world = Drive()
    world.odometry = False
    world.mission.odometry_trouble = "odom: stamped 10.0 s ago"
    world.step("move forward 75 cm")
    assert world.code() == "NO_ODOMETRY"
    assert world.message().endswith("odom: stamped 10.0 s ago")
