"""Parts of a home for the renderer: boxes of furniture and walls, shapes of things, textures.

A box is its middle, half sizes and yaw in metres, with a colour; everything else is MuJoCo XML.
"""

from __future__ import annotations

import io
import math
from typing import NamedTuple

import numpy as np
from PIL import Image

from collab_llm_nodes.sim.rooms import HEIGHT, RADIUS, Colour, Furniture, Room
from collab_llm_nodes.sim.view import (
    OUTLINE,
    PERSON_LEG,
    PERSON_LEGS,
    PERSON_STANCE,
    TABLE_LEG,
    TABLE_TOP,
)

WALL_HEIGHT = 2.6
RGB: dict[str, Colour] = {
    "red": (0.80, 0.07, 0.07),
    "green": (0.08, 0.52, 0.14),
    "blue": (0.10, 0.20, 0.78),
    "yellow": (0.93, 0.80, 0.06),
    "orange": (0.95, 0.43, 0.04),
    "purple": (0.48, 0.14, 0.62),
    "white": (0.94, 0.94, 0.93),
    "black": (0.06, 0.06, 0.07),
}
_WOODS: tuple[Colour, ...] = ((0.72, 0.53, 0.33), (0.45, 0.3, 0.19), (0.82, 0.72, 0.56))
_FABRICS: tuple[Colour, ...] = (
    (0.55, 0.53, 0.5),
    (0.35, 0.4, 0.47),
    (0.6, 0.5, 0.4),
    (0.42, 0.46, 0.38),
    (0.5, 0.36, 0.36),
)
_BOOKS: tuple[Colour, ...] = (
    (0.5, 0.25, 0.22),
    (0.25, 0.35, 0.45),
    (0.6, 0.55, 0.4),
    (0.3, 0.4, 0.3),
)
_SHADOW = 0.3
PAINTED, DETAIL, TROUSERS = 1, 2, 3
"""Groups of geoms; the first and the third get their colours later."""


MATERIALS = ("matt", "wood", "tiles", "carpet", "stripes")


class Box(NamedTuple):
    """One box of the scene; ``material`` is a name of ``MATERIALS``."""

    x: float
    y: float
    z: float
    half_x: float
    half_y: float
    half_z: float
    yaw: float
    colour: Colour
    alpha: float = 1.0
    material: str = "matt"


def boxes(room: Room) -> list[Box]:
    """Return all boxes of a room: walls with what hangs there, a rug, furniture."""
    rng = np.random.default_rng([room.seed, 0xB0C5])
    built = _walls(room) + _hung(rng, room)
    if rng.random() < 0.4:
        x, y = rng.uniform(0.3, 0.7) * room.width, rng.uniform(0.3, 0.7) * room.depth
        half = rng.uniform(0.6, 1.2, 2)
        if room.notch is None or x + half[0] < room.notch[0] or y + half[1] < room.notch[1]:
            rug = _fabric(rng)
            built.append(Box(x, y, 0.0, half[0], half[1], 0.004, 0.0, rug, material="carpet"))
    for piece in room.furniture:
        if piece.kind != "person":
            built += [_placed(piece, box) for box in _BUILT[piece.kind](rng, piece)]
        a, b = piece.length / 2 + 0.05, piece.width / 2 + 0.05
        black = (0.0, 0.0, 0.0)
        built.append(Box(piece.x, piece.y, 0.005, a, b, 0.001, piece.yaw, black, 0.5 * _SHADOW))
    return built


def _placed(piece: Furniture, box: Box) -> Box:
    c, s = math.cos(piece.yaw), math.sin(piece.yaw)
    x, y = piece.x + c * box.x - s * box.y, piece.y + s * box.x + c * box.y
    return box._replace(x=x, y=y, yaw=piece.yaw)


def _box(
    x: tuple[float, float],
    y: tuple[float, float],
    z: tuple[float, float],
    colour: Colour,
    material: str = "matt",
) -> Box:
    """Return the box between pairs of coordinates."""
    (a, b), (c, d), (e, f) = x, y, z
    middle = ((a + b) / 2, (c + d) / 2, (e + f) / 2)
    return Box(*middle, (b - a) / 2, (d - c) / 2, (f - e) / 2, 0.0, colour, 1.0, material)


