"""Answers that speak of another thing than the instruction."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from driving import CONFIG, Drive

from collab_llm_lab.home.answers import GIVE_UP, REPLY, Decision, answer
from collab_llm_lab.home.asking import draw_request
from collab_llm_lab.home.expert import drive
from collab_llm_lab.home.requests import About, Kind, Request
from collab_llm_lab.home.wording import HELD_OUT, TRAINED, Wordings
from collab_llm_nodes.robot.asked_thing import AskedThing
from collab_llm_nodes.robot.executor import ZERO
from collab_llm_nodes.robot.grammar import GrammarConfig, ParsedAction, parse
from collab_llm_nodes.robot.stop_words import asks_to_stop
from collab_llm_nodes.sim.rooms import COLOURS, NAMED_FURNITURE, SHAPES, make_room

AMBIGUOUS = {"cartoon", "cub", "cue", "dive", "fin", "had", "lad", "lap", "led", "net", "pal"}
AMBIGUOUS |= {"bra", "reed", "rub", "sand", "scarlett", "snow", "tack", "thin"}
"""Misspellings in requests that are words themselves, so that they may mean what they say."""
ALL = (TRAINED, *HELD_OUT.values())
NAMES = [*(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES), *NAMED_FURNITURE]


@cache
def read(reason: str, action: str = "move forward 50 cm") -> ParsedAction:
    return parse(f"{reason}. the next action is {action}.", GrammarConfig(reason="lenient"))


def objection(instruction: str, reason: str, action: str = "move forward 50 cm") -> str:
    return AskedThing(instruction).objection(read(reason, action))


def ahead(name: str) -> ParsedAction:
    """An answer that goes to a thing, and names another one first."""
    return read(f"i see a grey chair near. the {name} is straight ahead and near")


THINGS = ("the red mug", "mug that is red", "the mug in red", "a crimson coloured cup", "red mug")


def test_every_frame_and_verb_asks_for_its_thing_and_for_no_other() -> None:
    verbs = (*TRAINED.verbs, *HELD_OUT["verb"].verbs)
    frames = {*TRAINED.frames[Kind.GO], *HELD_OUT["frame"].frames[Kind.GO]}
    for number, (frame, verb) in enumerate(product(sorted(frames), verbs)):
        text = frame.format(verb=verb, thing=THINGS[number % len(THINGS)])
        if "{verb}" not in frame and verb != verbs[0]:
            continue
        asked = AskedThing(text)
        assert not asks_to_stop(text)
        assert not asked.objection(ahead("red mug")), text
        for other in ("blue mug", "red box", "sofa"):
            assert asked.objection(ahead(other)), text


def test_nothing_moves_towards_what_an_instruction_forbids() -> None:
    verbs = (*TRAINED.verbs, *HELD_OUT["verb"].verbs)
    frames = {*TRAINED.frames[Kind.DO_NOT], *HELD_OUT["frame"].frames[Kind.DO_NOT]}
    for number, (frame, verb) in enumerate(product(sorted(frames), verbs)):
        text = frame.format(verb=verb, thing=THINGS[number % len(THINGS)])
        assert asks_to_stop(text) or AskedThing(text).objection(ahead("red mug")), text


@pytest.mark.parametrize("wordings", ALL)
def test_however_a_thing_is_called_it_agrees_and_no_other_does(wordings: Wordings) -> None:
    rng = np.random.default_rng(3)
    for name in [name for name in (*NAMES, *SHAPES) for _ in range(4)]:
        about = About(name)
        text = wordings.draw(rng, Kind.GO, about)
        right = next(n for n in NAMES if about.matches(n))
        wrong = str(rng.choice([n for n in NAMES if not about.matches(n)]))
        asked = AskedThing(text)
        assert not asked.objection(ahead(right)) or AMBIGUOUS & {*re.findall(r"\w+", text)}, text
        assert asked.objection(ahead(wrong)), text


@pytest.mark.parametrize("wordings", ALL)
def test_nothing_moves_towards_a_thing_that_no_model_knows(wordings: Wordings) -> None:
    rng = np.random.default_rng(4)
    for name in wordings.nouns:
        asked = AskedThing(wordings.draw(rng, Kind.UNKNOWN, About(name)))
        for other in rng.choice(NAMES, 3):
            assert asked.objection(ahead(str(other))), (name, other)


@cache
def decisions() -> list[tuple[Request, Decision]]:
    """The expert's motions and stops in rooms, each with its request."""
    found: dict[tuple[Request, Decision], None] = {}
    for seed in range(16):
        room, rng = make_room(seed), np.random.default_rng(seed)
        requests = (draw_request(room, rng, TRAINED) for _ in range(40))
        request = next(r for r in requests if r.kind is Kind.GO)
        for step in drive(room, request, seed).steps:
            if step.decision.action not in (GIVE_UP, REPLY):
                found[request, step.decision] = None
    return list(found)


