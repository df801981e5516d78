"""The Go2's protocol without ROS: what may be asked, answers, stops, unlocking, avoidance."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from fake_sport_server import BALANCE, DAMPING, LOCKED, SportServer
from folders import PACKAGE

from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.robot.go2.sport import (
    CODES,
    NO_ANSWER,
    REST,
    Answer,
    Api,
    Call,
    ClockAlignment,
    Command,
    Go2,
    Go2Config,
    Phase,
    Requests,
    SportState,
    Stance,
)

AHEAD = Command(0.4, 0.0, 0.0)
LEFT = Command(0.0, 0.0, 0.6)


class Bench:
    """A driver's state machine and a robot, on one simulated clock. Answers come at once."""

    def __init__(self, config: Go2Config | None = None, **behaviour: Any) -> None:
        self.now = 100.0
        self.robot = SportServer(**behaviour)
        self.robot.advance(self.now)
        self.go2 = Go2(config or Go2Config())
        self.command: Command | None = None  # sent at 20 Hz
        self.speaks = True  # the robot's state comes
        self.sent: list[tuple[float, Call]] = []
        self.carry(self.go2.begin(self.now))

    def carry(self, calls: list[Call]) -> None:
        for call in calls:
            self.sent.append((self.now, call))
            api = call.api
            code, data, _ = self.robot.request(
                api.service, api.number, call.id, call.parameter, self.now
            )
            if not call.reply or api.value in self.robot.mute:
                continue
            answer = self.go2.requests.on_response(call.id, api.number, code, data)
            assert answer is not None
            self.carry(self.go2.on_answer(answer, self.now))

    def run(self, seconds: float) -> None:
        """Ticks at 100 Hz, state at 50 Hz, commands at 20 Hz."""
        for i in range(round(seconds * 100)):
            self.now += 0.01
            self.robot.advance(self.now)
            if i % 2 == 0 and self.speaks:
                r = self.robot
                speed = math.hypot(r.velocity[0], r.velocity[1])
                state = SportState(r.machine, 0, speed, r.velocity[2])
                self.carry(self.go2.on_state(state, self.now))
            if i % 5 == 0 and self.command is not None:
                self.carry(self.go2.on_command(self.command, self.now))
            self.carry(self.go2.tick(self.now))

    def times(self, api: Api, since: float = 0.0) -> list[float]:
        return [at for at, call in self.sent if call.api is api and at >= since]

    @property
    def moving(self) -> bool:
        return any(abs(v) > 1e-6 for v in self.robot.velocity)


# What may be asked at all.


def test_nothing_but_these_functions_can_be_asked_of_the_robot() -> None:
    assert {api.value for api in Api} == {
        ("sport", 1002),  # BalanceStand
        ("sport", 1003),  # StopMove
        ("sport", 1008),  # Move
        *((("obstacles_avoid", n)) for n in (1001, 1002, 1003, 1004)),
        ("videohub", 1001),
    }


def test_requests_are_made_and_sent_in_one_place_each() -> None:
    """A number of a function reaches the robot only through ``Api``."""
    sources = {p: p.read_text(encoding="utf-8") for p in PACKAGE.rglob("*.py")}

    def who(text: str) -> set[str]:
        return {str(p.relative_to(PACKAGE)) for p, source in sources.items() if text in source}

    assert who("identity.api_id =") == {"ros/unitree.py"}
    assert who("messages.Request") | who("unitree_api.msg import") == {"ros/unitree.py"}
    assert who("Call(self._last") | who("return Call(") == {"robot/go2/sport.py"}
    with pytest.raises(AttributeError):
        Requests(1.0).make(("sport", 1030), {}, 0.0).api.number  # type: ignore[arg-type]  # noqa: B018


# Requests and answers.


def test_numbers_of_requests_are_unique_and_grow() -> None:
    requests = Requests(1.0)
    ids = [requests.make(Api.MOVE, {}, now).id for now in (5.0, 5.0, 5.0, 4.0, 6.0)]
    assert ids == sorted(set(ids))
    assert ids[0] == 5_000_000_000


def test_an_answer_finds_its_request_once() -> None:
    requests = Requests(1.0)
    first, second = (requests.make(Api.STOP_MOVE, {}, 1.0) for _ in range(2))
    assert requests.on_response(7, 1003, 0) is None  # somebody else's
    assert requests.on_response(second.id, 1003, 0) == Answer(second, 0)
    assert requests.on_response(second.id, 1003, 0) is None
    wrong = requests.on_response(first.id, 1008, 0)
    assert wrong is not None
    assert wrong.code == 3105


