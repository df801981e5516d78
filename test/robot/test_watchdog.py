"""The watchdog of the Go2: it stops a motion that breaks off, and can do nothing else."""

from __future__ import annotations

import math

import pytest
from fake_sport_server import BALANCE, LOCKED
from hypothesis import given
from hypothesis import strategies as st
from sport_bench import Bench

from collab_llm_nodes.robot.go2.sport import Api, Command
from collab_llm_nodes.robot.go2.watchdog import SILENCE_S, Watchdog

AHEAD, REST = '{"x": 0.2, "y": 0.0, "z": 0.0}', '{"x": 0.0, "y": 0.0, "z": 0.0}'
AVOID = '{"x": 0.2, "y": 0.0, "yaw": 0.0, "mode": 0}'


class World:
    """A watchdog that is ticked at 100 Hz; ``stops``: when it sent StopMove."""

    def __init__(self) -> None:
        self.watchdog, self.now, self.stops = Watchdog(), 100.0, list[float]()
        self.number = 0

    def ask(self, api: Api, parameter: str = "{}") -> None:
        self.number += 1
        self.watchdog.on_request(api.value, self.number, parameter, self.now)

    def go(self, seconds: float) -> None:
        for _ in range(round(seconds * 100)):
            self.now += 0.01
            for call in self.watchdog.tick(self.now):
                assert (call.api, call.reply) == (Api.STOP_MOVE, False)
                self.stops.append(self.now)
                # It hears its own requests, too.
                self.watchdog.on_request(call.api.value, call.id, call.parameter, self.now)


def test_a_motion_that_breaks_off_is_stopped_for_a_while() -> None:
    for api, parameter in ((Api.MOVE, AHEAD), (Api.AVOID_MOVE, AVOID), (Api.MOVE, "no JSON")):
        world = World()
        world.ask(api, parameter)
        begin = world.now
        world.go(10.0)
        assert SILENCE_S <= world.stops[0] - begin <= SILENCE_S + 0.02 <= 0.5
        assert 1.5 <= world.stops[-1] - begin <= 3.0  # longer than the robot holds a velocity
        assert max(b - a for a, b in zip(world.stops, world.stops[1:], strict=False)) < 0.2
        assert not world.watchdog.watches


def test_a_motion_that_goes_on_or_ends_is_left_alone() -> None:
    world = World()
    for _ in range(100):
        world.ask(Api.MOVE, AHEAD)
        world.go(0.1)  # the slowest rate of a driver
    world.ask(Api.STOP_MOVE)
    world.go(3.0)
    world.ask(Api.MOVE, AHEAD)
    world.ask(Api.MOVE, REST)
    world.go(3.0)
    assert not world.stops


def test_whoever_stands_may_be_silent() -> None:
    world = World()
    world.ask(Api.BALANCE_STAND)
    world.ask(Api.AVOID_SWITCH_SET, '{"enable": true}')
    world.ask(Api.AVOID_MOVE, '{"x": 0.5, "y": 0.0, "yaw": 0.0, "mode": 1}')  # one increment
    world.go(3.0)
    assert not world.stops


@pytest.mark.parametrize("deaf_for", [0.9, 3.0, math.inf])
@pytest.mark.parametrize("machine", [BALANCE, LOCKED])
def test_a_driver_that_unlocks_the_joints_has_not_fallen_silent(
    machine: int, deaf_for: float
) -> None:
    """It pauses for a second after each BalanceStand."""
    bench, watchdog = Bench(machine=machine), Watchdog()
    bench.robot.deaf_until = bench.now + deaf_for
    bench.command = Command(0.4)
    for _ in range(1200):
        seen = len(bench.sent)
        bench.run(0.01)
        for at, call in bench.sent[seen:]:
            watchdog.on_request(call.api.value, call.id, call.parameter, at)
        assert not watchdog.tick(bench.now)
    assert bench.times(Api.BALANCE_STAND)


def test_a_driver_that_is_back_moves_the_robot_again() -> None:
    world = World()
    world.ask(Api.MOVE, AHEAD)
    world.go(SILENCE_S + 0.2)
    before = len(world.stops)
    assert before
    for _ in range(20):
        world.ask(Api.MOVE, AHEAD)
        world.go(0.1)
    assert len(world.stops) == before


def test_at_its_own_end_it_stops_at_once_what_it_watches() -> None:
    world = World()
    assert not world.watchdog.on_end(world.now)
    world.ask(Api.MOVE, AHEAD)
    assert [call.api for call in world.watchdog.on_end(world.now)] == [Api.STOP_MOVE]
    world.go(0.5)
    assert len(world.stops) > 2  # as long as it is ticked


@given(
    st.lists(
        st.tuples(
            st.sampled_from([api.value for api in Api] + [("sport", 1031), ("vui", 1)]),
            st.integers(-(2**63), 2**63 - 1),
            st.text(max_size=20) | st.sampled_from([AHEAD, REST, AVOID, "[]", "null", '{"x":[]}']),
            st.floats(0.0, 1.0),
        ),
        max_size=30,
    )
)
def test_whatever_it_hears_it_sends_nothing_but_stop_move(
    heard: list[tuple[tuple[str, int], int, str, float]],
) -> None:
    watchdog, now = Watchdog(), 100.0
    for api, number, parameter, pause in heard:
        watchdog.on_request(api, number, parameter, now)
        now += pause
        assert all(call.api is Api.STOP_MOVE for call in watchdog.tick(now))
    assert all(call.api is Api.STOP_MOVE for call in watchdog.on_end(now))
