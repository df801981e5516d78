"""Footprints of everything solid: oblongs with rounded corners, in the plane.

A circle is an oblong of no length, a wall a very large one. Lengths in m, angles in rad.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Footprint(NamedTuple):
    """Convex footprint: all points within ``radius`` of an oblong turned by ``yaw``."""

    x: float
    y: float
    yaw: float
    half_length: float
    half_width: float
    radius: float

    @classmethod
    def circle(cls, x: float, y: float, radius: float) -> Footprint:
        return cls(x, y, 0.0, 0.0, 0.0, radius)

    @classmethod
    def oblong(cls, x: float, y: float, yaw: float, length: float, width: float) -> Footprint:
        return cls(x, y, yaw, length / 2, width / 2, 0.0)

    def distance(self, x: float, y: float) -> float:
        """Return the distance of a point to the edge [m], negative inside."""
        return float(distances([self], x, y)[0])

    def inflated(self, margin: float, arc: int = 2) -> np.ndarray:
        """Return a polygon around all points within ``margin``: [4 * arc + 4, 2].

        Counter-clockwise; each rounded corner is ``arc`` chords that touch the circle from outside.
        """
        r = (self.radius + margin) / math.cos(math.pi / 4 / arc)
        corners = ((1, 1), (-1, 1), (-1, -1), (1, -1))
        points = [
            (i * self.half_length + r * math.cos(angle), j * self.half_width + r * math.sin(angle))
            for k, (i, j) in enumerate(corners)
            for angle in (math.pi / 2 * (k + m / arc) for m in range(arc + 1))
        ]
        return np.array([self.x, self.y]) + np.array(points) @ _turned(self.yaw).T

    def push_out(self, x: float, y: float, margin: float) -> tuple[float, float]:
        """Return the nearest place whose distance is at least ``margin``."""
        c, s = math.cos(self.yaw), math.sin(self.yaw)
        dx, dy = x - self.x, y - self.y
        a, b = c * dx + s * dy, c * dy - s * dx
        over_a, over_b = abs(a) - self.half_length, abs(b) - self.half_width
        keep = self.radius + margin
        outside = math.hypot(max(over_a, 0.0), max(over_b, 0.0))
        if outside >= keep:
            return x, y
        if outside > 0.0:
            a += math.copysign(max(over_a, 0.0), a) * (keep / outside - 1)
            b += math.copysign(max(over_b, 0.0), b) * (keep / outside - 1)
        elif over_a > over_b:
            a = math.copysign(self.half_length + keep, a)
        else:
            b = math.copysign(self.half_width + keep, b)
        return self.x + c * a - s * b, self.y + s * a + c * b


def distances(footprints: Sequence[Footprint] | np.ndarray, x: object, y: object) -> np.ndarray:
    """Return the distance of points ``x``, ``y`` [...] to each footprint [m]: [..., footprints]."""
    parts = np.asarray(footprints, float).reshape(-1, 6)
    cx, cy, yaw, half_length, half_width, radius = parts.T
    dx, dy = np.asarray(x)[..., None] - cx, np.asarray(y)[..., None] - cy
    c, s = np.cos(yaw), np.sin(yaw)
    over_a = np.abs(c * dx + s * dy) - half_length
    over_b = np.abs(c * dy - s * dx) - half_width
    outside = np.sqrt(np.maximum(over_a, 0.0) ** 2 + np.maximum(over_b, 0.0) ** 2)
    return outside + np.minimum(np.maximum(over_a, over_b), 0.0) - radius


def _turned(yaw: float) -> np.ndarray:
    c, s = math.cos(yaw), math.sin(yaw)
    return np.array([[c, -s], [s, c]])