def test_a_request_without_answer_is_reported_once() -> None:
    requests = Requests(0.5)
    call = requests.make(Api.STOP_MOVE, {}, 1.0)
    requests.make(Api.MOVE, {}, 1.0, reply=False)
    assert requests.overdue(1.5) == []
    (late,) = requests.overdue(1.6)
    assert late == Answer(call, NO_ANSWER)
    assert str(late) == "STOP_MOVE: 3104, no answer in time"
    assert requests.overdue(9.0) == []
    assert requests.on_response(call.id, 1003, 0) is None  # too late


@pytest.mark.parametrize("code", [0, 3102, 3104, 3203, 3204, 3205, 4101, 4201, 4202, 4205])
def test_the_vendors_codes_have_words(code: int) -> None:
    assert CODES[code]
    call = Call(1, Api.BALANCE_STAND, "{}", True)
    assert str(Answer(call, code)).startswith(f"BALANCE_STAND: {code}, ")
    assert "unknown code" in str(Answer(call, 9999))


def test_answers_are_read_with_care() -> None:
    call = Call(1, Api.AVOID_SWITCH_GET, "{}", True)
    assert Answer(call, 0, '{"enable": true}').value("enable") is True
    for junk in ("", "[1]", "{", "null", '{"other": 1}'):
        assert Answer(call, 0, junk).value("enable") is None


# What the robot says of itself.


@pytest.mark.parametrize(
    ("machine", "mode", "stance"),
    [
        (100, 0, Stance.READY),
        (1001, 0, Stance.DAMPED),
        (1002, 3, Stance.LOCKED),
        (1013, 6, Stance.READY),
        (1015, 3, Stance.READY),
        (1007, 0, Stance.OTHER),  # sitting
        (2012, 0, Stance.OTHER),
        (0, 0, Stance.READY),
        (0, 1, Stance.READY),
        (0, 3, Stance.READY),
        (0, 5, Stance.OTHER),  # lying
        (0, 6, Stance.LOCKED),
        (0, 7, Stance.DAMPED),
        (0, 11, Stance.OTHER),
    ],
)
def test_stances(machine: int, mode: int, stance: Stance) -> None:
    assert SportState(machine, mode).stance is stance


# Moving and stopping.


def test_it_begins_with_a_stop() -> None:
    bench = Bench()
    assert [call.api for _, call in bench.sent] == [Api.STOP_MOVE]
    bench.run(0.1)
    assert bench.go2.phase is Phase.STANDING
    assert len(bench.sent) == 1


def test_it_moves_sends_again_and_stops() -> None:
    bench = Bench()
    bench.command = AHEAD
    bench.run(1.0)
    assert bench.robot.velocity[0] == pytest.approx(0.4)
    moves = bench.times(Api.MOVE)
    assert len(moves) == pytest.approx(20, abs=2)
    assert all(not call.reply for _, call in bench.sent if call.api is Api.MOVE)
    bench.command = REST
    since = bench.now
    bench.run(0.06)
    assert bench.times(Api.STOP_MOVE, since)[0] <= since + 0.06
    bench.run(1.0)
    assert not bench.moving
    assert bench.go2.phase is Phase.STANDING
    assert not bench.times(Api.MOVE, since + 0.06)
    bench.run(3.0)
    assert not bench.times(Api.STOP_MOVE, bench.now - 3.0)  # whoever has the remote may walk it


def test_move_goes_on_between_commands_that_are_slow() -> None:
    bench = Bench()
    bench.carry(bench.go2.on_command(AHEAD, bench.now))
    bench.run(0.35)
    assert len(bench.times(Api.MOVE)) >= 6


@pytest.mark.parametrize(("rate", "least", "most"), [(20.0, 18, 22), (50.0, 45, 55)])
def test_rate(rate: float, least: int, most: int) -> None:
    bench = Bench(Go2Config(rate=rate))
    bench.command = AHEAD
    bench.run(1.0)
    assert least <= len(bench.times(Api.MOVE)) <= most


def test_a_flood_of_commands_is_not_passed_on() -> None:
    bench = Bench()
    for i in range(1000):
        bench.now += 0.001
        bench.carry(bench.go2.on_command(Command(0.2 + i * 1e-4), bench.now))
    assert len(bench.times(Api.MOVE)) <= 51


@pytest.mark.parametrize("watchdog", [0.2, 0.4])
def test_silence_of_who_commands_stops(watchdog: float) -> None:
    bench = Bench(Go2Config(watchdog=watchdog))
    bench.command = AHEAD
    bench.run(1.0)
    bench.command, since = None, bench.now
    bench.run(0.6)
    assert bench.times(Api.STOP_MOVE, since)[0] - since <= watchdog + 0.011
    bench.run(0.3)
    assert not bench.moving


