"""Execution of steps: by our own executor, or delegated as a whole.

The mission drives a :class:`Steps`. :class:`StepExecutor` returns velocities.
:class:`DelegatedSteps` hands over whole steps such as "75 cm ahead" (nav2's behaviours, the Go2's
obstacle avoidance). It measures them, and cancels one when odometry stops or jumps, or time runs
out.
"""

from __future__ import annotations

import math
from typing import Protocol

from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.robot.executor import (
    ALLOWANCE_FACTOR,
    ZERO,
    ExecutorConfig,
    Jumps,
    Outcome,
    Pose2D,
    Velocity,
)
from collab_llm_nodes.robot.grammar import Kind, ParsedAction, check_step

_TOP_SPEEDS = 2.0, 3.0
"""Bound on the speed that the delegate chooses, for the detection of jumps [m/s, rad/s]."""
_MOVES = 0.02
"""A smaller change counts as no progress (m, or rad)."""
_NEAR = 0.05
"""A remaining distance below this counts as arrived (m, or rad)."""


class Steps(Protocol):
    """The mission's view of an executor of steps; see :class:`StepExecutor`."""

    outcome: Outcome
    message: str
    travelled: float
    limit: float

    @property
    def time_left(self) -> float: ...

    def start(
        self,
        action: ParsedAction,
        pose: Pose2D,
        now: float,
        speed_share: float = 1.0,
        seen_from: Pose2D | None = None,
    ) -> Velocity: ...

    def on_odometry(self, pose: Pose2D, now: float, measured: float | None = None) -> Velocity: ...

    def tick(self, now: float) -> Velocity: ...

    def cancel(self) -> Velocity: ...


class StepOutput(Protocol):
    """A delegate that executes whole steps. No call blocks.

    Attributes:
        outcome: RUNNING from ``start`` until the step ends as DONE, BLOCKED (by an obstacle),
            TIMEOUT or FAILED.
        message: cause, for people; empty when DONE.
        reports_the_end: the delegate knows when a step is done; else odometry decides.
    """

    @property
    def outcome(self) -> Outcome: ...

    @property
    def message(self) -> str: ...

    @property
    def reports_the_end(self) -> bool: ...

    def start(self, action: ParsedAction, speed: float, allowance: float) -> None:
        """Begin a FORWARD or TURN step in place of any step under way.

        Args:
            speed: wanted [m/s or rad/s].
            allowance: time for the step [s].
        """

    def cancel(self) -> None:
        """Stop the robot now, even if no step is known to be under way."""


class ShownSteps:
    """Steps of a dry run: each is done at once, and nothing moves."""

    def __init__(self) -> None:
        self.outcome = Outcome.IDLE
        self.message = ""
        self.travelled = 0.0
        self.limit = self.time_left = math.inf

    def start(
        self,
        action: ParsedAction,
        pose: Pose2D,
        now: float,
        speed_share: float = 1.0,
        seen_from: Pose2D | None = None,
    ) -> Velocity:
        self.outcome = Outcome.DONE
        return ZERO

    def on_odometry(self, pose: Pose2D, now: float, measured: float | None = None) -> Velocity:
        return ZERO

    def tick(self, now: float) -> Velocity:
        return ZERO

    def cancel(self) -> Velocity:
        return ZERO


