"""Rooms of a home: a function of the seed, and solvable as promised."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.sim.footprints import Footprint, distances
from collab_llm_nodes.sim.rooms import (
    COLOURS,
    HELD_OUT_PAIRS,
    ROBOT_RADIUS,
    SHAPES,
    SUCCESS_DISTANCE,
    Room,
    Style,
    make_room,
)

SEEDS = range(60)


def reachable(room: Room) -> np.ndarray:
    """Places that a robot can come to, by a walk over a finer grid than that of `make_room`."""
    cell = 0.07
    x, y = np.meshgrid(
        np.arange(0, room.width, cell), np.arange(0, room.depth, cell), indexing="ij"
    )
    free = distances((*room.footprints, *room.walls), x, y).min(-1) >= ROBOT_RADIUS
    start = (round(room.start.x / cell), round(room.start.y / cell))
    seen, todo = {start}, [start]
    while todo:
        i, j = todo.pop()
        for cell_next in ((i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)):
            inside = 0 <= cell_next[0] < free.shape[0] and 0 <= cell_next[1] < free.shape[1]
            if inside and free[cell_next] and cell_next not in seen:
                seen.add(cell_next)
                todo.append(cell_next)
    return np.array([(x[c], y[c]) for c in seen])


def test_rooms_follow_from_their_seed() -> None:
    assert make_room(7) == make_room(7)
    assert make_room(7) != make_room(8)


@pytest.mark.parametrize("style", [Style(), Style(blocked=True), Style(size=(4.0, 5.0))])
def test_every_thing_can_be_reached(style: Style) -> None:
    for seed in SEEDS[:10]:
        room = make_room(seed, style)
        places = reachable(room)
        nearest = distances(room.footprints[: len(room.things)], *places.T).min(0)
        assert (nearest <= SUCCESS_DISTANCE).all(), seed


def test_rooms_are_as_promised() -> None:
    rooms = [make_room(seed) for seed in SEEDS]
    for room in rooms:
        assert 4.0 <= min(room.width, room.depth) <= max(room.width, room.depth) <= 12.0
        assert 2 <= len(room.things) <= 10
        assert len({t.name for t in room.things}) == len(room.things)
        assert all(t.shape in SHAPES and t.colour in COLOURS for t in room.things)
        assert not any((t.colour, t.shape) in HELD_OUT_PAIRS for t in room.things)
        gaps = distances((*room.footprints, *room.walls), room.start.x, room.start.y)
        assert gaps.min() >= ROBOT_RADIUS
        solid = (*room.footprints, *room.walls)
        for i, thing in enumerate(room.things):
            others = np.delete(distances(solid, thing.x, thing.y), i)
            assert others.min() >= 0.1 + thing.footprint.radius
    assert 0.1 < np.mean([room.notch is not None for room in rooms]) < 0.45
    assert 0.1 < np.mean([room.camera.late for room in rooms]) < 0.45
    kinds = {piece.kind for room in rooms for piece in room.furniture}
    assert kinds == {"table", "sofa", "shelf", "partition", "person"}
    assert {room.looks.floor for room in rooms} == {"plain", "wood", "tiles", "carpet"}


def test_pairs_held_out_are_spread() -> None:
    assert len(HELD_OUT_PAIRS) == 12
    for kinds, at in ((COLOURS, 0), (SHAPES, 1)):
        counts = [sum(pair[at] == kind for pair in HELD_OUT_PAIRS) for kind in kinds]
        assert 1 <= min(counts) <= max(counts) <= 2
    for seed in SEEDS[:20]:
        first = make_room(seed, Style(pairs="held_out")).things[0]
        assert (first.colour, first.shape) in HELD_OUT_PAIRS


def test_the_straight_way_may_be_blocked() -> None:
    for seed in SEEDS[:20]:
        room = make_room(seed, Style(blocked=True))
        first, share = room.things[0], np.linspace(0.0, 1.0, 200)
        x = room.start.x + share * (first.x - room.start.x)
        y = room.start.y + share * (first.y - room.start.y)
        furniture = room.footprints[len(room.things) :]
        assert distances(furniture, x, y).min() < ROBOT_RADIUS + 0.01


def test_a_style_fixes_what_it_names() -> None:
    style = Style(
        size=(8.0, 8.0), things=(3, 3), furniture=(0, 0), people=(0, 0), fov=(60.0, 60.0),
        camera_height=(0.6, 0.6), walls="yellow", floors=("tiles",), late=1.0, l_shaped=0.0,
    )  # fmt: skip
    room = make_room(5, style)
    assert (room.width, room.depth, room.notch) == (8.0, 8.0, None)
    assert (len(room.things), room.furniture) == (3, ())
    assert room.camera.height == 0.6
    assert room.camera.half_fov == pytest.approx(math.radians(30.0))
    assert room.camera.late
    assert room.looks.floor == "tiles"
    assert room.looks.wall_colour[2] < room.looks.wall_colour[0]


def test_an_impossible_style_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collab_llm_nodes.sim.rooms._ATTEMPTS", 5)
    with pytest.raises(CollabError, match="no room of seed 1"):
        make_room(1, Style(size=(2.0, 2.0), things=(10, 10)))


def test_distances_of_footprints() -> None:
    oblong = Footprint.oblong(1.0, 1.0, math.pi / 2, 2.0, 1.0)  # 1 m along x, 2 along y
    assert oblong.distance(2.5, 1.0) == pytest.approx(1.0)
    assert oblong.distance(1.0, 2.5) == pytest.approx(0.5)
    assert oblong.distance(1.5 + 3.0, 2.0 + 4.0) == pytest.approx(5.0)
    assert oblong.distance(1.0, 1.0) == pytest.approx(-0.5)
    assert Footprint.circle(0.0, 0.0, 0.2).distance(3.0, 4.0) == pytest.approx(4.8)


@pytest.mark.parametrize("part", [Footprint.circle(1.0, 2.0, 0.2), Footprint(1, 2, 0.7, 1, 0.3, 0)])
def test_inflated_footprints_hold_the_margin(part: Footprint) -> None:
    polygon = part.inflated(0.38)
    edges = list(pairwise([*polygon, polygon[0]]))
    share = np.linspace(0.0, 1.0, 20)[:, None]
    points = np.concatenate([a + share * (b - a) for a, b in edges])
    gaps = distances([part], *points.T)
    assert gaps.min() >= 0.38 - 1e-9
    assert gaps.max() <= 0.38 + 0.25 * (part.radius + 0.38)
    turns = [np.cross([*(b - a), 0], [*(c - b), 0])[2] for (a, b), (_, c) in pairwise(edges)]
    assert min(turns) >= -1e-9  # convex, counter-clockwise


def test_pushing_out_leaves_the_margin() -> None:
    rng = np.random.default_rng(3)
    part = Footprint(1.0, 2.0, 0.7, 0.8, 0.3, 0.0)
    for x, y in rng.uniform(-1.0, 4.0, (200, 2)):
        pushed = part.push_out(x, y, 0.3)
        assert part.distance(*pushed) == pytest.approx(max(0.3, part.distance(x, y)), abs=1e-6)
