"""Training pictures from seeds: rendered rooms, with the things that each image token shows.

A shard is a folder of arrays and a function of its number alone; it is never committed. Half of
a room's pictures come from a noisy expert's path through it (with the actions that led there),
half from random places, many of them close to a thing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from collab_llm_lab.training.run import replacing
from collab_llm_nodes.sim import expert
from collab_llm_nodes.sim.jpeg import from_jpeg, to_jpeg
from collab_llm_nodes.sim.pose import Pose
from collab_llm_nodes.sim.renderer import HEIGHT_PX, KINDS, WIDTH, Renderer, footprint
from collab_llm_nodes.sim.robot import Base
from collab_llm_nodes.sim.rooms import Room, make_room

TRAIN_SEEDS = 1_000_000
"""First room seed of the training shards; DAgger rooms start at twice this; evaluation is below."""
ROOMS_PER_SHARD = 200
MOST_THINGS = 4
TOKEN_PX = 28
TOKEN_ROWS, TOKEN_COLUMNS = HEIGHT_PX // TOKEN_PX, WIDTH // TOKEN_PX
TOKENS = TOKEN_ROWS * TOKEN_COLUMNS

_CELL = 4
_TRAJECTORY_STEPS = 16
_RANDOM_POSES = 9

_FIELDS: dict[str, tuple[tuple[int, ...], type]] = {
    "image": ((HEIGHT_PX, WIDTH, 3), np.uint8),
    "kind": ((MOST_THINGS,), np.int8),  # index into KINDS, -1 = no such thing
    "bearing": ((MOST_THINGS,), np.float32),
    "range": ((MOST_THINGS,), np.float32),
    "visible": ((MOST_THINGS,), np.float32),
    "shows": ((TOKENS,), np.uint8),  # bit i: the token shows thing i
    "history": ((expert.HISTORY,), np.int8),  # action numbers, oldest first, -1 = none
    "goal": ((), np.int8),  # thing index that the history was made for, -1 = any
}


@dataclass(frozen=True)
class Snapshot:
    """One place in one room: the picture, every thing's sight, and the actions that led here."""

    image: np.ndarray
    kind: np.ndarray
    bearing: np.ndarray
    range: np.ndarray
    visible: np.ndarray
    shows: np.ndarray
    history: np.ndarray
    goal: int


def snapshot(
    renderer: Renderer, room: Room, pose: Pose, history: Sequence[str], goal: int
) -> Snapshot:
    """Return picture (through JPEG, as at run time) and labels of a place in the entered room."""
    kind = np.full(MOST_THINGS, -1, np.int8)
    bearing, range_, visible = np.zeros((3, MOST_THINGS), np.float32)
    for i, (thing, sight) in enumerate(zip(room.things, expert.look(room, pose), strict=True)):
        kind[i] = KINDS.index((thing.colour, thing.shape))
        bearing[i], range_[i], visible[i] = sight.bearing, sight.range, sight.visible
    numbers = np.full(expert.HISTORY, -1, np.int8)
    recent = [expert.ACTIONS.index(a) for a in history[-expert.HISTORY :]]
    if recent:
        numbers[-len(recent) :] = recent
    image = from_jpeg(to_jpeg(renderer.picture(pose)))
    shows = _token_bits(footprint(room, pose, _CELL))
    return Snapshot(image, kind, bearing, range_, visible, shows, numbers, goal)


def _token_bits(canvas: np.ndarray) -> np.ndarray:
    """Return the things in each image token as bits.

    A thing is in a token of which it fills 5 %, and in the one that holds its largest part.
    """
    side = TOKEN_PX // _CELL
    blocks = canvas.reshape(TOKEN_ROWS, side, TOKEN_COLUMNS, side).swapaxes(1, 2)
    bits = np.zeros(TOKENS, np.uint8)
    for i in range(MOST_THINGS):
        share = (blocks == i).mean(axis=(2, 3)).reshape(-1)
        if share.max() > 0:
            bits |= ((share >= 0.05) | (share == share.max())).astype(np.uint8) << i
    return bits


