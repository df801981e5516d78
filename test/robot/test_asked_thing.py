"""Answers that speak of another thing than the instruction."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache

import pytest
from driving import CONFIG, Drive

from collab_llm_lab.training.nav.wording import (
    HELD_OUT,
    TRAINED,
    VERBS,
    Wording,
    reason_seen,
    reason_unseen,
)
from collab_llm_nodes.robot.asked_thing import AskedThing
from collab_llm_nodes.robot.executor import ZERO
from collab_llm_nodes.robot.grammar import GrammarConfig, ParsedAction, parse
from collab_llm_nodes.sim.expert import ACTIONS, DIRECTIONS, DISTANCES, action_for
from collab_llm_nodes.sim.rooms import COLOURS, SHAPES

NAMES = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]


@cache
def read(reason: str, action: str = "move forward 50 cm") -> ParsedAction:
    return parse(f"{reason}. the next action is {action}.", GrammarConfig(reason="lenient"))


def objection(instruction: str, reason: str, action: str = "move forward 50 cm") -> str:
    return AskedThing(instruction).objection(read(reason, action))


@pytest.mark.parametrize("wordings", [TRAINED, *HELD_OUT.values()])
def test_every_wording_of_the_embedded_pair_agrees_with_its_thing_and_with_no_other(
    wordings: object,
) -> None:
    """Another thing differs in shape, in colour, or in both."""
    for number, wording in enumerate(wordings.every()):  # type: ignore[attr-defined]
        name, *others = (NAMES[(number + step) % 16] for step in (0, 1, 4, 5))
        asked = AskedThing(wording.text(name))
        assert not asked.objection(read(f"i see the {name} on the left, near")), wording
        other = others[number % 3]
        assert asked.objection(read(f"i see the {other} on the left, near")), wording


@pytest.mark.parametrize("name", NAMES)
def test_every_answer_of_the_embedded_pair_agrees_with_its_thing(name: str) -> None:
    asked = AskedThing(Wording(VERBS[0]).text(name))
    other = AskedThing(Wording(VERBS[0]).text(NAMES[NAMES.index(name) - 1]))
    for verb in range(len(VERBS)):
        answers = [
            (reason_seen(name, direction, distance, verb), action_for(direction, distance))
            for direction in DIRECTIONS
            for distance in DISTANCES
        ]
        answers += [(reason_unseen(name, [done], verb), "turn left 45 degree") for done in ACTIONS]
        for answer in answers:
            assert not asked.objection(read(*answer))
            assert other.objection(read(*answer))


@pytest.mark.parametrize(
    ("instruction", "reason"),
    [
        ("find the ball", "the red ball is ahead"),
        ("find the red balls", "i see the red ball"),
        ("Go to the RED BALL!", "the ball is ahead"),
        ("find a big red ball", "the red ball is ahead"),
        ("find the red, round ball", "the round red ball is ahead"),
        ("find the ball that is red", "the red ball is ahead"),
        ("find something red", "the red ball is ahead"),
        ("go to the red thing", "the red ball is ahead"),
        ("go to the grey sofa", "the gray couch is ahead"),
        ("go to the bookshelves", "the shelf is ahead"),
        ("find the red and white sign", "the red and white sign is ahead"),
        ("find the red ball next to the blue box", "the red ball is near the blue box"),
        ("find the red ball", "the blue box is left of the red ball"),
        ("find the red or the blue ball", "the blue ball is ahead"),
        ("avoid the red cone and find the red chair", "the red chair is ahead"),
        ("use your camera to find red ball", "the red ball is ahead"),
        ("find the forklift", "the forklift is ahead"),
        ("find the fire hydrant", "the red fire hydrant is ahead"),
    ],
)
def test_other_words_for_the_same_thing_agree(instruction: str, reason: str) -> None:
    assert not objection(instruction, reason)


@pytest.mark.parametrize(
    ("instruction", "reason"),
    [
        ("find the red chair", "i see the red cone straight ahead"),
        ("find the red ball", "the blue ball is ahead"),
        ("find the scarlet ball", "the blue ball is ahead"),
        ("find the ball that is red", "the blue ball is ahead"),
        ("find something red", "the blue ball is ahead"),
        ("the red, round chair", "the red cone is ahead"),
        ("go to the ball pen", "the red ball is ahead"),
        ("find the wooden chair", "the metal chair is ahead"),
        ("find the red ball next to the blue box", "the blue ball is ahead"),
        ("find the red ball, not the blue one", "the blue ball is ahead"),
        ("find the ball but not the box", "the red box is ahead"),
        ("avoid the red cone and find the red chair", "the red cone is ahead"),
        ("find the red ball", "no red ball in sight, the red cone is ahead"),
        ("find the red ball", "the red cone is ahead and the red ball is not in view"),
        ("colourless green ideas", "i see the green ball ahead"),
        ("asdf", "the red cone is ahead"),
        ("asdf", "it is ahead"),
        ("find the red ball", "it is ahead"),
        ("find the red ball", "a wall is 10 cm ahead"),
        ("go to the kitchen", "straight ahead there is the green distant"),
        ("explore", "the red ball is ahead"),
        ("go there", "the red ball is ahead"),
        ("finde den roten Ball", "the blue ball is ahead"),
        ("cherche la balle", "the blue ball is ahead"),
        ("\N{CJK UNIFIED IDEOGRAPH-627E}\N{CJK UNIFIED IDEOGRAPH-7403}", "the ball is ahead"),
        ("", "the ball is ahead"),
    ],
)
@pytest.mark.parametrize("action", ["move forward 50 cm", "stop"])
def test_another_thing_is_objected_to(instruction: str, reason: str, action: str) -> None:
    assert objection(instruction, reason, action)


EXCLUSIONS = [
    "stay away from the red cone and find the chair",
    "stay away from the red cone and find a cone that is blue",
    "find a cone that is not red",
    "find the cone that isn't red",
    "find the cone that isn\N{RIGHT SINGLE QUOTATION MARK}t red",
    "find a non-red cone",
    "find a cone of any colour but red",
    "find a cone that is neither blue nor red",
    "find a cone that is not blue or red",
    "anything but the red cone",
    "find every cone except the red one",
    "keep clear of the red cone and find the cone",
    "leave the red cone alone and go to the cone",
    "forget about the red cone, find the ball",
    "skip the red cone",
    "beware of the red cone and find the blue cone",
    "avoid the blue ball and the red cone and find the box",
    "avoid the blue ball, the red cone, and find the box",
    "the cone other than the red cone",
    "find the cone, never the red one",
    "don't go to the red cone, go to the ball",
    "instead of the red cone go to the ball",
    "go to the ball without touching the red cone",
    "the red cone is off limits, find the cone",
    "i do not want the red cone, i want the ball",
    "stop following the red cone",
]
REFERENCES = [
    *(
        f"find the ball {place} the red cone"
        for place in ("next to", "behind", "in front of", "near", "to the left of", "on", "with")
    ),
    "find the ball between the blue box and the red cone",
    "find the ball beside the blue box and behind the red cone",
    "find the ball. it is next to the red cone",
    "find the ball that the red cone hides",
    "the owner of the red cone",
    "the red cone's owner",
    "find something near the red cone",
    "find forklift behind red cone",
    "go from the red cone to the ball",
    "go around the red cone to the ball",
]


@pytest.mark.parametrize("instruction", [*EXCLUSIONS, *REFERENCES])
def test_what_is_excluded_or_only_referred_to_is_objected_to(instruction: str) -> None:
    assert objection(instruction, "i see the red cone straight ahead")


@pytest.mark.parametrize(
    ("instruction", "seen"),
    [
        ("stay away from the red cone and find the chair", "chair"),
        ("find a ball that is not blue", "red ball"),
        ("find a non-blue ball", "red ball"),
        ("find the ball other than the blue ball", "red ball"),
        ("find anything but the red cone", "blue ball"),
        ("leave the room and find the red ball", "red ball"),
        ("instead of the red cone go to the ball", "blue ball"),
        ("i do not want the red cone, i want the ball", "blue ball"),
        ("nothing but the red ball", "red ball"),
        ("why don't you go to the red ball", "red ball"),
        ("don't forget to find the red ball", "red ball"),
        ("don't stop until you reach the red ball", "red ball"),
        ("if you don't mind, find the red ball", "red ball"),
        ("find the red ball, it is not far", "red ball"),
        ("find the red ball and do not touch it", "red ball"),
        ("find the ball between the red cone and the blue box", "green ball"),
        ("go next to the red ball", "red ball"),
        ("go between the red cone and the blue box", "blue box"),
        ("drive to the left of the red ball", "red ball"),
        ("stand in front of the red ball", "red ball"),
        ("halt beside the red ball", "red ball"),
        ("go past the red cone", "red cone"),
        ("go past the red cone to the ball", "blue ball"),
        ("find one of the red balls", "red ball"),
        ("stop one meter before the red ball", "red ball"),
        ("in the kitchen find the red ball", "red ball"),
        ("in front of you is the red ball, go to it", "red ball"),
        ("look at the red ball, then go to the blue box", "red ball"),
        ("look at the red ball, then go to the blue box", "blue box"),
        ("go to the dog's ball", "blue ball"),
    ],
)
def test_what_is_asked_for_beside_exclusions_and_references_agrees(
    instruction: str, seen: str
) -> None:
    assert not objection(instruction, f"i see the {seen} straight ahead")


def test_of_what_is_wanted_and_what_is_excluded_the_nearer_one_counts() -> None:
    asked = AskedThing("find the red ball, not the ball by the door")
    assert not asked.objection(read("i see the red ball ahead"))
    assert not asked.objection(read("the blue ball is left of the red ball"))
    assert asked.objection(read("i see the blue ball ahead"))
    assert asked.objection(read("i see the ball ahead"))


def test_a_long_instruction_is_read_in_proportion_to_its_length() -> None:
    begun = time.perf_counter()
    AskedThing("not the any of the red " * 400)
    assert time.perf_counter() - begun < 2.0


def test_a_search_may_name_what_is_seen_meanwhile() -> None:
    reason = "no red ball in sight, the blue box is on the left"
    assert not objection("find the red ball", reason, "turn left 45 degree")
    assert objection("find the red chair", reason, "turn left 45 degree")


def test_the_objection_names_both_things() -> None:
    told = objection("find the red chair", "i see the red cone straight ahead, near")
    assert told == "asked for the red chair, the answer names the red cone"
    assert objection("asdf", "it is ahead") == "asked for 'asdf', the answer names no thing"


@pytest.mark.parametrize("action", ["move forward 75 cm", "turn left 45 degree", "stop"])
def test_a_mission_holds_and_says_why(action: str) -> None:
    answer = f"i see the red cone on the left. the next action is {action}."
    drive = Drive(replace(CONFIG, check_thing=True), instruction="find the red chair")
    for _ in range(CONFIG.retries + 1):
        assert drive.code() == ""
        assert not drive.step(answer)
        assert drive.mission.velocity == ZERO
        drive.run(0.6)
    assert drive.code() == "NOT_FOUND"
    assert "asked for the red chair, the answer names the red cone" in drive.message()
    assert drive.mission.steps == 0
    unchecked = Drive(instruction="find the red chair")
    assert unchecked.step(answer) or unchecked.code() == "OK"
