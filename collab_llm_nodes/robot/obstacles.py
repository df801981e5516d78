"""Free distance ahead of the robot, from ranges. Pure.

Obstacles count in the corridor that the robot sweeps when it goes straight on. Sensors are taken to
be mounted level. Obstacles that they do not see (glass, a step down) do not exist here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from collab_llm_nodes.config import check_ranges, fixed
from collab_llm_nodes.errors import ConfigError

_USES = ("off", "optional", "required")
_SLOW_SHARE = 0.3
"""Share of the top speed left just before stop_distance, so that the stop there is short."""


@dataclass(frozen=True)
class ObstacleConfig:
    """Sensors that look ahead, their places, and distances that are too near."""

    scan: str = fixed(
        "optional",
        "Use of the laser scan: optional = where there is one, and no motion once it falls silent;"
        " required = no motion without it.",
        choices=_USES,
    )
    range: str = fixed(
        "optional", "Use of a range finder that looks ahead, likewise.", choices=_USES
    )
    stop_distance: float = fixed(
        0.3, "Gap before the robot's front at which it stops [m].", low=0.05, high=5.0
    )
    slow_distance: float = fixed(0.9, "Gap from which it slows down [m].", low=0.05, high=10.0)
    width: float = fixed(
        0.5, "Of the corridor ahead: the robot's, and some more [m].", low=0.1, high=5.0
    )
    front: float = fixed(0.35, "From the robot's centre to its front [m].", low=0.0, high=2.0)
    scan_x: float = fixed(
        0.0, "The scanner's place ahead of the robot's centre [m].", low=-2.0, high=2.0
    )
    scan_yaw: float = fixed(
        0.0, "Where the scanner's zero angle points, + = left [degree].", low=-180.0, high=180.0
    )
    range_x: float = fixed(
        0.35, "The range finder's place ahead of the robot's centre [m].", low=-2.0, high=2.0
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.slow_distance < self.stop_distance:
            raise ConfigError("must be >= stop_distance", field="slow_distance")

    def speed_share(self, gap: float) -> float:
        """Return the share of the top speed allowed ahead with ``gap`` [m] before the front."""
        if gap <= self.stop_distance:
            return 0.0
        if gap >= self.slow_distance:
            return 1.0
        share = (gap - self.stop_distance) / (self.slow_distance - self.stop_distance)
        return _SLOW_SHARE + (1.0 - _SLOW_SHARE) * share


def gap_in_scan(
    ranges: Sequence[float],
    angle_min: float,
    angle_increment: float,
    limits: tuple[float, float],
    config: ObstacleConfig,
) -> float:
    """Return the gap before the robot's front [m], ``inf`` without an obstacle in the corridor.

    Args:
        ranges: [beams] in m; of REP 117's special values ``-inf`` is too near to measure, ``inf``
            nothing there and ``nan`` no measurement.
        angle_min: of the first beam [rad], + = left; ``angle_increment`` to the next.
        limits: least and greatest range that is a measurement [m].
    """
    nearest, half = math.inf, 0.5 * config.width
    angle = angle_min + math.radians(config.scan_yaw)
    for distance in ranges:
        if distance == -math.inf and math.cos(angle) > 0.0:
            return 0.0
        if limits[0] <= distance <= limits[1]:
            gap = config.scan_x + distance * math.cos(angle) - config.front
            # Nearer than the front is the robot itself.
            if 0.0 < gap < nearest and abs(distance * math.sin(angle)) <= half:
                nearest = gap
        angle += angle_increment
    return nearest


def gap_of_range(distance: float, limits: tuple[float, float], config: ObstacleConfig) -> float:
    """Return the gap by a range finder; a value below its least range is an obstacle too near."""
    if distance < limits[0]:
        return 0.0
    if distance <= limits[1]:
        return max(0.0, config.range_x + distance - config.front)
    return math.inf
