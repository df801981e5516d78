"""Rooms of a home, drawn from an integer seed: outline, things, furniture, people, camera, start.

Lengths are metres, angles radians (+ = left, counter-clockwise).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.sim.footprints import Footprint, distances
from collab_llm_nodes.sim.pose import Pose

SHAPES = ("ball", "box", "cone", "bottle", "mug", "bucket", "lamp", "stool")
COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "white", "black")
NAMED_FURNITURE = ("table", "sofa", "shelf", "partition")
FURNITURE = (*NAMED_FURNITURE, "person")
FLOORS = ("plain", "wood", "tiles", "carpet")
ROBOT_RADIUS = 0.3
SUCCESS_DISTANCE = 0.75
"""m from the base's centre to the right thing's footprint at the stop."""
RADIUS = {
    "ball": 0.20,
    "box": 0.21,
    "cone": 0.20,
    "bottle": 0.13,
    "mug": 0.15,
    "bucket": 0.20,
    "lamp": 0.19,
    "stool": 0.19,
}
HEIGHT = {
    "ball": 0.40,
    "box": 0.28,
    "cone": 0.50,
    "bottle": 0.50,
    "mug": 0.32,
    "bucket": 0.34,
    "lamp": 0.48,
    "stool": 0.42,
}
FURNITURE_SIZE = {
    "table": (1.25, 0.75, 0.72),
    "sofa": (1.7, 0.85, 0.75),
    "shelf": (0.95, 0.35, 1.6),
    "partition": (1.5, 0.1, 1.5),
    "person": (0.46, 0.28, 1.7),
}
"""Length, width and height; each piece is up to 10 % longer or shorter."""
HELD_OUT_PAIRS = frozenset(
    {
        ("red", "ball"),
        ("green", "box"),
        ("blue", "cone"),
        ("yellow", "bottle"),
        ("orange", "mug"),
        ("purple", "bucket"),
        ("white", "lamp"),
        ("black", "stool"),
        ("red", "mug"),
        ("green", "lamp"),
        ("blue", "stool"),
        ("yellow", "bucket"),
    }
)
"""Pairs of colour and shape in no training room; each colour and shape is in at most two."""
KINDS = tuple((colour, shape) for colour in COLOURS for shape in SHAPES)
NAMES = tuple(f"{colour} {shape}" for colour, shape in KINDS)
"""Names of all things."""

_CELL = 0.1
_CLEARANCE = 0.43
"""Clearance of the centre, so that between two cells a planner still has 0.38 m."""
_APPROACH = 0.65
_THING_GAP = 0.5
_START_GAP = 0.6
_ATTEMPTS = 500
_ALONG_WALL = {"table": 0.3, "sofa": 0.7, "shelf": 0.9, "partition": 0.5, "person": 0.0}
_PAINT = {
    "grey": (0.86, 0.85, 0.82),
    "yellow": (0.87, 0.78, 0.46),
    "brown": (0.62, 0.47, 0.36),
    "blue": (0.52, 0.64, 0.78),
}
_FLOOR_PAINT = ((0.72, 0.7, 0.67), (0.78, 0.6, 0.42), (0.52, 0.41, 0.33), (0.58, 0.62, 0.65))

Range = tuple[float, float]
Colour = tuple[float, float, float]


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

    @property
    def radius(self) -> float:
        return RADIUS[self.shape]

    @property
    def footprint(self) -> Footprint:
        return Footprint.circle(self.x, self.y, RADIUS[self.shape])


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

    @property
    def radius(self) -> float:
        """Radius of the circle around its footprint."""
        return math.hypot(self.length, self.width) / 2

    @property
    def footprint(self) -> Footprint:
        return Footprint.oblong(self.x, self.y, self.yaw, self.length, self.width)


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
class Looks:
    """Paint and light of one room; colours are RGB from 0 to 1."""

    floor: str = "plain"
    """One of ``FLOORS``."""
    floor_colour: Colour = (0.6, 0.55, 0.5)
    wall_colour: Colour = (0.85, 0.84, 0.8)
    wallpaper: bool = False
    """Stripes on the walls."""
    light: float = 1.0
    """Brightness of all lights, 1 = normal."""
    light_yaw: float = 0.5
    """Direction of the light."""
    noise: float = 0.0
    """Largest shift of a thing's colour, drawn from the room's seed."""


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
    looks: Looks = Looks()

    @property
    def goal(self) -> Thing:
        """The first thing; a request may be for another."""
        return self.things[0]

    @property
    def parts(self) -> list[Thing | Furniture]:
        """All things, then all furniture; their numbers are those of ``footprints``."""
        return [*self.things, *self.furniture]

    @cached_property
    def footprints(self) -> tuple[Footprint, ...]:
        """Footprints of all ``parts``."""
        return tuple(part.footprint for part in self.parts)

    @cached_property
    def walls(self) -> tuple[Footprint, ...]:
        """Footprints of the four walls, and of the corner that an L-shaped room lacks."""
        w, d, thick = self.width, self.depth, 1.0
        walls = [
            Footprint.oblong(w / 2, -thick / 2, 0.0, w + 2 * thick, thick),
            Footprint.oblong(w / 2, d + thick / 2, 0.0, w + 2 * thick, thick),
            Footprint.oblong(-thick / 2, d / 2, 0.0, thick, d + 2 * thick),
            Footprint.oblong(w + thick / 2, d / 2, 0.0, thick, d + 2 * thick),
        ]
        if self.notch is not None:
            x, y = self.notch
            walls.append(Footprint.oblong((x + w) / 2, (y + d) / 2, 0.0, w - x, d - y))
        return tuple(walls)

    def push_out(self, x: float, y: float, radius: float) -> tuple[float, float]:
        """Return the nearest place where a disc of ``radius`` [m] touches nothing solid."""
        solid = (*self.footprints, *self.walls)
        for _ in range(3):  # out of one may be into another
            touched = np.flatnonzero(distances(solid, x, y) < radius)
            for i in touched:
                x, y = solid[i].push_out(x, y, radius)
            if len(touched) < 2:
                break
        return x, y


@dataclass(frozen=True)
class Style:
    """Kind of rooms to draw; every pair of numbers is a range, ends included."""

    size: Range = (4.0, 12.0)
    l_shaped: float = 0.25
    """Share of rooms that lack a corner."""
    things: tuple[int, int] = (2, 10)
    furniture: tuple[int, int] = (0, 5)
    people: tuple[int, int] = (0, 2)
    pairs: Literal["trained", "held_out", "all"] = "trained"
    """Colours with shapes: none held out; the first thing's held out; any."""
    first: str = ""
    """Name of the first thing, such as "red mug", held out or not; drawn if empty."""
    blocked: bool = False
    """The straight way from the start to the first thing leads through furniture."""
    camera_height: Range = (0.25, 0.45)
    camera_pitch: Range = (7.0, 17.0)
    """Degrees downwards."""
    camera_roll: Range = (-2.0, 2.0)
    """Degrees."""
    fov: Range = (76.5, 103.5)
    """Degrees, horizontal, the whole angle."""
    sway: Range = (0.0, 1.0)
    jpeg_quality: tuple[int, int] = (60, 95)
    late: float = 0.25
    """Share of rooms whose pictures are one action old."""
    floors: tuple[str, ...] = FLOORS
    walls: Literal["any", "grey", "yellow", "brown", "blue"] = "any"
    light: Range = (0.7, 1.15)
    noise: float = 0.06
    """Largest shift of a thing's colour."""


