"""Missions that ask for the next answer while the robot still moves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from driving import CONFIG, DT, INDOORS, Drive

from collab_llm_nodes.robot.executor import ZERO
from collab_llm_nodes.robot.mission import MissionConfig, Phase

AHEAD = replace(CONFIG, overlap=0.6, max_steps=20)


def looking_ahead(text: str, config: MissionConfig = AHEAD) -> Drive:
    """A mission in the middle of ``text``, which has just asked about the step after it."""
    drive = Drive(config)
    assert drive.step(text)
    for _ in range(200):
        drive.run(DT)
        if drive.observe():
            assert drive.mission.phase is Phase.ACT
            assert drive.mission.velocity != ZERO
            return drive
    raise AssertionError("it never looked ahead")


def slowest(drive: Drive, seconds: float) -> float:
    """Run; the least speed commanded meanwhile."""
    speeds = []
    for _ in range(round(seconds / DT)):
        drive.run(DT)
        speeds.append(drive.mission.velocity.linear)
    return min(speeds)


def test_it_does_not_look_ahead_unless_told_to() -> None:
    drive = Drive()
    assert drive.step("move forward 75 cm")
    while drive.mission.phase is Phase.ACT:
        drive.run(DT)
        assert drive.mission.phase is not Phase.ACT or not drive.observe()


def test_the_same_motion_goes_on_without_a_pause_from_where_the_picture_was_taken() -> None:
    drive = looking_ahead("move forward 75 cm")
    assert 0.25 < drive.pose.x < 0.75  # late in the step
    assert drive.mission.prompt_history == ["move forward 75 cm"]
    assert drive.mission.prompt_search.text == "place 1, walked 75"
    assert drive.mission.search.text == "place 1, turned 0"
    taken = drive.pose.x
    before = drive.mission.velocity.linear
    drive.run(0.2)
    assert drive.answer("move forward 50 cm")
    assert slowest(drive, 0.4) >= before - 1e-9
    drive.run(3.0)
    assert drive.pose.x == pytest.approx(taken + 0.5, abs=0.03)
    assert drive.mission.history == ["move forward 75 cm", "move forward 50 cm"]
    assert drive.mission.steps == 2


def test_another_motion_begins_once_the_first_has_slowed_down() -> None:
    drive = looking_ahead("move forward 75 cm")
    yaw = drive.pose.yaw
    assert drive.answer("turn left 30 degree")
    last, limit = drive.mission.velocity, CONFIG.executor.linear_acceleration * DT
    while drive.mission.phase is Phase.ACT:
        drive.run(DT)
        v = drive.mission.velocity
        assert last.linear - v.linear <= limit + 1e-9
        assert v.linear == 0.0 or v.angular == pytest.approx(0.0, abs=0.01)
        last = v
    assert drive.pose.yaw - yaw == pytest.approx(math.radians(30), abs=0.03)


def test_a_stop_ahead_stops_at_once() -> None:
    drive = looking_ahead("move forward 75 cm")
    assert not drive.answer("stop")
    assert (drive.code(), drive.mission.velocity) == ("OK", ZERO)


def test_an_answer_that_comes_after_the_step_is_waited_for_at_rest() -> None:
    drive = looking_ahead("move forward 75 cm")
    taken = drive.pose.x
    drive.run(2.0)
    assert drive.mission.phase is Phase.THINK
    assert drive.mission.velocity == ZERO
    assert not drive.observe()
    assert drive.answer("move forward 50 cm")
    drive.run(3.0)
    assert drive.pose.x == pytest.approx(taken + 0.5, abs=0.03)


def test_an_unusable_answer_ahead_does_not_end_the_step() -> None:
    drive = looking_ahead("move forward 75 cm")
    drive.answer("hello")
    assert drive.mission.velocity != ZERO
    drive.run(0.3)
    assert not drive.observe()  # a pause, as after any failure
    drive.run(2.0)
    assert drive.pose.x == pytest.approx(0.75, abs=0.03)
    assert drive.mission.phase is Phase.OBSERVE
    assert drive.observe()


def test_no_answer_ahead_in_time() -> None:
    drive = looking_ahead("move forward 75 cm", replace(AHEAD, outage_timeout=0.0))
    drive.run(AHEAD.answer_timeout + 0.1)
    assert drive.code() == "DEADLINE_EXCEEDED"


def test_what_was_asked_on_the_way_is_dropped_when_the_way_is_blocked() -> None:
    drive = looking_ahead("move forward 75 cm")
    drive.obeys = False
    drive.run(1.5)
    assert drive.mission.phase is Phase.OBSERVE
    assert not drive.mission.answering
    assert not drive.answer("move forward 50 cm")
    assert drive.mission.velocity == ZERO


def test_the_last_step_and_unverified_steps_are_not_looked_beyond() -> None:
    for config, verified in ((replace(AHEAD, max_steps=1), True), (AHEAD, False)):
        drive = Drive(config)
        assert drive.step("move forward 75 cm", verified)
        while drive.mission.phase is Phase.ACT:
            assert not drive.observe()
            drive.run(DT)


def test_a_picture_that_comes_late_counts_from_where_it_was_taken() -> None:
    drive = Drive(AHEAD)
    assert drive.step("move forward 75 cm")
    while drive.pose.x < 0.5:
        drive.run(DT)
    taken, stamp = drive.pose.x, drive.now
    drive.run(0.2)
    assert drive.mission.on_observation(stamp, drive.now)
    assert drive.answer("move forward 50 cm")
    drive.run(3.0)
    assert drive.pose.x == pytest.approx(taken + 0.5, abs=0.03)


def drive_ahead(way: float, latency: float, overlap: float) -> tuple[float, int]:
    """Seconds for ``way`` in steps of 75 cm with answers that take ``latency``; stops on it."""
    drive = Drive(MissionConfig(overlap=overlap, executor=INDOORS))
    begun, stops, last, asked = drive.now, 0, 0.0, math.inf
    while drive.pose.x < way:
        drive.run(DT)
        assert drive.now - begun < 60.0
        if asked == math.inf and drive.observe():
            asked = drive.now
        elif drive.now - asked >= latency:
            drive.answer("move forward 75 cm")
            asked = math.inf
        speed = drive.mission.velocity.linear
        stops, last = stops + (speed == 0.0 < last), speed
    return drive.now - begun, stops


def test_looking_ahead_saves_the_stops() -> None:
    """The figures of docs/safety.md."""
    standing, stops = drive_ahead(3.0, 0.6, 0.0)
    moving, none = drive_ahead(3.0, 0.6, 1.0)
    assert (stops, none) == (4, 0)
    assert standing == pytest.approx(12.9, abs=0.3)
    assert moving == pytest.approx(7.3, abs=0.3)
