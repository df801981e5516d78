"""The pose of a robot or a thing in a room."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pose:
    """Place and heading of something: x, y in m, yaw in rad (0 = +x, + = left)."""

    x: float
    y: float
    yaw: float
