"""Missions whose motion is refused by others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from driving import CONFIG, Drive, moving

from collab_llm_nodes.robot.executor import ZERO
from collab_llm_nodes.robot.mission import Phase


def test_the_emergency_stop_ends_the_mission_in_every_phase() -> None:
    waiting, thinking, acting = Drive(), Drive(), moving()
    thinking.run(0.2)
    assert thinking.observe()
    for drive in (waiting, thinking, acting):
        drive.permit(allowed=False, emergency_stop=True, text="pressed")
        assert (drive.code(), drive.message()) == ("EMERGENCY_STOP", "pressed")
        assert drive.mission.velocity == ZERO
        drive.permit()
        drive.run(0.5)
        assert drive.mission.velocity == ZERO


def test_a_refusal_ends_the_step_and_a_permission_makes_it_look_again() -> None:
    drive = moving(replace(CONFIG, max_blocked=1))
    drive.refuse("STALE_CAMERA")
    assert drive.mission.velocity == ZERO
    assert drive.mission.history == ["move forward 75 cm"]
    assert not drive.mission.search.blocked  # as nothing stands in the way
    assert drive.mission.search.x < 0.3  # as measured
    for _ in range(20):  # longer than the wait for a frame: there are frames, but no use for them
        drive.run(0.2)
        drive.refuse("STALE_CAMERA")
        assert not drive.observe()
    assert drive.code() == ""
    drive.permit()
    assert drive.step("move forward 25 cm")
    drive.run(1.0)
    assert drive.mission.velocity != ZERO


def test_a_step_refused_before_it_moved_was_not_done_nor_blocked() -> None:
    drive = Drive(replace(CONFIG, max_blocked=1), guarded=True)
    drive.permit()
    assert drive.step("move forward 75 cm")
    drive.refuse("STALE_ODOMETRY")
    assert drive.mission.phase is Phase.OBSERVE
    assert drive.mission.history == []
    drive.permit()
    assert drive.step("move forward 75 cm")


def test_a_refusal_that_lasts_ends_the_mission_and_is_named() -> None:
    drive = moving(replace(CONFIG, refusal_timeout=4.0))
    for _ in range(19):
        drive.refuse("STALE_CAMERA")
        drive.run(0.2)
        drive.observe()
    assert drive.code() == ""
    drive.run(0.3)
    assert (drive.code(), drive.message()) == ("MOTION_REFUSED", "because")


def test_an_answer_that_finds_motion_refused_is_asked_for_again() -> None:
    drive = Drive(replace(CONFIG, retries=0))
    drive.run(0.2)
    assert drive.observe()
    drive.refuse("OTHER")
    assert not drive.answer("move forward 75 cm")
    assert drive.mission.phase is Phase.OBSERVE
    assert drive.code() == ""  # no failure of the model's
    drive.permit()
    assert drive.step("move forward 75 cm")


def test_a_link_that_is_down_is_tried_by_asking() -> None:
    drive = Drive()
    drive.refuse("LINK_DOWN")
    drive.run(0.2)
    assert drive.observe()


def test_an_obstacle_ends_a_step_ahead_but_no_turn() -> None:
    drive = moving()
    drive.permit(reasons=("OBSTACLE",), speed_limit=0.0)
    assert drive.mission.velocity == ZERO
    assert drive.mission.phase is Phase.OBSERVE
    assert drive.mission.search.blocked
    assert drive.step("turn left 30 degree")
    assert not drive.mission.prompt_search.blocked
    drive.permit(reasons=("OBSTACLE",), speed_limit=0.0)
    drive.run(0.5)
    assert drive.mission.velocity.angular > 0.0
    drive.run(2.0)
    for _ in range(CONFIG.max_blocked):
        assert drive.code() == ""
        assert drive.step("move forward 25 cm")
        drive.permit(reasons=("OBSTACLE",), speed_limit=0.0)
    assert drive.code() == "BLOCKED"


def test_a_lower_speed_limit_is_kept_and_not_taken_for_a_wall() -> None:
    drive = moving()
    drive.permit(speed_limit=0.1)
    drive.run(0.5)
    assert drive.fastest(2.0) == pytest.approx(0.1)
    assert drive.mission.phase is Phase.ACT


def test_where_a_guard_is_required_and_there_is_none_the_mission_says_so() -> None:
    drive = Drive(guarded=True)
    drive.run(CONFIG.guard_timeout - 0.5)
    assert drive.code() == ""
    drive.run(1.0)
    assert drive.code() == "MOTION_REFUSED"
    assert "motion_guard is silent" in drive.message()
    assert Drive().code() == ""  # where it is not


def test_nothing_moves_before_the_guard_was_heard() -> None:
    drive = Drive(guarded=True)
    drive.run(0.2)
    assert not drive.observe()
    drive.permit()
    assert drive.step("move forward 75 cm")


def test_a_guard_that_falls_silent_is_waited_for() -> None:
    drive = moving()
    drive.run(CONFIG.guard_timeout + 0.1)
    assert drive.mission.velocity == ZERO
    assert not drive.observe()
    drive.permit()
    assert drive.step("move forward 25 cm")
    drive.run(CONFIG.guard_timeout + CONFIG.refusal_timeout + 1.0)
    assert drive.code() == "NO_OBSERVATION" or "motion_guard is silent" in drive.message()
