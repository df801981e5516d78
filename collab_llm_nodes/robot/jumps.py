"""Odometry that jumps: motion between two poses that no robot makes in the time between them.

Odometry is continuous (REP 105: the frame ``odom`` may drift, but must not jump). Where a driver
restarts, a localisation corrects itself or a scale is wrong, distance and heading of the step under
way are lost, so the step ends.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the executor itself uses this module
    from collab_llm_nodes.robot.executor import Pose2D

_REACH = 2.0
"""The robot may move this many times as fast as it is told to at most."""
_SLACK_M, _SLACK_RAD = 0.1, 0.15
"""Inexactness of odometry on top of that."""


class Jumps:
    """Compares each pose with the one before.

    What a robot may move accumulates with time up to the slack, so that poses may come unevenly
    and be inexact, but a sequence of small jumps is found as well.

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