def make_room(seed: int, style: Style | None = None) -> Room:
    """Return the room of ``seed``: the robot can come within ``SUCCESS_DISTANCE`` of every thing.

    Raises ``CollabError`` if no such room is found, as with ten things on 4 square metres.
    """
    style = style or Style()
    for attempt in range(_ATTEMPTS):
        rng = np.random.default_rng([seed, attempt, 0x403E])
        room = _draw(rng, seed, style)
        if room is not None:
            return room
    raise CollabError(
        f"no room of seed {seed} in {_ATTEMPTS} attempts",
        field="style",
        remedy="ask for larger rooms, or fewer things and furniture",
    )


def _draw(rng: np.random.Generator, seed: int, style: Style) -> Room | None:
    """Return a room, or None if something finds no place or cannot be reached."""
    shell = _shell(rng, seed, style)
    area = shell.width * shell.depth
    if shell.notch is not None:
        area -= (shell.width - shell.notch[0]) * (shell.depth - shell.notch[1])
    kinds = [
        str(rng.choice(NAMED_FURNITURE)) for _ in range(_count(rng, style.furniture, area / 6))
    ]
    kinds += ["person"] * _count(rng, style.people, area / 12)
    if style.blocked and not kinds:
        kinds = [str(rng.choice(NAMED_FURNITURE))]
    furniture = _furnish(rng, shell, kinds)
    if furniture is None:
        return None
    room = replace(shell, furniture=furniture)
    things = _scatter(rng, room, _pairs(rng, style, _count(rng, style.things, area / 2.5)))
    if things is None:
        return None
    room = replace(room, things=things)
    start = _start(rng, room, style.blocked)
    return None if start is None else replace(room, start=start)


