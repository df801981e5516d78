"""The mission: what it does in every phase when something is late, missing, wrong or cancelled."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.errors import ConfigError, InvalidInput
from collab_llm_nodes.robot.executor import ZERO, ExecutorConfig, Pose2D
from collab_llm_nodes.robot.grammar import Code, Kind, ParsedAction, parse
from collab_llm_nodes.robot.mission import (
    Mission,
    MissionConfig,
    Permission,
    Phase,
    UnverifiedConfig,
    check_instruction,
)

DT = 0.05
CONFIG = MissionConfig(
    max_steps=5,
    deadline=60.0,
    observation_timeout=2.0,
    answer_timeout=3.0,
    parser_timeout=1.0,
    retries=2,
    retry_pause=0.5,
    max_blocked=2,
)


class Drive:
    """A mission with a clock and an obedient base around it."""

    def __init__(self, config: MissionConfig = CONFIG, *, guarded: bool = False) -> None:
        self.now = 100.0
        self.mission = Mission(config, self.now, self.now, guarded=guarded)
        self.pose = Pose2D()
        self.odometry = True
        self.obeys = True

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / DT)):
            self.now += DT
            v = self.mission.velocity
            if self.obeys:
                yaw = self.pose.yaw + v.angular * DT
                x = self.pose.x + v.linear * math.cos(yaw) * DT
                self.pose = Pose2D(x, self.pose.y + v.linear * math.sin(yaw) * DT, yaw)
            if self.odometry:
                self.mission.on_odometry(self.pose, self.now, self.now)
            self.mission.tick(self.now, self.now)

    def observe(self) -> bool:
        return self.mission.on_observation(self.now, self.now)

    def answer(self, text: str, verified: bool = True) -> bool:
        """A whole answer, as parser and generation deliver it."""
        begins = self.mission.on_action(parse(text), self.now, self.now, verified=verified)
        self.mission.on_answer_ended(self.now)
        return begins

    def step(self, text: str, verified: bool = True) -> bool:
        self.run(0.2)
        assert self.observe()
        return self.answer(text, verified)

    def fastest(self, seconds: float) -> float:
        """Run; the greatest speed commanded meanwhile, linear or angular."""
        top = 0.0
        for _ in range(round(seconds / DT)):
            self.run(DT)
            v = self.mission.velocity
            top = max(top, abs(v.linear), abs(v.angular))
        return top

    def permit(self, **fields: Any) -> None:
        """What motion_guard says."""
        self.mission.on_motion_state(Permission(**fields), self.now, self.now)

    def refuse(self, *reasons: str) -> None:
        self.permit(allowed=False, reasons=reasons, text="because", speed_limit=0.0)

    def code(self) -> str:
        """Of the ending; "" while there is none."""
        return self.mission.ending.code if self.mission.ending else ""

    def message(self) -> str:
        return self.mission.ending.message if self.mission.ending else ""


def refusal(code: Code) -> ParsedAction:
    return ParsedAction(Kind.NONE, 0.0, code, (0, 0), "text")


def test_a_whole_mission() -> None:
    drive = Drive()
    assert drive.step("turn left 45 degree")
    drive.run(3.0)
    assert drive.mission.phase is Phase.OBSERVE
    assert drive.step("move forward 50 cm")
    drive.run(3.0)
    assert drive.mission.history == ["turn left 45 degree", "move forward 50 cm"]
    assert not drive.step("stop")
    assert drive.code() == "OK"
    assert drive.mission.steps == 3
    assert drive.mission.distance == pytest.approx(0.5, abs=0.03)
    assert drive.mission.angle == pytest.approx(math.pi / 4, abs=0.05)
    assert drive.mission.velocity == ZERO


def test_only_frames_taken_at_rest_count() -> None:
    drive = Drive()
    drive.run(0.2)
    assert not drive.mission.on_observation(99.0, drive.now)  # from before the mission
    assert drive.observe()
    assert not drive.observe()  # one answer at a time
    assert drive.answer("move forward 25 cm")
    drive.run(0.5)
    assert not drive.observe()  # it moves
    ended = 0.0
    while drive.mission.phase is Phase.ACT:
        drive.run(DT)
        ended = drive.now
    assert not drive.mission.on_observation(ended, ended)  # not settled yet
    assert drive.mission.on_observation(ended + CONFIG.settle, ended + CONFIG.settle)


def test_a_step_waits_for_the_end_of_the_answer_before_it_asks_again() -> None:
    drive = Drive()
    drive.run(0.2)
    assert drive.observe()
    assert drive.mission.on_action(parse("turn left 15 degree"), drive.now, drive.now)  # streamed
    drive.run(2.0)
    assert drive.mission.phase is Phase.OBSERVE
    assert not drive.observe()
    drive.mission.on_answer_ended(drive.now)
    assert drive.observe()


def test_an_action_taken_back_stops_the_robot() -> None:
    drive = Drive()
    assert drive.step("move forward 75 cm")
    drive.run(0.5)
    assert drive.mission.velocity != ZERO
    drive.mission.on_retraction(refusal(Code.NEGATED), drive.now, drive.now)
    assert drive.mission.velocity == ZERO
    assert drive.mission.phase is Phase.OBSERVE
    assert drive.mission.history == []


def test_a_second_reading_that_agrees_changes_nothing() -> None:
    drive = Drive()
    assert drive.step("move forward 75 cm")
    drive.run(0.5)
    assert not drive.mission.on_action(parse("turn left 30 degree"), drive.now, drive.now)
    drive.mission.on_retraction(parse("move forward 75 cm"), drive.now, drive.now)
    assert drive.mission.phase is Phase.ACT
    assert drive.mission.velocity.linear > 0.0


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (Code.UNREADABLE, "UNREADABLE"),
        (Code.AMBIGUOUS, "UNREADABLE"),
        (Code.STALE, "NO_OBSERVATION"),
        (Code.UNVERIFIED, "UNAVAILABLE"),
    ],
)
def test_refused_answers_are_asked_again_then_given_up(code: Code, status: str) -> None:
    drive = Drive()
    for attempt in range(CONFIG.retries + 1):
        assert drive.code() == ""
        drive.run(0.2)
        assert drive.observe(), attempt
        drive.mission.on_action(refusal(code), drive.now, drive.now)
        drive.mission.on_answer_ended(drive.now)
        assert drive.mission.velocity == ZERO
        assert not drive.observe()  # a pause
        drive.run(CONFIG.retry_pause)
    assert drive.code() == status
    assert "text" in drive.message()


def test_a_good_step_forgives_earlier_failures() -> None:
    drive = Drive()
    for _ in range(2):
        for _ in range(CONFIG.retries):
            drive.run(0.6)
            assert drive.observe()
            drive.answer("hello")
        drive.run(0.6)
        assert drive.step("turn left 15 degree")
        drive.run(2.0)
    assert drive.code() == ""


@pytest.mark.parametrize("code", ["VOCABULARY_MISMATCH", "INVALID_INPUT", "UNAUTHENTICATED"])
def test_hopeless_failures_end_at_once(code: str) -> None:
    drive = Drive()
    drive.run(0.2)
    assert drive.observe()
    drive.mission.on_answer_ended(drive.now)
    drive.mission.on_failure(code, "why", drive.now, drive.now)
    assert (drive.code(), drive.message()) == (code, "why")


def test_no_frame_in_time() -> None:
    drive = Drive()
    drive.run(CONFIG.observation_timeout - 0.2)
    assert drive.code() == ""
    drive.run(0.4)
    assert drive.code() == "NO_OBSERVATION"


def test_no_answer_in_time() -> None:
    drive = Drive()
    for _ in range(CONFIG.retries + 1):
        drive.run(0.2)
        assert drive.observe()
        drive.run(CONFIG.answer_timeout + 0.1)
        drive.run(CONFIG.retry_pause)
    assert drive.code() == "DEADLINE_EXCEEDED"


def test_an_answer_without_an_action_in_time() -> None:
    drive = Drive(replace(CONFIG, retries=0))
    drive.run(0.2)
    assert drive.observe()
    drive.mission.on_answer_ended(drive.now)
    drive.run(CONFIG.parser_timeout + 0.1)
    assert drive.code() == "UNAVAILABLE"


def test_a_generation_that_never_ends_is_given_up_after_the_step() -> None:
    drive = Drive(replace(CONFIG, retries=0))
    drive.run(0.2)
    assert drive.observe()
    assert drive.mission.on_action(parse("turn left 15 degree"), drive.now, drive.now)
    drive.run(CONFIG.answer_timeout + 0.1)
    assert drive.code() == "DEADLINE_EXCEEDED"


def test_the_whole_deadline() -> None:
    drive = Drive(replace(CONFIG, deadline=1.0))
    assert drive.step("move forward 75 cm")
    drive.run(1.0)
    assert drive.code() == "DEADLINE_EXCEEDED"
    assert drive.mission.velocity == ZERO


def test_odometry_that_stops_or_never_was() -> None:
    drive = Drive()
    assert drive.step("move forward 75 cm")
    drive.run(0.3)
    assert drive.mission.velocity != ZERO
    drive.odometry = False
    drive.run(0.7)
    assert drive.code() == "NO_ODOMETRY"
    never = Drive()
    never.odometry = False
    assert not never.step("move forward 75 cm")
    assert never.code() == "NO_ODOMETRY"
    for each in (drive, never):
        assert "is the robot's driver running" in each.message()


def test_a_clock_that_stands_still_does_not_hang_a_step() -> None:
    drive = Drive()
    assert drive.step("move forward 75 cm")
    for i in range(100):  # the machine's clock goes on, the robot's does not
        drive.mission.tick(drive.now, drive.now + i * 0.1)
    assert drive.code() == "NO_ODOMETRY"


def test_a_wall_is_told_to_the_model_and_given_up_after_a_while() -> None:
    drive = Drive()
    drive.obeys = False
    assert drive.step("move forward 75 cm")
    drive.run(2.0)
    assert drive.code() == ""
    assert drive.mission.history == ["move forward 75 cm"]
    assert drive.step("move forward 75 cm")
    drive.run(2.0)
    assert drive.code() == "BLOCKED"


def test_steps_are_limited() -> None:
    drive = Drive()
    for _ in range(CONFIG.max_steps):
        assert drive.step("turn left 15 degree")
        drive.run(2.0)
    assert drive.code() == "MAX_STEPS"


def test_a_step_beyond_its_allowance() -> None:
    hasty = ExecutorConfig(allowance_base=0.1, allowance_factor=1.0, progress_share=0.0)
    drive = Drive(replace(CONFIG, executor=hasty))
    drive.obeys = False
    assert drive.step("move forward 50 cm")
    for _ in range(40):
        drive.pose = Pose2D(drive.pose.x + 0.001, 0.0, 0.0)
        drive.run(DT)
    assert drive.code() == "TIMEOUT"
    assert drive.mission.velocity == ZERO


def test_the_first_ending_counts() -> None:
    drive = Drive()
    assert drive.step("move forward 75 cm")
    drive.mission.end("CANCELLED")
    assert drive.mission.velocity == ZERO
    drive.mission.end("INTERNAL")
    assert drive.code() == "CANCELLED"
    assert not drive.mission.on_action(parse("move forward 75 cm"), drive.now, drive.now)
    drive.run(0.5)
    assert drive.mission.velocity == ZERO


def test_instructions_are_checked() -> None:
    with pytest.raises(InvalidInput, match="empty"):
        check_instruction(" \n", CONFIG)
    with pytest.raises(InvalidInput, match="at most 500"):
        check_instruction("go " * 400, CONFIG)
    check_instruction("find the red ball", CONFIG)


@pytest.mark.parametrize("character", ["\x00", "\x1b", "\x07", "\x7f", "\x85"])
def test_an_instruction_has_no_control_characters(character: str) -> None:
    with pytest.raises(InvalidInput, match="control character .* at 5") as caught:
        check_instruction(f"go to{character}[2J the ball", CONFIG)
    assert caught.value.field == "instruction"
    assert character not in str(caught.value), "nor does the message"
    check_instruction("find the bal\u00e9\tor\r\nthe box\n", CONFIG)


EVENTS = st.sampled_from(
    [
        "observe",
        "forward",
        "turn",
        "stop",
        "junk",
        "ended",
        "fail",
        "fatal",
        "run",
        "mute",
        "cancel",
        "allow",
        "refuse",
        "obstacle",
        "retract",
    ]
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(EVENTS, max_size=40), st.sampled_from([0.0, 0.5, 5.0]), st.booleans())
def test_any_order_of_events_moves_only_in_act(
    events: list[str], overlap: float, guarded: bool
) -> None:
    drive = Drive(replace(CONFIG, overlap=overlap), guarded=guarded)
    mission = drive.mission
    for event in events:
        now = drive.now
        if event == "observe":
            drive.observe()
        elif event == "forward":
            mission.on_action(parse("move forward 50 cm"), now, now)
        elif event == "turn":
            mission.on_action(parse("turn right 30 degree"), now, now)
        elif event == "stop":
            mission.on_action(parse("stop"), now, now)
        elif event == "junk":
            mission.on_action(parse("hello"), now, now)
        elif event == "ended":
            mission.on_answer_ended(now)
        elif event == "fail":
            mission.on_failure("UNAVAILABLE", "", now, now)
        elif event == "fatal":
            mission.on_failure("MODEL_ERROR", "", now, now)
        elif event == "mute":
            drive.odometry = not drive.odometry
        elif event == "cancel":
            mission.end("CANCELLED")
        elif event == "allow":
            drive.permit(speed_limit=0.3)
        elif event == "refuse":
            drive.refuse("STALE_CAMERA")
        elif event == "obstacle":
            drive.permit(reasons=("OBSTACLE",), speed_limit=0.0)
            assert mission.velocity.linear == 0.0
        elif event == "retract":
            mission.on_retraction(refusal(Code.NEGATED), now, now)
        else:
            drive.run(0.6)
        assert mission.phase is Phase.ACT or mission.velocity == ZERO
        assert (mission.phase is Phase.ENDED) == (mission.ending is not None)
    drive.run(70.0)  # every wait has a deadline
    assert mission.ending is not None
    assert mission.velocity == ZERO


LIMITS = UnverifiedConfig(speed_share=0.4, max_distance=0.2, max_angle=20.0)


def test_an_unverified_step_is_slow_and_short() -> None:
    drive = Drive(replace(CONFIG, unverified=LIMITS))
    assert drive.step("move forward 75 cm", verified=False)
    executor = CONFIG.executor
    assert drive.fastest(2.2) == pytest.approx(0.4 * executor.linear_speed)
    assert drive.pose.x == pytest.approx(0.2, abs=0.02)
    assert drive.step("turn right 45 degree", verified=False)
    assert drive.fastest(2.2) <= 0.4 * executor.angular_speed + 1e-9
    assert drive.pose.yaw == pytest.approx(-math.radians(20.0), abs=0.03)
    # The model is told what was done, not what was said.
    assert drive.mission.history == ["move forward 20 cm", "turn right 20 degree"]
    # The link is back.
    assert drive.step("move forward 75 cm")
    assert drive.fastest(3.0) == pytest.approx(executor.linear_speed)
    assert drive.mission.history[-1] == "move forward 75 cm"


def test_a_short_unverified_step_keeps_its_length() -> None:
    drive = Drive(replace(CONFIG, unverified=LIMITS))
    assert drive.step("move forward 10 cm", verified=False)
    drive.run(4.0)
    assert drive.mission.history == ["move forward 10 cm"]


def test_an_unverified_stop_is_no_success() -> None:
    drive = Drive()
    for _ in range(CONFIG.retries + 1):
        assert drive.code() == ""
        assert not drive.step("stop", verified=False)
        assert drive.mission.velocity == ZERO
        drive.run(CONFIG.retry_pause + 0.2)
    assert drive.code() == "UNAVAILABLE"
    assert "not verified" in drive.message()


@pytest.mark.parametrize(
    ("field", "value"),
    [("speed_share", 0.0), ("speed_share", 1.5), ("max_distance", 0.0), ("max_angle", 181.0)],
)
def test_limits_of_unverified_steps_have_limits(field: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(UnverifiedConfig, {field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("instruction", ["", " \n", "\x01\x02", "?!"])
def test_an_instruction_that_says_nothing_is_refused(instruction: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_instruction(instruction, MissionConfig())
    assert caught.value.field == "instruction"


# Looking ahead: the next answer is asked for while the robot still moves.

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
    assert drive.mission.told == ["move forward 75 cm"]
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
    drive = looking_ahead("move forward 75 cm", replace(AHEAD, retries=0))
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
    drive = Drive(MissionConfig(overlap=overlap))
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


# Motion refused by others.


def moving(config: MissionConfig = CONFIG) -> Drive:
    drive = Drive(config, guarded=True)
    drive.permit()
    assert drive.step("move forward 75 cm")
    drive.run(0.5)
    assert drive.mission.velocity != ZERO
    return drive


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


def test_a_refusal_ends_the_step_and_a_permission_makes_it_look_anew() -> None:
    drive = moving(replace(CONFIG, max_blocked=1))
    drive.refuse("STALE_CAMERA")
    assert drive.mission.velocity == ZERO
    assert drive.mission.history == ["move forward 75 cm"]
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
    assert drive.step("turn left 30 degree")
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
    drive = Drive(replace(CONFIG, observation_timeout=10.0), guarded=True)
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
