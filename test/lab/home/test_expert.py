"""The expert: it arrives around obstacles, searches, gives up, and replies."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from collab_llm_lab.home.answers import REPLY, STOP, read, reply
from collab_llm_lab.home.expert import MAX_STEPS, Expert, drive
from collab_llm_lab.home.planner import MARGIN, path, straight
from collab_llm_lab.home.requests import About, Kind, Request
from collab_llm_nodes.robot.grammar import Code, parse
from collab_llm_nodes.robot.search import SearchMemory
from collab_llm_nodes.sim.footprints import distances
from collab_llm_nodes.sim.pose import Pose
from collab_llm_nodes.sim.rooms import Camera, Furniture, Room, Style, Thing, make_room
from collab_llm_nodes.sim.view import look

BALL = Thing("ball", "red", 5.0, 2.5)
SOFA = Furniture("sofa", 3.0, 2.5, math.pi / 2, 1.7, 0.85, 0.75)


def _room(*parts: Thing | Furniture, yaw: float = 0.0) -> Room:
    things = tuple(part for part in parts if isinstance(part, Thing))
    furniture = tuple(part for part in parts if isinstance(part, Furniture))
    return Room(0, 6.0, 5.0, None, things, furniture, Camera(), Pose(1.0, 2.5, yaw))


def _go(name: str) -> Request:
    return Request(Kind.GO, f"find the {name}", About(name))


def test_a_path_keeps_its_distance_and_ends_beside_the_thing() -> None:
    room = _room(BALL, SOFA)
    solid, to = [*room.footprints[1:], *room.walls], room.footprints[0]
    assert not straight(solid, (1.0, 2.5), to)
    corners = [(1.0, 2.5), *path(solid, (1.0, 2.5), to)]
    share = np.linspace(0.0, 1.0, 50)[:, None]
    way = np.concatenate(
        [a + share * np.subtract(b, a) for a, b in zip(corners, corners[1:], strict=False)]
    )
    assert distances(solid, *way.T).min() >= MARGIN - 1e-6
    assert to.distance(*corners[-1]) <= 0.55
    assert 4.0 < sum(map(math.dist, corners, corners[1:])) < 5.0


def test_a_penalty_chooses_the_side() -> None:
    room = _room(BALL, SOFA)
    solid, to = [*room.footprints[1:], *room.walls], room.footprints[0]
    for side in (1, -1):
        first, *_ = path(solid, (1.0, 2.5), to, _against(side))
        assert side * (first[1] - 2.5) > 0


def _against(side: int) -> Callable[[tuple[float, float]], float]:
    return lambda point: float(side * (point[1] - 2.5) < 0)


def test_there_is_no_path_through_a_wall_of_furniture() -> None:
    wall = Furniture("partition", 3.0, 2.5, math.pi / 2, 4.9, 0.1, 1.5)
    room = _room(BALL, wall)
    assert path([*room.footprints[1:], *room.walls], (1.0, 2.5), room.footprints[0]) == []


def test_straight_ahead_it_goes_and_stops() -> None:
    episode = drive(_room(BALL), _go("red ball"))
    assert episode.outcome == "reached"
    assert episode.steps[0].answer == (
        "the red ball is straight ahead and distant. the next action is move forward 75 cm."
    )
    assert {step.decision.action.split()[0] for step in episode.steps} == {"move", "stop"}


@pytest.mark.parametrize("yaw", [0.0, 2.0, -2.0])
def test_it_goes_round_a_sofa(yaw: float) -> None:
    episode = drive(_room(BALL, SOFA, yaw=yaw), _go("red ball"))
    assert episode.outcome == "reached"
    for step in episode.steps:
        assert parse(step.answer).code is Code.OK
        assert read(step.answer) == step.decision


def test_it_gives_up_what_is_not_there_after_looking_round_elsewhere() -> None:
    episode = drive(_room(BALL, SOFA), _go("blue mug"))
    assert episode.outcome == "given up"
    assert episode.steps[-1].memory.startswith("place 5, turned 315")
    assert len(episode.steps) < MAX_STEPS


@pytest.mark.parametrize("style", [Style(), Style(blocked=True), Style(size=(8.0, 12.0))])
def test_it_arrives_in_rooms_of_every_style(style: Style) -> None:
    for seed in range(4):
        room = make_room(seed, style)
        assert drive(room, _go(room.things[0].name)).outcome == "reached"


def test_a_remembered_thing_is_gone_to_out_of_view() -> None:
    room = _room(BALL)
    expert, memory = Expert(room, _go("red ball")), SearchMemory()
    expert.decide(look(room, room.start), room.start, [], memory)
    memory = memory.after("turn right 45 degree", "i see the red ball straight ahead, distant.")
    memory = memory.after("turn right 45 degree", "the red ball is not in view")
    away = Pose(1.0, 2.5, -math.pi / 2)
    decision = expert.decide(look(room, away), away, ["turn left 45 degree"], memory)
    assert decision.action == "turn left 45 degree"
    assert decision.report.direction == "left"
    assert not decision.report.in_view


def test_what_only_a_model_has_seen_is_gone_to_until_it_is_forgotten() -> None:
    room = _room(SOFA, yaw=math.pi)
    expert = Expert(room, _go("red ball"))
    memory = SearchMemory().after("turn left 45 degree", "i see the red ball on the right, near.")
    decision = expert.decide(look(room, room.start), room.start, ["turn left 45 degree"], memory)
    assert decision.report.name == "red ball"
    assert decision.action.startswith("turn right")


def test_a_search_turns_as_before_and_left_at_first() -> None:
    room = _room(BALL, yaw=math.pi)
    for history, side in (([], "left"), (["turn right 15 degree", "move forward 25 cm"], "right")):
        expert = Expert(room, _go("blue mug"))
        decision = expert.decide(look(room, room.start), room.start, history, SearchMemory())
        assert decision.action == f"turn {side} 45 degree"


def test_a_relation_is_kept_once_it_was_seen() -> None:
    other = Thing("ball", "green", 4.5, 0.8)
    mug = Thing("mug", "blue", 4.6, 2.0)
    room = _room(BALL, other, mug)
    request = Request(
        Kind.GO, "find the ball left of the mug", About("ball", "left of", "blue mug")
    )
    episode = drive(room, request)
    assert episode.outcome == "reached"
    assert "red ball" in episode.steps[-1].answer


def test_requests_that_want_no_motion() -> None:
    room = _room(BALL, SOFA)
    view = look(room, Pose(4.0, 2.2, 0.3))

    def said(kind: Kind, about: About = About()) -> str:  # noqa: B008
        decision = Expert(room, Request(kind, "", about)).decide(
            view, room.start, [], SearchMemory()
        )
        assert decision.action == (STOP if kind is Kind.STOP else REPLY)
        return decision.reply

    assert said(Kind.STOP) == ""
    assert said(Kind.DO_NOT, About("sofa")) == "i will not go to the sofa"
    assert said(Kind.UNKNOWN, About("umbrella")) == "i do not know what an umbrella is"
    assert said(Kind.IS_THERE, About("ball")) == "yes, a red ball is straight ahead"
    assert said(Kind.IS_THERE, About("blue mug")) == "no, i see no blue mug"
    assert said(Kind.HOW_MANY, About("ball")) == "i see one ball"
    assert said(Kind.HOW_MANY, About("box")) == "i see no boxes"
    assert said(Kind.HOW_MANY, About()) == "i see one thing"
    assert said(Kind.WHAT_COLOUR, About("ball")) == "the ball is red"
    assert said(Kind.WHAT_DO_YOU_SEE) == "i see a red ball straight ahead"
    assert reply(Request(Kind.WHAT_DO_YOU_SEE, ""), look(room, Pose(1.0, 2.5, 3.0))) == (
        "i see nothing"
    )


def test_no_step_is_longer_than_the_free_way() -> None:
    for seed in range(20, 24):
        room = make_room(seed)
        for step in drive(room, _go(room.things[-1].name)).steps:
            if step.decision.action.startswith("move"):
                cm = float(step.decision.action.split()[2])
                assert cm / 100 <= look(room, step.pose).free
