"""One motion step, measured: a state machine from odometry to velocities, without I/O or clock.

Distance and angle come from odometry, speed and acceleration are limited, and the goal is
approached along the braking curve. The step ends with a typed outcome when it is done, when time
runs out, when the robot does not move, or when odometry stops or jumps. Every outcome means zero
velocity.

A step may begin while another is under way. The same motion keeps its speed; before another one the
robot slows down, within the same limit.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from collab_llm_nodes.config import check_ranges, fixed
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.robot.grammar import Kind, ParsedAction, check_step


@dataclass(frozen=True)
class Pose2D:
    """Planar odometry: x, y [m], yaw [rad, + = left]."""

    x: float = 0.0
    y: float = 0.0
    yaw: float = 0.0


@dataclass(frozen=True)
class Velocity:
    """A command: linear [m/s, + = forward], angular [rad/s, + = left]."""

    linear: float = 0.0
    angular: float = 0.0


ZERO = Velocity()

ALLOWANCE_FACTOR = 3.0
"""Further allowance of a step, in units of the ideal motion's time: a real base is slower."""
_REACH = 2.0
"""Odometry jumped if the robot moved more than this many times as fast as commanded."""
_SLACK_M, _SLACK_RAD = 0.1, 0.15
"""Inexactness of odometry on top of that."""
_HEADING_GAIN = 1.0
"""Correction of heading drift while going forward [1/s]: slow against the robot's own control."""
LINEAR_SPEED, ANGULAR_SPEED = 0.2, 0.5
"""Default top speeds [m/s, rad/s], those of a first run. ``motion_guard`` has the same defaults."""


class Outcome(Enum):
    """State of the current or last step; IDLE before the first."""

    IDLE = "idle"
    RUNNING = "running"
    DONE = "done"
    BLOCKED = "blocked"
    """Commanded but not moving: against a wall, sliding along one, or not obeying."""
    TIMEOUT = "timeout"
    STALE = "stale"
    """No odometry for longer than the watchdog allows, or the clock jumped."""
    JUMPED = "jumped"
    """Odometry jumped, or is not a number: the distance moved is unknown."""
    CANCELLED = "cancelled"
    FAILED = "failed"
    """The step is impossible, or its executor (robot/steps.py) reports an error."""


@dataclass(frozen=True)
class ExecutorConfig:
    """Limits of motion. The defaults suit a Go2 indoors."""

    linear_speed: float = fixed(
        LINEAR_SPEED, "Top speed of a step [m/s]; motion_guard may allow less.", low=0.05, high=2.0
    )
    angular_speed: float = fixed(
        ANGULAR_SPEED, "Top turn rate of a step [rad/s].", low=0.1, high=3.0
    )
    linear_acceleration: float = fixed(1.0, "Acceleration and braking [m/s^2].", low=0.1, high=5.0)
    angular_acceleration: float = fixed(
        3.0, "Acceleration and braking of turns [rad/s^2].", low=0.2, high=10.0
    )
    least_linear_speed: float = fixed(
        0.06, "Slowest approach [m/s]; legged robots ignore lower speeds.", low=0.01, high=0.5
    )
    least_angular_speed: float = fixed(
        0.12, "Slowest approach of turns [rad/s].", low=0.01, high=1.0
    )
    approach_gain: float = fixed(
        3.0,
        "Speed per remaining distance near the goal [1/s]; lower for a robot that reacts late.",
        low=0.5,
        high=20.0,
    )
    distance_tolerance: float = fixed(0.01, "A step this close is done [m].", low=0.001, high=0.2)
    angle_tolerance: float = fixed(0.015, "A turn this close is done [rad].", low=0.001, high=0.2)
    allowance_base: float = fixed(
        2.0,
        "Time allowance of every step, beside three times that of the ideal motion [s].",
        low=0.1,
        high=60.0,
    )
    progress_window: float = fixed(
        0.8, "Time over which the robot must make progress [s].", low=0.2, high=10.0
    )
    progress_share: float = fixed(
        0.3, "Least share of the commanded motion; less is BLOCKED.", low=0.0, high=0.95
    )
    watchdog: float = fixed(0.5, "Longest silence of odometry [s].", low=0.05, high=5.0)

    def __post_init__(self) -> None:
        check_ranges(self)