def _wood(rng: np.random.Generator) -> Colour:
    return _WOODS[int(rng.integers(len(_WOODS)))]


def _fabric(rng: np.random.Generator) -> Colour:
    return _FABRICS[int(rng.integers(len(_FABRICS)))]


def _lighter(colour: Colour, by: float) -> Colour:
    r, g, b = (min(1.0, c * by) for c in colour)
    return r, g, b


def _table(rng: np.random.Generator, piece: Furniture) -> list[Box]:
    a, b, h = piece.length / 2, piece.width / 2, piece.height
    wood = _wood(rng)
    legs = [
        _box((x, x + TABLE_LEG), (y, y + TABLE_LEG), (0.0, h - TABLE_TOP), _lighter(wood, 0.8))
        for x in (-a, a - TABLE_LEG)
        for y in (-b, b - TABLE_LEG)
    ]
    return [_box((-a, a), (-b, b), (h - TABLE_TOP, h), wood, "wood"), *legs]


def _sofa(rng: np.random.Generator, piece: Furniture) -> list[Box]:
    a, b, h = piece.length / 2, piece.width / 2, piece.height
    fabric = _fabric(rng)
    dark, light = _lighter(fabric, 0.85), _lighter(fabric, 1.18)
    arm, back = 0.19, 0.24
    inner = a - arm - 0.01
    return [
        _box((-a, a), (-b, b - 0.04), (0.05, 0.26), dark),
        _box((-a, a), (-b, -b + back), (0.26, h), fabric),
        *(_box(x, (-b, b), (0.05, 0.6), fabric) for x in ((-a, -a + arm), (a - arm, a))),
        *(_box(x, (-b + back, b), (0.27, 0.43), light) for x in ((-inner, -0.01), (0.01, inner))),
        *(
            _box(x, (-b + back, -b + back + 0.14), (0.43, h - 0.06), light)
            for x in ((-inner, -0.01), (0.01, inner))
        ),
    ]


def _shelf(rng: np.random.Generator, piece: Furniture) -> list[Box]:
    a, b, h = piece.length / 2, piece.width / 2, piece.height
    wood, board, floors = _wood(rng), 0.03, 4
    built = [_box(x, (-b, b), (0.0, h), wood) for x in ((-a, -a + board), (a - board, a))]
    built.append(_box((-a, a), (-b, -b + 0.02), (0.0, h), _lighter(wood, 0.6)))
    step = (h - board - 0.06) / floors
    for k in range(floors + 1):
        z = 0.06 + k * step
        built.append(_box((-a, a), (-b, b), (z, z + board), wood))
        if k == floors:
            break
        x = -a + board + rng.uniform(0.0, 0.1)
        while x < a - 0.25 and rng.random() < 0.8:
            wide, tall = rng.uniform(0.1, 0.2), rng.uniform(0.5, 0.85) * step
            book = _BOOKS[int(rng.integers(len(_BOOKS)))]
            built.append(_box((x, x + wide), (-b + 0.05, b - 0.06), (z + board, z + tall), book))
            x += wide + rng.uniform(0.0, 0.15)
    return built


def _partition(rng: np.random.Generator, piece: Furniture) -> list[Box]:
    a, b, h = piece.length / 2, piece.width / 2, piece.height
    frame, paper = _wood(rng), (0.88, 0.85, 0.78)
    built = [_box((-a, a), (-0.015, 0.015), (0.05, h - 0.02), paper)]
    for k in range(4):
        x = -a + k * (2 * a - 0.05) / 3
        built.append(_box((x, x + 0.05), (-b, b), (0.0, h), frame))
    built += [_box((-a, a), (-b / 2, b / 2), (z, z + 0.05), frame) for z in (0.05, h / 2, h - 0.05)]
    return built


_BUILT = {"table": _table, "sofa": _sofa, "shelf": _shelf, "partition": _partition}


