"""The guard's decisions: what may reach the robot, when it stops, how it starts again."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from collab_llm_nodes.assets import config_file
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.robot.executor import ZERO, ExecutorConfig, Velocity
from collab_llm_nodes.robot.guard import (
    ALONE_S,
    LONGEST_S,
    REASONS,
    UNWATCHED,
    FreshnessConfig,
    Guard,
    GuardConfig,
    LimitsConfig,
    Source,
)
from collab_llm_nodes.robot.obstacles import ObstacleConfig, gap_in_scan, gap_of_range

FAST = LimitsConfig(
    linear_speed=0.8, angular_speed=1.5, linear_acceleration=10.0, angular_acceleration=30.0
)
AHEAD = Velocity(0.5, 0.0)


class Robot:
    """A guard with everything fresh at ``self.wall``; both clocks run alike."""

    def __init__(self, **config: Any) -> None:
        self.guard = Guard(GuardConfig(**{"limits": FAST, **config}))
        self.wall = 100.0
        self.refresh()

    def refresh(self, *but: Source) -> None:
        events = {
            Source.ODOMETRY: lambda: self.guard.on_odometry(0.0, False, self.wall),
            Source.CAMERA: lambda: self.guard.on_camera(0.0, self.wall),
            Source.LINK: lambda: self.guard.on_link(True, 0.0, self.wall),
            Source.SCAN: lambda: self.guard.on_gap(Source.SCAN, math.inf, 0.0, self.wall),
            Source.RANGE: lambda: self.guard.on_gap(Source.RANGE, math.inf, 0.0, self.wall),
        }
        for source, event in events.items():
            if source not in but:
                event()

    def command(self, velocity: Velocity = AHEAD) -> Velocity:
        return self.guard.on_command(velocity.linear, velocity.angular, self.wall, self.wall)

    def go(self, seconds: float, *silent: Source, until_stop: bool = False) -> float | None:
        """Time goes by, all but ``silent`` are heard; when the guard stopped the robot, or None."""
        begin = self.wall
        while self.wall < begin + seconds:
            self.wall += 0.01
            self.refresh(*silent)
            sent = [self.guard.tick(self.wall)]
            if Source.COMMAND not in silent:
                sent.append(self.command())
            if ZERO in sent:
                return self.wall - begin
        return None

    @property
    def reasons(self) -> tuple[str, ...]:
        return self.guard.state(self.wall).reasons


def test_velocities_are_passed_on_at_once() -> None:
    robot = Robot()
    assert robot.command() == AHEAD
    assert robot.guard.state(robot.wall).allowed
    assert robot.go(2.0) is None
    assert robot.command(Velocity(-0.3, 0.7)) == Velocity(-0.3, 0.7)


@pytest.mark.parametrize(
    ("source", "reason", "limit"),
    [
        (Source.COMMAND, "NO_COMMAND", 0.3),
        (Source.ODOMETRY, "STALE_ODOMETRY", 0.3),
        (Source.CAMERA, "STALE_CAMERA", 0.45),
        (Source.LINK, "LINK_DOWN", 0.4),
        (Source.SCAN, "STALE_SCAN", 0.45),
        (Source.RANGE, "STALE_RANGE", 0.45),
    ],
)
def test_silence_stops_within_its_limit_and_not_before(
    source: Source, reason: str, limit: float
) -> None:
    robot = Robot(obstacle=ObstacleConfig(scan="required", range="required"))
    robot.command()
    stopped = robot.go(1.0, source)
    assert stopped is not None
    assert limit < stopped <= limit + 0.02
    assert robot.reasons == (reason,)
    assert robot.guard.stops == {reason: 1}


@pytest.mark.parametrize("source", [s for s in Source if s is not Source.COMMAND])
def test_limits_are_parameters_that_no_configuration_can_widen(source: Source) -> None:
    config = replace(FreshnessConfig(), **{source.value: 0.1})
    robot = Robot(freshness=config, obstacle=ObstacleConfig(scan="required", range="required"))
    robot.command()
    assert robot.go(0.2, source) == pytest.approx(0.105, abs=0.006)


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(FreshnessConfig)])
@pytest.mark.parametrize("value", [LONGEST_S + 0.01, -0.01, math.inf, math.nan])
def test_no_silence_longer_than_half_a_second_can_be_allowed(name: str, value: float) -> None:
    assert replace(FreshnessConfig(), **{name: LONGEST_S})
    with pytest.raises(ConfigError):
        replace(FreshnessConfig(), **{name: value})


def test_a_second_guard_forbids_motion_until_it_is_gone() -> None:
    robot = Robot()
    robot.command()
    robot.guard.on_peers("motion_guard of process 7", "", robot.wall)
    assert robot.guard.tick(robot.wall) == ZERO
    state = robot.guard.state(robot.wall)
    assert (state.allowed, state.reasons) == (False, ("STARTED_TWICE",))
    assert "motion_guard of process 7" in state.text
    robot.wall += 60.0
    robot.refresh()
    assert robot.command() == ZERO
    robot.guard.on_peers("", "", robot.wall)
    assert robot.command() == ZERO, "the graph may have lost sight of it for a moment"
    robot.wall += ALONE_S - 0.01
    robot.refresh()
    assert robot.command() == ZERO
    robot.wall += 0.02
    robot.refresh()
    robot.guard.tick(robot.wall)
    assert robot.guard.velocity == ZERO, "nothing moves by itself"
    assert robot.command() == AHEAD


def test_a_second_guard_that_comes_back_forbids_motion_again() -> None:
    robot = Robot()
    robot.guard.on_peers("motion_guard of process 7", "", robot.wall)
    robot.guard.on_peers("", "", robot.wall)
    robot.wall += ALONE_S / 2
    robot.guard.on_peers("motion_guard of process 7", "", robot.wall)
    robot.wall += 2 * ALONE_S
    robot.refresh()
    assert robot.command() == ZERO
    robot.guard.on_peers("", "", robot.wall)
    robot.wall += ALONE_S / 2
    robot.refresh()
    assert robot.command() == ZERO


def test_the_state_names_who_has_not_confirmed_the_emergency_stop() -> None:
    robot = Robot()
    told = []
    robot.guard.on_peers("", "go2_driver of process 8", robot.wall)
    told.append(robot.reasons)
    robot.guard.on_emergency("a test", robot.wall)
    told.append(robot.reasons)
    assert "go2_driver of process 8" in robot.guard.state(robot.wall).text
    robot.guard.on_peers("", "", robot.wall)
    told.append(robot.reasons)
    assert told == [(), ("EMERGENCY_STOP", "STOP_UNCONFIRMED"), ("EMERGENCY_STOP",)]


def test_what_was_never_heard_of_forbids_motion() -> None:
    guard = Guard(GuardConfig())
    assert guard.on_command(0.5, 0.0, 0.0, 0.0) == ZERO
    assert guard.state(0.0).reasons == ("STALE_ODOMETRY", "STALE_CAMERA", "LINK_DOWN")
    for missing in ("driver running (topic odom)", "camera_ingest", "verifier: is it running"):
        assert missing in guard.state(0.0).text
    assert not guard.state(0.0).allowed


def test_what_came_back_does_not_move_the_robot_by_itself() -> None:
    robot = Robot()
    robot.command()
    robot.go(1.0, Source.CAMERA)
    robot.refresh()
    for _ in range(30):
        robot.wall += 0.01
        robot.refresh()
        assert robot.guard.tick(robot.wall) in (None, ZERO)
    assert robot.command() == AHEAD  # a new command does


def test_a_robot_at_rest_needs_fresh_pictures_to_start() -> None:
    robot = Robot()
    robot.command(ZERO)
    robot.wall += 10.0
    robot.refresh(Source.CAMERA)
    assert robot.reasons == ("STALE_CAMERA",)
    assert robot.command() == ZERO
    assert robot.guard.stops == {}  # nothing was stopped
    robot.refresh()
    assert robot.command() == AHEAD


@pytest.mark.parametrize("age", [0.6, -0.6])
@pytest.mark.parametrize("source", [Source.ODOMETRY, Source.CAMERA, Source.LINK])
def test_old_messages_are_no_sign_of_life(source: Source, age: float) -> None:
    for limit, allowed in ((0.5, False), (0.0, True)):
        robot = Robot(freshness=FreshnessConfig(max_age=limit))
        robot.wall += 5.0
        robot.refresh(source)
        if source is Source.ODOMETRY:
            robot.guard.on_odometry(age, True, robot.wall)
        elif source is Source.CAMERA:
            robot.guard.on_camera(age, robot.wall)
        else:
            robot.guard.on_link(True, age, robot.wall)
        assert robot.guard.state(robot.wall).allowed is allowed


def test_what_old_messages_say_does_not_count() -> None:
    robot = Robot(obstacle=ObstacleConfig(scan="optional"))
    robot.guard.on_gap(Source.SCAN, 0.1, 0.0, robot.wall)
    robot.guard.on_gap(Source.SCAN, math.inf, 0.6, robot.wall)
    assert robot.command() == ZERO
    assert robot.reasons == ("OBSTACLE",)
    robot = Robot()
    robot.guard.on_link(False, 0.0, robot.wall)
    robot.guard.on_link(True, 0.6, robot.wall)
    assert robot.command() == ZERO


def test_old_commands_do_not_move_the_robot_but_may_stop_it() -> None:
    def old(robot: Robot, speed: float) -> Velocity:
        return robot.guard.on_command(speed, 0.0, robot.wall, robot.wall, 0.6)

    robot = Robot()
    assert old(robot, 0.5) == ZERO
    assert robot.reasons == ("NO_COMMAND",)
    assert robot.command() == AHEAD
    assert old(robot, 0.0) == ZERO


def test_what_is_not_needed_may_be_silent() -> None:
    unused = ObstacleConfig(scan="off", range="off")
    needless = {"needs_camera": False, "needs_odometry": False, "obstacle": unused}
    robot = Robot(link_policy="ignore", **needless)
    robot.command()
    assert robot.go(2.0, *(s for s in Source if s is not Source.COMMAND)) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["linear", "angular"])
def test_what_is_no_number_stops(bad: float, place: str) -> None:
    robot = Robot()
    robot.command()
    assert robot.command(replace(AHEAD, **{place: bad})) == ZERO
    assert robot.reasons == ("INVALID_COMMAND",)
    assert robot.command() == AHEAD


def test_the_link_is_policy() -> None:
    for policy, expected in (
        ("hold", ZERO),
        ("draft_only", Velocity(0.2, 0.3)),
        ("ignore", Velocity(0.7, 1.4)),
    ):
        robot = Robot(
            link_policy=policy,
            unverified_share=0.2,
            limits=replace(FAST, linear_speed=1.0, angular_speed=1.5),
        )
        robot.guard.on_link(False, 0.0, robot.wall)
        robot.command(Velocity(0.7, 1.4))
        robot.wall += 0.1
        sent = robot.command(Velocity(0.7, 1.4))
        assert (sent.linear, sent.angular) == pytest.approx((expected.linear, expected.angular))
        assert ("LINK_DOWN" in robot.reasons) == (policy == "hold")


def test_no_reduction_goes_below_what_a_go2_obeys() -> None:
    config = yaml.safe_load(config_file("go2.yaml").read_text(encoding="utf-8"))
    shipped = config["/**/motion_guard"]["ros__parameters"]["limits"]
    least = config["/**/navigator"]["ros__parameters"]["mission"]["executor"]
    floor = Velocity(least["least_linear_speed"], least["least_angular_speed"])
    for gap, linear in ((math.inf, floor.linear), (0.41, floor.linear), (0.4, 0.0)):
        robot = Robot(link_policy="draft_only", limits=LimitsConfig(**shipped), obstacle=CORRIDOR)
        robot.guard.on_link(False, 0.0, robot.wall)
        robot.guard.on_gap(Source.SCAN, gap, 0.0, robot.wall)
        assert robot.guard.speed_limit(robot.wall) == linear
        assert robot.command(Velocity(9.0, 9.0)) == Velocity(linear, floor.angular)
        assert robot.command(Velocity(-9.0, -9.0)) == Velocity(-floor.linear, -floor.angular)
    slow = LimitsConfig(linear_speed=0.05, angular_speed=0.1)  # who wants it slower gets it
    robot = Robot(link_policy="draft_only", limits=slow)
    robot.guard.on_link(False, 0.0, robot.wall)
    assert robot.command(Velocity(9.0, 9.0)) == Velocity(0.05, 0.1)


# Limits.


def test_speed_is_limited_both_ways() -> None:
    robot = Robot(limits=replace(FAST, linear_speed=0.4, angular_speed=0.9))
    for sign in (1.0, -1.0):
        robot.command(ZERO)
        robot.wall += 1.0
        robot.refresh()
        robot.command(Velocity(sign * 9.0, sign * 9.0))
        robot.wall += 0.1
        assert robot.command(Velocity(sign * 9.0, sign * 9.0)) == Velocity(sign * 0.4, sign * 0.9)
    assert robot.guard.state(robot.wall).speed_limit == 0.4


@pytest.mark.parametrize("period", [0.001, 0.05, 0.2])
def test_acceleration_is_limited_however_often_commands_come(period: float) -> None:
    limits = LimitsConfig(linear_acceleration=1.0, angular_acceleration=2.0)
    robot = Robot(limits=replace(limits, linear_speed=2.0, angular_speed=3.0))
    sent = []
    for _ in range(round(1.0 / period)):
        robot.wall += period
        robot.refresh()
        sent.append((robot.wall, robot.command(Velocity(2.0, -3.0))))
    for (t0, a), (t1, b) in itertools.combinations(sent[:: max(1, len(sent) // 20)], 2):
        assert b.linear - a.linear <= 1.0 * (t1 - t0 + 0.1) + 1e-9
        assert a.angular - b.angular <= 2.0 * (t1 - t0 + 0.1) + 1e-9
    expected = min(1.0, 0.1 / period)  # pauses beyond a tenth of a second are not made up for
    assert sent[-1][1].linear == pytest.approx(expected, abs=0.11)
    assert robot.command(Velocity(0.1, 0.0)) == Velocity(0.1, 0.0)  # less at once
    assert robot.command(ZERO) == ZERO


def test_turning_round_starts_from_zero() -> None:
    robot = Robot(limits=LimitsConfig(linear_acceleration=1.0))
    for _ in range(100):
        robot.wall += 0.01
        robot.refresh()
        robot.command(Velocity(0.8, 0.0))
    assert robot.command(Velocity(-0.8, 0.0)).linear >= -0.11


def test_a_clock_that_stands_or_jumps_back_grants_no_speed() -> None:
    robot = Robot(limits=LimitsConfig(linear_acceleration=1.0))
    for now in (5.0, 5.0, 5.0, 3.0, 3.0):
        robot.wall += 0.1
        robot.refresh()
        sent = robot.guard.on_command(0.8, 0.0, now, robot.wall)
    assert sent.linear == pytest.approx(0.1)


# Stops are repeated.


def test_zero_is_repeated_until_the_robot_stands() -> None:
    robot = Robot(stop_repeat=1.0)
    robot.command()
    robot.command(ZERO)
    stopped, repeats = robot.wall, []
    for step in range(200):
        robot.wall += 0.01
        robot.guard.on_odometry(0.0, step > 50, robot.wall)
        if robot.guard.tick(robot.wall) is not None:
            repeats.append(robot.wall - stopped)
    assert repeats[-1] == pytest.approx(0.5, abs=0.02)
    robot.refresh()
    robot.command()
    robot.command(ZERO)
    stopped = robot.wall
    while robot.guard.tick(robot.wall) is not None:  # odometry silent: nobody knows
        robot.wall += 0.01
    assert robot.wall - stopped == pytest.approx(1.0, abs=0.02)


def test_a_robot_that_somebody_else_moves_is_left_alone() -> None:
    """The guard must not fight a remote control for ever, say."""
    robot = Robot()
    robot.wall += 10.0
    robot.guard.on_odometry(0.0, False, robot.wall)
    assert robot.guard.tick(robot.wall) is None


def test_a_commander_that_died_is_forgotten_once_the_robot_stands() -> None:
    robot = Robot()
    robot.command()
    robot.go(1.0, Source.COMMAND)
    assert robot.reasons == ("NO_COMMAND",)
    for _ in range(100):
        robot.wall += 0.01
        robot.refresh()
        robot.guard.tick(robot.wall)
    assert robot.guard.state(robot.wall).allowed


# The emergency stop.


def test_the_emergency_stop_is_latched_until_reset() -> None:
    robot = Robot()
    robot.command()
    robot.guard.on_emergency("the service", robot.wall)
    assert robot.guard.tick(robot.wall) == ZERO
    for _ in range(500):
        robot.wall += 0.01
        robot.refresh()
        assert robot.command() == ZERO
    state = robot.guard.state(robot.wall)
    assert (state.emergency_stop, state.allowed) == (True, False)
    assert state.reasons == ("EMERGENCY_STOP",)
    assert "the service" in state.text


def test_a_reset_needs_the_cause_gone_and_moves_nothing() -> None:
    robot = Robot()
    robot.command()
    robot.guard.on_emergency("the joystick", robot.wall, held=True)
    assert "still pressed" in robot.guard.on_reset(robot.wall)
    robot.wall += 1.1
    robot.refresh()
    robot.command()
    assert "still commanded" in robot.guard.on_reset(robot.wall)
    assert robot.guard.state(robot.wall).emergency_stop
    robot.command(ZERO)
    assert robot.guard.on_reset(robot.wall) == ""
    assert robot.guard.tick(robot.wall) in (None, ZERO)
    assert robot.guard.on_reset(robot.wall) == ""  # nothing to clear is no error
    assert robot.command() == AHEAD


def test_the_guards_own_end_is_zero_and_forgets_all_but_the_emergency_stop() -> None:
    robot = Robot()
    robot.command()
    assert robot.guard.on_halt(robot.wall) == ZERO
    assert robot.command() == ZERO
    robot.guard.on_emergency("the topic", robot.wall)
    robot.guard.on_halt(robot.wall)
    robot.refresh()
    assert robot.reasons == ("EMERGENCY_STOP",)


# Obstacles.

CORRIDOR = ObstacleConfig(
    scan="optional", front=0.3, width=0.6, stop_distance=0.4, slow_distance=1.4
)


@pytest.mark.parametrize(
    ("gap", "expected"),
    [(0.0, 0.0), (0.4, 0.0), (0.41, 0.246), (0.9, 0.52), (1.4, 0.8), (9.0, 0.8)],
)
def test_the_way_ahead_limits_the_speed(gap: float, expected: float) -> None:
    robot = Robot(obstacle=CORRIDOR)
    for _ in range(20):
        robot.wall += 0.05
        robot.refresh(Source.SCAN)
        robot.guard.on_gap(Source.SCAN, gap, 0.0, robot.wall)
        sent = robot.command(Velocity(0.8, 0.4))
    assert (sent.linear, sent.angular) == pytest.approx((expected, 0.4), abs=2e-3)
    assert robot.command(Velocity(-0.2, 0.0)) == Velocity(-0.2, 0.0)  # away from it
    state = robot.guard.state(robot.wall)
    assert state.allowed  # to turn
    assert ("OBSTACLE" in state.reasons) == (expected == 0.0)


def test_an_obstacle_stops_a_motion_under_way_but_not_its_turn() -> None:
    robot = Robot(obstacle=CORRIDOR)
    robot.command(Velocity(0.5, 0.2))
    robot.guard.on_gap(Source.SCAN, 0.9, 0.0, robot.wall)
    assert robot.guard.tick(robot.wall) is None  # half the top speed is allowed there
    robot.guard.on_gap(Source.SCAN, 0.2, 0.0, robot.wall)
    assert robot.guard.tick(robot.wall) == Velocity(0.0, 0.2)
    assert robot.guard.stops == {"OBSTACLE": 1}


def test_the_use_of_a_scanner() -> None:
    """A scanner that was there and falls silent is no free way."""
    for use, silent_ok in (("off", True), ("optional", False), ("required", False)):
        robot = Robot(obstacle=replace(CORRIDOR, scan=use))
        robot.guard.on_gap(Source.SCAN, 0.1, 0.0, robot.wall)
        robot.command()
        assert (robot.guard.velocity == ZERO) == (use != "off")
        robot.wall += 1.0
        robot.refresh(Source.SCAN)
        assert (robot.command() != ZERO) == silent_ok


def test_a_sensor_is_used_where_it_is_there_without_being_asked_for() -> None:
    for source, use in ((Source.SCAN, "scan"), (Source.RANGE, "range")):
        assert getattr(ObstacleConfig(), use) == "optional"
        robot = Robot()
        assert robot.command() == AHEAD
        robot.guard.on_gap(source, 0.1, 0.0, robot.wall)
        assert robot.command() == ZERO
        assert robot.reasons == ("OBSTACLE",)
    robot = Robot()
    robot.guard = Guard(GuardConfig(limits=FAST))
    robot.refresh(Source.SCAN, Source.RANGE)
    assert robot.command() == AHEAD  # a robot that never had one


def test_that_nothing_watches_for_obstacles_is_said_and_forbids_nothing() -> None:
    robot = Robot()
    robot.guard = guard = Guard(GuardConfig(limits=FAST))
    robot.refresh(Source.SCAN, Source.RANGE)
    assert (robot.command(), robot.reasons) == (AHEAD, ())
    assert guard.state(robot.wall).text == UNWATCHED
    guard.on_avoidance(True)
    assert (guard.watchers(robot.wall), guard.state(robot.wall).text) == (("robot",), "")
    guard.on_avoidance(False)
    for source in (Source.SCAN, Source.RANGE):
        guard.on_gap(source, math.inf, 0.0, robot.wall)
        assert source.value in guard.watchers(robot.wall)
        assert guard.state(robot.wall).text == ""
    robot.wall += 1.0
    robot.refresh(Source.SCAN, Source.RANGE)
    assert guard.watchers(robot.wall) == ()
    robot.guard = guard = Guard(GuardConfig(limits=FAST))
    robot.refresh(Source.SCAN, Source.RANGE)
    guard.on_gap(Source.SCAN, math.inf, 3.0, robot.wall)  # stamped 3 s ago
    guard.troubles[Source.SCAN] = "3.0 s old"
    assert "scan: its messages are 3.0 s old" in guard.state(robot.wall).text


# A dry run.


@given(st.lists(st.sampled_from(["command", "tick", "halt", "stop", "reset", "wait"]), max_size=40))
def test_in_a_dry_run_nothing_but_zero_is_sent(events: list[str]) -> None:
    robot = Robot(dry_run=True)
    guard = robot.guard
    for event in events:
        robot.wall += 0.3 if event == "wait" else 0.01
        robot.refresh()
        sent = {
            "command": lambda: guard.on_command(0.5, 0.3, robot.wall, robot.wall),
            "tick": lambda: guard.tick(robot.wall),
            "halt": lambda: guard.on_halt(robot.wall),
            "stop": lambda: guard.on_emergency("a test", robot.wall),
            "reset": lambda: guard.on_reset(robot.wall),
            "wait": lambda: None,
        }[event]()
        assert not isinstance(sent, Velocity) or sent == ZERO
        state = guard.state(robot.wall)
        assert guard.velocity == state.velocity == ZERO
        assert not state.allowed
        assert state.reasons[0] == "DRY_RUN"
        assert state.speed_limit == 0.0


def scan(x: float, y: float, config: ObstacleConfig, beams: int = 720) -> float:
    """The gap that a scanner at the robot's centre finds with one post at (x, y)."""
    step = math.tau / beams
    ranges = [math.inf] * beams
    beam = round((math.atan2(y, x) + math.pi) / step) % beams
    ranges[beam] = math.hypot(x, y)
    return gap_in_scan(ranges, -math.pi, step, (0.05, 10.0), config)


