"""Rooms of a home, drawn from an integer seed: outline, things, furniture, people, camera, start.

Lengths are metres, angles radians (+ = left, counter-clockwise).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from collab_llm_nodes.sim.rooms import Pose

SHAPES = ("ball", "box", "cone", "bottle", "mug", "bucket", "lamp", "stool")
COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "white", "black")
NAMED_FURNITURE = ("table", "sofa", "shelf", "partition")
FURNITURE = (*NAMED_FURNITURE, "person")
ROBOT_RADIUS = 0.3
SUCCESS_DISTANCE = 0.75
"""m from the base's centre to the right thing's footprint at the stop."""


@dataclass(frozen=True)
class Thing:
    """One thing on the floor, with a round footprint; ``yaw`` turns boxes and mugs only."""

    shape: str
    colour: str
    x: float
    y: float
    yaw: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Furniture:
    """Something with an oblong footprint, ``length`` x ``width``, its length along ``yaw``."""

    kind: str
    x: float
    y: float
    yaw: float
    length: float
    width: float
    height: float

    @property
    def name(self) -> str:
        return self.kind


@dataclass(frozen=True)
class Camera:
    """The camera of one robot, and how it moves while the robot walks."""

    height: float = 0.35
    pitch: float = math.radians(12.0)
    """Downwards."""
    roll: float = 0.0
    half_fov: float = math.radians(45.0)
    """Horizontal, half of the whole angle."""
    sway: float = 0.0
    """Share of the full sway per picture (2 degrees of pitch and roll, 1 of yaw), 0 to 1."""
    jpeg_quality: int = 92
    late: bool = False
    """The picture shows the place before the last action."""


@dataclass(frozen=True)
class Room:
    """One room; a function of its seed and style.

    It spans ``[0, width] x [0, depth]`` less ``notch``: an L-shaped room lacks the corner
    ``x > notch[0] and y > notch[1]``.
    """

    seed: int
    width: float
    depth: float
    notch: tuple[float, float] | None
    things: tuple[Thing, ...]
    furniture: tuple[Furniture, ...]
    camera: Camera
    start: Pose
