"""Answers: plain observations that name the thing asked for, and that can be read back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from collab_llm_lab.home.answers import ACTIONS, GIVE_UP, REPLY, Decision, a, answer, read
from collab_llm_nodes.robot.asked_thing import AskedThing
from collab_llm_nodes.robot.grammar import Code, parse
from collab_llm_nodes.robot.search import EIGHTHS, Report
from collab_llm_nodes.sim.rooms import COLOURS, NAMED_FURNITURE, SHAPES
from collab_llm_nodes.sim.view import DIRECTIONS, DISTANCES, WAYS

MOTIONS = ACTIONS[1:10]
SCENES = (
    (),
    (("orange mug", "near"),),
    (("white stool", "very close"), ("partition", "some way off")),
)


def _seen(name: str) -> Iterator[Decision]:
    for direction in DIRECTIONS:
        for distance in DISTANCES:
            yield Decision("stop", Report(name, True, direction, distance))
            for leg in ("", *DIRECTIONS):
                for action in MOTIONS:
                    yield Decision(action, Report(name, True, direction, distance, "", leg))


def _unseen(name: str) -> Iterator[Decision]:
    for action in MOTIONS:
        for way in WAYS:
            yield Decision(action, Report(name, way=way))
        for direction in EIGHTHS:
            for leg in ("", *DIRECTIONS):
                yield Decision(action, Report(name, direction=direction, leg=leg))


def _agrees(decision: Decision) -> bool:
    """Return True if a turn is to a side that the reason names, or that names none."""
    report, turned = decision.report, decision.action.split()[1:2]
    named = f"{report.direction} {report.leg}".split()
    return not {"left", "right"} & {*named} or turned[0] in (*named, "forward")


def _decisions(name: str) -> Iterator[Decision]:
    for scene in SCENES:
        for decision in (*_seen(name), *_unseen(name)):
            moves = decision.action.startswith("move")
            if decision.action != "stop" and not _agrees(decision):
                continue
            if scene and moves and not decision.report.in_view:
                continue  # the parser asks a motion to be about a thing in view
            yield Decision(decision.action, decision.report, scene)


@pytest.mark.parametrize("name", ["red ball", "partition"])
def test_every_answer_passes_the_grammar_and_is_read_back(name: str) -> None:
    asked = AskedThing(f"find the {name}")
    for decision in _decisions(name):
        text = answer(decision)
        parsed = parse(text)
        assert parsed.code is Code.OK, (text, parsed.reason)
        assert parsed.phrase == decision.action
        assert not asked.objection(parsed), text
        assert read(text) == decision
        assert text == text.lower()


@pytest.mark.parametrize("name", [f"{c} {s}" for c in COLOURS for s in SHAPES] + [*NAMED_FURNITURE])
def test_every_name_passes_the_grammar(name: str) -> None:
    decision = Decision("stop", Report(name, True, "ahead", "very close"), ((name, "near"),))
    assert parse(answer(decision)).code is Code.OK
    assert read(answer(decision)) == decision


def test_the_form_of_a_sentence_depends_on_what_is_seen() -> None:
    texts = {
        answer(Decision("stop", Report("x", True, direction, distance))).split()[0]
        for direction in DIRECTIONS
        for distance in DISTANCES
    }
    assert {"the", "i", "on", "straight"} <= texts


def test_the_ends_that_move_nothing_are_read_back() -> None:
    absent = Decision(GIVE_UP, Report("red ball"))
    assert answer(absent) == "the red ball is not here. the next action is give up."
    assert read(answer(absent)) == absent
    reply = Decision(REPLY, reply="yes, a red ball is on the left")
    assert answer(reply) == "yes, a red ball is on the left. the next action is reply."
    assert read(answer(reply)) == reply
    assert answer(Decision("stop")) == "the next action is stop."
    assert read("the next action is fly.") is None
    assert read("") is None


def test_articles_are_those_of_speech() -> None:
    assert a("orange ball") == "an orange ball"
    assert a("green box") == "a green box"