def _walls(room: Room) -> list[Box]:
    """Return walls and skirting boards, and the corner that is missing."""
    paint, skirting = room.looks.wall_colour, (0.93, 0.92, 0.9)
    material = "stripes" if room.looks.wallpaper else "matt"
    built = []
    for wall in room.walls:
        x, y, _, a, b, _ = wall
        half = WALL_HEIGHT / 2
        built.append(Box(x, y, half, a, b, half, 0.0, paint, material=material))
        built.append(Box(x, y, 0.04, a + 0.015, b + 0.015, 0.04, 0.0, skirting))
    ceiling = (room.width / 2, room.depth / 2, WALL_HEIGHT + 0.1)
    built.append(Box(*ceiling, room.width, room.depth, 0.1, 0.0, (0.95, 0.95, 0.94)))
    return built


def _hung(rng: np.random.Generator, room: Room) -> list[Box]:
    """Return windows and pictures on the four walls, where the walls are."""
    built = []
    for wall in range(4):
        along_x = wall < 2
        length = room.width if along_x else room.depth
        if room.notch is not None and wall in (1, 3):
            length = room.notch[0] if along_x else room.notch[1]
        for _ in range(int(rng.integers(0, 3)) if length > 2.2 else 0):
            window = rng.random() < 0.5
            half, tall = (rng.uniform(0.4, 0.8), 0.5) if window else rng.uniform(0.2, 0.4, 2)
            at, z = rng.uniform(0.9, length - 0.9), rng.uniform(1.35, 1.6)
            pane = (0.72, 0.84, 0.95) if window else _lighter(_fabric(rng), 1.3)
            frame = (0.95, 0.95, 0.95) if window else _wood(rng)
            for out, grow, colour in ((0.015, 0.05, frame), (0.025, 0.0, pane)):
                face = 0.0 if wall % 2 == 0 else (room.depth if along_x else room.width)
                x, y = (at, face) if along_x else (face, at)
                a, b = (half + grow, out) if along_x else (out, half + grow)
                built.append(Box(x, y, z, a, b, tall + grow, 0.0, colour))
    return built


def thing_xml(shape: str) -> str:
    """Return the geoms of one shape; those without a colour are ``PAINTED``."""
    r, h = RADIUS[shape], HEIGHT[shape]
    drawn = {
        "ball": f'<geom type="sphere" size="{r}" pos="0 0 {r}"/>',
        "box": f'<geom type="box" size="0.17 0.17 {h / 2}" pos="0 0 {h / 2}"/>',
        "cone": '<geom type="mesh" mesh="cone"/>',
        "bottle": '<geom type="mesh" mesh="bottle"/><geom type="mesh" mesh="shoulder"/>'
        f'<geom type="cylinder" size="0.05 {0.15 * h}" pos="0 0 {0.85 * h}"/>',
        "mug": f'<geom type="cylinder" size="0.13 {h / 2}" pos="0 0 {h / 2}"/>'
        + _tube([(0.12, 0.07), (0.22, 0.09), (0.23, 0.22), (0.12, 0.26)], 0.025)
        + _hollow(0.11, h),
        "bucket": '<geom type="mesh" mesh="bucket"/>'
        + _tube(
            [(-0.19, h), (-0.15, h + 0.11), (0.0, h + 0.16), (0.15, h + 0.11), (0.19, h)],
            0.012,
            f'rgba="0.45 0.45 0.47 1" group="{DETAIL}"',
        )
        + _hollow(0.18, h),
        "lamp": '<geom type="mesh" mesh="foot"/><geom type="mesh" mesh="shade"/>'
        f'<geom type="cylinder" size="0.045 {0.2 * h}" pos="0 0 {0.25 * h}"/>',
        "stool": f'<geom type="cylinder" size="{r} 0.035" pos="0 0 {h - 0.035}"/>'
        + "".join(
            f'<geom type="capsule" size="0.026" fromto="{0.11 * c} {0.11 * s} {h - 0.05}'
            f' {0.16 * c} {0.16 * s} 0.02"/>'
            for c, s in ((0.7, 0.7), (-0.7, 0.7), (-0.7, -0.7), (0.7, -0.7))
        ),
    }
    shadow = f'<geom type="cylinder" size="{1.2 * r} 0.001" pos="0 0 0.006" group="{DETAIL}"'
    return drawn[shape] + shadow + f' rgba="0 0 0 {_SHADOW}"/>'


