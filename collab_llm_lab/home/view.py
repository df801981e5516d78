"""The camera's view by geometry, in the words that answers are made of."""

from __future__ import annotations

from dataclasses import dataclass

DIRECTIONS = ("far left", "left", "ahead", "right", "far right")
DIRECTION_EDGES = (25.0, 10.0, -10.0, -25.0)
"""Degrees, + = left."""
DISTANCES = ("very close", "close", "near", "some way off", "distant")
DISTANCE_EDGES = (0.4, 0.65, 0.9, 2.4)
"""m from the camera to the footprint."""
WAYS = ("blocked", "short", "open")
WAY_EDGES = (0.8, 2.0)
"""m free straight ahead, for the robot's width."""


@dataclass(frozen=True)
class Sight:
    """One thing or piece of furniture as seen from the camera."""

    name: str
    """Such as "red ball", "sofa"; "person" is an obstacle that answers do not name."""
    bearing: float
    """Of its centre [rad], + = left."""
    range: float
    """To the nearest point of its footprint [m]."""
    visible: float
    """Share of it that is inside the picture and not hidden by something nearer."""

    @property
    def in_view(self) -> bool:
        return self.visible >= 0.5

    @property
    def borderline(self) -> bool:
        """Return True if visibility is ambiguous; such views are reported on their own."""
        return 0.3 < self.visible < 0.65


@dataclass(frozen=True)
class View:
    """Sights of all things and furniture of a room from one place, and the free way."""

    things: tuple[Sight, ...]
    furniture: tuple[Sight, ...]
    free: float
    """Way of the robot's width that is free straight ahead [m], at most 5."""
