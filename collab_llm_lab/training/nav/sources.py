"""Training pictures from seeds: from random places in rooms, and on the expert's ways.

A shard is a function of its number alone; it is never committed. Each picture has requests with the
expert's decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from collab_llm_lab.home.answers import ENDS, MOVES, answer
from collab_llm_lab.home.asking import draw_request
from collab_llm_lab.home.expert import MAX_STEPS, Expert
from collab_llm_lab.home.requests import About, Kind, Request, relations
from collab_llm_lab.home.wording import LEARNT, PLAIN, Wordings, plain
from collab_llm_lab.training.nav.asks import Ask, ask
from collab_llm_lab.training.nav.pictures import (
    Snapshot,
    random_pose,
    snapshot,
    write_shard,
)
from collab_llm_nodes.robot.search import SearchMemory
from collab_llm_nodes.sim.pose import Pose
from collab_llm_nodes.sim.renderer import Renderer
from collab_llm_nodes.sim.robot import Base
from collab_llm_nodes.sim.rooms import Room, Style, make_room
from collab_llm_nodes.sim.view import View, look

POSES_PER_ROOM = 10
ASKS_PER_POSE = 4

Asked = tuple[list[Snapshot], list[list[Ask]]]
"""Pictures, and the requests at each."""

_KEPT = 0.6
"""Share of the states on a way that become pictures: neighbours are alike."""
_AT_HAND = 0.5
"""Share of the requests to go to something in view."""
_BLOCKED = 0.35
"""Share of the ways on which furniture is in the straight way."""
_NOISE = (0.0, 0.1, 0.25)


def room_poses(renderer: Renderer, seed: int, style: Style | None = None) -> Asked:
    """Return pictures from random places in a room, with several requests at each."""
    room = make_room(seed, style)
    rng = np.random.default_rng([seed, 0xDA7A])
    renderer.enter(room)
    poses = [random_pose(room, rng) for _ in range(POSES_PER_ROOM)]
    pictures = [snapshot(renderer, room, pose, n) for n, pose in enumerate(poses)]
    return pictures, [pose_asks(room, pose, rng, ASKS_PER_POSE) for pose in poses]


def draw_way(seed: int, wordings: Wordings = PLAIN) -> tuple[Room, Request]:
    """Return a room and a request to go somewhere in it."""
    rng = np.random.default_rng([seed, 0xDA9])
    blocked = bool(rng.random() < _BLOCKED)
    room = make_room(seed, Style(blocked=blocked))
    if blocked:
        about = About(room.things[0].name)
        return room, Request(Kind.GO, wordings.draw(rng, Kind.GO, about), about)
    while True:
        request = draw_request(room, rng, wordings)
        if request.kind is Kind.GO:
            return room, request


def room_way(renderer: Renderer, seed: int) -> Asked:
    """Return pictures on a noisy expert's way to something in a room.

    The requests at each are that of the way, and another one.
    """
    room, request = draw_way(seed)
    rng = np.random.default_rng([seed, 0x3A7])
    renderer.enter(room)
    noise = _NOISE[int(rng.integers(len(_NOISE)))]
    expert, base = Expert(room, request), Base(room, seed=1)
    memory, history, seen_from = SearchMemory(), list[str](), room.start
    pictures, asks = list[Snapshot](), list[list[Ask]]()
    for step in range(MAX_STEPS):
        decision = expert.decide(look(room, base.pose), base.pose, history, memory)
        if rng.random() < _KEPT:
            pictures.append(snapshot(renderer, room, seen_from, step))
            own = ask(request.kind, request.about, history, memory.text, decision)
            asks.append([own, *pose_asks(room, seen_from, rng, 1)])
        action = decision.action
        if rng.random() < noise:
            action = MOVES[int(rng.integers(len(MOVES)))]
        if action in ENDS:
            break
        before = base.pose
        done = base.execute(action)
        memory = memory.after(action, answer(decision), done)
        history.append(action)
        seen_from = before if room.camera.late else base.pose
    return pictures, asks


def pose_asks(room: Room, pose: Pose, rng: np.random.Generator, count: int) -> list[Ask]:
    """Return requests to a robot at ``pose``, most of them for what is in view."""
    room = replace(room, start=pose)
    view = look(room, pose)
    memory, history = SearchMemory(), list[str]()
    for _ in range(int(rng.integers(3))):
        history.append(MOVES[int(rng.integers(len(MOVES)))])
        memory = memory.after(history[-1], "")
    asks = []
    for _ in range(count):
        request = _at_hand(view, rng) if rng.random() < _AT_HAND else None
        request = request or draw_request(room, rng, LEARNT)
        decision = Expert(room, request).decide(view, pose, history, memory)
        asks.append(ask(request.kind, request.about, history, memory.text, decision))
    return asks


def _at_hand(view: View, rng: np.random.Generator) -> Request | None:
    """Return a request to go to something in view, or None if nothing is."""
    if rng.random() < 0.2 and (related := relations(view)):
        about = related[int(rng.integers(len(related)))]
    else:
        sights = (*view.things, *view.furniture)
        names = [s.name for s in sights if s.in_view and not s.borderline and s.name != "person"]
        if not names:
            return None
        name = names[int(rng.integers(len(names)))]
        shape = name.split()[-1]
        alone = sum(s.visible > 0 and shape in s.name.split() for s in sights) == 1
        about = About(shape if alone and rng.random() < 0.2 else name)
    return Request(Kind.GO, plain(Kind.GO, about), about)


@dataclass(frozen=True)
class Source:
    """A kind of training pictures."""

    name: str
    first_seed: int
    """First seed of its rooms; evaluation and DAgger have others."""
    make: Callable[[Renderer, int], Asked]
    """Returns the pictures of a room."""
    rooms: int = 250
    """Number of rooms of a shard."""

    def folder(self, data: Path, number: int) -> Path:
        """Return the folder of a shard."""
        return data / f"{self.name}-{number:04d}"

    def make_shard(self, data: Path, number: int, renderer: Renderer) -> None:
        """Render a shard: rooms that follow those of the one before."""
        first = self.first_seed + number * self.rooms
        made = [self.make(renderer, seed) for seed in range(first, first + self.rooms)]
        pictures = [picture for of_room, _ in made for picture in of_room]
        write_shard(self.folder(data, number), pictures, [a for _, asks in made for a in asks])


POSES = Source("poses", 1_000_000, room_poses)
WAYS = Source("ways", 2_000_000, room_way)
