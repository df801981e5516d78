"""The Go2's Sport API: requests, moving and stopping."""

from __future__ import annotations

import math
from typing import Any

import pytest
from fake_sport_server import BALANCE
from folders import PACKAGE
from sport_bench import AHEAD, Bench

from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.robot.go2.sport import (
    CODES,
    NO_ANSWER,
    REST,
    Answer,
    Api,
    Call,
    Command,
    Go2,
    Go2Config,
    Phase,
    Requests,
    SportState,
    Stance,
)

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
    bench = Bench(Go2Config(avoid=False, rate=rate))
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
    bench = Bench(Go2Config(avoid=False, watchdog=watchdog))
    bench.command = AHEAD
    bench.run(1.0)
    bench.command, since = None, bench.now
    bench.run(0.6)
    assert bench.times(Api.STOP_MOVE, since)[0] - since <= watchdog + 0.011
    bench.run(0.3)
    assert not bench.moving


@pytest.mark.parametrize("limit", [0.2, 0.4])
def test_silence_of_the_robot_stops(limit: float) -> None:
    bench = Bench(Go2Config(avoid=False, state_timeout=limit))
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
            {"linear_speed": 0.5, "angular_speed": 0.7},
            {"x": 0.5, "y": -0.4, "z": 0.7},
        ),
    ],
)
def test_speeds_are_limited(limits: dict[str, Any], sent: dict[str, float]) -> None:
    bench = Bench(Go2Config(avoid=False, **limits))
    bench.run(0.1)
    bench.carry(bench.go2.on_command(Command(9.0, -9.0, 9.0), bench.now))
    assert bench.robot.log[-1] == ("sport", 1008, sent)


@pytest.mark.parametrize("repeat", [0.05, 0.2])
def test_a_stop_is_repeated_until_it_is_answered(repeat: float) -> None:
    bench = Bench(Go2Config(avoid=False, stop_repeat=repeat))
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
    go2 = Go2(Go2Config(avoid=False))
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
