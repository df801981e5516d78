"""The view by geometry, against pictures of the same rooms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.sim.jpeg import from_jpeg, to_jpeg
from collab_llm_nodes.sim.pose import Pose
from collab_llm_nodes.sim.renderer import HEIGHT_PX, WIDTH, Renderer, footprint, sway
from collab_llm_nodes.sim.rooms import (
    COLOURS,
    SHAPES,
    Camera,
    Furniture,
    Room,
    Style,
    Thing,
    make_room,
)
from collab_llm_nodes.sim.view import direction, distance, free_way, look, way

START = Pose(1.0, 3.0, 0.0)
BALL = Thing("ball", "red", 3.2, 3.0)
SOFA = Furniture("sofa", 4.5, 3.0, math.pi / 2, 1.7, 0.8, 0.75)


def room_of(*parts: Thing | Furniture, camera: Camera = Camera()) -> Room:  # noqa: B008
    things = tuple(p for p in parts if isinstance(p, Thing))
    furniture = tuple(p for p in parts if isinstance(p, Furniture))
    return Room(1, 8.0, 6.0, None, things, furniture, camera, START)


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer()
    yield renderer
    renderer.close()


def pixels_of(renderer: Renderer, room: Room, number: int, base: Pose) -> np.ndarray:
    """Return the pixels that a thing's colour changes: bool [112, 224]."""
    pictures = []
    for colour in ("white", "black"):
        things = list(room.things)
        things[number] = replace(things[number], colour=colour)
        renderer.enter(replace(room, things=tuple(things)))
        pictures.append(renderer.picture(base).astype(int))
    return np.abs(pictures[0] - pictures[1]).sum(-1) > 40


def still(room: Room) -> Room:
    return replace(
        room, camera=replace(room.camera, sway=0.0), looks=replace(room.looks, noise=0.0)
    )


def test_words_change_at_their_edges() -> None:
    degrees = (60, 25.1, 24.9, 10.1, 9.9, 0, -9.9, -10.1, -24.9, -25.1)
    words = [direction(math.radians(d)) for d in degrees]
    assert words == [
        *("far left",) * 2,
        *("left",) * 2,
        *("ahead",) * 3,
        *("right",) * 2,
        "far right",
    ]
    metres = (0.0, 0.39, 0.41, 0.64, 0.66, 0.89, 0.91, 2.39, 2.41)
    assert [distance(m) for m in metres] == [
        *("very close",) * 2, *("close",) * 2, *("near",) * 2, *("some way off",) * 2, "distant",
    ]  # fmt: skip
    assert [way(m) for m in (0.0, 0.79, 0.81, 1.99, 2.01)] == [
        *("blocked",) * 2, *("short",) * 2, "open",
    ]  # fmt: skip


def test_bearing_and_range_are_those_of_the_camera() -> None:
    sight = look(room_of(BALL), START).things[0]
    assert sight.bearing == pytest.approx(0.0)
    assert sight.range == pytest.approx(2.2 - 0.2 - 0.2)
    assert sight.in_view
    left = look(room_of(BALL), Pose(3.2, 1.0, math.radians(60))).things[0]
    assert left.bearing > 0
    sofa = look(room_of(SOFA), START).furniture[0]
    assert sofa.range == pytest.approx(4.5 - 0.4 - 1.2)


