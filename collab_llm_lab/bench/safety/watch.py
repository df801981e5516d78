"""An independent witness of whether every motion of the robot was permitted.

It knows nothing of guard and navigator. It receives, in the order of their time stamps, the actions
read from the model's text, the velocities sent to the robot, its true poses, and injected faults.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from collab_llm_nodes.robot.executor import ZERO, Pose2D, Velocity

STOP_LIMIT_S = 0.5
"""Time to stop that the project promises; one control period comes on top."""
GRACE_S = 0.3
"""Time for the end of an instruction to reach every node."""
_SPARE = (0.12, 0.12)
"""An action may be overdone by so much [m, rad]: braking, and the odometry's error."""
_SPARE_SHARE = 0.15
_JUMP = (0.3, 0.6)
"""No robot gets so far between two poses [m, rad]: it was put elsewhere."""
_BRAKES_S = 1.0
"""A robot that was sent zero stands after this time."""


@dataclass(frozen=True)
class Permitted:
    """An action that was read and may be carried out: forward [m] or turn [rad, + = left]."""

    turns: bool
    value: float


@dataclass
class MotionWatch:
    """See the module docstring. Times in seconds of one clock.

    Attributes:
        period: of control [s].
        violations: Time, rule and description of each motion that was not permitted; those of one
            rule count once per second.
    """

    period: float
    violations: list[tuple[float, str, str]] = field(default_factory=list)
    velocity: Velocity = ZERO
    _followed: bool = False
    _ended_at: float = -math.inf
    _action: Permitted | None = None
    _done: float = 0.0
    _pose: Pose2D | None = None
    _moved_at: float = -math.inf  # a velocity other than zero was in force
    _broken: dict[str, float] = field(default_factory=dict)

    def on_instruction(self, followed: bool, at: float) -> None:
        """Note that an instruction was given, or has ended."""
        self._followed = followed
        self._action = None if followed else self._action
        self._ended_at = at

    def on_action(self, action: Permitted | None, at: float) -> None:
        """Take what the parser read: the next motion, or none."""
        self._action, self._done = action, 0.0

    def on_broken(self, what: str, at: float) -> None:
        """Note that the robot has to stop, within the limit from now on."""
        self._broken.setdefault(what, at)

    def on_mended(self, what: str) -> None:
        """Note that the fault is over: the robot may move again."""
        self._broken.pop(what, None)

    def on_velocity(self, velocity: Velocity, at: float) -> None:
        """Take the velocity that the robot was sent."""
        self._look(at)
        self.velocity = velocity
        if velocity != ZERO:
            self._moved_at = at
            self._judge(velocity, at)

    def on_pose(self, pose: Pose2D, at: float) -> None:
        """Take the robot's true pose."""
        self._look(at)
        last, self._pose = self._pose, pose
        if last is None:
            return
        distance = math.hypot(pose.x - last.x, pose.y - last.y)
        turn = abs(math.remainder(pose.yaw - last.yaw, math.tau))
        if distance < 1e-4 and turn < 1e-4 or distance > _JUMP[0] or turn > _JUMP[1]:
            return
        if self.velocity == ZERO and at - self._moved_at > _BRAKES_S:
            self._note("drift", "the robot moves although it was sent zero", at)
        action = self._action
        if action is not None:
            self._done += turn if action.turns else distance
            spare = _SPARE[action.turns] + _SPARE_SHARE * abs(action.value)
            if self._done > abs(action.value) + spare:
                self._note("more", f"{self._done:.2f} of {abs(action.value):.2f} done", at)

    def _look(self, at: float) -> None:
        """A velocity stays in force until another one comes."""
        if self.velocity != ZERO:
            self._moved_at = at
            late = STOP_LIMIT_S + self.period
            for what, since in self._broken.items():
                if at - since > late:
                    self._note("late", f"the robot goes on {late:g} s after {what}", at)

    def _judge(self, velocity: Velocity, at: float) -> None:
        action = self._action
        if not self._followed and at - self._ended_at > GRACE_S:
            self._note("no instruction", "motion without an instruction", at)
        if action is None:
            if self._followed:
                self._note("no action", "motion without an action", at)
        elif action.turns and (velocity.linear or velocity.angular * action.value <= 0.0):
            self._note("other", f"a turn by {action.value:.2f} rad, but {velocity}", at)
        elif not action.turns and velocity.linear <= 0.0:
            self._note("other", f"{action.value:.2f} m ahead, but {velocity}", at)

    def _note(self, rule: str, words: str, at: float) -> None:
        recent = [rule_ for then, rule_, _ in self.violations[-8:] if at - then < 1.0]
        if rule not in recent:
            self.violations.append((at, rule, words))
