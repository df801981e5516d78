"""The camera's view by geometry, in the words that answers are made of.

Everything is seen by rays from the camera: a ray has a bearing (+ = left of the heading) and a
slope (metres up per metre ahead in the plane), both as arrays [rays].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from collab_llm_nodes.robot.search import BEARINGS, RANGE_EDGES, RANGES
from collab_llm_nodes.sim.footprints import distances
from collab_llm_nodes.sim.pose import Pose
from collab_llm_nodes.sim.rooms import HEIGHT, ROBOT_RADIUS, SHAPES, Camera, Furniture, Room

DIRECTIONS = tuple(BEARINGS)
DIRECTION_EDGES = (25.0, 10.0, -10.0, -25.0)
"""Degrees, + = left."""
DISTANCES = tuple(RANGES)
DISTANCE_EDGES = RANGE_EDGES
"""m from the camera to the footprint."""
WAYS = ("blocked", "short", "open")
WAY_EDGES = (0.8, 2.0)
"""m free straight ahead, for the robot's width."""
SIGHT_RANGE = 6.0
"""m: a thing farther away is too small (6 pixels) to be told from others."""
CAMERA_FORWARD = 0.2
"""m from the base's centre to the camera."""
FREE_MOST = 5.0
"""m ahead that are looked at."""
ASPECT = 2.0
"""Width of a picture by its height."""
OUTLINE = {
    "ball": ((0.0, 0.0), (0.05, 0.09), (0.15, 0.14), (0.5, 0.2), (0.85, 0.14), (1.0, 0.0)),
    "box": ((0.0, 0.21), (1.0, 0.21)),
    "cone": ((0.0, 0.2), (1.0, 0.0)),
    "bottle": ((0.0, 0.13), (0.55, 0.13), (0.7, 0.05), (1.0, 0.05)),
    "mug": ((0.0, 0.13), (1.0, 0.13)),
    "bucket": ((0.0, 0.13), (1.0, 0.2)),
    "lamp": ((0.0, 0.13), (0.08, 0.11), (0.1, 0.05), (0.4, 0.05), (0.42, 0.19), (1.0, 0.1)),
    "stool": ((0.0, 0.14), (0.83, 0.14), (0.85, 0.19), (1.0, 0.19)),
}
"""Half width [m] of each shape at shares of its height; between a stool's legs counts too."""
TABLE_TOP, TABLE_LEG, PERSON_LEG = 0.05, 0.07, 0.16
"""m of thickness."""
PERSON_LEGS, PERSON_STANCE = 0.8, 0.105
"""m: length of the legs, and from their axis to the middle."""

_BINS = 24
_HALF_WIDTH = np.array(
    [np.interp((np.arange(_BINS) + 0.5) / _BINS, *np.array(OUTLINE[s]).T) for s in SHAPES]
)
_ROWS = np.array([0.125, 0.375, 0.625, 0.875])  # shares of a thing's height
_ROW_WIDTH = _HALF_WIDTH[:, (_ROWS * _BINS).astype(int)]
_COLUMNS = (np.arange(21) + 0.5) / 21
_FURNITURE_ROWS = np.array(
    [0.05, 0.15, 0.25, 0.35]
)  # m: more of it is above the picture when it is near

Rays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Bearing, slope and way [m] of rays to something, and the share of it that each stands for."""


@dataclass(frozen=True)
class Sight:
    """One thing or piece of furniture as seen from the camera."""

    name: str
    """Name such as "red ball", "sofa"; "person" is an obstacle that answers do not name."""
    bearing: float
    """Angle to its centre [rad], + = left."""
    range: float
    """To the nearest point of its footprint [m]."""
    visible: float
    """Share of it that is inside the picture and not hidden by something nearer, 0 to 1."""

    @property
    def in_view(self) -> bool:
        return self.visible >= self._least and self.range <= SIGHT_RANGE

    @property
    def borderline(self) -> bool:
        """Return True if visibility is ambiguous; such views are reported on their own."""
        far = self.visible >= self._least and abs(self.range - SIGHT_RANGE) < 1.0
        return far or self._least - 0.2 < self.visible < self._least + 0.15

    @property
    def _least(self) -> float:
        # a quarter of what is very close is large; the rest is below the picture
        return 0.25 if self.range < DISTANCE_EDGES[0] else 0.5


@dataclass(frozen=True)
class View:
    """Sights of all things and furniture of a room from one place, and the free way."""

    things: tuple[Sight, ...]
    furniture: tuple[Sight, ...]
    free: float
    """Way of the robot's width that is free straight ahead [m], at most 5."""