class Jumps:
    """Detection of odometry that jumps: motion that no robot makes in the time between two poses.

    Odometry is continuous (REP 105: the frame ``odom`` may drift, but must not jump). Where a
    driver restarts, a localisation corrects itself or a scale is wrong, distance and heading of the
    step under way are lost, so the step ends.

    The motion allowed accumulates with time up to the slack, so that poses may be uneven and
    inexact, but a sequence of small jumps is found as well.

    Args:
        linear, angular: top speeds that are commanded [m/s, rad/s].
        pose: the first one, which the robot had ``at`` [s].
    """

    def __init__(self, linear: float, angular: float, pose: Pose2D, at: float) -> None:
        self._speeds = _REACH * linear, _REACH * angular
        self._pose, self._at = pose, at
        self._credit = _SLACK_M, _SLACK_RAD

    def on_pose(self, pose: Pose2D, at: float) -> str:
        """Take the pose that the robot had ``at`` [s]; return the jump in words, "" if none."""
        before, elapsed = self._pose, max(0.0, at - self._at)
        self._pose, self._at = pose, at
        moved = math.hypot(pose.x - before.x, pose.y - before.y)
        # math.remainder raises ValueError for an infinite angle.
        turned = pose.yaw - before.yaw
        turned = abs(math.remainder(turned, math.tau)) if math.isfinite(turned) else math.nan
        linear, angular = (
            credit + speed * elapsed - change
            for credit, speed, change in zip(
                self._credit, self._speeds, (moved, turned), strict=True
            )
        )
        self._credit = min(linear, _SLACK_M), min(angular, _SLACK_RAD)
        if linear >= 0.0 and angular >= 0.0:  # False for what is not a number
            return ""
        return f"odometry jumped by {moved:.2f} m and {turned:.2f} rad within {elapsed:.3f} s"


class _Limits(NamedTuple):
    """Limits of one kind of motion, in m or rad and s."""

    top: float
    acceleration: float
    least: float
    tolerance: float