def test_only_what_is_in_the_corridor_ahead_counts() -> None:
    assert scan(1.0, 0.0, CORRIDOR) == pytest.approx(0.7, abs=0.01)
    assert scan(1.0, 0.25, CORRIDOR) == pytest.approx(0.7, abs=0.01)
    assert scan(1.0, 0.35, CORRIDOR) == math.inf
    assert scan(-1.0, 0.0, CORRIDOR) == math.inf
    assert scan(0.2, 0.0, CORRIDOR) == math.inf  # the robot itself
    moved = replace(CORRIDOR, scan_x=0.2)
    assert scan(1.0, 0.0, moved) == pytest.approx(0.9, abs=0.01)
    turned = replace(CORRIDOR, scan_yaw=90.0)
    assert scan(0.0, -1.0, turned) == pytest.approx(0.7, abs=0.01)


def test_values_that_are_no_ranges() -> None:
    for value, expected in (
        (math.nan, math.inf),
        (math.inf, math.inf),
        (0.0, math.inf),  # below the least range: no measurement
        (99.0, math.inf),
        (-math.inf, 0.0),  # too near to be measured
        (0.8, 0.5),
    ):
        gap = gap_in_scan([value], 0.0, 0.1, (0.05, 10.0), CORRIDOR)
        assert gap == pytest.approx(expected)
    sensor = replace(CORRIDOR, range_x=0.25)
    for value, expected in ((1.0, 0.95), (0.01, 0.0), (9.0, math.inf), (0.04, 0.0)):
        assert gap_of_range(value, (0.05, 4.0), sensor) == pytest.approx(expected)