def test_no_answer_of_the_expert_is_objected_to() -> None:
    assert len(decisions()) > 120
    for request, decision in decisions():
        for wordings in ALL:
            text = wordings.draw(np.random.default_rng(5), Kind.GO, request.about)
            objected = AskedThing(text).objection(parse(answer(decision)))
            assert not objected or AMBIGUOUS & {*re.findall(r"\w+", text)}, text


def test_an_answer_about_another_thing_is_objected_to_whatever_it_sees_beside_it() -> None:
    rng = np.random.default_rng(6)
    for request, decision in decisions():
        text = TRAINED.draw(rng, Kind.GO, request.about)
        wrong = str(rng.choice([name for name in NAMES if not request.about.matches(name)]))
        scene = ((decision.report.name, "near"),) if decision.report.in_view else ()
        report = replace(decision.report, name=wrong)
        action = parse(answer(replace(decision, report=report, scene=scene)))
        assert AskedThing(text).objection(action), (text, action.words)


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
        ("find the red or the blue ball", "the red ball is ahead"),
        ("red mug or blue ball", "the red mug is ahead"),
        ("red mug or blue ball", "the blue ball is ahead"),
        ("the red one", "the red mug is ahead"),
        ("find the mug but not the red one", "the blue mug is ahead"),
        ("where did i leave my red cup", "the red mug is ahead"),
        ("find the redd coffee mugg", "the red mug is ahead"),
        ("find the red-coloured mug", "the red mug is ahead"),
        ("find the mug of red color", "the red mug is ahead"),
        ("mug, red", "the red mug is ahead"),
        ("find the mug that is nearest", "the red mug is ahead"),
        ("find the mug in sight", "the red mug is ahead"),
        ("find me a seat: the couch", "the sofa is ahead"),
        ("walk round the table to the red mug", "the red mug is ahead"),
        ("find the red ball", "a blue ball is near. the red ball is ahead. it is near"),
        ("avoid the red cone and find the red chair", "the red chair is ahead"),
        ("go to the red ball right away", "the red ball is ahead"),
        ("go to the red ball straight away, carefully", "the red ball is ahead"),
        ("would you mind going to the red ball", "the red ball is ahead"),
        ("if you do not mind, find the red ball when you are ready", "the red ball is ahead"),
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
        ("find the teal ball", "the blue ball is ahead"),
        ("find the ball in teal", "the blue ball is ahead"),
        ("find the lamp which is maroon", "the red lamp is ahead"),
        ("find the ball that is red", "the blue ball is ahead"),
        ("find something red", "the blue ball is ahead"),
        ("the red, round chair", "the red cone is ahead"),
        ("go to the ball pen", "the red ball is ahead"),
        ("find the table tennis racket", "the table is ahead"),
        ("find the shoe box", "the blue box is ahead"),
        ("find a person", "the red mug is ahead"),
        ("find the person in red", "the red mug is ahead"),
        ("follow me", "the red mug is ahead"),
        ("find Ruby", "the red mug is ahead"),
        ("go to scarlett", "the red mug is ahead"),
        ("find my pal", "the red bucket is ahead"),
        ("find somebody with a red mug", "the red mug is ahead"),
        ("find the person who holds the red mug", "the red mug is ahead"),
        ("bring me to whoever stands at the sofa", "the sofa is ahead"),
        ("go to the child behind the sofa", "the sofa is ahead"),
        ("find the cat on the sofa", "the sofa is ahead"),
        ("the thing next to the door", "the red mug is ahead"),
        ("go to the thing left of the sofa", "the sofa is ahead"),
        ("the red one", "the blue mug is ahead"),
        ("find the blue one, not the red one", "the red mug is ahead"),
        ("find the mug but not the red one", "the red mug is ahead"),
        ("red mug or blue ball", "the blue mug is ahead"),
        ("find the red mug and the blue ball", "the blue mug is ahead"),
        ("find the orange", "the orange ball is ahead"),
        ("find anything but the sofa", "the sofa is ahead"),
        ("find the red ball", "a red ball is near. the blue ball is ahead"),
        ("find the red ball", "a red ball is near. the blue ball is ahead. it is near"),
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
    "would you mind the red cone and find the chair",
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
    *("nicht zum red cone", "kein red cone", "ne va pas au red cone", "nunca al red cone"),
    *("red cone? no way", "no way you go to the red cone", "the red cone. not now"),
    *("go to the red cone when i say so", "find the red cone unless it is small"),
    *("how far is the red cone?", "yesterday you went to the red cone"),
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
ASKING_NOTHING = [
    *("who bought the red cone?", "why is the red cone here", "what do you think of the red cone"),
    *("is the red cone bigger than the box", "which cone is older, the red cone?"),
    *("do you like the red cone", "did you really walk to the red cone", "what a nice red cone"),
    *(
        "my sister went to the red cone",
        "he is going to the red cone",
        "the cat ran to the red cone",
    ),
    *("i have already found the red cone", "mum told dad to go to the red cone"),
    *("well done, you got to the red cone!", "once upon a time a dog came to the red cone"),
    *("when the bell rings, go to the red cone", "go to the red cone once dinner is ready"),
    *("as soon as anna calls, walk to the red cone", "next time it rains go to the red cone"),
    *("go to the red cone... no, forget it", "cancel that red cone", "scrap the red cone thing"),
    *("go to the red cone. i changed my mind, stay", "disregard my wish to see the red cone"),
    *("his red cone is broken, what a pity", 'in the film he shouts "go to the red cone"'),
    *("if the bell rings, go to the red cone", "wait until i call, then go to the red cone"),
    *(
        "i love that red cone",
        "later i'm going to paint the red cone",
        "i used to own the red cone",
    ),
    *("go to the red cone no wait i mean the ball", "the red cone is in your way, go to the ball"),
    *("i dreamt of the red cone", "tell me about the red cone", "thanks for finding the red cone"),
    *("go to the red cone, never mind", "the order to go to the red cone is withdrawn"),
    *("go to the ball because the red cone is dirty", "after lunch we will go to the red cone"),
    *(
        "go to the red cone at 17:00",
        "go to the red cone on monday",
        "on my signal go to the red cone",
    ),
    *("in ten minutes go to the red cone", "wait five minutes and go to the red cone"),
    *("whenever the phone rings go to the red cone", "should the bell ring, go to the red cone"),
    *("should i go to the red cone", "is it safe to go to the red cone"),
    *("tell the other robot to go to the red cone", "you have reached the red cone"),
    *("go to the red cone; correction: the mug", "cancel the trip to the red cone"),
    *("nein red cone", "nie zum red cone", "nope red cone"),
    "\N{CJK UNIFIED IDEOGRAPH-4E0D}\N{CJK UNIFIED IDEOGRAPH-53BB} red cone",
    *("don't you dare go to the red cone", "you are forbidden to go to the red cone"),
    *("please find the ball. anna went to the red cone", "walk round the red cone to the ball"),
]
"""Statements, questions that no motion answers, requests for later and what is taken back."""
EXCLUDED_ELSEWHERE = [
    "do not go to the red cone until i say so. find a cone",
    "never go near the red cone when the baby is there. find a cone",
    "do not approach the red cone if the dog is there. find a cone",
    "find a cone. the red cone is off limits",
    "find a cone. the red cone should be avoided",
    "find a cone. mum told me not to go to the red one",
    'find a cone. mum said "not the red one"',
    "find a cone. because it is wet not the red one",
    "do not go to the red cone, i mean it! find another cone",
    "don't touch the red cone. i mean it. go to a cone",
    "avoid the red cone. never mind. find a cone",
    "not the red cone! i changed my mind about the rest. find a cone",
    "never forget that the red cone is off limits, find a cone",
    "go to the red cone. cancel.",
    "go to the red cone, disregard",
    "go to the red cone. no, don't",
    "go to the red cone. actually no",
    "go to the red cone. no, cancel!",
    "go to the red cone. forget about it",
    "go to the red cone. i take it back",
    "go to the red cone. just kidding",
    "go to the red cone. ignore that",
    "go to the red cone. scratch  that",
    "i\N{RIGHT SINGLE QUOTATION MARK}m going to paint the red cone",
    "he\N{RIGHT SINGLE QUOTATION MARK}s going to the red cone",
    "do  you like the red cone",
    "do not approach the cone or drop by the red cone",
    "don't catch the cone or swing by the red cone",
]
"""Exclusions that hold whatever the other sentences say; and orders taken back."""