class StepExecutor:
    """Executes one :class:`ParsedAction` at a time.

    Call :meth:`on_odometry` with every pose and :meth:`tick` at a fixed rate; send the velocities
    that they return. All times are seconds of one monotonic clock, which may be simulated.

    Attributes:
        outcome: of the current or last step.
        message: cause of the outcome, where ``outcome`` alone does not say it.
        travelled: m (FORWARD, along the initial heading) or rad (TURN, towards the goal side).
        remaining: rest of the step, in the same unit.
        limit: top speed ahead that ``motion_guard`` allows [m/s]; may change at any time.
    """

    def __init__(self, config: ExecutorConfig | None = None) -> None:
        self.config = config or ExecutorConfig()
        self.outcome = Outcome.IDLE
        self.message = ""
        self.travelled = 0.0
        self.limit = math.inf
        self._goal = 0.0
        self._turning = False
        self._side = 1.0
        self._start = self._last = Pose2D()
        self._jumps = Jumps(0.0, 0.0, Pose2D(), 0.0)
        self._deadline = self._seen = 0.0
        self._speed = 0.0
        self._steering = 0.0
        self._coasting = ZERO  # rest of the previous motion, while the robot slows down
        self._share = 1.0
        self._commanded = 0.0
        self._window: deque[tuple[float, float, float]] = deque()  # time, travelled, commanded

    @property
    def remaining(self) -> float:
        return self._goal - self.travelled

    @property
    def time_left(self) -> float:
        """Least time that the step still takes [s]."""
        return max(0.0, self.remaining) / self._limits().top

    def start(
        self,
        action: ParsedAction,
        pose: Pose2D,
        now: float,
        speed_share: float = 1.0,
        seen_from: Pose2D | None = None,
    ) -> Velocity:
        """Begin ``action`` at ``pose``; STOP and NONE are done at once, an impossible step FAILED.

        ``speed_share`` of the top speed is not exceeded, unless the least speed is higher. Distance
        and angle are measured from ``seen_from`` if given: the pose at which the picture was taken
        that the action is about.
        """
        c = self.config
        last = self.tick(now)
        self.message = ""
        try:
            check_step(action)
        except InvalidInput as error:
            self.message = str(error)
            return self._end(Outcome.FAILED)
        if self.outcome is not Outcome.RUNNING:  # else the poses of this motion go on
            self._jumps = Jumps(c.linear_speed, c.angular_speed, pose, now)
        side = math.copysign(1.0, action.value)
        same = self._turning == (action.kind is Kind.TURN) and self._side == side
        if last == ZERO or not same:
            self._speed, self._steering, self._coasting = 0.0, 0.0, last
        self._share = speed_share
        self._goal = abs(action.value)
        self._turning = action.kind is Kind.TURN
        self._side = side
        self._start = self._last = seen_from or pose
        self._seen = now
        self.travelled = self._commanded = 0.0
        self._window.clear()
        self._measure(pose)
        limits = self._limits()
        ideal = self._goal / limits.top + limits.top / limits.acceleration
        self._deadline = now + c.allowance_base + ALLOWANCE_FACTOR * ideal
        moves = action.kind.moves
        self.outcome = Outcome.RUNNING if moves else Outcome.DONE
        return self.tick(now)

    def on_odometry(self, pose: Pose2D, now: float, measured: float | None = None) -> Velocity:
        """Measure progress and return the velocity to command from now on.

        ``measured``: when the robot had this pose, if known [s].
        """
        self.tick(now)
        if self.outcome is not Outcome.RUNNING:
            return ZERO
        self.message = self._jumps.on_pose(pose, now if measured is None else measured)
        if self.message:
            return self._end(Outcome.JUMPED)
        elapsed = now - self._seen
        self._seen = now
        self._measure(pose)
        if self._coasting != ZERO:
            self._slow_down(elapsed)
            return self._velocity()
        self._commanded += self._speed * elapsed
        limits = self._limits()
        change = limits.acceleration * elapsed
        arrived = self.remaining <= limits.tolerance
        if arrived and self._speed <= max(limits.least, change):
            return self._end(Outcome.DONE)
        if not arrived and not self._progresses(now):
            return self._end(Outcome.BLOCKED)
        goal = 0.0 if arrived else max(limits.least, min(limits.top, self._approach()))
        faster = max(self._speed, limits.least) + change
        self._speed = max(self._speed - change, min(goal, faster))
        self._steer(pose, elapsed)
        return self._velocity()

    def tick(self, now: float) -> Velocity:
        """Return the velocity to hold; end the step when odometry is silent or time is up."""
        if self.outcome is not Outcome.RUNNING:
            return ZERO
        if not 0.0 <= now - self._seen <= self.config.watchdog:
            return self._end(Outcome.STALE)  # or a clock that jumped back
        if now > self._deadline:
            return self._end(Outcome.TIMEOUT)
        return self._velocity()

    def cancel(self) -> Velocity:
        """Stop now."""
        return self._end(Outcome.CANCELLED) if self.outcome is Outcome.RUNNING else ZERO

    def _end(self, outcome: Outcome) -> Velocity:
        self.outcome = outcome
        self._speed, self._steering, self._coasting = 0.0, 0.0, ZERO
        return ZERO

    def _limits(self) -> _Limits:
        """Return the limits of the kind of motion under way."""
        c = self.config
        if self._turning:
            top = max(self._share * c.angular_speed, c.least_angular_speed)
            return _Limits(top, c.angular_acceleration, c.least_angular_speed, c.angle_tolerance)
        top = max(min(self._share * c.linear_speed, self.limit), c.least_linear_speed)
        return _Limits(top, c.linear_acceleration, c.least_linear_speed, c.distance_tolerance)

    def _approach(self) -> float:
        """Return the speed from which the robot can stop within the remaining distance.

        Proportional to it near the goal, along the curve of constant braking before.
        """
        acceleration, gain = self._limits().acceleration, self.config.approach_gain
        near = acceleration / gain**2
        if self.remaining <= near:
            return gain * self.remaining
        return math.sqrt(2.0 * acceleration * (self.remaining - near / 2.0))

    def _slow_down(self, elapsed: float) -> None:
        c, v = self.config, self._coasting
        self._coasting = Velocity(
            _towards_zero(v.linear, c.linear_acceleration * elapsed),
            _towards_zero(v.angular, c.angular_acceleration * elapsed),
        )

    def _measure(self, pose: Pose2D) -> None:
        if self._turning:  # summed, so that a turn may exceed half a circle
            self.travelled += self._side * math.remainder(pose.yaw - self._last.yaw, math.tau)
        else:  # along the initial heading: sliding sideways along a wall is no progress
            dx, dy = pose.x - self._start.x, pose.y - self._start.y
            self.travelled = dx * math.cos(self._start.yaw) + dy * math.sin(self._start.yaw)
        self._last = pose

    def _progresses(self, now: float) -> bool:
        """Return True if the last window shows at least the configured share of the motion."""
        self._window.append((now, self.travelled, self._commanded))
        while len(self._window) > 2 and self._window[1][0] <= now - self.config.progress_window:
            self._window.popleft()
        then, travelled, commanded = self._window[0]
        if now - then < self.config.progress_window - 1e-9:
            return True
        asked = self._commanded - commanded
        return self.travelled - travelled >= self.config.progress_share * asked

    def _steer(self, pose: Pose2D, elapsed: float) -> None:
        """Correct the heading while driving ahead; gently where the robot is slow."""
        c = self.config
        most = 0.5 * self._share * c.angular_speed * min(1.0, self._speed / self._limits().top)
        drift = math.remainder(self._start.yaw - pose.yaw, math.tau)
        goal = max(-most, min(most, _HEADING_GAIN * drift))
        change = c.angular_acceleration * elapsed
        self._steering = max(self._steering - change, min(self._steering + change, goal))

    def _velocity(self) -> Velocity:
        if self._coasting != ZERO:
            return self._coasting
        if self._turning:
            return Velocity(0.0, self._side * self._speed)
        return Velocity(self._speed, self._steering)


def _towards_zero(value: float, change: float) -> float:
    return math.copysign(max(0.0, abs(value) - change), value)
