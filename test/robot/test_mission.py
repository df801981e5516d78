"""Missions from the first frame to their end."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from driving import CONFIG, DT, INDOORS, Drive
from hypothesis import given, settings
from hypothesis import strategies as st

from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.errors import ConfigError, InvalidInput
from collab_llm_nodes.robot.executor import ZERO, Pose2D
from collab_llm_nodes.robot.grammar import Code, Kind, ParsedAction, parse
from collab_llm_nodes.robot.mission import (
    OBSERVATION_S,
    PARSER_S,
    RETRY_PAUSE_S,
    Phase,
    UnverifiedConfig,
    check_instruction,
)


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


def test_the_search_is_remembered_step_by_step() -> None:
    drive = Drive()
    seen = "the ball is on the left and distant. the next action is turn left 15 degree."
    for said, remembered in (
        ("no ball in view, the way is open. the next action is turn left 45 degree.", "turned 45"),
        ("hello", "turned 45"),
        ("the next action is turn left 30 degree.", "turned 75"),
        (seen, "seen ball ahead, distant"),
    ):
        drive.run(0.6)
        assert drive.step(said) == (said != "hello")
        drive.run(2.0)
        assert drive.mission.prompt_search.text.removeprefix("place 1, ") == remembered
    assert drive.mission.search == drive.mission.prompt_search


def test_a_step_that_was_not_made_is_not_remembered() -> None:
    drive = Drive()
    drive.permit()
    assert drive.step("the next action is turn left 45 degree.")
    assert drive.mission.prompt_search.turned == 45
    drive.refuse("LINK_DOWN")  # before it has turned
    assert drive.mission.prompt_search.turned == 0


ENDS = [
    ("the ball is near. the next action is stop.", "OK", "the ball is near."),
    ("it is not here. the next action is give up.", "NOT_FOUND", "it is not here."),
    ("Give up!", "NOT_FOUND", ""),
    ("i see no chair. the next action is reply.", "ANSWERED", "i see no chair."),
    ("turn left 45 degree? No. The next action is reply.", "ANSWERED", "turn left 45 degree? No."),
]


@pytest.mark.parametrize(("text", "code", "words"), ENDS)
@pytest.mark.parametrize("allowed", [True, False])
def test_the_model_ends_the_task_and_its_words_are_kept(
    text: str, code: str, words: str, allowed: bool
) -> None:
    drive = Drive(replace(CONFIG, check_thing=code != "OK"))  # nothing moves: of any thing
    drive.run(0.2)
    assert drive.observe()
    if not allowed:
        drive.refuse("OBSTACLE")
    assert not drive.answer(text)
    assert drive.mission.ending is not None
    assert drive.code() == code
    assert drive.mission.ending.text == words
    assert (drive.message() == "") == (code == "OK")
    assert drive.mission.steps == 1
    assert drive.fastest(2.0) == 0.0
    assert not drive.answer("move forward 75 cm"), "it is over"


@pytest.mark.parametrize(("text", "code"), [end[:2] for end in ENDS])
def test_an_end_that_is_not_verified_is_none(text: str, code: str) -> None:
    drive = Drive(replace(CONFIG, outage_timeout=1.2))
    assert not drive.step(text, verified=False)
    assert drive.code() == ""
    assert drive.fastest(2.0) == 0.0
    assert not drive.step(text, verified=False)
    assert drive.code() == "UNAVAILABLE"
    assert "the draft model alone says" in drive.message()


@pytest.mark.parametrize(("text", "code"), [end[:2] for end in ENDS])
def test_an_end_in_the_middle_of_a_step_stops_the_robot(text: str, code: str) -> None:
    drive = Drive(replace(CONFIG, overlap=2.0))
    assert drive.step("move forward 75 cm")
    drive.run(0.5)
    assert drive.mission.velocity != ZERO
    assert drive.observe()
    assert not drive.answer(text)
    assert drive.mission.velocity == ZERO
    assert drive.code() == code


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
    drive = Drive(replace(CONFIG, outage_timeout=1.2))
    for attempt in range(CONFIG.retries + 1):
        assert drive.code() == ""
        drive.run(0.2)
        assert drive.observe(), attempt
        drive.mission.on_action(refusal(code), drive.now, drive.now)
        drive.mission.on_answer_ended(drive.now)
        assert drive.mission.velocity == ZERO
        assert not drive.observe()  # a pause
        drive.run(RETRY_PAUSE_S)
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
    drive.run(OBSERVATION_S - 0.2)
    assert drive.code() == ""
    drive.run(0.4)
    assert drive.code() == "NO_OBSERVATION"


def test_no_answer_in_time() -> None:
    drive = Drive(replace(CONFIG, outage_timeout=6.0))
    for _ in range(3):
        assert drive.code() == ""
        drive.run(0.2)
        assert drive.observe()
        drive.run(CONFIG.answer_timeout + 0.1)
        drive.run(RETRY_PAUSE_S)
    assert drive.code() == "DEADLINE_EXCEEDED"


def test_an_answer_without_an_action_in_time() -> None:
    drive = Drive(replace(CONFIG, outage_timeout=0.0))
    drive.run(0.2)
    assert drive.observe()
    drive.mission.on_answer_ended(drive.now)
    drive.run(PARSER_S + 0.1)
    assert drive.code() == "UNAVAILABLE"


def test_a_generation_that_never_ends_is_given_up_after_the_step() -> None:
    drive = Drive(replace(CONFIG, outage_timeout=0.0))
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


@pytest.mark.parametrize("pace", [0.25, 4.0])
def test_the_deadline_is_the_callers_time_however_fast_a_simulation_runs(pace: float) -> None:
    drive = Drive(replace(CONFIG, deadline=20.0), pace=pace)
    for _ in range(19):
        drive.run(pace)
        drive.observe()
        drive.mission.on_answer_ended(drive.wall)
        drive.mission.on_failure("UNAVAILABLE", "why", drive.now, drive.wall)
        assert drive.code() == ""
    drive.run(1.5 * pace)
    assert (drive.code(), drive.message()) == ("DEADLINE_EXCEEDED", "not done within 20 s")


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


def test_the_search_is_told_what_is_in_the_way() -> None:
    drive = Drive()
    drive.obeys = False
    assert drive.step("the way is open. the next action is move forward 75 cm.")
    drive.run(2.0)
    assert drive.mission.prompt_search.text == "place 1, turned 0, blocked"
    drive.obeys = True
    assert drive.step("the next action is turn left 45 degree.")
    drive.run(2.0)
    assert drive.mission.prompt_search.text == "place 1, turned 45"


def test_steps_are_limited() -> None:
    drive = Drive()
    for _ in range(CONFIG.max_steps):
        assert drive.step("turn left 15 degree")
        drive.run(2.0)
    assert drive.code() == "MAX_STEPS"


def test_a_step_beyond_its_allowance() -> None:
    hasty = replace(INDOORS, allowance_base=0.1, progress_share=0.0)
    drive = Drive(replace(CONFIG, executor=hasty))
    drive.obeys = False
    assert drive.step("move forward 50 cm")
    for _ in range(100):
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
        check_instruction(" \n")
    with pytest.raises(InvalidInput, match="at most 500"):
        check_instruction("go " * 400)
    check_instruction("find the red ball")


@pytest.mark.parametrize("character", ["\x00", "\x1b", "\x07", "\x7f", "\x85"])
def test_an_instruction_has_no_control_characters(character: str) -> None:
    with pytest.raises(InvalidInput, match="control character .* at 5") as caught:
        check_instruction(f"go to{character}[2J the ball")
    assert caught.value.field == "instruction"
    assert character not in str(caught.value), "nor does the message"
    check_instruction("find the bal\u00e9\tor\r\nthe box\n")


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


@settings(max_examples=200, derandomize=True)
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
    drive = Drive(replace(CONFIG, outage_timeout=2.0))
    for _ in range(4):
        assert drive.code() == ""
        assert not drive.step("stop", verified=False)
        assert drive.mission.velocity == ZERO
        drive.run(RETRY_PAUSE_S + 0.2)
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
        check_instruction(instruction)
    assert caught.value.field == "instruction"
