"""Pictures with the things that each image token shows, and shards of them on disk.

A shard is a folder of arrays; pictures are kept as the JPEGs that the robot would send.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from collab_llm_lab.training.nav.asks import Ask, read_asks, write_asks
from collab_llm_lab.training.nav.forward import GRID, MERGE, PATCH
from collab_llm_lab.training.run import replacing
from collab_llm_nodes.sim.footprints import distances
from collab_llm_nodes.sim.jpeg import from_jpeg, to_jpeg
from collab_llm_nodes.sim.pose import Pose
from collab_llm_nodes.sim.renderer import CELL, Renderer, footprint
from collab_llm_nodes.sim.rooms import (
    FURNITURE,
    ROBOT_RADIUS,
    Room,
)
from collab_llm_nodes.sim.rooms import NAMES as THINGS
from collab_llm_nodes.sim.view import Sight, View, look

NAMES = (*THINGS, *FURNITURE)
"""Every name that something in a room can have, in the order of their numbers."""
MOST_SIGHTS = 20
"""Things and furniture of a room at most."""

_FIELDS: dict[str, tuple[tuple[int, ...], type]] = {
    "name": ((MOST_SIGHTS,), np.int8),  # index into NAMES, -1 = no such thing
    "bearing": ((MOST_SIGHTS,), np.float32),
    "range": ((MOST_SIGHTS,), np.float32),
    "visible": ((MOST_SIGHTS,), np.float32),
    "free": ((), np.float32),
    "shows": ((GRID.tokens,), np.uint32),  # bit i: the token shows sight i
    "seed": ((), np.int64),  # of the room
    "pose": ((3,), np.float64),
}


@dataclass(frozen=True)
class Snapshot:
    """One place in one room: the picture, every sight, and which image tokens show it."""

    jpeg: bytes
    name: np.ndarray
    bearing: np.ndarray
    range: np.ndarray
    visible: np.ndarray
    free: float
    shows: np.ndarray
    seed: int
    pose: tuple[float, float, float]


def snapshot(renderer: Renderer, room: Room, pose: Pose, number: int) -> Snapshot:
    """Return picture and labels of a place in the entered room.

    Args:
        number: of the picture in this room; the camera's sway follows from it.
    """
    view = look(room, pose)
    sights = (*view.things, *view.furniture)
    name = np.full(MOST_SIGHTS, -1, np.int8)
    bearing, range_, visible = np.zeros((3, MOST_SIGHTS), np.float32)
    for i, sight in enumerate(sights):
        name[i] = NAMES.index(sight.name)
        bearing[i], range_[i], visible[i] = sight.bearing, sight.range, sight.visible
    return Snapshot(
        to_jpeg(renderer.picture(pose, number), room.camera.jpeg_quality),
        name,
        bearing,
        range_,
        visible,
        view.free,
        _token_bits(footprint(room, pose, number), len(sights)),
        room.seed,
        (pose.x, pose.y, pose.yaw),
    )


def _token_bits(canvas: np.ndarray, count: int) -> np.ndarray:
    """Return the things in each image token as bits.

    A thing is in a token of which it fills 5 %, and in the one that holds its largest part.
    """
    side = PATCH * MERGE // CELL
    blocks = canvas.reshape(GRID.rows, side, GRID.columns, side).swapaxes(1, 2)
    bits = np.zeros(GRID.tokens, np.uint32)
    for i in range(count):
        share = (blocks == i).mean(axis=(2, 3)).reshape(-1)
        if share.max() > 0:
            bits |= ((share >= 0.05) | (share == share.max())).astype(np.uint32) << i
    return bits


def random_pose(room: Room, rng: np.random.Generator) -> Pose:
    """Return a free place; most of them look at something, near ones preferred."""
    aims = room.parts
    solid = (*room.footprints, *room.walls)
    for _ in range(100):
        if rng.random() < 0.7:
            aim = aims[int(rng.integers(len(aims)))]
            reach = float(np.exp(rng.uniform(math.log(0.5), math.log(7.0))))
            around = float(rng.uniform(-math.pi, math.pi))
            x, y = aim.x + reach * math.cos(around), aim.y + reach * math.sin(around)
            yaw = around + math.pi + float(rng.uniform(-1.0, 1.0))
        else:
            x, y = float(rng.uniform(0.0, room.width)), float(rng.uniform(0.0, room.depth))
            yaw = float(rng.uniform(-math.pi, math.pi))
        inside = 0.0 < x < room.width and 0.0 < y < room.depth
        if inside and distances(solid, x, y).min() >= ROBOT_RADIUS:
            return Pose(x, y, math.remainder(yaw, math.tau))
    return room.start


def write_shard(
    folder: Path, snapshots: Sequence[Snapshot], asks: Sequence[Sequence[Ask]] = ()
) -> None:
    """Write a shard; a half-written folder is never taken for a whole one."""
    with replacing(folder) as building:
        np.save(building / "jpeg.npy", np.frombuffer(b"".join(s.jpeg for s in snapshots), np.uint8))
        np.save(building / "ends.npy", np.cumsum([len(s.jpeg) for s in snapshots]))
        for name, (shape, dtype) in _FIELDS.items():
            values: np.ndarray = np.stack([np.asarray(getattr(s, name), dtype) for s in snapshots])
            assert values.shape[1:] == shape
            np.save(building / f"{name}.npy", values)
        if asks:
            write_asks(building, asks)


class Pictures:
    """Several shards as one list of pictures."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._jpegs = [np.load(f / "jpeg.npy", mmap_mode="r") for f in folders]
        self._ends = [np.load(f / "ends.npy") for f in folders]
        self._first = np.cumsum([0] + [len(e) for e in self._ends])
        parts = {name: [np.load(f / f"{name}.npy") for f in folders] for name in _FIELDS}
        joined = {name: np.concatenate(parts[name]) for name in _FIELDS}
        self.name, self.bearing, self.range = joined["name"], joined["bearing"], joined["range"]
        self.visible, self.free, self.shows = joined["visible"], joined["free"], joined["shows"]
        self.seed, self.pose = joined["seed"], joined["pose"]
        self.asks = [asks for folder in folders for asks in read_asks(folder)]
        """Requests at each picture; empty if the shards have none."""

    def __len__(self) -> int:
        return int(self._first[-1])

    def image(self, index: int) -> np.ndarray:
        """Return a picture, uint8 [112, 224, 3]."""
        shard = int(np.searchsorted(self._first, index, side="right")) - 1
        ends, at = self._ends[shard], index - int(self._first[shard])
        begin = int(ends[at - 1]) if at else 0
        return from_jpeg(self._jpegs[shard][begin : int(ends[at])].tobytes())

    def view(self, index: int, flip: bool = False) -> View:
        """Return what a picture shows; ``flip``: in a mirror."""
        sign = -1.0 if flip else 1.0
        things, furniture = list[Sight](), list[Sight]()
        for i in np.flatnonzero(self.name[index] >= 0):
            name = NAMES[self.name[index, i]]
            sight = Sight(
                name,
                sign * float(self.bearing[index, i]),
                float(self.range[index, i]),
                float(self.visible[index, i]),
            )
            (furniture if name in FURNITURE else things).append(sight)
        return View(tuple(things), tuple(furniture), float(self.free[index]))
