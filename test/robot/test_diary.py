"""The diary: what of a graph's messages becomes a sentence, and when an episode ends."""

from __future__ import annotations

import math
from datetime import datetime, timezone

import numpy as np
import pytest

from collab_llm_lab.home.answers import GIVE_UP, REPLY, answer
from collab_llm_lab.home.asking import draw_request
from collab_llm_lab.home.expert import drive
from collab_llm_lab.home.requests import QUESTIONS, Kind
from collab_llm_lab.home.wording import HELD_OUT, TRAINED
from collab_llm_nodes.robot.diary import Diary, sightings
from collab_llm_nodes.robot.episodes import EpisodeConfig
from collab_llm_nodes.robot.executor import Pose2D
from collab_llm_nodes.robot.grammar import Code, GrammarConfig, ParsedAction, parse
from collab_llm_nodes.robot.grammar import Kind as Act
from collab_llm_nodes.sim.rooms import make_room

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


def remembered(instruction: str, *answers: str) -> dict[str, str]:
    """What the diary keeps of answers, by thing: the place it was last seen from, and the words."""
    diary = Diary(EpisodeConfig())
    diary.on_instruction(instruction, MORNING)
    for number, text in enumerate(answers):
        diary.on_pose(Pose2D(float(number)))
        diary.on_action(str(number), read(text), MORNING + number)
    found = diary.take_sightings()
    told = {d.name.removeprefix("last sighting of "): d.content.strip() for d in found}
    return {thing: told[thing].partition("last seen from ")[2] for thing in told}


def test_what_the_expert_saw_in_its_drives_is_remembered_and_nothing_else() -> None:
    """Last sightings are those of the decisions: of the thing asked for, and of others in view."""
    kinds = set[Kind]()
    for seed in range(8):
        room, rng = make_room(seed), np.random.default_rng(seed)
        for wordings in (TRAINED, *HELD_OUT.values()):
            request = draw_request(room, rng, wordings)
            steps = drive(room, request, seed).steps
            kinds.add(request.kind)
            seen = dict[str, int]()
            for number, step in enumerate(steps):
                if step.decision.action not in (GIVE_UP, REPLY):
                    report = step.decision.report
                    names = [name for name, _ in step.decision.scene]
                    names += [report.name] if report.in_view else []
                    seen |= dict.fromkeys(names, number)
            told = remembered(request.text, *(answer(step.decision) for step in steps))
            assert {
                thing: int(where[1 : where.index(".")]) for thing, where in told.items()
            } == seen
            assert not [words for words in told.values() if " not " in words or " no " in words]
    assert {Kind.GO, Kind.UNKNOWN, Kind.DO_NOT} <= kinds
    assert kinds & set(QUESTIONS)


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
    assert " ".join(sightings(parse(text, GrammarConfig(reason="lenient")))) == said


@pytest.mark.parametrize("end", [". ", ", so "])
def test_a_free_way_alone_is_no_sighting(end: str) -> None:
    diary = Diary(EpisodeConfig())
    diary.on_pose(Pose2D())
    action = parse(
        f"a red box is near. The way is open{end}the next action is move forward 25 cm.",
        GrammarConfig(reason="lenient"),
    )
    assert action.code is Code.OK
    diary.on_action("1", action, MORNING)
    (line,) = content(diary)
    assert line.endswith("): a red box is near.")


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
    refused = ParsedAction(Act.NONE, 0.0, Code.UNREADABLE, (0, 0), SEEN)
    diary.on_action("b", refused, MORNING)
    diary.on_instruction("", MORNING)
    assert content(diary) == []
    assert diary.take(MORNING + 3600) is None


@pytest.mark.parametrize(
    ("instruction", "said", "things"),
    [
        ("find the red ball", "the red ball is on the left and near", ["red ball"]),
        (
            "Could you please go to a green box?",
            "straight ahead stands the green box",
            ["green box"],
        ),
        ("find the crimson cup", "i see the red mug straight ahead", ["red mug"]),
        ("find the ball that is red", "the red ball is near", ["red ball"]),
        ("find the red box", "the red ball is near the blue box", ["red ball", "blue box"]),
        ("find the red ball", "i see a sofa near. the red ball is ahead", ["sofa", "red ball"]),
        ("find the red ball", "i see a sofa near. the red ball is not in view", ["sofa"]),
        ("find the red ball", "i cannot see the red ball, it is behind me on the left", []),
        ("find the red ball", "the way is open and the red ball is not in view", []),
        ("find the red ball", "no red ball in sight, the way is open", []),
        ("find the forklift", "the red forklift is near", ["red forklift"]),
        ("find the ball", "the forklift is near", []),
        ("", "the lamp is near", []),
    ],
)
def test_the_things_in_view_are_remembered_by_the_names_of_the_answer(
    instruction: str, said: str, things: list[str]
) -> None:
    diary = Diary(EpisodeConfig())
    diary.on_instruction(instruction, MORNING)
    diary.on_pose(Pose2D())
    text = f"{said}. the next action is turn left 45 degree."
    diary.on_action("a", parse(text, GrammarConfig(reason="lenient")), MORNING)
    assert [d.name for d in diary.take_sightings()] == [f"last sighting of {t}" for t in things]


def test_a_thing_that_is_not_there_is_no_sighting_and_what_is_seen_meanwhile_is_one() -> None:
    said = "i see a sofa near. no red mug in sight, the way is open."
    told = remembered("find the red mug", f"{said} the next action is turn left 45 degree.")
    assert told == {"sofa": "(0.0, 0.0): a sofa near."}


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