def direction(bearing: float) -> str:
    """Return the direction word of a bearing in rad (+ = left)."""
    degrees = math.degrees(bearing)
    return DIRECTIONS[sum(degrees <= edge for edge in DIRECTION_EDGES)]


def distance(metres: float) -> str:
    """Return the distance word of a range in m."""
    return DISTANCES[sum(metres >= edge for edge in DISTANCE_EDGES)]


def way(free: float) -> str:
    """Return the word of a free way in m."""
    return WAYS[sum(free >= edge for edge in WAY_EDGES)]


def camera_of(base: Pose) -> Pose:
    """Return the camera's pose in the plane for a base pose."""
    return Pose(
        base.x + CAMERA_FORWARD * math.cos(base.yaw),
        base.y + CAMERA_FORWARD * math.sin(base.yaw),
        base.yaw,
    )


def axes(camera: Camera, turn: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> np.ndarray:
    """Return the camera's right, up and forward as rows [3, 3]; x is the heading, y left, z up.

    ``turn`` is added to its yaw, pitch and roll [rad].
    """
    yaw, pitch, roll = turn[0], camera.pitch + turn[1], camera.roll + turn[2]
    forward = np.array(
        [math.cos(yaw) * math.cos(pitch), math.sin(yaw) * math.cos(pitch), -math.sin(pitch)]
    )
    right = np.array([math.sin(yaw), -math.cos(yaw), 0.0])
    up = np.cross(right, forward)
    c, s = math.cos(roll), math.sin(roll)
    return np.stack([c * right + s * up, c * up - s * right, forward])


class Scene:
    """Outlines of things and boxes of furniture around one camera pose, to be met by rays."""

    def __init__(self, room: Room, base: Pose) -> None:
        eye = camera_of(base)
        self.height = room.camera.height
        c, s = math.cos(eye.yaw), math.sin(eye.yaw)
        at = np.array([(t.x - eye.x, t.y - eye.y) for t in room.things]).reshape(-1, 2)
        self.things = at @ np.array([[c, -s], [s, c]])
        """Ahead and left of the camera [m], [things, 2]."""
        self._shape = np.array([SHAPES.index(t.shape) for t in room.things], int)
        self._top = np.array([HEIGHT[t.shape] for t in room.things])
        parts = [_boxes(piece) for piece in room.furniture]
        if room.notch is not None:
            parts.append([(*room.walls[4][:5], 0.0, math.inf)])
        self.first = np.cumsum([0, *(len(p) for p in parts[:-1])])
        boxes = np.array([box for part in parts for box in part]).reshape(-1, 7)
        x, y, yaw, self._length, self._width, self._from, self._to = boxes.T
        self._yaw = yaw - eye.yaw
        c, s = np.cos(yaw), np.sin(yaw)
        # the camera in each box's own frame
        self._eye = np.stack([c * (eye.x - x) + s * (eye.y - y), c * (eye.y - y) - s * (eye.x - x)])

    def meet(self, bearing: np.ndarray, slope: np.ndarray) -> np.ndarray:
        """Return the way of each ray to things, furniture, notch [m], inf if it misses."""
        return np.concatenate([self._to_things(bearing, slope), self._to_rest(bearing, slope)], 1)

    def _to_things(self, bearing: np.ndarray, slope: np.ndarray) -> np.ndarray:
        c, s = np.cos(bearing)[:, None], np.sin(bearing)[:, None]
        x, y = self.things.T
        ahead, aside = c * x + s * y, c * y - s * x
        z = self.height + slope[:, None] * ahead
        step = np.clip((z / self._top * _BINS).astype(int), 0, _BINS - 1)
        rest = _HALF_WIDTH[self._shape, step] ** 2 - aside**2
        half = np.sqrt(np.maximum(rest, 0.0))
        rise = np.abs(slope)[:, None] * half
        met = (rest > 0) & (ahead > half) & (z + rise >= 0.0) & (z - rise <= self._top)
        return np.where(met, ahead - half, np.inf)

    def _to_rest(self, bearing: np.ndarray, slope: np.ndarray) -> np.ndarray:
        if not len(self._from):
            return np.empty((len(bearing), 0))
        near, far = self.cross(bearing)
        z = self.height + slope[:, None] * np.stack([near, far])
        met = (near < far) & (z.max(0) >= self._from) & (z.min(0) <= self._to)
        return np.minimum.reduceat(np.where(met, near, np.inf), self.first, axis=1)

    def cross(self, bearing: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where rays enter and leave each box in the plane [m]; far < near: they miss."""
        angle = bearing[:, None] - self._yaw
        heading = np.stack([np.cos(angle), np.sin(angle)])
        heading = np.where(np.abs(heading) < 1e-9, 1e-9, heading)
        middle = -self._eye[:, None] / heading
        half = np.stack([self._length, self._width])[:, None] / np.abs(heading)
        return np.maximum((middle - half).max(0), 0.0), (middle + half).min(0)


def _boxes(piece: Furniture) -> list[tuple[float, ...]]:
    """Return x, y, yaw, half length, half width, bottom and top of the parts of furniture."""
    x, y, yaw, a, b, _ = piece.footprint
    if piece.kind == "table":
        bottom, leg = piece.height - TABLE_TOP, TABLE_LEG / 2
    elif piece.kind == "person":
        bottom, leg = PERSON_LEGS, PERSON_LEG / 2
    else:
        return [(x, y, yaw, a, b, 0.0, piece.height)]
    legs = [(u, v, yaw, leg, leg, 0.0, bottom) for u, v in legs_of(piece)]
    return [(x, y, yaw, a, b, bottom, piece.height), *legs]


def legs_of(piece: Furniture) -> list[tuple[float, float]]:
    """Return the places of the legs of a table or person."""
    a, b = (piece.length - TABLE_LEG) / 2, (piece.width - TABLE_LEG) / 2
    corners = [(a, b), (-a, b), (-a, -b), (a, -b)]
    if piece.kind == "person":
        corners = [(PERSON_STANCE, 0.0), (-PERSON_STANCE, 0.0)]
    c, s = math.cos(piece.yaw), math.sin(piece.yaw)
    return [(piece.x + c * u - s * v, piece.y + s * u + c * v) for u, v in corners]


def look(room: Room, base: Pose) -> View:
    """Return the sights of everything in the room, in its order, and the free way.

    A share of something is visible if rays to its outline are inside the picture and meet nothing
    nearer. Of furniture wider than half of the picture, half a picture full is enough.
    """
    eye, scene = camera_of(base), Scene(room, base)
    bearing, slope, reach, weight = _rays(room, scene, eye)
    met = scene.meet(bearing.ravel(), slope.ravel())
    own = np.repeat(np.arange(len(bearing)), bearing[0].size if len(bearing) else 0)
    met[np.arange(len(own)), own] = np.inf
    clear = (met.min(1, initial=np.inf) > reach.ravel()).reshape(bearing.shape)
    clear &= inside(room.camera, bearing, slope)
    visible = np.minimum(1.0, (clear * weight).sum((1, 2)))
    ranges = np.maximum(0.0, distances(room.footprints, eye.x, eye.y))
    sights = [
        Sight(
            part.name,
            math.remainder(math.atan2(part.y - eye.y, part.x - eye.x) - eye.yaw, math.tau),
            float(ranges[i]),
            float(visible[i]),
        )
        for i, part in enumerate(room.parts)
    ]
    count = len(room.things)
    return View(tuple(sights[:count]), tuple(sights[count:]), free_way(room, base))


def inside(camera: Camera, bearing: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """Return which rays are inside the picture."""
    heading = np.stack([np.cos(bearing), np.sin(bearing), slope], -1)
    right, up, ahead = np.moveaxis(heading @ axes(camera).T, -1, 0)
    most = math.tan(camera.half_fov) * ahead
    return (ahead > 0) & (np.abs(right) <= most) & (np.abs(up) <= most / ASPECT)


def free_way(room: Room, base: Pose) -> float:
    """Return how far ahead [m] the base can go before it touches something, at most 5."""
    along = np.arange(0.0, FREE_MOST, 0.025)
    x, y = base.x + along * math.cos(base.yaw), base.y + along * math.sin(base.yaw)
    gaps = distances((*room.footprints, *room.walls), x, y)
    # what it touches already, beside or behind it, is not in its way
    near = ((gaps < ROBOT_RADIUS - 0.005) & (gaps < gaps[0] - 0.01)).any(-1)
    return float(along[near.argmax()]) if near.any() else FREE_MOST


def _rays(room: Room, scene: Scene, eye: Pose) -> Rays:
    """Return the rays to everything: four arrays [things and furniture, rows, columns]."""
    x, y = scene.things.T
    shape = [SHAPES.index(t.shape) for t in room.things]
    tall = np.array([HEIGHT[s] for s in SHAPES])[shape][:, None] * _ROWS
    half, away = _ROW_WIDTH[shape], np.hypot(x, y)
    aside = half[..., None] * (2 * _COLUMNS - 1)
    bearing = np.arctan2(y, x)[:, None, None] + np.arctan2(aside, away[:, None, None])
    way = np.hypot(aside, away[:, None, None])
    slope = (tall[..., None] - scene.height) / way
    weight = np.broadcast_to(
        half[..., None] / half.sum(1)[:, None, None] / len(_COLUMNS), way.shape
    )
    rays = [(bearing, slope, way, weight)]
    rays += [_rays_to(piece, i, scene, room.camera, eye) for i, piece in enumerate(room.furniture)]
    bearing, slope, way, weight = (np.concatenate(part) for part in zip(*rays, strict=True))
    return bearing, slope, way, weight


def _rays_to(piece: Furniture, number: int, scene: Scene, camera: Camera, eye: Pose) -> Rays:
    """Return the rays to one piece: to a table's legs, else spread over its sides."""
    middle = math.atan2(piece.y - eye.y, piece.x - eye.x) - eye.yaw
    corners = piece.footprint.inflated(0.0, arc=1) - (eye.x, eye.y)
    turned = np.arctan2(*corners.T[::-1]) - eye.yaw - middle
    low, high = (
        edge(np.remainder(turned + math.pi, math.tau) - math.pi) for edge in (np.min, np.max)
    )
    if piece.kind == "table":
        legs = np.array(legs_of(piece))[np.arange(len(_COLUMNS)) % 4] - (eye.x, eye.y)
        bearing, way = np.arctan2(*legs.T[::-1]) - eye.yaw, np.hypot(*legs.T) - TABLE_LEG
    else:
        bearing = middle + low + _COLUMNS * (high - low)
        way = scene.cross(bearing)[0][:, scene.first[number]]
    way = np.maximum(way, 0.01)[None, None].repeat(len(_ROWS), 1)
    slope = (_FURNITURE_ROWS[:, None] - scene.height) / way
    weight = np.full_like(way, max(1.0, (high - low) / camera.half_fov) / way.size)
    return np.broadcast_to(bearing, way.shape), slope, way, weight
