"""The step executor on a simulated base: measured motion, limits, and a stop on every way out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from driving import INDOORS
from hypothesis import given, settings
from hypothesis import strategies as st

from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.robot.executor import (
    ZERO,
    ExecutorConfig,
    Outcome,
    Pose2D,
    StepExecutor,
    Velocity,
)
from collab_llm_nodes.robot.grammar import GrammarConfig, ParsedAction, parse
from collab_llm_nodes.sim.robot import Base
from collab_llm_nodes.sim.rooms import make_room

DT = 0.05


@dataclass
class LaggingBase:
    """A base that follows commands with a time constant, drifts, and may be held by a wall.

    ``wall``: x at which it is stopped; ``slope``: it slides along the wall, keeping its heading.
    """

    pose: Pose2D = Pose2D()
    lag: float = 0.15
    drift: float = 0.0
    wall: float = math.inf
    slope: float = 0.0
    linear: float = 0.0
    angular: float = 0.0

    def step(self, command: Velocity) -> Pose2D:
        share = 1.0 - math.exp(-DT / self.lag)
        self.linear += (command.linear - self.linear) * share
        self.angular += (command.angular - self.angular) * share
        yaw = self.pose.yaw + (self.angular + self.drift * self.linear) * DT
        x = self.pose.x + self.linear * math.cos(yaw) * DT
        y = self.pose.y + self.linear * math.sin(yaw) * DT
        if x > self.wall:
            y += self.slope * (x - self.wall)
            x = self.wall
        self.pose = Pose2D(x, y, math.remainder(yaw, math.tau))
        return self.pose


def drive(
    executor: StepExecutor, action: ParsedAction, base: LaggingBase, limit: float = 30.0
) -> list[Velocity]:
    """Run the step to its end and let the base come to rest; all commands."""
    now = 100.0
    commands = [executor.start(action, base.pose, now)]
    while executor.outcome is Outcome.RUNNING and now < 100.0 + limit:
        now += DT
        commands.append(executor.on_odometry(base.step(commands[-1]), now))
    for _ in range(40):
        base.step(ZERO)
    return commands


@settings(max_examples=60, derandomize=True)
@given(
    st.sampled_from([25, 50, 75]),
    st.floats(-math.pi, math.pi),
    st.floats(0.02, 0.2),  # a base that lags by 0.25 s comes to rest 5.2 cm too far
    st.floats(-0.15, 0.15),
)
def test_forward_is_measured(cm: int, yaw: float, lag: float, drift: float) -> None:
    base = LaggingBase(Pose2D(1.0, -2.0, yaw), lag=lag, drift=drift)
    executor = StepExecutor(INDOORS)
    commands = drive(executor, parse(f"move forward {cm} cm"), base)
    assert executor.outcome is Outcome.DONE
    along = (base.pose.x - 1.0) * math.cos(yaw) + (base.pose.y + 2.0) * math.sin(yaw)
    assert along == pytest.approx(cm / 100, abs=0.05)
    assert commands[-1] == ZERO


@settings(max_examples=60, derandomize=True)
@given(
    st.sampled_from([-170, -45, -30, -15, 15, 30, 45, 170]),
    st.floats(-math.pi, math.pi),
    st.floats(0.02, 0.15),
)
def test_turn_is_measured_across_the_seam(degrees: int, yaw: float, lag: float) -> None:
    base = LaggingBase(Pose2D(yaw=yaw), lag=lag)
    executor = StepExecutor(INDOORS)
    side = "left" if degrees > 0 else "right"
    action = parse(f"turn {side} {abs(degrees)} degree", GrammarConfig(max_angle=180.0))
    commands = drive(executor, action, base)
    assert executor.outcome is Outcome.DONE
    error = math.remainder(base.pose.yaw - yaw - math.radians(degrees), math.tau)
    assert abs(error) < math.radians(4.0)
    assert commands[-1] == ZERO
    assert all(c.linear == 0.0 for c in commands)


def test_limits_of_speed_and_acceleration() -> None:
    config = ExecutorConfig(linear_speed=0.4, linear_acceleration=0.8)
    commands = drive(StepExecutor(config), parse("move forward 75 cm"), LaggingBase(lag=0.01))
    speeds = [c.linear for c in commands]
    assert max(speeds) == pytest.approx(0.4)
    rises = [b - a for a, b in zip(speeds[1:], speeds[2:], strict=False)]
    assert max(rises) <= 0.8 * DT + 1e-9
    # Braking is commanded ahead of the goal, not at it: the last command before zero is slow.
    assert speeds[-2] <= 0.25


def changes(commands: list[Velocity]) -> tuple[float, float]:
    """The greatest change of speed and of turn rate from one command to the next."""
    pairs = list(zip(commands, commands[1:], strict=False))
    return (
        max(abs(b.linear - a.linear) for a, b in pairs),
        max(abs(b.angular - a.angular) for a, b in pairs),
    )


@settings(max_examples=60, derandomize=True)
@given(
    st.lists(
        st.sampled_from(
            ["move forward 75 cm", "move forward 1 cm", "turn left 45 degree", "turn right 9 deg"]
        ),
        min_size=2,
        max_size=4,
    ),
    st.floats(0.3, 1.5),
    st.floats(0.3, 1.0),
)
def test_a_chain_of_steps_keeps_the_limits(texts: list[str], each: float, share: float) -> None:
    """Each step takes the place of the one before; the last goes to its end."""
    config = ExecutorConfig(angular_acceleration=2.0, least_angular_speed=0.05)
    executor, base, now = StepExecutor(config), LaggingBase(lag=0.01), 5.0
    commands = [ZERO]
    for text in texts:
        commands.append(executor.start(parse(text), base.pose, now, share))
        until = now + (each if text is not texts[-1] else 30.0)
        while executor.outcome is Outcome.RUNNING and now < until:
            now += DT
            commands.append(executor.on_odometry(base.step(commands[-1]), now))
    assert executor.outcome is Outcome.DONE
    linear, angular = changes(commands)
    least = config.least_linear_speed + config.linear_acceleration * DT
    assert linear <= least + 1e-9
    assert angular <= max(least, config.least_angular_speed + 2.0 * DT) + 1e-9


def test_the_same_motion_keeps_its_speed_and_is_measured_from_the_picture() -> None:
    base, executor, now = LaggingBase(lag=0.01), StepExecutor(INDOORS), 1.0
    commands = [executor.start(parse("move forward 75 cm"), base.pose, now)]
    while base.pose.x < 0.4:
        now += DT
        commands.append(executor.on_odometry(base.step(commands[-1]), now))
    seen, top = base.pose, commands[-1]
    for _ in range(2):
        now += DT
        commands.append(executor.on_odometry(base.step(commands[-1]), now))
    assert 0.0 < executor.time_left < 0.6
    assert executor.start(parse("move forward 75 cm"), base.pose, now, 1.0, seen) == commands[-1]
    while executor.outcome is Outcome.RUNNING:
        now += DT
        commands.append(executor.on_odometry(base.step(commands[-1]), now))
        assert commands[-1].linear >= top.linear - 1e-9 or base.pose.x > 0.7
    assert base.pose.x == pytest.approx(seen.x + 0.75, abs=0.02)


def test_a_goal_already_passed_is_braked_for_not_jumped_at() -> None:
    base, executor, now = LaggingBase(lag=0.01), StepExecutor(INDOORS), 1.0
    commands = [executor.start(parse("move forward 75 cm"), base.pose, now)]
    while base.pose.x < 0.4:
        now += DT
        commands.append(executor.on_odometry(base.step(commands[-1]), now))
    executor.start(parse("move forward 5 cm"), base.pose, now, 1.0, Pose2D(0.3))
    while executor.outcome is Outcome.RUNNING:
        now += DT
        commands.append(executor.on_odometry(base.step(commands[-1]), now))
    assert executor.outcome is Outcome.DONE
    assert changes(commands)[0] <= 0.06 + DT + 1e-9


def test_a_limit_from_outside_slows_down_within_the_acceleration() -> None:
    base, executor, now = LaggingBase(lag=0.01), StepExecutor(INDOORS), 1.0
    commands = [executor.start(parse("move forward 75 cm"), base.pose, now)]
    while base.pose.x < 0.3:
        now += DT
        commands.append(executor.on_odometry(base.step(commands[-1]), now))
    executor.limit = 0.1
    for _ in range(20):
        now += DT
        commands.append(executor.on_odometry(base.step(commands[-1]), now))
    assert commands[-1].linear == pytest.approx(0.1)
    assert changes(commands)[0] <= 0.06 + DT + 1e-9


def test_ends_within_tolerance_in_the_simulated_room() -> None:
    base = Base(make_room(3))
    executor = StepExecutor(INDOORS)
    start = base.odometry
    now = 0.0
    command = executor.start(parse("turn left 45 degree"), Pose2D(start.x, start.y, start.yaw), now)
    while executor.outcome is Outcome.RUNNING:
        now += DT
        base.step(command.linear, command.angular, DT)
        o = base.odometry
        command = executor.on_odometry(Pose2D(o.x, o.y, o.yaw), now)
    assert executor.outcome is Outcome.DONE
    assert base.odometry.yaw - start.yaw == pytest.approx(math.pi / 4, abs=0.05)


@pytest.mark.parametrize("slope", [0.0, 0.8])
def test_a_wall_ends_the_step(slope: float) -> None:
    base = LaggingBase(wall=0.2, slope=slope)
    executor = StepExecutor(INDOORS)
    commands = drive(executor, parse("move forward 75 cm"), base)
    assert executor.outcome is Outcome.BLOCKED
    assert executor.travelled == pytest.approx(0.2, abs=0.01)
    assert commands[-1] == ZERO
    assert len(commands) * DT < 2.5  # soon after the wall, not at the end of the allowance


def test_a_base_that_does_not_obey_is_blocked() -> None:
    for text in ("move forward 25 cm", "turn right 15 degree"):
        executor = StepExecutor(INDOORS)
        commands = drive(executor, parse(text), LaggingBase(lag=1e9))
        assert executor.outcome is Outcome.BLOCKED
        assert any(c != ZERO for c in commands)
        assert commands[-1] == ZERO


def test_a_base_that_only_creeps_runs_out_of_time() -> None:
    config = ExecutorConfig(progress_share=0.0, allowance_base=0.5)
    executor = StepExecutor(config)
    commands = drive(executor, parse("move forward 75 cm"), LaggingBase(lag=20.0))
    assert executor.outcome is Outcome.TIMEOUT
    assert commands[-1] == ZERO


def started(text: str = "move forward 75 cm") -> StepExecutor:
    executor = StepExecutor(INDOORS)
    executor.start(parse(text), Pose2D(), 10.0)
    assert executor.on_odometry(Pose2D(), 10.1) != ZERO
    return executor


def test_silent_odometry_stops() -> None:
    executor = started()
    assert executor.tick(10.5) != ZERO
    assert executor.tick(10.61) == ZERO
    assert executor.outcome is Outcome.STALE
    assert executor.on_odometry(Pose2D(0.1), 10.7) == ZERO  # it does not start again by itself


def test_a_late_call_stops() -> None:
    executor = started()
    assert executor.on_odometry(Pose2D(0.1), 10.9) == ZERO
    assert executor.outcome is Outcome.STALE


def test_a_clock_that_jumps_back_stops() -> None:
    executor = started()
    assert executor.tick(3.0) == ZERO
    assert executor.outcome is Outcome.STALE


def test_cancel_stops() -> None:
    executor = started()
    assert executor.cancel() == ZERO
    assert executor.outcome is Outcome.CANCELLED
    assert executor.tick(10.2) == ZERO
    assert executor.on_odometry(Pose2D(), 10.2) == ZERO


@pytest.mark.parametrize("text", ["stop", "hello", "do not move"])
def test_no_motion_is_done_at_once(text: str) -> None:
    executor = StepExecutor(INDOORS)
    assert executor.start(parse(text), Pose2D(), 0.0) == ZERO
    assert executor.outcome is Outcome.DONE
    assert executor.on_odometry(Pose2D(), 0.1) == ZERO


def test_the_heading_is_held() -> None:
    executor = started()
    assert executor.on_odometry(Pose2D(0.02, 0.0, 0.1), 10.15).angular < 0.0
    assert executor.on_odometry(Pose2D(0.04, 0.0, -0.1), 10.20).angular > 0.0


def test_a_new_step_forgets_the_last_one() -> None:
    executor = started()
    executor.cancel()
    executor.start(parse("turn left 30 degree"), Pose2D(5.0, 5.0, 3.0), 50.0)
    command = executor.on_odometry(Pose2D(5.0, 5.0, 3.0), 50.05)
    assert command.linear == 0.0
    assert command.angular > 0.0
    assert executor.remaining == pytest.approx(math.radians(30))


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="linear_speed"):
        ExecutorConfig(linear_speed=-1.0)


@pytest.mark.parametrize(
    ("text", "tolerance", "before"),
    [
        ("move forward 50 cm", {"distance_tolerance": 0.1}, Pose2D(0.41)),
        ("turn left 45 degree", {"angle_tolerance": 0.2}, Pose2D(yaw=math.radians(45) - 0.19)),
    ],
)
def test_a_step_within_its_tolerance_is_done(
    text: str, tolerance: dict[str, float], before: Pose2D
) -> None:
    base = ExecutorConfig(progress_share=0.0)
    for config, outcome in ((base, Outcome.RUNNING), (replace(base, **tolerance), Outcome.DONE)):
        executor = StepExecutor(config)
        executor.start(parse(text), Pose2D(), 10.0)
        for part in range(1, 11):
            pose = Pose2D(before.x * part / 10, 0.0, before.yaw * part / 10)
            executor.on_odometry(pose, 10.0 + 0.3 * part)
        assert executor.outcome is outcome


def test_a_lower_gain_approaches_the_goal_more_slowly() -> None:
    longest = []
    for gain in (3.0, 0.5):
        executor = StepExecutor(replace(INDOORS, approach_gain=gain))
        longest.append(len(drive(executor, parse("move forward 50 cm"), LaggingBase())))
        assert executor.outcome is Outcome.DONE
    assert longest[1] > 1.3 * longest[0]