@pytest.mark.parametrize("limit", [0.2, 0.4])
def test_silence_of_the_robot_stops(limit: float) -> None:
    bench = Bench(Go2Config(state_timeout=limit))
    bench.command = AHEAD
    bench.run(1.0)
    bench.speaks, since = False, bench.now
    bench.run(0.6)
    assert bench.times(Api.STOP_MOVE, since)[0] - since <= limit + 0.021
    assert bench.go2.refusing
    assert bench.go2.trouble(bench.now).code == "STALE_STATE"
    assert not bench.times(Api.MOVE, since + limit + 0.02)


@pytest.mark.parametrize("field", ["watchdog", "state_timeout"])
def test_no_configuration_waits_longer_than_half_a_second(field: str) -> None:
    late: dict[str, Any] = {field: 0.51}
    with pytest.raises(ConfigError, match=field):
        Go2Config(**late)


def test_a_robot_never_heard_is_not_moved() -> None:
    bench = Bench()
    bench.speaks, bench.command = False, AHEAD
    bench.run(3.0)
    assert not bench.times(Api.MOVE)
    assert bench.go2.trouble(bench.now).code == "NO_STATE"
    assert bench.go2.refusing


def test_a_velocity_that_is_no_number_is_a_stop() -> None:
    for bad in (Command(math.nan), Command(0.4, math.inf), Command(0.1, 0.0, -math.inf)):
        bench = Bench()
        bench.command = AHEAD
        bench.run(0.5)
        bench.command, since = bad, bench.now
        bench.run(0.5)
        assert bench.times(Api.STOP_MOVE, since)
        assert not bench.moving


@pytest.mark.parametrize(
    ("limits", "sent"),
    [
        ({}, {"x": 1.0, "y": -0.4, "z": 1.5}),
        (
            {"linear_speed": 0.5, "lateral_speed": 0.1, "angular_speed": 0.7},
            {"x": 0.5, "y": -0.1, "z": 0.7},
        ),
    ],
)
def test_speeds_are_limited(limits: dict[str, Any], sent: dict[str, float]) -> None:
    bench = Bench(Go2Config(**limits))
    bench.run(0.1)
    bench.carry(bench.go2.on_command(Command(9.0, -9.0, 9.0), bench.now))
    assert bench.robot.log[-1] == ("sport", 1008, sent)


@pytest.mark.parametrize("repeat", [0.05, 0.2])
def test_a_stop_is_repeated_until_it_is_answered(repeat: float) -> None:
    bench = Bench(Go2Config(stop_repeat=repeat))
    bench.command = AHEAD
    bench.run(1.0)
    bench.robot.mute.add(Api.STOP_MOVE.value)
    bench.command, since = REST, bench.now
    bench.run(1.0)
    stops = bench.times(Api.STOP_MOVE, since)
    assert len(stops) == pytest.approx(1.0 / repeat, abs=2)
    assert bench.go2.trouble(bench.now).code == "NO_ANSWER"
    bench.robot.mute.clear()
    bench.run(0.3)
    assert bench.go2.phase is Phase.STANDING
    assert not bench.go2.trouble(bench.now)


def test_a_late_answer_to_an_earlier_stop_is_none_to_this_one() -> None:
    go2 = Go2(Go2Config())
    (first,) = go2.begin(1.0)
    go2.on_state(SportState(BALANCE), 1.0)
    go2.on_command(AHEAD, 1.01)
    go2.on_state(SportState(BALANCE, 0, 0.4), 1.02)
    (second,) = go2.on_command(REST, 1.05)
    late, right = (go2.requests.on_response(c.id, 1003, 0) for c in (first, second))
    assert late is not None
    assert right is not None
    go2.on_answer(late, 1.06)
    go2.on_state(SportState(BALANCE), 1.07)
    before = go2.phase
    go2.on_answer(right, 1.08)
    assert (before, go2.phase) == (Phase.STOPPING, Phase.STANDING)


def test_a_stop_that_is_never_answered_ends_when_the_robot_stands() -> None:
    bench = Bench(mute={Api.STOP_MOVE.value})
    bench.run(5.0)
    assert bench.go2.phase is Phase.STANDING
    assert max(bench.times(Api.STOP_MOVE)) < bench.now - 2.5


def test_a_robot_that_is_away_is_stopped_when_it_comes_back() -> None:
    bench = Bench(mute={Api.STOP_MOVE.value})
    bench.speaks = False
    bench.run(5.0)
    assert not bench.times(Api.STOP_MOVE, bench.now - 2.5)
    bench.speaks, since = True, bench.now
    bench.robot.mute.clear()
    bench.run(0.2)
    assert bench.times(Api.STOP_MOVE, since)
    assert bench.go2.phase is Phase.STANDING


