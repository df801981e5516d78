"""The simulated base: solid walls and things, limits, odometry, and what each action does."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from collab_llm_nodes.sim.pose import Pose
from collab_llm_nodes.sim.robot import Base, BaseConfig, parse_action
from collab_llm_nodes.sim.rooms import Camera, Furniture, Room, Thing

MIDDLE = Pose(2.0, 2.0, 0.0)


def empty(*parts: Thing | Furniture, start: Pose = MIDDLE) -> Room:
    things = tuple(p for p in parts if isinstance(p, Thing))
    furniture = tuple(p for p in parts if isinstance(p, Furniture))
    return Room(1, 6.0, 5.0, None, things, furniture, Camera(), start)


@pytest.mark.parametrize(
    ("part", "stop"),
    [
        (Thing("ball", "red", 4.0, 2.0), 4.0 - 0.2 - 0.3),
        (Furniture("sofa", 4.0, 2.0, math.pi / 2, 1.7, 0.8, 0.75), 4.0 - 0.4 - 0.3),
        (Thing("ball", "red", 2.0, 4.0), 6.0 - 0.3),
    ],
)
def test_things_furniture_and_walls_stop_the_base(part: Thing | Furniture, stop: float) -> None:
    base = Base(empty(part))
    for _ in range(140):
        base.step(0.8, 0.0, 0.05)
    assert base.pose.x == pytest.approx(stop, abs=1e-6)
    assert base.pose.y == pytest.approx(2.0, abs=1e-6)


def test_a_step_against_something_is_done_in_part() -> None:
    base = Base(empty(Thing("ball", "red", 4.0, 2.0), start=Pose(3.25, 2.0, 0.0)))
    assert base.execute("move forward 75 cm") == pytest.approx(1 / 3, abs=0.05)


def test_the_corner_that_is_missing_stops_the_base() -> None:
    room = replace(empty(Thing("ball", "red", 1.0, 1.0)), notch=(3.0, 2.5))
    base = Base(replace(room, start=Pose(1.0, 3.5, 0.0)))
    for _ in range(100):
        base.step(0.8, 0.0, 0.05)
    assert base.pose.x == pytest.approx(3.0 - 0.3, abs=1e-6)


def test_base_slides_along_a_wall() -> None:
    base = Base(empty(start=Pose(1.0, 4.6, math.pi / 4)))
    for _ in range(40):
        base.step(0.8, 0.0, 0.05)
    assert base.pose.y == pytest.approx(4.7)
    assert base.pose.x > 1.5


def test_speed_and_acceleration_are_limited() -> None:
    base = Base(empty())
    before = 0.0
    for _ in range(10):
        base.step(100.0, -100.0, 0.05)
        assert base.speed - before <= 2.0 * 0.05 + 1e-9
        before = base.speed
    assert base.speed == pytest.approx(BaseConfig().max_speed)
    assert base.turn == pytest.approx(-BaseConfig().max_turn)


def test_odometry_drifts_but_little() -> None:
    base = Base(empty(), seed=4)
    base.execute("turn left 45 degree")
    assert base.pose.yaw == pytest.approx(math.radians(45), abs=math.radians(6))
    assert base.pose.yaw != base.odometry.yaw
    again = Base(empty(), seed=4)
    again.execute("turn left 45 degree")
    assert again.odometry == base.odometry


@pytest.mark.parametrize(
    "action", ["stop", "move forward 25 cm", "turn left 45 degree", "turn right 15 degree"]
)
def test_actions_do_what_they_say(action: str) -> None:
    room = empty(start=Pose(1.0, 1.0, 0.0))
    base = Base(room, config=BaseConfig(odometry_scale=0.0, odometry_noise=0.0))
    assert base.execute(action) == pytest.approx(1.0, abs=0.1)
    kind, sign, amount = parse_action(action)
    turned = sign * amount if kind == "turn" else 0.0
    moved = amount if kind == "move" else 0.0
    assert base.pose.yaw == pytest.approx(turned, abs=0.04)
    assert base.pose.x - 1.0 == pytest.approx(moved, abs=0.04)
    assert base.speed == base.turn == 0.0
