"""Pictures on the expert's ways through rooms, and requests at pictures from anywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from collab_llm_lab.home.answers import ACTIONS, GIVE_UP, REPLY, STOP, answer
from collab_llm_lab.home.asking import draw_request
from collab_llm_lab.home.expert import MAX_STEPS, Expert
from collab_llm_lab.home.renderer import Renderer
from collab_llm_lab.home.requests import About, Kind, Request, relations
from collab_llm_lab.home.rooms import Room, make_room
from collab_llm_lab.home.training.asks import Ask, ask, write_asks
from collab_llm_lab.home.training.pictures import (
    ROOMS_PER_SHARD,
    TRAIN_SEEDS,
    Pictures,
    Snapshot,
    shard_folder,
    snapshot,
    write_shard,
)
from collab_llm_lab.home.view import View, look
from collab_llm_lab.home.wording import plain
from collab_llm_nodes.robot.search import SearchMemory
from collab_llm_nodes.sim.robot import Base
from collab_llm_nodes.sim.rooms import Pose

WAY_SEEDS = 2 * TRAIN_SEEDS
"""First room seed of the ways; DAgger rooms start at 3 * TRAIN_SEEDS."""
ASKS_PER_PICTURE = 4

_MOVES = [a for a in ACTIONS if a not in (STOP, GIVE_UP, REPLY)]
_KEPT = 0.6
"""Share of the states on a way that become pictures: neighbours are alike."""
_NOISE = (0.0, 0.1, 0.25)


def room_way(renderer: Renderer, seed: int) -> tuple[list[Snapshot], list[list[Ask]]]:
    """Return pictures on a noisy expert's way to something in a room, and the request at each."""
    room = make_room(seed)
    rng = np.random.default_rng([seed, 0x3A7])
    renderer.enter(room)
    request = draw_request(room, rng)
    while request.kind is not Kind.GO:
        request = draw_request(room, rng)
    noise = _NOISE[int(rng.integers(len(_NOISE)))]
    expert, base = Expert(room, request), Base(room, seed=1)
    memory, history, seen_from = SearchMemory(), list[str](), room.start
    pictures, asks = list[Snapshot](), list[list[Ask]]()
    for step in range(MAX_STEPS):
        decision = expert.decide(look(room, base.pose), base.pose, history, memory)
        if rng.random() < _KEPT:
            pictures.append(snapshot(renderer, room, seen_from, step))
            asks.append([ask(request.kind, request.about, history, memory.text, decision)])
        action = decision.action
        if rng.random() < noise:
            action = _MOVES[int(rng.integers(len(_MOVES)))]
        if action in (STOP, GIVE_UP, REPLY):
            break
        memory = memory.after(action, answer(decision))
        history.append(action)
        before = base.pose
        base.execute(action)
        seen_from = before if room.camera.late else base.pose
    return pictures, asks


def pose_asks(room: Room, pose: Pose, rng: np.random.Generator) -> list[Ask]:
    """Return requests to a robot at ``pose``, most of them for what is in view."""
    room = replace(room, start=pose)
    view = look(room, pose)
    memory, history = SearchMemory(), list[str]()
    for _ in range(int(rng.integers(3))):
        history.append(_MOVES[int(rng.integers(len(_MOVES)))])
        memory = memory.after(history[-1], "")
    asks = []
    for number in range(ASKS_PER_PICTURE):
        request = _at_hand(view, rng) if number % 2 == 0 else None
        request = request or draw_request(room, rng)
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


def way_folder(data: Path, number: int) -> Path:
    """Return the folder of a shard of ways."""
    return data / f"ways-{number:04d}"


def make_ways(
    data: Path,
    count: int,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Render the first ``count`` shards of ways that are not there yet."""
    renderer = None
    for number in range(count):
        folder = way_folder(data, number)
        if not folder.exists():
            renderer = renderer or Renderer()
            first = WAY_SEEDS + number * ROOMS_PER_SHARD
            ways = [room_way(renderer, seed) for seed in range(first, first + ROOMS_PER_SHARD)]
            write_shard(
                folder, [s for way in ways for s in way[0]], [a for way in ways for a in way[1]]
            )
        report(number + 1, count)
    if renderer is not None:
        renderer.close()


def make_asks(data: Path, number: int) -> None:
    """Add the requests at the pictures of a training shard, if they are not there yet."""
    folder = shard_folder(data, number)
    pictures = Pictures([folder])
    if pictures.asks:
        return
    room, asks = None, []
    for seed, pose in zip(pictures.seed, pictures.pose, strict=True):
        if room is None or room.seed != seed:
            room = make_room(int(seed))
            rng = np.random.default_rng([int(seed), 0xA5C])
        asks.append(pose_asks(room, Pose(*map(float, pose)), rng))
    write_asks(folder, asks)
