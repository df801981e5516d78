"""The diary: what of a graph's messages becomes a sentence, and when an episode ends."""

from __future__ import annotations

import math
from datetime import datetime, timezone

import pytest

from collab_llm_lab.training.nav.wording import (
    ARTICLES,
    FRAMES,
    HELD_OUT_FRAMES,
    VERBS,
    Wording,
    reason_seen,
    reason_unseen,
)
from collab_llm_nodes.robot.diary import Diary, sighting, thing_of
from collab_llm_nodes.robot.episodes import EpisodeConfig
from collab_llm_nodes.robot.executor import Pose2D
from collab_llm_nodes.robot.grammar import Code, GrammarConfig, Kind, ParsedAction, parse
from collab_llm_nodes.sim.expert import DIRECTIONS, DISTANCES

MORNING = datetime(2026, 11, 23, 10, 32, 5, tzinfo=timezone.utc).timestamp()
SEEN = "the red ball is on the left and near. the next action is turn left 15 degree."
UNSEEN = (
    "i cannot see the red ball, so i search to the left. the next action is turn left 45 degree."
)


def read(text: str) -> ParsedAction:
    return parse(text, GrammarConfig())


def content(diary: Diary, now: float = MORNING) -> list[str]:
    episode = diary.take(now, all_of_it=True)
    return [] if episode is None else episode.content.splitlines()


@pytest.mark.parametrize("verb", range(6))
def test_the_words_of_the_model_are_told_from_its_action(verb: int) -> None:
    for place in DIRECTIONS:
        for far in DISTANCES:
            said = reason_seen("red ball", place, far, verb)
            text = f"{said}. the next action is stop."
            assert sighting(read(text)) == f"{said}."
    text = f"{reason_unseen('red ball', [], verb)}. the next action is turn left 45 degree."
    assert sighting(read(text)) == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("The next action is stop", ""),
        ("stop", ""),
        ("I see a box, so the next action is: stop", "I see a box"),
        ("A box is ahead; next action is stop", "A box is ahead"),
        ("A knot is ahead. The next action is stop", "A knot is ahead."),
        ("There isn\N{RIGHT SINGLE QUOTATION MARK}t a box. The next action is stop", ""),
        ("Nothing is ahead. The next action is stop", ""),
        ("A box is ahead. The next action is reply", ""),
    ],
)
def test_other_words(text: str, said: str) -> None:
    assert sighting(parse(text, GrammarConfig(reason="lenient"))) == said


def test_a_drive_is_told_with_its_places() -> None:
    diary = Diary(EpisodeConfig())
    diary.on_instruction("find the red ball", MORNING)
    diary.on_pose(Pose2D(1.0, 2.0, math.pi / 2))
    diary.on_action("a", read(UNSEEN), MORNING)
    diary.on_pose(Pose2D(1.0, 2.0, math.pi * 3 / 4))
    diary.on_action("b", read(SEEN), MORNING + 60)
    diary.on_action("b", read(SEEN), MORNING + 60)  # read again, as a whole
    diary.on_pose(Pose2D(1.0, 2.0, math.pi * 3 / 4 + 0.01))  # it has hardly turned
    assert diary.take(MORNING + 59) is None
    diary.on_instruction("", MORNING + 61)
    episode = diary.take(MORNING + 59)
    assert episode is not None
    assert episode.content.splitlines() == [
        "At 10:33 on 2026-11-23, the robot did: turn left 45 degree, at (1.0, 2.0).",
        "At 10:33 on 2026-11-23, seen from (1.0, 2.0): the red ball is on the left and near.",
    ]
    assert diary.take(MORNING + 3600) is None


def test_a_reply_is_no_observation() -> None:
    diary = Diary(EpisodeConfig())
    diary.on_instruction("where is the red ball?", MORNING)
    diary.on_pose(Pose2D())
    for number, end in enumerate(("reply", "give up")):
        text = f"the red ball was sold. the next action is {end}."
        assert read(text).code is Code.OK
        diary.on_action(str(number), read(text), MORNING)
    diary.on_instruction("", MORNING)
    assert content(diary) == []
    assert diary.take_sightings() == []


def test_nothing_is_told_without_a_place_or_an_action() -> None:
    diary = Diary(EpisodeConfig())
    diary.on_action("a", read(SEEN), MORNING)
    assert content(diary) == []
    diary.on_pose(Pose2D())
    refused = ParsedAction(Kind.NONE, 0.0, Code.UNREADABLE, (0, 0), SEEN)
    diary.on_action("b", refused, MORNING)
    diary.on_instruction("", MORNING)
    assert content(diary) == []
    assert diary.take(MORNING + 3600) is None


@pytest.mark.parametrize(
    ("instruction", "said", "thing"),
    [
        ("find the red ball", "the red ball is on the left and near", "red ball"),
        ("Could you please go to a green box?", "straight ahead stands the green box", "green box"),
        ("find red ball", "i see the red ball straight ahead", "red ball"),
        ("go to the box that is on the left", "the box is on the left and near", "box"),
        ("go straight ahead to the red box", "straight ahead stands the red box", "red box"),
        ("look to the left for the green cone", "the green cone is on the left", "green cone"),
        ("find the red box", "the red ball is near the blue box", ""),
        ("go to the red ball", "the blue ball is near", ""),
        ("find the ball", "the lamp is near", ""),
        ("", "the lamp is near", ""),
    ],
)
def test_the_thing_is_what_instruction_and_sighting_name(
    instruction: str, said: str, thing: str
) -> None:
    assert thing_of(instruction, said) == thing


@pytest.mark.parametrize("frame", [*FRAMES, *HELD_OUT_FRAMES])
@pytest.mark.parametrize("article", sorted(set(ARTICLES)))
def test_however_an_instruction_is_worded_its_thing_is_found(frame: str, article: str) -> None:
    for verb in (*VERBS, "make your way to", "pinpoint"):
        wording = Wording(verb, frame, article, "!")
        assert (
            thing_of(wording.text("red ball"), "the red ball is on the left and near") == "red ball"
        )


def test_the_last_sighting_of_each_thing_is_kept() -> None:
    diary = Diary(EpisodeConfig())
    diary.on_instruction("find the red ball", MORNING)
    for number, x in enumerate((1.0, 2.0)):
        diary.on_pose(Pose2D(x))
        text = "i see the red ball straight ahead, near. the next action is move forward 50 cm."
        diary.on_action(str(number), read(text), MORNING + number)
    diary.on_instruction("", MORNING + 2)
    (found,) = diary.take_sightings()
    assert found.name == "last sighting of red ball"
    assert "last seen from (2.0, 0.0): the red ball straight ahead, near." in found.content
    assert diary.take_sightings() == []
    assert "i see" not in "".join(content(diary))


def test_without_an_instruction_no_thing_has_a_name() -> None:
    diary = Diary(EpisodeConfig())
    diary.on_pose(Pose2D())
    diary.on_action("a", read(SEEN), MORNING)
    assert diary.take_sightings() == []
