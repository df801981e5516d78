"""The simulator: everything a function of the seed; an expert that solves the rooms."""

from __future__ import annotations

import math

import pytest

from collab_llm_lab.training.nav import wording
from collab_llm_nodes.sim import expert
from collab_llm_nodes.sim.expert import ACTIONS, DIRECTIONS, DISTANCES, Sight
from collab_llm_nodes.sim.pose import Pose
from collab_llm_nodes.sim.robot import Base, BaseConfig, parse_action
from collab_llm_nodes.sim.rooms import COLOURS, SHAPES, Room, Thing, make_room

MIDDLE = Pose(2.0, 2.0, 0.0)


def empty_room(*things: Thing, start: Pose = MIDDLE) -> Room:
    return Room(seed=1, width=4.0, depth=4.0, things=things, target=0, start=start)


def drive(seed: int) -> tuple[str, Base, list[str]]:
    """The expert in room ``seed``: last action, base, actions before it."""
    room = make_room(seed)
    base, history = Base(room), list[str]()
    action = ""
    for _ in range(expert.MAX_STEPS):
        action = expert.decide(expert.look(room, base.pose)[room.target], history)
        if action == "stop":
            break
        base.execute(action)
        history.append(action)
    return action, base, history


def test_rooms_follow_from_their_seed() -> None:
    assert make_room(7) == make_room(7)
    assert make_room(7) != make_room(8)


def test_rooms_are_as_promised() -> None:
    sharing = distractors = 0
    for seed in range(200):
        room = make_room(seed)
        assert 4.0 <= room.width <= 7.0
        assert 4.0 <= room.depth <= 7.0
        assert 2 <= len(room.things) <= 4
        assert len({t.name for t in room.things}) == len(room.things)
        assert all(t.shape in SHAPES and t.colour in COLOURS for t in room.things)
        for i, a in enumerate(room.things):
            for b in room.things[:i]:
                assert math.hypot(a.x - b.x, a.y - b.y) >= 1.0
        others = [t for t in room.things if t != room.goal]
        distractors += len(others)
        sharing += sum(t.shape == room.goal.shape or t.colour == room.goal.colour for t in others)
        towards = math.atan2(room.goal.y - room.start.y, room.goal.x - room.start.x)
        facing = Pose(room.start.x, room.start.y, towards)
        assert expert.look(room, facing)[room.target].visible > 0.8
    assert sharing / distractors > 0.7


def test_expert_solves_the_rooms() -> None:
    solved = 0
    for seed in range(150):
        action, base, _ = drive(seed)
        solved += action == "stop" and expert.reached(make_room(seed), base.pose)
    assert solved >= 149


def test_drives_are_reproducible() -> None:
    first, second = drive(3), drive(3)
    assert first[2] == second[2]
    assert first[1].pose == second[1].pose
    assert first[1].odometry == second[1].odometry


def test_walls_and_things_stop_the_base() -> None:
    ball = Thing("ball", "red", 3.0, 2.0)
    base = Base(empty_room(ball))
    for _ in range(100):
        base.step(0.8, 0.0, 0.05)
    assert base.pose.x == pytest.approx(3.0 - 0.3 - ball.radius, abs=1e-6)
    base = Base(empty_room(ball, start=Pose(1.0, 3.5, math.pi / 2)))
    for _ in range(100):
        base.step(0.8, 0.0, 0.05)
    assert base.pose.y == pytest.approx(4.0 - 0.3)


def test_base_slides_along_a_wall() -> None:
    base = Base(empty_room(Thing("ball", "red", 0.8, 0.8), start=Pose(1.0, 3.6, math.pi / 4)))
    for _ in range(40):
        base.step(0.8, 0.0, 0.05)
    assert base.pose.y == pytest.approx(3.7)
    assert base.pose.x > 1.5


def test_speed_and_acceleration_are_limited() -> None:
    base = Base(empty_room(Thing("ball", "red", 3.5, 3.5)))
    before = 0.0
    for _ in range(10):
        base.step(100.0, -100.0, 0.05)
        assert base.speed - before <= 2.0 * 0.05 + 1e-9
        before = base.speed
    assert base.speed == pytest.approx(BaseConfig().max_speed)
    assert base.turn == pytest.approx(-BaseConfig().max_turn)