@pytest.mark.parametrize(
    "instruction", [*EXCLUSIONS, *REFERENCES, *ASKING_NOTHING, *EXCLUDED_ELSEWHERE]
)
def test_what_is_not_asked_for_is_objected_to(instruction: str) -> None:
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
        ("anna went to the sofa. find the red ball", "red ball"),
        ("go to the cone... forget it, go to the red ball", "red ball"),
        ("don't forget that you should find the red ball", "red ball"),
        ("i was wondering if you would find the red ball", "red ball"),
        ("i would love it if you went over to the red ball", "red ball"),
        ("how about you go to the red ball, as soon as you can", "red ball"),
        ("when you are ready, swing by the red ball", "red ball"),
        ("find the red ball once more, at once", "red ball"),
        ("where on earth has the red ball got to", "red ball"),
        ("i want to see you standing beside the red ball", "red ball"),
        ("you ought to be at the red ball by now", "red ball"),
        ("find the red ball because my knees are bad", "red ball"),
        ("because my knees are bad, find the red ball", "red ball"),
        ("the red ball has gone missing again, go and search", "red ball"),
        ('she said "go to the red ball", so do go to the red ball', "red ball"),
        ("walk up to the ball thats red", "red ball"),
        ("go to the blue cone no wait i mean the red ball", "red ball"),
        ("find the red ball right this second", "red ball"),
    ],
)
def test_what_is_asked_for_beside_exclusions_and_references_agrees(
    instruction: str, seen: str
) -> None:
    assert not objection(instruction, f"i see the {seen} straight ahead")