def _count(rng: np.random.Generator, wanted: tuple[int, int], most: float) -> int:
    """Return a number in the range wanted, at most ``most`` where the range allows that."""
    return min(int(rng.integers(wanted[0], wanted[1] + 1)), max(wanted[0], int(most)))


def _shell(rng: np.random.Generator, seed: int, style: Style) -> Room:
    """Return the outline, camera and looks of a room without anything in it."""
    # homes have more small rooms than large ones
    low, high = style.size
    width, depth = (low + (high - low) * float(u) ** 1.5 for u in rng.random(2))
    notch = None
    if rng.random() < style.l_shaped:
        share = rng.uniform(0.45, 0.7, 2)
        notch = (width * float(share[0]), depth * float(share[1]))
    camera = Camera(
        height=float(rng.uniform(*style.camera_height)),
        pitch=math.radians(rng.uniform(*style.camera_pitch)),
        roll=math.radians(rng.uniform(*style.camera_roll)),
        half_fov=math.radians(rng.uniform(*style.fov) / 2),
        sway=float(rng.uniform(*style.sway)),
        jpeg_quality=int(rng.integers(style.jpeg_quality[0], style.jpeg_quality[1] + 1)),
        late=bool(rng.random() < style.late),
    )
    paints = list(_PAINT) if style.walls == "any" else [style.walls]
    looks = Looks(
        floor=str(rng.choice(style.floors)),
        floor_colour=_shade(rng, _FLOOR_PAINT[int(rng.integers(len(_FLOOR_PAINT)))]),
        wall_colour=_shade(rng, _PAINT[str(rng.choice(paints))]),
        wallpaper=bool(rng.random() < 0.25),
        light=float(rng.uniform(*style.light)),
        light_yaw=float(rng.uniform(-math.pi, math.pi)),
        noise=style.noise,
    )
    return Room(seed, width, depth, notch, (), (), camera, Pose(0.0, 0.0, 0.0), looks)


def _shade(rng: np.random.Generator, paint: Colour) -> Colour:
    """Return the paint, somewhat lighter or darker, with a tint."""
    r, g, b = np.clip(np.array(paint) * rng.uniform(0.75, 1.1) + rng.uniform(-0.04, 0.04, 3), 0, 1)
    return float(r), float(g), float(b)


