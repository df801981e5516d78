"""The floor plan of a room: what stands in it, the robot, its way and its view, from above."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from PIL import Image, ImageDraw

from collab_llm_lab.demo.tasks import Task
from collab_llm_nodes.sim.footprints import Footprint
from collab_llm_nodes.sim.pose import Pose
from collab_llm_nodes.sim.rooms import Colour, Furniture, Room, Thing
from collab_llm_nodes.sim.scenery import RGB, Box, boxes
from collab_llm_nodes.sim.view import camera_of

GOAL, WAY = "#2b8a3e", "#1971c2"
_DARK, _PAPER = "#343a40", "#ffffff"
_SHARPER = 3
"""Times that the plan is drawn larger than it is shown, for smooth edges."""
_WALL = 0.12
"""Thickness of walls as drawn [m]."""
_TALLEST = 1.8
"""Height of furniture at most [m]; what is higher are walls, windows and the ceiling."""
_SIGHT = 2.5
"""Length of the view as drawn [m]."""
_SMALLEST = 5.0
"""Radius of a thing at least [pixels]."""


def draw_plan(task: Task, path: Sequence[Pose], size: tuple[int, int]) -> Image.Image:
    """Return the plan of the task's room as RGB, in ``size`` [pixels] at most.

    Args:
        path: the robot's true poses so far, the newest last.
    """
    plan, room, robot = _Plan(task.room, size), task.room, path[-1]
    furniture = [box for box in boxes(room) if box.z + box.half_z < _TALLEST]
    for box in sorted(furniture, key=lambda box: box.z + box.half_z):
        corners = Footprint(box.x, box.y, box.yaw, box.half_x, box.half_y, 0.0).inflated(0.0, 1)
        plan.polygon(corners, fill=_rgba(box))
    for piece in room.furniture:
        plan.furniture(piece)
    plan.view(robot, room.camera.half_fov)
    for goal in task.goals:  # a stop in here is a success
        plan.polygon(goal.inflated(task.within, arc=8), fill=f"{GOAL}30", outline=GOAL, width=2)
    for thing in room.things:
        plan.thing(thing)
    plan.walls(room)
    plan.line(path)
    plan.robot(robot)
    return plan.image()


class _Plan:
    """A drawing in metres."""

    def __init__(self, room: Room, size: tuple[int, int]) -> None:
        width, depth = room.width + 2 * _WALL, room.depth + 2 * _WALL
        self._scale = min(size[0] / width, size[1] / depth) * _SHARPER
        self._depth = room.depth
        floor = tuple(round(255 * (0.5 * part + 0.5)) for part in room.looks.floor_colour)
        pixels = (round(width * self._scale), round(depth * self._scale))
        self._image = Image.new("RGB", pixels, floor)
        self._pen = ImageDraw.Draw(self._image, "RGBA")

    def image(self) -> Image.Image:
        width, height = self._image.size
        size = (width // _SHARPER, height // _SHARPER)
        return self._image.resize(size, Image.Resampling.LANCZOS)

    def polygon(
        self, points: Iterable[Sequence[float]], fill: str, outline: str = "", width: float = 1.0
    ) -> None:
        at = [self._at(x, y) for x, y in points]
        self._pen.polygon(at, fill=fill)
        if outline:
            thick = round(width * _SHARPER)
            self._pen.line([*at, at[0]], fill=outline, width=thick, joint="curve")

    def line(self, path: Sequence[Pose]) -> None:
        at = [self._at(pose.x, pose.y) for pose in path]
        if len(at) > 1:
            self._pen.line(at, fill=WAY, width=2 * _SHARPER, joint="curve")
        self._disc(*at[0], 2.5 * _SHARPER, WAY)

    def view(self, robot: Pose, half_fov: float) -> None:
        """Draw what the camera may see, whatever stands in the way."""
        eye = camera_of(robot)
        angles = [robot.yaw + half_fov * k / 8 for k in range(-8, 9)]
        rim = [(eye.x + _SIGHT * math.cos(a), eye.y + _SIGHT * math.sin(a)) for a in angles]
        self.polygon([(eye.x, eye.y), *rim], fill=f"{WAY}28")

    def furniture(self, piece: Furniture) -> None:
        if piece.kind == "person":
            self.polygon(_rounded(piece), fill="#868e96", outline=_DARK)
            self._disc(*self._at(piece.x, piece.y), 0.12 * self._scale, "#e8c9a8", _DARK)
        else:
            self.polygon(piece.footprint.inflated(0.0, arc=1), fill="#00000000", outline=_DARK)

    def thing(self, thing: Thing) -> None:
        """Draw a shape by its rim, and by what is seen inside it."""
        fill, inner = code_of(RGB[thing.colour]), code_of(RGB[thing.colour], 0.5)
        x, y = self._at(thing.x, thing.y)
        r = max(thing.radius * self._scale, _SMALLEST * _SHARPER)
        if thing.shape == "box":
            angles = [thing.yaw + math.pi * (0.25 + 0.5 * k) for k in range(4)]
            corners = [(x + r * math.cos(a), y - r * math.sin(a)) for a in angles]
            self._pen.polygon(corners, fill=fill, outline=_DARK, width=_SHARPER)
            return
        if thing.shape == "mug":  # its handle
            a = thing.yaw
            self._disc(x + r * math.cos(a), y - r * math.sin(a), 0.5 * r, "#00000000", fill, 3)
        self._disc(x, y, r, fill, _DARK)
        share = {"ball": 0.0, "cone": 0.2, "bottle": 0.4, "lamp": 0.5}.get(thing.shape, 0.65)
        self._disc(x, y, share * r, "#fff3bf" if thing.shape == "lamp" else inner)

    def walls(self, room: Room) -> None:
        if room.notch is not None:
            x, y = room.notch
            far = (room.width + 2 * _WALL, room.depth + 2 * _WALL)
            self.polygon([(x, y), (far[0], y), far, (x, far[1])], fill=_PAPER)
        thick = _WALL * self._scale / _SHARPER
        self.polygon(_outline(room), fill="#00000000", outline=_DARK, width=thick)

    def robot(self, pose: Pose) -> None:
        """Draw a body with its head ahead."""
        body = Footprint(pose.x, pose.y, pose.yaw, 0.2, 0.08, 0.1)
        x, y = pose.x + 0.3 * math.cos(pose.yaw), pose.y + 0.3 * math.sin(pose.yaw)
        head = Footprint(x, y, pose.yaw, 0.06, 0.06, 0.03)
        self.polygon(head.inflated(0.0, arc=3), fill=WAY, outline=_PAPER)
        self.polygon(body.inflated(0.0, arc=4), fill=_DARK, outline=_PAPER)

    def _at(self, x: float, y: float) -> tuple[float, float]:
        return self._scale * (x + _WALL), self._scale * (self._depth + _WALL - y)

    def _disc(
        self, x: float, y: float, r: float, fill: str, outline: str | None = None, width: int = 1
    ) -> None:
        """Draw a disc in pixels."""
        at = (x - r, y - r, x + r, y + r)
        self._pen.ellipse(at, fill=fill, outline=outline, width=width * _SHARPER)


def _outline(room: Room) -> list[tuple[float, float]]:
    """Return the middle of the walls, counter-clockwise."""
    low, w, d = -_WALL / 2, room.width + _WALL / 2, room.depth + _WALL / 2
    if room.notch is None:
        return [(low, low), (w, low), (w, d), (low, d)]
    x, y = (edge + _WALL / 2 for edge in room.notch)
    return [(low, low), (w, low), (w, y), (x, y), (x, d), (low, d)]


def _rounded(piece: Furniture) -> Iterable[Sequence[float]]:
    """Return the oblong of ``piece`` with round ends."""
    r = piece.width / 2
    half = piece.length / 2 - r
    return Footprint(piece.x, piece.y, piece.yaw, half, 0.0, r).inflated(0.0, arc=4)


def _rgba(box: Box) -> str:
    return f"{code_of(box.colour)}{round(255 * box.alpha):02x}"


def code_of(colour: Colour, share: float = 1.0) -> str:
    """Return ``colour`` as "#rrggbb"; a ``share`` below 1 makes it darker."""
    return "#" + "".join(f"{round(255 * share * part):02x}" for part in colour)