def test_errors_of_the_robot_are_told_in_words() -> None:
    bench = Bench(codes={Api.STOP_MOVE.value: 3205})
    bench.run(1.0)
    trouble = bench.go2.trouble(bench.now)
    assert trouble.code == "REFUSED"
    assert "another program has exclusive use" in trouble.text


def test_the_end_is_a_stop_that_nothing_undoes() -> None:
    bench = Bench()
    bench.command = AHEAD
    bench.run(1.0)
    since = bench.now
    bench.carry(bench.go2.halt(bench.now))
    assert bench.times(Api.STOP_MOVE, since) == [since]
    bench.run(1.0)  # commands go on coming
    assert not bench.times(Api.MOVE, since)
    assert not bench.moving
    bench.carry(bench.go2.begin(bench.now))
    bench.run(0.5)
    assert bench.moving


# A robot that does not obey.


def test_damping_is_left_alone() -> None:
    bench = Bench(machine=DAMPING)
    bench.command = AHEAD
    bench.run(3.0)
    assert bench.go2.refusing
    assert bench.go2.trouble(bench.now).code == "DAMPED"
    assert {call.api for _, call in bench.sent} == {Api.STOP_MOVE}


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
    bench = Bench(Go2Config(unlock=False), machine=LOCKED)
    bench.command = AHEAD
    bench.run(2.0)
    assert bench.go2.refusing
    assert {call.api for _, call in bench.sent} == {Api.STOP_MOVE}


def test_joints_that_somebody_locks_in_mid_motion_stay_locked() -> None:
    """With the remote control: that is meant as a stop."""
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


@pytest.mark.parametrize(("pause", "tries"), [(0.5, 3), (1.0, 2)])
def test_unlocking_is_tried_again_but_not_for_ever(pause: float, tries: int) -> None:
    config = Go2Config(unlock_pause=pause, unlock_tries=tries)
    bench = Bench(config, machine=LOCKED, codes={Api.BALANCE_STAND.value: 3203})
    bench.command = AHEAD
    bench.run(6.0)
    at = bench.times(Api.BALANCE_STAND)
    assert len(at) == tries
    assert all(b - a == pytest.approx(pause, abs=0.03) for a, b in pairwise(at))
    assert bench.go2.phase in (Phase.STANDING, Phase.STOPPING)
    assert bench.go2.refusing
    bench.command = REST
    bench.run(0.3)
    bench.command = AHEAD  # another motion, another try
    bench.run(0.3)
    assert len(bench.times(Api.BALANCE_STAND)) == tries + 1


@pytest.mark.parametrize("deaf_after", [0.5, 1.0])
def test_a_deaf_robot_is_noticed_by_its_measured_velocity_and_tried_again(
    deaf_after: float,
) -> None:
    bench = Bench(Go2Config(deaf_after=deaf_after))
    bench.robot.deaf_until = bench.now + 5.0
    bench.command, since = LEFT, bench.now
    bench.run(deaf_after - 0.1)
    assert not bench.go2.trouble(bench.now)
    bench.run(0.2)
    assert bench.go2.refusing
    assert bench.go2.trouble(bench.now).code == "DEAF"
    bench.run(5.0 - deaf_after)
    assert 2 <= len(bench.times(Api.BALANCE_STAND, since)) <= 4
    bench.run(2.0)
    assert bench.moving
    assert not bench.go2.trouble(bench.now)
    assert not bench.go2.refusing


@pytest.mark.parametrize(("share", "deaf"), [(0.2, False), (0.7, True)])
def test_how_slow_is_deaf(share: float, deaf: bool) -> None:
    go2 = Go2(Go2Config(deaf_share=share, unlock=False))
    go2.begin(0.0)
    for i in range(200):
        go2.on_state(SportState(BALANCE, 0, 0.2, 0.0), i * 0.01)
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


def test_every_number_was_used_once() -> None:
    bench = Bench(Go2Config(avoid=True))
    bench.command = AHEAD
    bench.run(3.0)
    assert set(bench.robot.ids.values()) == {1}


def test_request_timeout() -> None:
    for timeout in (0.2, 1.0):
        go2 = Go2(replace(Go2Config(), request_timeout=timeout))
        go2.begin(10.0)
        go2.on_state(SportState(BALANCE), 10.0 + timeout - 0.05)
        go2.tick(10.0 + timeout - 0.05)
        assert not go2.trouble(10.0 + timeout - 0.05)
        go2.tick(10.0 + timeout + 0.05)
        assert go2.trouble(10.0 + timeout + 0.05).code == "NO_ANSWER"


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