def _pairs(rng: np.random.Generator, style: Style, count: int) -> list[tuple[str, str]]:
    """Return different pairs of colour and shape, most of which share one with the first."""
    held_out = sorted(HELD_OUT_PAIRS)
    allowed = [k for k in KINDS if style.pairs != "trained" or k not in HELD_OUT_PAIRS]
    firsts = held_out if style.pairs == "held_out" else allowed
    if style.first:
        firsts = [kind for kind in KINDS if " ".join(kind) == style.first]
    pairs = [firsts[int(rng.integers(len(firsts)))]]
    while len(pairs) < count:
        others = [k for k in allowed if k not in pairs]
        like = [k for k in others if (k[0] == pairs[0][0]) != (k[1] == pairs[0][1])]
        choice = like if like and rng.random() < 0.6 else others
        pairs.append(choice[int(rng.integers(len(choice)))])
    return pairs


def _furnish(
    rng: np.random.Generator, room: Room, kinds: list[str]
) -> tuple[Furniture, ...] | None:
    """Return a piece of each kind, or None if one finds no place."""
    placed: list[Furniture] = []
    for kind in kinds:
        for _ in range(30):
            piece = _piece(rng, room, kind)
            edge = _points(piece.footprint)
            if distances(room.walls, *edge).min() < 0.0:
                continue
            gap = 0.1 if kind != "person" else 0.4
            if all(
                min(distances([p.footprint], *edge).min(), _gap(piece, p)) >= gap for p in placed
            ):
                placed.append(piece)
                break
        else:
            return None
    return tuple(placed)


def _gap(a: Furniture, b: Furniture) -> float:
    return float(distances([a.footprint], *_points(b.footprint)).min())


def _piece(rng: np.random.Generator, room: Room, kind: str) -> Furniture:
    """Return a piece of furniture somewhere, mostly along a wall if it is of that kind."""
    length, width, height = (side * float(rng.uniform(0.9, 1.1)) for side in FURNITURE_SIZE[kind])
    if rng.random() >= _ALONG_WALL[kind]:
        x, y = rng.uniform(0.0, room.width), rng.uniform(0.0, room.depth)
        return Furniture(kind, x, y, float(rng.uniform(-math.pi, math.pi)), length, width, height)
    # its front, the left side of its length, looks into the room; a partition stands off the wall
    inwards = math.pi / 2 * int(rng.integers(4))
    yaw = inwards if kind == "partition" else inwards - math.pi / 2
    off = (length if kind == "partition" else width) / 2 + 0.02
    along = float(rng.uniform(0.0, 1.0))
    x, y = along * room.width, along * room.depth
    if abs(math.cos(inwards)) > 0.5:
        x = off if math.cos(inwards) > 0 else room.width - off
    else:
        y = off if math.sin(inwards) > 0 else room.depth - off
    return Furniture(kind, x, y, math.remainder(yaw, math.tau), length, width, height)