def _tube(points: list[tuple[float, float]], radius: float, paint: str = "") -> str:
    """Return a bent tube through points of the plane x, z."""
    return "".join(
        f'<geom type="capsule" size="{radius}" fromto="{a} 0 {b} {c} 0 {d}" {paint}/>'
        for (a, b), (c, d) in zip(points, points[1:], strict=False)
    )


def _hollow(radius: float, height: float) -> str:
    """Return the dark inside of a vessel, as a lid."""
    return (
        f'<geom type="cylinder" size="{radius} 0.002" pos="0 0 {height}" group="{DETAIL}"'
        ' rgba="0.2 0.19 0.18 1"/>'
    )


PERSON_XML = (
    "".join(
        f'<geom type="capsule" size="{PERSON_LEG / 2}" fromto="{x} 0 {PERSON_LEGS} {x} 0 0.1"'
        f' group="{TROUSERS}"/><geom type="box" size="0.06 0.13 0.045"'
        f' pos="{x} 0.05 0.045" group="{DETAIL}" rgba="0.2 0.16 0.14 1"/>'
        f'<geom type="capsule" size="0.05" fromto="{2.1 * x} 0 1.35 {2.3 * x} 0.03 0.8"/>'
        for x in (-PERSON_STANCE, PERSON_STANCE)
    )
    + '<geom type="ellipsoid" size="0.21 0.13 0.36" pos="0 0 1.12"/>'
    f'<geom type="sphere" size="0.12" pos="0 0 1.6" group="{DETAIL}" rgba="0.8 0.62 0.5 1"/>'
)
"""Geoms of a standing person; the shirt (``PAINTED``) and the trousers get their colours later."""


def meshes_xml() -> str:
    """Return the turned parts: ``OUTLINE`` between two shares of the height."""
    parts = {
        "cone": ("cone", 0, 1),
        "bottle": ("bottle", 0, 1),
        "shoulder": ("bottle", 1, 2),
        "bucket": ("bucket", 0, 1),
        "foot": ("lamp", 0, 1),
        "shade": ("lamp", 4, 5),
    }
    meshes = []
    for name, (shape, low, high) in parts.items():
        vertices = []
        for share, radius in (OUTLINE[shape][low], OUTLINE[shape][high]):
            turns = [k * math.tau / 20 for k in range(20)] if radius else [0.0]
            vertices += [
                f"{radius * math.cos(t):.4f} {radius * math.sin(t):.4f} {share * HEIGHT[shape]:.4f}"
                for t in turns
            ]
        meshes.append(f'<mesh name="{name}" vertex="{" ".join(vertices)}"/>')
    return "".join(meshes)


def textures() -> dict[str, bytes]:
    """Return the textures as PNG, light grey: the colour of a geom tints them."""
    rng = np.random.default_rng(0x7E0)
    size = 256
    v, u = np.mgrid[0:size, 0:size]
    plank = v // 32
    grain = rng.normal(0.0, 0.05, (8, size))[plank, u] * 0.5 + rng.normal(0, 0.02, (size, size))
    tone = rng.uniform(-0.12, 0.08, (8, 2))[plank, ((u + 80 * (plank % 3)) // 128) % 2]
    seam = (v % 32 < 2) | ((u + 80 * (plank % 3)) % 128 < 2)
    wood = np.where(seam, 0.55, 0.88 + tone + grain)
    chequer = (u // 128 + v // 128) % 2
    tiles = np.where((u % 128 < 5) | (v % 128 < 5), 0.6, 0.97 - 0.14 * chequer)
    carpet = 0.85 + rng.normal(0.0, 0.1, (size, size)) + 0.05 * np.sin(u * math.tau / 32)
    stripes = 0.93 + 0.06 * np.sign(np.sin(u * math.tau / 64))
    pictures = {"wood": wood, "tiles": tiles, "carpet": carpet, "stripes": stripes}
    return {f"{name}.png": _png(picture) for name, picture in pictures.items()}


def _png(grey: np.ndarray) -> bytes:
    levels = (np.clip(grey, 0.0, 1.0) * 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(np.repeat(levels[..., None], 3, -1)).save(buffer, "PNG")
    return buffer.getvalue()
