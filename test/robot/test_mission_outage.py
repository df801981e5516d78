"""Missions during which a model, its link or a camera goes away and comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from driving import CONFIG, Drive, moving

from collab_llm_nodes.robot.executor import ZERO
from collab_llm_nodes.robot.guard import Guard, GuardConfig, Source
from collab_llm_nodes.robot.mission import OBSERVATION_S, Permission

OUTAGE = replace(CONFIG, deadline=300.0, outage_timeout=20.0, refusal_timeout=5.0)


@pytest.mark.parametrize(
    "code", ["UNAVAILABLE", "DEADLINE_EXCEEDED", "BUSY", "INACTIVE", "CANCELLED"]
)
def test_a_model_that_restarts_costs_time_only(code: str) -> None:
    """Far more answers fail than the mission has retries for."""
    drive = Drive(OUTAGE)
    assert drive.step("turn left 15 degree")
    drive.run(2.0)
    for _ in range(25):
        drive.fail(code)
        assert drive.mission.velocity == ZERO
    assert drive.code() == ""
    drive.run(0.6)
    assert drive.step("move forward 25 cm")
    assert drive.mission.history == ["turn left 15 degree"]


def test_a_model_that_stays_away_is_reported_as_what_it_was_last() -> None:
    drive = Drive(OUTAGE)
    for number in range(100):
        if drive.code():
            break
        drive.fail("UNAVAILABLE", f"failure {number}")
    assert drive.now == pytest.approx(120.0, abs=1.5)
    assert drive.code() == "UNAVAILABLE"
    assert drive.message() == f"failure {number - 1}"


def test_each_outage_has_its_own_time() -> None:
    drive = Drive(OUTAGE)
    for _ in range(3):
        for _ in range(20):
            drive.fail()
        drive.run(0.6)
        assert drive.step("turn left 15 degree")
        drive.run(2.0)
    assert drive.code() == ""


def test_answers_that_are_no_actions_are_still_given_up_soon() -> None:
    drive = Drive(OUTAGE)
    for _ in range(CONFIG.retries + 1):
        drive.fail("UNREADABLE")
    assert drive.code() == "UNREADABLE"


def test_a_lost_link_that_refuses_motion_is_waited_for_like_the_model_behind_it() -> None:
    drive = moving(OUTAGE)
    for _ in range(20):
        drive.refuse("LINK_DOWN")
        drive.fail("DEADLINE_EXCEEDED")
    assert drive.code() == ""  # more than twice refusal_timeout
    drive.permit()
    drive.run(0.6)
    assert drive.step("move forward 25 cm")


def test_a_link_that_stays_down_is_reported_by_the_failure_of_the_answers() -> None:
    drive = moving(OUTAGE)
    for _ in range(40):
        if drive.code():
            break
        drive.refuse("LINK_DOWN")
        drive.fail("UNAVAILABLE", "no verifier at cloud:50551")
    assert (drive.code(), drive.message()) == ("UNAVAILABLE", "no verifier at cloud:50551")


def test_a_camera_that_restarts_costs_time_only_and_one_that_does_not_is_reported() -> None:
    config = replace(OUTAGE, refusal_timeout=OBSERVATION_S + 3.0)
    drive = Drive(config)
    assert drive.step("turn left 15 degree")
    drive.run(2.0)
    drive.run(OBSERVATION_S + 1.0)
    assert drive.code() == ""
    assert drive.step("turn left 15 degree")
    drive.run(2.0 + config.refusal_timeout)
    assert drive.code() == "NO_OBSERVATION"


@pytest.mark.parametrize(
    ("fault", "begin", "end"),
    [
        ("camera", 40.0, 40.6),
        ("odometry", 1.0, 40.0),
        ("odometry", 40.0, 61.0),
        ("scan", 59.0, 62.0),
        ("obstacle", 0.0, 70.0),
        ("guard", 40.0, 44.0),
    ],
)
def test_other_faults_in_an_outage_do_not_lose_the_mission(
    fault: str, begin: float, end: float
) -> None:
    """The link is down for 60 s, half of ``outage_timeout`` and twice ``refusal_timeout``."""
    drive = moving(replace(CONFIG, deadline=300.0, refusal_timeout=30.0, outage_timeout=120.0))
    guard = Guard(GuardConfig())
    start, asked = drive.wall, 0
    while (t := drive.wall - start) < 61.5:
        now = {fault} if begin <= t < end else set()
        guard.on_link(t >= 60.0, 0.0, drive.wall)
        if "odometry" not in now:
            guard.on_odometry(0.0, True, drive.wall)
        if "camera" not in now:
            guard.on_camera(0.0, drive.wall)
        if "scan" not in now:
            gap = 0.2 if "obstacle" in now else 5.0
            guard.on_gap(Source.SCAN, gap, 0.0, drive.wall)
        if "guard" not in now:
            state = guard.state(drive.wall)
            told = Permission(
                state.allowed, state.emergency_stop, state.reasons, state.text, state.speed_limit
            )
            drive.mission.on_motion_state(told, drive.now, drive.wall)
        if "camera" not in now and drive.observe():
            asked += 1
            drive.mission.on_answer_ended(drive.wall)
            drive.mission.on_failure("DEADLINE_EXCEEDED", "why", drive.now, drive.wall)
        drive.run(0.05)
        assert drive.code() == "", (t, drive.message())
        assert drive.mission.velocity == ZERO
    assert asked > 80, "to ask is how a link is found again"