@pytest.mark.parametrize(
    "instruction",
    [
        "go to the red ball, i mean it",
        "go to the red ball now, i mean now",
        "the cat ran away, go to the red ball",
        "mom is coming, go to the red ball quickly",
        "it's going to rain, get the red ball",
        "you went too far, go back to the red ball",
        "what are you waiting for, go to the red ball",
        "did you hear me, go to the red ball",
        "who cares, go to the red ball",
        "i have found my glasses, now go to the red ball",
        "the room is dark, navigate carefully to the red ball",
        "the door is open, proceed to the red ball",
        "the dog has the red ball, fetch it",
        "the plan is to navigate to the red ball",
        "the destination is the red ball",
        "the next stop is the red ball",
        "my request is the red ball",
        "go to the red ball and wait until i come",
        "go to the red ball and stay there until i call you",
        "find the red ball and call me when you have found it",
        "tell me when you have found the red ball",
        "find the ball that was moved near the sofa",
        "find the red ball that my son lost when he was playing",
        "if the way is free, go to the red ball",
        "the moment has come to find the red ball",
        "cancel that and go to the red ball",
        "change of plan: go to the red ball",
        "i have changed my mind: go to the red ball",
        "forget what i said and go to the red ball",
        "on second thought go to the red ball",
        "go to the red ball and forget everything else",
        "do you see the red ball? go to it",
        "the cat moved the red ball. find it",
        "dad has seen the red ball. go find it",
        "the red ball has vanished. track it down",
        "Robot! the red ball is over there. fetch it!",
        "don\N{RIGHT SINGLE QUOTATION MARK}t forget that you should find the red ball",
        "dont forget that you should find the red ball",
    ],
)
def test_what_else_is_told_hides_no_request(instruction: str) -> None:
    assert not objection(instruction, "i see the red ball straight ahead")


def test_free_words_are_read_as_nearly_everybody_would() -> None:
    """Written by somebody who knew none of the lists; so is each label."""
    names = [*NAMES, *(f"{colour} {piece}" for colour in COLOURS for piece in NAMED_FURNITURE)]
    refused, passed = [], []
    for line in (Path(__file__).parent / "instructions.jsonl").read_text("utf-8").splitlines():
        told = json.loads(line)
        asked = AskedThing(told["text"])
        stops = asks_to_stop(told["text"])
        agree = {name for name in names if not stops and not asked.objection(ahead(name))}
        if told["go"] and told["go"] not in agree:
            refused.append(told["text"])
        if agree & {*told["not"]} if told["go"] else agree & {*NAMES}:
            passed.append(told["text"])
    assert len(refused) <= 19, refused
    assert len(passed) <= 21, passed


def test_of_what_is_wanted_and_what_is_excluded_the_nearer_one_counts() -> None:
    asked = AskedThing("find the red ball, not the ball by the door")
    assert not asked.objection(read("i see the red ball ahead"))
    assert not asked.objection(read("the blue ball is left of the red ball"))
    assert asked.objection(read("i see the blue ball ahead"))
    assert asked.objection(read("i see the ball ahead"))


LONG = [
    "not the any of the red ",
    "ball in red and ",
    "mug or ",
    "a b ",
    "and ",
    "forget the a ",
    "is ",
]


@pytest.mark.parametrize("text", LONG)
def test_a_long_instruction_is_read_in_proportion_to_its_length(text: str) -> None:
    begun = time.perf_counter()
    AskedThing(text * (8800 // len(text)))
    assert time.perf_counter() - begun < 2.0


def test_a_thing_that_is_not_in_view_is_no_reason_to_stop() -> None:
    assert objection("find the red ball", "i cannot see the red ball", "stop")
    assert not objection("find the red ball", "i cannot see the red ball")


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