def test_the_picture_ends() -> None:
    """A ball that is passed leaves the picture at its side, and one under the camera below."""
    room = room_of(BALL)
    shares = [look(room, Pose(x, 2.0, 0.0)).things[0].visible for x in (1.0, 1.9, 2.0, 2.2, 3.2)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(1.0)
    assert shares[-1] == 0.0
    below = room_of(BALL, camera=Camera(height=0.9))
    assert look(below, Pose(2.8, 3.0, 0.0)).things[0].visible < 0.3
    assert look(room, Pose(2.6, 3.0, 0.0)).things[0].in_view  # at the stop


def test_far_things_are_too_small() -> None:
    room = replace(room_of(replace(BALL, x=9.0)), width=12.0)
    assert [look(room, Pose(x, 3.0, 0.0)).things[0].in_view for x in (1.0, 3.0)] == [False, True]


@pytest.mark.parametrize(
    ("kind", "height", "hides"),
    [("sofa", 0.75, True), ("shelf", 1.6, True), ("partition", 1.5, True), ("table", 0.72, False)],
)
def test_what_furniture_hides(renderer: Renderer, kind: str, height: float, *, hides: bool) -> None:
    piece = Furniture(kind, 3.0, 3.0, math.pi / 2, 1.4, 0.5, height)
    room = room_of(Thing("box", "red", 4.2, 3.0), piece)
    assert look(room, START).things[0].in_view != hides
    assert pixels_of(renderer, room, 0, START).any() != hides
    assert look(room, START).furniture[0].in_view


def test_the_missing_corner_hides() -> None:
    room = replace(room_of(Thing("box", "red", 2.0, 5.5)), notch=(3.0, 3.5))
    assert look(room, Pose(2.0, 1.0, math.pi / 2)).things[0].in_view
    assert not look(room, Pose(7.0, 3.2, math.radians(155))).things[0].in_view


def test_near_furniture_that_fills_the_picture_is_in_view() -> None:
    for x in (1.0, 2.5, 3.3):
        sight = look(room_of(SOFA), Pose(x, 3.5, 0.0)).furniture[0]
        assert sight.in_view


def test_free_way() -> None:
    assert free_way(room_of(BALL), START) == pytest.approx(2.2 - 0.5, abs=0.03)
    assert free_way(room_of(SOFA), START) == pytest.approx(3.5 - 0.4 - 0.3, abs=0.03)
    assert free_way(room_of(), START) == 5.0
    assert free_way(room_of(), Pose(6.0, 3.0, 0.0)) == pytest.approx(1.7, abs=0.03)
    beside = replace(BALL, x=0.95, y=3.49)  # it is touched, but not in the way
    assert free_way(room_of(beside), START) == 5.0
    beside = replace(BALL, y=3.52)  # just wide enough
    assert free_way(room_of(beside), START) == 5.0
    assert free_way(replace(room_of(), notch=(3.0, 2.0)), START) == pytest.approx(1.7, abs=0.03)


def test_shares_agree_with_pixels(renderer: Renderer) -> None:
    """Return the share that others hide of a thing: by geometry, and by pictures without them."""
    off = []
    for seed in range(12):
        room = still(make_room(seed))
        for turn in range(4):
            base = Pose(room.start.x, room.start.y, turn * math.pi / 2)
            view = look(room, base)
            for i, thing in enumerate(room.things):
                alone = replace(room, things=(thing,), furniture=())
                whole = look(alone, base).things[0].visible
                silhouette = pixels_of(renderer, alone, 0, base).sum() if whole > 0.3 else 0
                if silhouette >= 20:
                    share = pixels_of(renderer, room, i, base).sum() / silhouette
                    off.append(share - view.things[i].visible / whole)
    assert len(off) > 60
    assert np.mean(np.abs(off)) < 0.04
    assert np.mean(np.abs(off) > 0.25) <= 0.02


@pytest.mark.parametrize("shape", SHAPES)
def test_footprints_cover_the_pixels(renderer: Renderer, shape: str) -> None:
    camera = Camera(roll=math.radians(2.0), half_fov=math.radians(50.0), sway=1.0)
    room = room_of(Thing(shape, "red", 2.6, 3.3, 0.4), SOFA, camera=camera)
    seen = pixels_of(renderer, room, 0, START)
    cells = footprint(room, START)
    assert cells.shape == (HEIGHT_PX // 4, WIDTH // 4)
    shown = np.kron(cells == 0, np.ones((4, 4), bool))
    assert (shown & seen).sum() / (shown | seen).sum() > (0.4 if shape == "stool" else 0.7)
    assert (cells == 1).sum() > 20


def test_pictures_follow_from_room_pose_and_number(renderer: Renderer) -> None:
    room = make_room(3)
    room = replace(room, camera=replace(room.camera, sway=1.0))
    renderer.enter(make_room(4))
    renderer.enter(room)
    first, second = renderer.picture(room.start, 1), renderer.picture(room.start, 2)
    assert first.shape == (HEIGHT_PX, WIDTH, 3)
    assert (first != second).any()
    assert (renderer.picture(room.start, 1) == first).all()
    assert sway(room, 1) != sway(room, 2)
    assert sway(still(room), 1) == (0.0, 0.0, 0.0)
    assert renderer.large_picture(room.start).shape == (4 * HEIGHT_PX, 4 * WIDTH, 3)


@pytest.mark.parametrize(
    "style",
    [Style(), Style(size=(4.0, 4.5), l_shaped=1.0), Style(size=(9.0, 12.0), furniture=(5, 5))],
)
def test_every_room_has_its_place_in_the_scene(renderer: Renderer, style: Style) -> None:
    for seed in range(40):
        renderer.enter(make_room(seed, style))


def test_colours_are_told_apart(renderer: Renderer) -> None:
    means = []
    for colour in COLOURS:
        room = room_of(Thing("box", colour, 2.2, 3.0))
        seen = pixels_of(renderer, room, 0, START)
        renderer.enter(room)
        means.append(from_jpeg(to_jpeg(renderer.picture(START), 60))[seen].mean(0))
    gaps = [np.abs(a - b).sum() for i, a in enumerate(means) for b in means[:i]]
    assert min(gaps) > 60


def test_a_wider_camera_sees_more(renderer: Renderer) -> None:
    shares = []
    for degrees in (38.0, 45.0, 52.0):
        room = room_of(BALL, camera=Camera(half_fov=math.radians(degrees)))
        shares.append(int(pixels_of(renderer, room, 0, START).sum()))
    assert shares[0] > 1.3 * shares[2]
    assert shares == sorted(shares, reverse=True)


def test_a_crowd_that_has_no_place_in_the_scene_is_refused(renderer: Renderer) -> None:
    with pytest.raises(CollabError, match="ball8"):
        renderer.enter(room_of(*[BALL] * 9))