def random_pose(room: Room, rng: np.random.Generator) -> Pose:
    """Return a free place; most of them look at a thing, near ones preferred."""
    for _ in range(100):
        if rng.random() < 0.65:
            thing = room.things[int(rng.integers(len(room.things)))]
            reach = float(np.exp(rng.uniform(math.log(0.55), math.log(5.0))))
            around = float(rng.uniform(-math.pi, math.pi))
            x, y = thing.x + reach * math.cos(around), thing.y + reach * math.sin(around)
            yaw = around + math.pi + float(rng.uniform(-1.0, 1.0))
        else:
            x, y = (
                float(rng.uniform(0.3, room.width - 0.3)),
                float(rng.uniform(0.3, room.depth - 0.3)),
            )
            yaw = float(rng.uniform(-math.pi, math.pi))
        inside = 0.3 <= x <= room.width - 0.3 and 0.3 <= y <= room.depth - 0.3
        if inside and all(math.hypot(x - t.x, y - t.y) >= 0.3 + t.radius for t in room.things):
            return Pose(x, y, math.remainder(yaw, math.tau))
    return room.start


def random_history(rng: np.random.Generator) -> list[str]:
    """Return up to two actions; turns of a search and forward moves are the likeliest."""
    weight = np.array([0.0, 1, 1, 3, 1.5, 1.5, 4, 1.5, 1.5, 4])
    count = int(rng.choice(3, p=[0.1, 0.15, 0.75]))
    return [str(a) for a in rng.choice(expert.ACTIONS, size=count, p=weight / weight.sum())]


def room_snapshots(renderer: Renderer, seed: int) -> Iterator[Snapshot]:
    """Yield the training pictures of one room: a noisy expert's path, then random places."""
    room = make_room(seed)
    rng = np.random.default_rng([seed, 0xDA7A])
    renderer.enter(room)
    base, history = Base(room, seed=1), list[str]()
    noise = float(rng.choice([0.0, 0.15, 0.35]))
    for _ in range(_TRAJECTORY_STEPS):
        yield snapshot(renderer, room, base.pose, history, room.target)
        action = expert.decide(expert.look(room, base.pose)[room.target], history)
        if rng.random() < noise or (action == "stop" and rng.random() < 0.3):
            action = str(rng.choice(expert.ACTIONS[1:]))
        if action == "stop":
            break
        base.execute(action)
        history.append(action)
    for _ in range(_RANDOM_POSES):
        yield snapshot(renderer, room, random_pose(room, rng), random_history(rng), -1)


def write_shard(folder: Path, snapshots: Sequence[Snapshot]) -> None:
    """Write a shard; a half-written folder is never taken for a whole one."""
    with replacing(folder) as building:
        for name, (shape, dtype) in _FIELDS.items():
            values: np.ndarray = np.stack([np.asarray(getattr(s, name), dtype) for s in snapshots])
            assert values.shape[1:] == shape
            np.save(building / f"{name}.npy", values)


def make_shards(
    data: Path,
    count: int,
    report: Callable[[int, int], None] = lambda done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Path]:
    """Render the first ``count`` training shards that are not there yet; return all of them.

    Shard N has ``ROOMS_PER_SHARD`` rooms, which follow those of shard N - 1. ``stop`` is asked
    before each shard that is missing; True ends the call with those made so far.
    """
    folders = [data / f"shard-{number:04d}" for number in range(count)]
    renderer = None
    for number, folder in enumerate(folders):
        if not folder.exists():
            if stop():
                folders = folders[:number]
                break
            renderer = renderer or Renderer()
            first = TRAIN_SEEDS + number * ROOMS_PER_SHARD
            seeds = range(first, first + ROOMS_PER_SHARD)
            write_shard(folder, [s for seed in seeds for s in room_snapshots(renderer, seed)])
        report(number + 1, count)
    if renderer is not None:
        renderer.close()
    return folders


class Pictures:
    """Several shards as one list of pictures; the images stay on disk until asked for."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._images = [np.load(f / "image.npy", mmap_mode="r") for f in folders]
        self._first = np.cumsum([0] + [len(i) for i in self._images])
        small = [name for name in _FIELDS if name != "image"]
        parts = {name: [np.load(f / f"{name}.npy") for f in folders] for name in small}
        self.kind, self.bearing, self.range, self.visible, self.shows, self.history, self.goal = (
            np.concatenate(parts[name]) for name in small
        )

    def __len__(self) -> int:
        return int(self._first[-1])

    def images(self, indices: np.ndarray) -> np.ndarray:
        """Return uint8 [n, 84, 168, 3]."""
        shard = np.searchsorted(self._first, indices, side="right") - 1
        return np.stack(
            [self._images[s][i - self._first[s]] for s, i in zip(shard, indices, strict=True)]
        )
