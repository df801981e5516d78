"""Answers that speak of another thing than the instruction."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from driving import CONFIG, Drive

from collab_llm_nodes.robot.asked_thing import AskedThing
from collab_llm_nodes.robot.executor import ZERO
from collab_llm_nodes.robot.grammar import GrammarConfig, ParsedAction, parse
from collab_llm_nodes.sim.expert import ACTIONS, DIRECTIONS, DISTANCES, action_for
from collab_llm_nodes.sim.rooms import COLOURS, SHAPES
from collab_llm_nodes.training.nav.wording import (
    HELD_OUT,
    TRAINED,
    VERBS,
    Wish,
    reason_seen,
    reason_unseen,
)

NAMES = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]


@cache
def read(reason: str, action: str = "move forward 50 cm") -> ParsedAction:
    return parse(f"{reason}. the next action is {action}.", GrammarConfig(reason="lenient"))


def objection(instruction: str, reason: str, action: str = "move forward 50 cm") -> str:
    return AskedThing(instruction).objection(read(reason, action))


@pytest.mark.parametrize("wishes", [TRAINED, *HELD_OUT.values()])
def test_every_wording_of_the_embedded_pair_agrees_with_its_thing_and_with_no_other(
    wishes: object,
) -> None:
    """Another thing differs in shape, in colour, or in both."""
    for number, wish in enumerate(wishes.every()):  # type: ignore[attr-defined]
        name, *others = (NAMES[(number + step) % 16] for step in (0, 1, 4, 5))
        asked = AskedThing(wish.text(name))
        assert not asked.objection(read(f"i see the {name} on the left, near")), wish
        other = others[number % 3]
        assert asked.objection(read(f"i see the {other} on the left, near")), wish


@pytest.mark.parametrize("name", NAMES)
def test_every_answer_of_the_embedded_pair_agrees_with_its_thing(name: str) -> None:
    asked = AskedThing(Wish(VERBS[0]).text(name))
    other = AskedThing(Wish(VERBS[0]).text(NAMES[NAMES.index(name) - 1]))
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
