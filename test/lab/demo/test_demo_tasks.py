"""Tasks of the demo in the home: what is asked for, what counts as right, and the film's map."""

from __future__ import annotations

import numpy as np
import pytest
import yaml

from collab_llm_lab.demo.drive import WORLDS
from collab_llm_lab.demo.film import COLOUR_OF_SOURCE, HEIGHT, WIDTH, Frame, draw
from collab_llm_lab.demo.tasks import SHOWN, tasks_at_home, tasks_in_rooms
from collab_llm_lab.home import planner
from collab_llm_lab.home.expert import drive
from collab_llm_lab.home.requests import About, Kind, Request
from collab_llm_lab.training.nav.models import MAX_TOKENS
from collab_llm_nodes.assets import config_file
from collab_llm_nodes.protocols.edge_cloud.client import Source
from collab_llm_nodes.robot.prompt import SEARCH_TEMPLATE
from collab_llm_nodes.sim.jpeg import to_jpeg
from collab_llm_nodes.sim.pose import Pose
from collab_llm_nodes.sim.rooms import Room

AWAY = Pose(-5.0, -5.0, 0.0)


def test_most_tasks_want_something_there_one_a_reply_and_the_last_the_absent() -> None:
    tasks = list(tasks_at_home(5, 20))
    assert [task.ending for task in tasks] == ["OK", "ANSWERED", "OK", "OK", "NOT_FOUND"]
    assert [bool(task.goals) for task in tasks] == [True, False, True, True, False]
    assert tasks == list(tasks_at_home(5, 20))
    assert [task.ending for task in tasks_at_home(1, 0)] == ["OK"]


def test_an_ending_is_right_if_the_task_asks_for_it() -> None:
    going, question, *_, absent = tasks_at_home(4, 20)
    goal = going.goals[0]
    there = Pose(*goal.push_out(goal.x, goal.y, going.within - 0.01), 0.0)
    assert going.right("OK", "", there)
    assert not going.right("OK", "", AWAY)
    assert not going.right("NOT_FOUND", "", there)
    assert question.right("ANSWERED", f"{question.reply.capitalize()}.", AWAY)
    assert not question.right("ANSWERED", "i see a dragon.", AWAY)
    assert absent.right("NOT_FOUND", "", AWAY)
    assert not absent.right("OK", "", AWAY)


def test_a_task_in_a_room_without_furniture_ends_near_the_middle_of_the_thing() -> None:
    (task,) = tasks_in_rooms(1, 3)
    goal = task.room.goal
    assert goal.name in task.instruction
    assert task.right("OK", "", Pose(goal.x + 0.79, goal.y, 0.0))
    assert not task.right("OK", "", Pose(goal.x + 0.81, goal.y, 0.0))


def test_the_room_that_is_shown_has_a_red_mug_behind_a_table() -> None:
    task = next(tasks_at_home(1, 0, show=True))
    room = task.room
    assert isinstance(room, Room)
    assert room.goal.name == task.thing == SHOWN
    assert task.instruction == "please go to the red mug"
    here, furniture = (room.start.x, room.start.y), room.footprints[len(room.things) :]
    between = [
        piece.kind
        for piece, solid in zip(room.furniture, furniture, strict=True)
        if not planner.straight([solid], here, room.footprints[0])
    ]
    assert between == ["table"]
    assert drive(room, Request(Kind.GO, task.instruction, About(SHOWN))).outcome == "reached"


@pytest.mark.parametrize("seed", [20, 22])
def test_the_film_shows_furniture_and_the_goal_from_above(seed: int) -> None:
    task = next(tasks_at_home(1, seed))
    camera = to_jpeg(np.full((448, 896, 3), 90, np.uint8))
    words = [("the red ball", Source.ACCEPTED), (" is near.", Source.BONUS)]
    picture = draw(Frame(task, camera, [task.room.start], words, task.instruction, "step 1"))
    assert picture.size == (WIDTH, HEIGHT)
    shown = {colour for _, colour in picture.getcolors(WIDTH * HEIGHT) or []}
    assert (0xAD, 0xB5, 0xBD) in shown  # the edge of the goal
    for source in (Source.ACCEPTED, Source.BONUS):
        code = COLOUR_OF_SOURCE[source].lstrip("#")
        assert tuple(bytes.fromhex(code)) in shown


def test_the_parameters_of_the_home_are_those_that_its_pair_is_trained_with() -> None:
    nodes = yaml.safe_load(config_file("home.yaml").read_text())
    navigator = nodes["/**/navigator"]["ros__parameters"]
    assert navigator["answer"]["prompt"] == SEARCH_TEMPLATE
    assert navigator["mission"]["max_steps"] == WORLDS["home"].max_steps
    client = nodes["/**/draft_vlm"]["ros__parameters"]["client"]
    assert client["max_tokens"] == WORLDS["home"].max_tokens == MAX_TOKENS