def test_odometry_drifts_but_little() -> None:
    base = Base(empty_room(Thing("ball", "red", 3.5, 3.5)), seed=4)
    base.execute("turn left 45 degree")
    assert base.pose.yaw == pytest.approx(math.radians(45), abs=math.radians(6))
    assert base.pose.yaw != base.odometry.yaw


@pytest.mark.parametrize("action", ACTIONS)
def test_actions_do_what_they_say(action: str) -> None:
    room = empty_room(Thing("ball", "red", 3.5, 3.5), start=Pose(1.0, 1.0, 0.0))
    base = Base(room, config=BaseConfig(odometry_scale=0.0, odometry_noise=0.0))
    base.execute(action)
    kind, sign, amount = parse_action(action)
    turned = sign * amount if kind == "turn" else 0.0
    moved = amount if kind == "move" else 0.0
    assert base.pose.yaw == pytest.approx(turned, abs=0.04)
    assert base.pose.x - 1.0 == pytest.approx(moved, abs=0.04)
    assert base.speed == base.turn == 0.0


def test_what_is_behind_or_hidden_is_not_in_view() -> None:
    near = Thing("ball", "red", 2.8, 2.0)
    hidden = Thing("cone", "blue", 3.7, 2.0)
    behind = Thing("box", "green", 0.8, 2.0)
    sights = expert.look(
        empty_room(near, hidden, behind, start=Pose(1.6, 2.0, 0.0)), Pose(1.6, 2, 0)
    )
    assert [s.in_view for s in sights] == [True, False, False]
    assert sights[0].range == pytest.approx(1.0)
    assert sights[0].bearing == pytest.approx(0.0)


def test_search_keeps_its_direction() -> None:
    assert expert.search([]) == "turn left 45 degree"
    assert expert.search(["turn right 15 degree", "move forward 75 cm"]) == "turn right 45 degree"
    assert expert.search(["turn right 15 degree", "turn left 30 degree"]) == "turn left 45 degree"
    # older than the navigator remembers
    forward = ["move forward 25 cm"] * 2
    assert expert.search(["turn right 15 degree", *forward]) == "turn left 45 degree"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("distance", DISTANCES)
def test_words_determine_the_action(direction: str, distance: str) -> None:
    """The reason's words, read back from the answer, imply the answer's own action."""
    bearing = {"far left": 35, "left": 15, "ahead": 0, "right": -15, "far right": -35}[direction]
    metres = dict(zip(DISTANCES, (0.4, 0.6, 0.9, 2.0, 4.0), strict=True))[distance]
    sight = Sight(math.radians(bearing), metres, 1.0)
    for verb in range(len(wording.VERBS)):
        text = wording.answer("red ball", sight, [], verb)
        assert wording.direction_said(text) == direction
        assert distance in text
        assert wording.action_said(text) == expert.action_for(direction, distance)
        assert wording.action_said(text) == expert.decide(sight, [])


def test_thresholds_of_words_and_actions_are_the_same() -> None:
    for tenths in range(-449, 450):
        sight = Sight(math.radians(tenths / 10), 2.0, 1.0)
        word, action = expert.direction(sight.bearing), expert.decide(sight, [])
        turn = {
            "ahead": "move forward 75 cm",
            "left": "turn left 15 degree",
            "right": "turn right 15 degree",
            "far left": "turn left 30 degree",
            "far right": "turn right 30 degree",
        }
        assert action == turn[word]


def test_unseen_answers_say_so_and_search() -> None:
    for verb in range(len(wording.VERBS)):
        text = wording.answer("red ball", None, ["turn right 30 degree"], verb)
        assert wording.direction_said(text) == "unseen"
        assert wording.action_said(text) == "turn right 45 degree"


def test_answers_are_read_by_the_navigator() -> None:
    from collab_llm_nodes.robot.grammar import Code, GrammarConfig, parse

    sights = [None, Sight(0.6, 2.0, 1.0), Sight(-0.3, 0.9, 1.0), Sight(0.0, 0.4, 1.0)]
    sights += [Sight(0.0, metres, 1.0) for metres in (0.6, 0.9, 3.0)]
    for verb in range(len(wording.VERBS)):
        for sight in sights:
            text = wording.answer("blue bottle", sight, ["turn right 15 degree"], verb)
            action = wording.action_said(text)
            assert action is not None
            kind, sign, amount = parse_action(action)
            parsed = parse(text, GrammarConfig())
            assert parsed.code is Code.OK
            assert parsed.value == pytest.approx(sign * amount)