def test_a_slow_zone_behind_the_stop_is_refused() -> None:
    with pytest.raises(ConfigError, match="stop_distance"):
        ObstacleConfig(stop_distance=1.0, slow_distance=0.5)


# All together: whatever happens in whatever order.

EVENTS = st.lists(
    st.tuples(
        st.sampled_from([*Source, "emergency", "reset", "down", "tick", "nan", "halt", "peers"]),
        st.floats(0.0, 0.3),
        st.sampled_from([0.0, 0.3, -0.4, 5.0]),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(EVENTS)
def test_motion_only_with_every_sign_of_life_and_at_somebodys_command(
    events: list[tuple[Any, float, float]],
) -> None:
    """An independent account of the same events must allow each nonzero velocity."""
    guard = Guard(GuardConfig(obstacle=replace(CORRIDOR, scan="required")))
    wall, last, emergency, gap, up = 0.0, dict[Source, float](), False, math.inf, False
    doubled, doubled_at = False, -math.inf
    for kind, pause, value in events:
        wall += pause
        sent: Velocity | None
        if kind is Source.COMMAND or kind == "nan":
            last[Source.COMMAND] = wall
            speed = math.nan if kind == "nan" else value
            sent = guard.on_command(speed, value, wall, wall)
        else:
            if isinstance(kind, Source):
                last[kind] = wall
            if kind is Source.ODOMETRY:
                guard.on_odometry(0.0, value == 0.0, wall)
            elif kind is Source.CAMERA:
                guard.on_camera(0.0, wall)
            elif kind is Source.LINK or kind == "down":
                up = kind is Source.LINK
                last[Source.LINK] = wall
                guard.on_link(up, 0.0, wall)
            elif kind in (Source.SCAN, Source.RANGE):
                gap = abs(value) if kind is Source.SCAN else gap
                guard.on_gap(kind, abs(value), 0.0, wall)
            elif kind == "emergency":
                guard.on_emergency("a test", wall)
                emergency = True
            elif kind == "reset":
                emergency = bool(guard.on_reset(wall)) and emergency
            elif kind == "peers":
                doubled_at = wall if doubled else doubled_at
                doubled = value > 0.0
                guard.on_peers("another" if doubled else "", "", wall)
            elif kind == "halt":
                guard.on_halt(wall)
                last.clear()
            sent = guard.tick(wall)
        assert sent is None or sent == guard.velocity
        if guard.velocity != ZERO:
            needed = (Source.COMMAND, Source.ODOMETRY, Source.CAMERA, Source.LINK, Source.SCAN)
            assert all(wall - last.get(s, -math.inf) <= LONGEST_S for s in needed)
            assert up
            assert not emergency
            assert not doubled
            assert wall - doubled_at >= ALONE_S
            assert guard.velocity.linear <= 0.0 or gap > CORRIDOR.stop_distance
            assert abs(guard.velocity.linear) <= 0.8
            assert abs(guard.velocity.angular) <= 1.5
            assert sent is None or kind is Source.COMMAND or guard.velocity.linear >= 0.0
        state = guard.state(wall)
        assert set(state.reasons) <= set(REASONS)
        assert state.allowed or guard.velocity == ZERO


def test_guard_and_executor_have_the_same_top_speeds() -> None:
    limits, steps = LimitsConfig(), ExecutorConfig()
    assert (limits.linear_speed, limits.angular_speed) == (steps.linear_speed, steps.angular_speed)