def _points(footprint: Footprint) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y of points all over an oblong."""
    a, b = np.meshgrid(
        np.linspace(-footprint.half_length, footprint.half_length, 9),
        np.linspace(-footprint.half_width, footprint.half_width, 5),
    )
    c, s = math.cos(footprint.yaw), math.sin(footprint.yaw)
    return (footprint.x + c * a - s * b).ravel(), (footprint.y + s * a + c * b).ravel()


def _scatter(
    rng: np.random.Generator, room: Room, pairs: list[tuple[str, str]]
) -> tuple[Thing, ...] | None:
    """Return things at free places of the floor, or None if there are too few."""
    x, y = rng.uniform(0.0, room.width, 300), rng.uniform(0.0, room.depth, 300)
    free = distances(room.walls, x, y).min(-1) >= 0.1 + max(RADIUS.values())
    if room.furniture:
        free &= distances(room.footprints, x, y).min(-1) >= 0.15 + max(RADIUS.values())
    spots = np.stack([x, y], -1)[free]
    things: list[Thing] = []
    for colour, shape in pairs:
        if not len(spots):
            return None
        u, v = (float(w) for w in spots[0])
        thing = Thing(shape, colour, u, v, float(rng.uniform(-math.pi, math.pi)))
        apart = np.hypot(*(spots - spots[0]).T) - RADIUS[shape] - max(RADIUS.values())
        spots = spots[apart >= _THING_GAP]
        things.append(thing)
    return tuple(things)


def _start(rng: np.random.Generator, room: Room, blocked: bool) -> Pose | None:
    """Return a start from which the robot can come to every thing, or None."""
    x, y, free = _grid(room)
    if not free.any():
        return None
    cells = np.argwhere(free)
    reached = _flood(free, *cells[int(rng.integers(len(cells)))])
    places = np.stack([x[reached], y[reached]], -1)
    to_things = distances(room.footprints[: len(room.things)], *places.T)
    if not all(_approachable(room, i, places, d) for i, d in enumerate(to_things.T)):
        return None
    starts = places[to_things.min(-1) >= _START_GAP]
    starts = starts[rng.permutation(len(starts))[:100]]
    if blocked:
        to = room.things[0]
        starts = starts[_to_furniture(room, starts, np.array([to.x, to.y])) < ROBOT_RADIUS]
    if not len(starts):
        return None
    u, v = (float(w) for w in starts[0])
    return Pose(u, v, float(rng.uniform(-math.pi, math.pi)))


def _grid(room: Room) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x, y and freedom of the cells of the floor, [columns, rows] each."""
    columns, rows = int(room.width / _CELL), int(room.depth / _CELL)
    x, y = np.meshgrid(
        (np.arange(columns) + 0.5) * _CELL, (np.arange(rows) + 0.5) * _CELL, indexing="ij"
    )
    free = np.ones((columns, rows), bool)
    for part in (*room.footprints, *room.walls):
        # only the cells that it may touch: distances to all cells would take most of the time
        c, s = abs(math.cos(part.yaw)), abs(math.sin(part.yaw))
        reach = part.radius + _CLEARANCE
        across = c * part.half_length + s * part.half_width + reach
        along = s * part.half_length + c * part.half_width + reach
        window = (
            slice(
                max(0, int((part.x - across) / _CELL)), max(0, int((part.x + across) / _CELL) + 1)
            ),
            slice(max(0, int((part.y - along) / _CELL)), max(0, int((part.y + along) / _CELL) + 1)),
        )
        free[window] &= distances([part], x[window], y[window])[..., 0] >= _CLEARANCE
    return x, y, free


def _flood(free: np.ndarray, column: int, row: int) -> np.ndarray:
    """Return the free cells that are connected, side by side, with one cell."""
    reached = np.zeros_like(free)
    reached[column, row] = True
    # each run of free cells is filled at once, columns and rows in turn
    runs = [np.cumsum(~free, axis) * free for axis in (0, 1)]
    for axis, run in enumerate(runs):
        run += np.expand_dims(np.arange(free.shape[1 - axis]), axis) * (free.shape[axis] + 1)
    before = 0
    while before != (before := int(reached.sum())):
        for run in runs:
            hit = np.zeros(int(run.max()) + 1, bool)
            hit[run[reached]] = True
            reached = hit[run] & free
    return reached


def _approachable(room: Room, thing: int, places: np.ndarray, to_thing: np.ndarray) -> bool:
    """Return True if the thing is near one of the places and no furniture between them."""
    near = places[to_thing <= _APPROACH]
    near = near[:: 1 + len(near) // 12]
    if not len(near) or not room.furniture:
        return bool(len(near))
    to = room.things[thing]
    return bool((_to_furniture(room, near, np.array([to.x, to.y])) > 0.02).any())


def _to_furniture(room: Room, places: np.ndarray, to: np.ndarray) -> np.ndarray:
    """Return how close the straight ways from ``places`` come to furniture [m]: [places]."""
    if not room.furniture:
        return np.full(len(places), np.inf)
    share = np.linspace(0.0, 1.0, 60)[:, None, None]
    way = places + share * (to - places)
    return distances(room.footprints[len(room.things) :], way[..., 0], way[..., 1]).min((0, -1))
