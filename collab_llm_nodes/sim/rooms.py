"""Rooms drawn from an integer seed: size, things on the floor, the one to find, where to start.

Lengths are metres, angles radians (+ = left, counter-clockwise). A room spans
``[0, width] x [0, depth]``. Things of one shape have one size, so their apparent size
shows their distance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from collab_llm_nodes.sim.pose import Pose

SHAPES = ("box", "ball", "cone", "bottle")
COLOURS = ("red", "green", "blue", "yellow")
RADIUS = {"box": 0.19, "ball": 0.20, "cone": 0.20, "bottle": 0.14}
"""Footprint radius in m: what blocks the robot."""
HEIGHT = {"box": 0.50, "ball": 0.40, "cone": 0.60, "bottle": 0.60}

_WALL_MARGIN = 0.65  # a thing's centre to a wall: the robot fits between
_THING_GAP = 1.1  # between centres
_CORRIDOR = 0.85  # other things' centres to the straight line from start to target
_START_GAP = 1.0
_TARGET_GAP = 1.4


@dataclass(frozen=True)
class Thing:
    """One object on the floor; ``yaw`` turns boxes only."""

    shape: str
    colour: str
    x: float
    y: float
    yaw: float = 0.0

    @property
    def radius(self) -> float:
        return RADIUS[self.shape]

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Camera:
    """The camera of every room, in the terms of ``home.rooms.Camera``."""

    jpeg_quality: int = 92
    late: bool = False


@dataclass(frozen=True)
class Room:
    """One generated room; a function of ``seed`` alone.

    ``target`` indexes ``things``; no two things share both shape and colour. From ``start`` a
    straight corridor leads to the target, so it is visible at some heading.
    """

    seed: int
    width: float
    depth: float
    things: tuple[Thing, ...]
    target: int
    start: Pose
    camera: ClassVar[Camera] = Camera()

    @property
    def parts(self) -> list[Thing]:
        """All things, as in ``home.rooms.Room``."""
        return list(self.things)

    @property
    def goal(self) -> Thing:
        return self.things[self.target]

    def push_out(self, x: float, y: float, radius: float) -> tuple[float, float]:
        """Return the nearest place where a disc of ``radius`` [m] touches nothing solid."""
        for thing in self.things:
            dx, dy = x - thing.x, y - thing.y
            gap, least = math.hypot(dx, dy), radius + thing.radius
            if gap < least:
                scale = least / max(gap, 1e-9)
                x, y = thing.x + dx * scale, thing.y + dy * scale
        return (
            min(max(x, radius), self.width - radius),
            min(max(y, radius), self.depth - radius),
        )


def make_room(seed: int) -> Room:
    """Return the room of ``seed``: 1-3 distractors, 4 of 5 with the target's shape or colour."""
    rng = np.random.default_rng([seed, 0x0C0117AB])
    while True:
        width, depth = rng.uniform(4.0, 7.0, size=2)
        kinds = _kinds(rng)
        spots = _spots(rng, width, depth, len(kinds))
        start = _start(rng, width, depth, spots) if spots else None
        if start is None:
            continue
        things = tuple(
            Thing(shape, colour, x, y, float(rng.uniform(-math.pi, math.pi)))
            for (shape, colour), (x, y) in zip(kinds, spots, strict=True)
        )
        order = [int(i) for i in rng.permutation(len(things))]
        shuffled = tuple(things[i] for i in order)
        return Room(seed, float(width), float(depth), shuffled, order.index(0), start)


def _kinds(rng: np.random.Generator) -> list[tuple[str, str]]:
    """Return shape and colour of the target (first) and of its distractors, all different."""
    kinds = [(str(rng.choice(SHAPES)), str(rng.choice(COLOURS)))]
    wanted = 1 + int(rng.integers(1, 4))
    while len(kinds) < wanted:
        shape, colour = str(rng.choice(SHAPES)), str(rng.choice(COLOURS))
        if rng.random() < 0.8:
            shape, colour = (kinds[0][0], colour) if rng.random() < 0.5 else (shape, kinds[0][1])
        if (shape, colour) not in kinds:
            kinds.append((shape, colour))
    return kinds


def _spots(
    rng: np.random.Generator, width: float, depth: float, count: int
) -> list[tuple[float, float]]:
    """Return places at least ``_THING_GAP`` apart; none if the room is too crowded."""
    spots: list[tuple[float, float]] = []
    for _ in range(20 * count):
        x = float(rng.uniform(_WALL_MARGIN, width - _WALL_MARGIN))
        y = float(rng.uniform(_WALL_MARGIN, depth - _WALL_MARGIN))
        if all(math.hypot(x - a, y - b) >= _THING_GAP for a, b in spots):
            spots.append((x, y))
            if len(spots) == count:
                return spots
    return []


def _start(
    rng: np.random.Generator, width: float, depth: float, spots: list[tuple[float, float]]
) -> Pose | None:
    """Return a start with a free corridor to the first spot, heading anywhere, or None."""
    for _ in range(40):
        x = float(rng.uniform(0.6, width - 0.6))
        y = float(rng.uniform(0.6, depth - 0.6))
        if math.hypot(x - spots[0][0], y - spots[0][1]) < _TARGET_GAP:
            continue
        if any(math.hypot(x - a, y - b) < _START_GAP for a, b in spots):
            continue
        if all(_distance_to_segment(s, (x, y), spots[0]) >= _CORRIDOR for s in spots[1:]):
            return Pose(x, y, float(rng.uniform(-math.pi, math.pi)))
    return None


def _distance_to_segment(
    p: tuple[float, float], a: tuple[float, float], b: tuple[float, float]
) -> float:
    dx, dy = b[0] - a[0], b[1] - a[1]
    t = ((p[0] - a[0]) * dx + (p[1] - a[1]) * dy) / (dx * dx + dy * dy)
    t = min(1.0, max(0.0, t))
    return math.hypot(p[0] - a[0] - t * dx, p[1] - a[1] - t * dy)
