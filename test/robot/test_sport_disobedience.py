"""The Go2's Sport API: a robot that does not obey, avoidance, clocks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from fake_sport_server import BALANCE, DAMPING, LOCKED
from sport_bench import AHEAD, Bench

from collab_llm_nodes.robot.go2.sport import (
    DEAF_S,
    DEAF_SHARE,
    REQUEST_S,
    REST,
    UNLOCK_PAUSE_S,
    Api,
    ClockAlignment,
    Command,
    Go2,
    Go2Config,
    Phase,
    SportState,
)

LEFT = Command(0.0, 0.0, 0.6)


# A robot that does not obey.


def test_damping_is_left_alone() -> None:
    bench = Bench(machine=DAMPING)
    bench.command = AHEAD
    bench.run(3.0)
    assert bench.go2.refusing
    assert bench.go2.trouble(bench.now).code == "DAMPED"
    assert {call.api for _, call in bench.sent} == {Api.STOP_MOVE}


def test_a_second_driver_forbids_motion_until_it_is_gone() -> None:
    bench = Bench()
    bench.command = AHEAD
    bench.run(1.0)
    assert bench.moving
    bench.carry(bench.go2.on_peers("go2_driver of process 7", bench.now))
    seen = bench.now
    assert bench.times(Api.STOP_MOVE, since=seen), "at once"
    bench.run(3.0)
    assert not bench.times(Api.MOVE, since=seen + 0.001)
    assert bench.go2.refusing
    trouble = bench.go2.trouble(bench.now)
    assert trouble.code == "STARTED_TWICE"
    assert "go2_driver of process 7" in trouble.text
    bench.carry(bench.go2.on_peers("", bench.now))
    bench.run(1.0)
    assert bench.moving


def test_a_robot_that_sits_is_left_alone() -> None:
    bench = Bench(machine=1007)
    bench.command = AHEAD
    bench.run(1.0)
    assert bench.go2.trouble(bench.now).code == "NOT_STANDING"
    assert "1007" in bench.go2.trouble(bench.now).text
    assert {call.api for _, call in bench.sent} == {Api.STOP_MOVE}


def test_locked_joints_are_unlocked_when_motion_is_wanted() -> None:
    bench = Bench(machine=LOCKED)
    bench.run(1.0)
    assert not bench.times(Api.BALANCE_STAND)  # not before
    assert bench.go2.trouble(bench.now).code == "LOCKED"
    bench.command = AHEAD
    bench.run(1.0)
    assert len(bench.times(Api.BALANCE_STAND)) == 1
    assert bench.moving


def test_unlocking_can_be_forbidden() -> None:
    bench = Bench(Go2Config(avoid=False, unlock=False), machine=LOCKED)
    bench.command = AHEAD
    bench.run(2.0)
    assert bench.go2.refusing
    assert {call.api for _, call in bench.sent} == {Api.STOP_MOVE}


def test_joints_that_somebody_locks_during_a_motion_stay_locked() -> None:
    """Somebody who locks them with the remote control means a stop."""
    bench = Bench()
    bench.command = AHEAD
    bench.run(1.0)
    bench.robot.machine = LOCKED
    bench.run(3.0)
    assert not bench.times(Api.BALANCE_STAND)
    assert bench.go2.refusing
    assert "locked while it walked" in bench.go2.trouble(bench.now).text
    bench.command = REST
    bench.run(1.0)
    bench.command, since = AHEAD, bench.now  # nor for the next motion
    bench.run(1.0)
    assert not bench.times(Api.MOVE, since)
    assert not bench.times(Api.BALANCE_STAND)
    bench.robot.machine = BALANCE  # by remote control as well
    bench.run(1.0)
    assert bench.moving


@pytest.mark.parametrize("tries", [2, 3])
def test_unlocking_is_tried_again_but_not_for_ever(tries: int) -> None:
    config = Go2Config(avoid=False, unlock_tries=tries)
    bench = Bench(config, machine=LOCKED, codes={Api.BALANCE_STAND.value: 3203})
    bench.command = AHEAD
    bench.run(6.0)
    at = bench.times(Api.BALANCE_STAND)
    assert len(at) == tries
    assert all(b - a == pytest.approx(UNLOCK_PAUSE_S, abs=0.03) for a, b in pairwise(at))
    assert bench.go2.phase in (Phase.STANDING, Phase.STOPPING)
    assert bench.go2.refusing
    bench.command = REST
    bench.run(0.3)
    bench.command = AHEAD  # another motion, another try
    bench.run(0.3)
    assert len(bench.times(Api.BALANCE_STAND)) == tries + 1


def test_a_deaf_robot_is_noticed_by_its_measured_velocity_and_tried_again() -> None:
    bench = Bench(Go2Config(avoid=False))
    bench.robot.deaf_until = bench.now + 5.0
    bench.command, since = LEFT, bench.now
    bench.run(DEAF_S - 0.1)
    assert not bench.go2.trouble(bench.now)
    bench.run(0.2)
    assert bench.go2.refusing
    assert bench.go2.trouble(bench.now).code == "DEAF"
    bench.run(5.0 - DEAF_S)
    assert 2 <= len(bench.times(Api.BALANCE_STAND, since)) <= 4
    bench.run(2.0)
    assert bench.moving
    assert not bench.go2.trouble(bench.now)
    assert not bench.go2.refusing


@pytest.mark.parametrize(("share", "deaf"), [(DEAF_SHARE + 0.01, False), (0.1, True)])
def test_how_slow_is_deaf(share: float, deaf: bool) -> None:
    go2 = Go2(Go2Config(avoid=False, unlock=False))
    go2.begin(0.0)
    for i in range(200):
        go2.on_state(SportState(BALANCE, 0, share * AHEAD.x, 0.0), i * 0.01)
        go2.on_command(AHEAD, i * 0.01)
    assert (go2.trouble(2.0).code == "DEAF") is deaf


def test_stand_up_as_it_is_on_the_robot() -> None:
    """Locked after StandUp, then deaf for seconds: it walks in the end, by itself."""
    bench = Bench()
    bench.robot.stand_up(bench.now, deaf_s=4.0)
    bench.command = AHEAD
    bench.run(8.0)
    assert bench.robot.velocity[0] == pytest.approx(0.4, abs=0.01)


# Obstacle avoidance.


def test_avoidance_is_switched_on_as_the_vendor_does() -> None:
    bench = Bench(Go2Config(avoid=True), switches_needed=3)
    bench.command = AHEAD
    bench.run(2.0)
    calls = [(n, p) for s, n, p in bench.robot.log if s == "obstacles_avoid" and n != 1003]
    assert [n for n, _ in calls[:8]] == [1002, 1001, 1002, 1001, 1002, 1001, 1002, 1004]
    assert calls[7][1] == {"is_remote_commands_from_api": True}
    moves = [p for s, n, p in bench.robot.log if (s, n) == ("obstacles_avoid", 1003)]
    assert moves[-1] == {"x": 0.4, "y": 0.0, "yaw": 0.0, "mode": 0}
    assert bench.robot.velocity[0] == pytest.approx(0.4)
    assert not bench.times(Api.MOVE)  # never around the avoidance


def test_without_avoidance_there_is_no_motion() -> None:
    bench = Bench(Go2Config(avoid=True), codes={Api.AVOID_SWITCH_SET.value: 3203})
    bench.command = AHEAD
    bench.run(3.0)
    trouble = bench.go2.trouble(bench.now)
    assert (trouble.code, bench.go2.refusing) == ("NO_AVOIDANCE", True)
    assert not bench.moving
    assert not bench.times(Api.MOVE)


def test_avoidance_that_is_switched_off_is_noticed() -> None:
    bench = Bench(Go2Config(avoid=True))
    bench.command = AHEAD
    bench.run(2.0)
    assert bench.moving
    bench.robot.switches_needed = 99
    since = bench.now
    bench.run(2.5)
    assert bench.times(Api.STOP_MOVE, since)
    assert bench.go2.trouble(bench.now).code == "NO_AVOIDANCE"
    bench.robot.switches_needed = 0
    bench.run(1.0)
    assert bench.moving


def test_a_robot_that_avoids_something_is_reported_and_not_unlocked() -> None:
    bench = Bench(Go2Config(avoid=True))
    bench.run(1.0)
    bench.command, bench.robot.deaf_until = AHEAD, bench.now + 2.0  # stands before an obstacle
    bench.run(1.8)
    assert bench.go2.trouble(bench.now).code == "DEAF"
    assert "in its way" in bench.go2.trouble(bench.now).text
    assert not bench.times(Api.BALANCE_STAND)
    bench.run(1.0)  # it is gone
    assert bench.moving
    assert not bench.go2.trouble(bench.now)


def test_avoidance_is_given_back_at_the_end() -> None:
    bench = Bench(Go2Config(avoid=True))
    bench.command = AHEAD
    bench.run(2.0)
    taken = bench.robot.remote
    bench.carry(bench.go2.halt(bench.now))
    bench.run(1.0)
    assert (taken, bench.robot.remote) == (True, False)
    assert not bench.moving
    zero = {"x": 0.0, "y": 0.0, "yaw": 0.0, "mode": 0}
    assert ("obstacles_avoid", 1003, zero) in bench.robot.log


def test_avoidance_is_the_default_and_a_robot_without_is_told_what_to_do() -> None:
    bench = Bench(Go2Config(), codes={Api.AVOID_SWITCH_GET.value: 3203})
    bench.command = AHEAD
    bench.run(2.0)
    assert "avoid: false" in bench.go2.trouble(bench.now).text
    assert not bench.go2.avoiding
    assert not bench.moving


@pytest.mark.parametrize("avoid", [True, False])
def test_in_a_dry_run_nothing_but_stop_move_is_asked_of_the_robot(avoid: bool) -> None:
    config = Go2Config(avoid=avoid, dry_run=True)
    assert config.functions == (Api.STOP_MOVE,)
    bench = Bench(config, machine=LOCKED)  # which would be unlocked otherwise
    bench.command = AHEAD
    bench.run(3.0)
    bench.carry(bench.go2.begin(bench.now))  # as an emergency stop does
    bench.carry(bench.go2.halt(bench.now))
    bench.run(1.0)
    assert {call.api for _, call in bench.sent} == {Api.STOP_MOVE}
    assert bench.go2.trouble(bench.now).code == "DRY_RUN"


def test_every_number_was_used_once() -> None:
    bench = Bench(Go2Config(avoid=True))
    bench.command = AHEAD
    bench.run(3.0)
    assert set(bench.robot.ids.values()) == {1}


def test_a_request_that_is_not_answered_in_time_is_reported() -> None:
    go2, due = Go2(Go2Config(avoid=False)), 10.0 + REQUEST_S
    go2.begin(10.0)
    go2.on_state(SportState(BALANCE), due - 0.05)
    go2.tick(due - 0.05)
    assert not go2.trouble(due - 0.05)
    go2.tick(due + 0.05)
    assert go2.trouble(due + 0.05).code == "NO_ANSWER"


# Clocks.


def test_delays_show_whatever_the_clocks_say() -> None:
    alignment = ClockAlignment()
    for i in range(100):  # the robot's clock is 5000 s behind; transport takes 2 to 12 ms
        late = 0.010 * (i % 2)
        delay = alignment.delay(50.0 + i * 0.02, 5050.0 + i * 0.02 + 0.002 + late)
        assert delay == pytest.approx(late, abs=1e-3)
    # A burst that was held up for two seconds is two seconds old.
    assert alignment.delay(52.0, 5054.0) == pytest.approx(2.0, abs=0.01)
    # A robot that was restarted has another clock.
    assert alignment.delay(1.0, 5060.0) == 0.0
    assert alignment.delay(2.0, 5061.01) == pytest.approx(0.01, abs=1e-3)


@pytest.mark.parametrize("step", [5.0, -5.0, 50.0, -50.0])
def test_a_clock_of_the_robot_that_was_set_is_followed_at_once(step: float) -> None:
    alignment = ClockAlignment()
    for i in range(2000):
        stamped = 7.0 + 0.1 * i + (step if i >= 200 else 0.0)
        assert alignment.delay(stamped, 100.0 + 0.1 * i) < 0.001


def test_a_delay_that_grows_slowly_or_stays_is_never_taken_for_a_clock() -> None:
    alignment = ClockAlignment()
    for i in range(6000):
        seconds = 0.1 * i
        late = min(2.0, 0.004 * seconds)
        delay = alignment.delay(seconds, 50.0 + seconds + late)
        assert delay == pytest.approx(late, abs=0.001 + 2e-4 * seconds)


def test_a_clock_that_drifts_is_followed() -> None:
    alignment = ClockAlignment()
    for i in range(3600):
        received = 100.0 + i
        assert alignment.delay(received * (1 - 1e-4), received) < 0.01
