"""The demo's film: camera, floor plan and coloured words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from collab_llm_lab.demo.film import COLOUR_OF_SOURCE, HEIGHT, WIDTH, Frame, draw, save
from collab_llm_lab.demo.floor_plan import GOAL, draw_plan
from collab_llm_lab.demo.tasks import Task, draw_tasks
from collab_llm_nodes.protocols.edge_cloud.client import Source
from collab_llm_nodes.sim.jpeg import to_jpeg

CAMERA = to_jpeg(np.full((448, 896, 3), 90, np.uint8))
WORDS = [("the red ball", Source.ACCEPTED), (" is near.", Source.BONUS)]


@pytest.fixture(scope="module")
def task() -> Task:
    """A task of the demo in an L-shaped room."""
    return next(task for task in draw_tasks(30, 0) if task.goals and task.room.notch)


def like(picture: Image.Image, code: str) -> int:
    """Return how many pixels have the colour ``code``, or nearly so."""
    wanted = np.frombuffer(bytes.fromhex(code.lstrip("#")), np.uint8).astype(int)
    return int((abs(np.asarray(picture).astype(int) - wanted).max(-1) < 12).sum())


def test_the_plan_shows_the_goal_and_lacks_the_missing_corner(task: Task) -> None:
    room = task.room
    plan = draw_plan(task, [room.start], (280, 260))
    assert plan.width <= 280
    assert plan.height <= 260
    assert plan.width / plan.height == pytest.approx(room.width / room.depth, rel=0.03)
    assert room.notch is not None
    corner = (room.notch[0] + room.width) / 2 / room.width
    assert plan.getpixel((round(corner * plan.width), 8)) == (255, 255, 255)
    assert like(plan, GOAL) > 50
    assert like(draw_plan(replace(task, goals=()), [room.start], (280, 260)), GOAL) < 10


def test_the_plan_shows_each_piece_of_furniture_and_each_thing(task: Task) -> None:
    room = task.room
    whole = np.asarray(draw_plan(task, [room.start], (280, 260)))
    for kept in ({"furniture": room.furniture[1:]}, {"things": room.things[:-1]}):
        less = replace(task, room=replace(room, **kept))
        without = np.asarray(draw_plan(less, [room.start], (280, 260)))
        assert 20 < (whole != without).any(-1).sum() < 0.2 * whole.shape[0] * whole.shape[1]


def test_a_frame_holds_the_words_in_the_colours_of_their_sources(task: Task) -> None:
    path = [task.room.start]
    picture = draw(Frame(task, CAMERA, path, WORDS, task.instruction, "step 1"))
    assert picture.size == (WIDTH, HEIGHT)
    for _, source in WORDS:
        assert like(picture, COLOUR_OF_SOURCE[source]) > 50


def test_the_film_rests_at_the_end_of_each_drive(task: Task, tmp_path: Path) -> None:
    path, other = [task.room.start], replace(task, instruction="find the red mug")
    frames = [
        Frame(of, CAMERA, path, WORDS, of.instruction, f"step {number}")
        for number, of in enumerate((task, task, other))
    ]
    save(frames, tmp_path / "film.gif")
    lengths = []
    with Image.open(tmp_path / "film.gif") as film:
        for number in range(film.n_frames):  # type: ignore[attr-defined]
            film.seek(number)
            lengths.append(film.info["duration"])
    assert lengths == [700, 2500, 2500]