class DelegatedSteps:
    """Steps handed to a ``StepOutput``; attributes as of :class:`StepExecutor`."""

    def __init__(self, config: ExecutorConfig, output: StepOutput) -> None:
        self.config = config
        self.outcome = Outcome.IDLE
        self.message = ""
        self.travelled = 0.0
        self.limit = math.inf
        self._output = output
        self._action: ParsedAction | None = None
        self._start = self._last = Pose2D()
        self._jumps = Jumps(*_TOP_SPEEDS, Pose2D(), 0.0)
        self._deadline = self._seen = 0.0
        self._progress, self._progress_at = 0.0, 0.0  # farthest, and since when

    @property
    def time_left(self) -> float:
        """Infinite: the delegate's plan is unknown, so no step is asked for ahead of time."""
        return math.inf

    def start(
        self,
        action: ParsedAction,
        pose: Pose2D,
        now: float,
        speed_share: float = 1.0,
        seen_from: Pose2D | None = None,
    ) -> Velocity:
        """Hand ``action`` over; ``seen_from`` is not used."""
        c = self.config
        self.cancel()
        try:
            check_step(action)
        except InvalidInput as error:
            self.outcome, self.message = Outcome.FAILED, str(error)
            return ZERO
        self._action = action
        self._start = self._last = pose
        self._jumps = Jumps(*_TOP_SPEEDS, pose, now)
        self._seen = self._progress_at = now
        self.travelled, self._progress, self.message = 0.0, 0.0, ""
        if not action.kind.moves:
            self.outcome = Outcome.DONE
            return ZERO
        turning = action.kind is Kind.TURN
        top, acceleration = c.linear_speed, c.linear_acceleration
        if turning:
            top, acceleration = c.angular_speed, c.angular_acceleration
        speed = speed_share * top
        if not turning:
            speed = max(c.least_linear_speed, min(speed, self.limit))
        ideal = abs(action.value) / speed + speed / acceleration
        allowance = c.allowance_base + ALLOWANCE_FACTOR * ideal
        self._deadline = now + allowance
        self.outcome = Outcome.RUNNING
        self._output.start(action, speed, allowance)
        return ZERO

    def on_odometry(self, pose: Pose2D, now: float, measured: float | None = None) -> Velocity:
        """Measure; ``measured`` as in ``StepExecutor``."""
        self.tick(now)
        if self.outcome is Outcome.RUNNING and self._action is not None:
            self.message = self._jumps.on_pose(pose, now if measured is None else measured)
            if self.message:
                self._cancel_as(Outcome.JUMPED)
                return ZERO
            self._seen = now
            if self._action.kind is Kind.TURN:
                turned = math.remainder(pose.yaw - self._last.yaw, math.tau)
                self.travelled += math.copysign(1.0, self._action.value) * turned
            else:
                dx, dy = pose.x - self._start.x, pose.y - self._start.y
                yaw = self._start.yaw
                self.travelled = dx * math.cos(yaw) + dy * math.sin(yaw)
            self._last = pose
            if not self._output.reports_the_end:
                self._judge(now)
        return ZERO

    def tick(self, now: float) -> Velocity:
        """Take the output's outcome; cancel the step when odometry is silent or time is up."""
        if self.outcome is not Outcome.RUNNING:
            return ZERO
        if not 0.0 <= now - self._seen <= self.config.watchdog:
            self._cancel_as(Outcome.STALE)
        elif self._output.outcome is not Outcome.RUNNING:
            self.outcome, self.message = self._output.outcome, self._output.message
        elif now > self._deadline:
            self._cancel_as(Outcome.TIMEOUT)
        return ZERO

    def cancel(self) -> Velocity:
        """Stop now."""
        if self.outcome is Outcome.RUNNING:
            self._cancel_as(Outcome.CANCELLED)
        return ZERO

    def _judge(self, now: float) -> None:
        """End the step as done at or near the goal, as blocked where the robot rests elsewhere."""
        assert self._action is not None, "a step is under way"
        c, turning = self.config, self._action.kind is Kind.TURN
        remaining = abs(self._action.value) - self.travelled
        if remaining <= (c.angle_tolerance if turning else c.distance_tolerance):
            self._cancel_as(Outcome.DONE)
        elif self.travelled > self._progress + _MOVES:
            self._progress, self._progress_at = self.travelled, now
        elif now - self._progress_at > c.allowance_base:
            self._cancel_as(Outcome.DONE if remaining <= _NEAR else Outcome.BLOCKED)

    def _cancel_as(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._output.cancel()
