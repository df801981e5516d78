"""Tasks of the demo: what is asked for, what counts as right, and the settings."""

from __future__ import annotations

import yaml

from collab_llm_lab.demo.drive import MAX_TOKENS
from collab_llm_lab.demo.tasks import SHOWN, draw_tasks
from collab_llm_lab.home import planner
from collab_llm_lab.home.expert import drive
from collab_llm_lab.home.requests import About, Kind, Request
from collab_llm_lab.training.nav import models
from collab_llm_nodes.assets import config_file
from collab_llm_nodes.robot.prompt import SEARCH_TEMPLATE
from collab_llm_nodes.sim.pose import Pose

AWAY = Pose(-5.0, -5.0, 0.0)


def test_most_tasks_want_something_there_one_a_reply_and_the_last_the_absent() -> None:
    tasks = list(draw_tasks(5, 20, show=False))
    assert [task.ending for task in tasks] == ["OK", "ANSWERED", "OK", "OK", "NOT_FOUND"]
    assert [bool(task.goals) for task in tasks] == [True, False, True, True, False]
    assert tasks == list(draw_tasks(5, 20, show=False))
    assert [task.ending for task in draw_tasks(1, 0, show=False)] == ["OK"]


def test_an_ending_is_right_if_the_task_asks_for_it() -> None:
    going, question, *_, absent = draw_tasks(4, 20, show=False)
    goal = going.goals[0]
    there = Pose(*goal.push_out(goal.x, goal.y, going.within - 0.01), 0.0)
    assert going.right("OK", "", there)
    assert not going.right("OK", "", AWAY)
    assert not going.right("NOT_FOUND", "", there)
    assert question.right("ANSWERED", f"{question.reply.capitalize()}.", AWAY)
    assert not question.right("ANSWERED", "i see a dragon.", AWAY)
    assert absent.right("NOT_FOUND", "", AWAY)
    assert not absent.right("OK", "", AWAY)


def test_the_room_that_is_shown_has_a_red_mug_behind_a_table() -> None:
    task = next(draw_tasks(1, 0))
    room = task.room
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


def test_the_parameters_are_those_that_the_pair_is_trained_with() -> None:
    nodes = yaml.safe_load(config_file("embedded.yaml").read_text())
    assert nodes["/**/navigator"]["ros__parameters"]["answer"]["prompt"] == SEARCH_TEMPLATE
    client = nodes["/**/draft_vlm"]["ros__parameters"]["client"]
    assert client["max_tokens"] == MAX_TOKENS == models.MAX_TOKENS
