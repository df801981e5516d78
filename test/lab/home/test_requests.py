"""Requests: which sight of a view is meant, and relations that are beyond doubt."""

from __future__ import annotations

import math

import pytest

from collab_llm_lab.home.requests import (
    CLEAR,
    NEXT_TO,
    NOT_NEXT_TO,
    About,
    Kind,
    Request,
    relations,
    resolve,
)
from collab_llm_nodes.sim.view import Sight, View


def sight(name: str, degrees: float, away: float, visible: float = 1.0) -> Sight:
    return Sight(name, math.radians(degrees), away, visible)


def view(things: tuple[Sight, ...], *furniture: Sight) -> View:
    return View(things, furniture, free=5.0)


ROOM = view(
    (
        sight("red ball", 20.0, 3.0),
        sight("blue ball", -20.0, 2.0),
        sight("red mug", 25.0, 2.0),
        sight("green cone", 0.0, 1.0, visible=0.1),
    ),
    sight("sofa", 0.0, 3.0),
    sight("person", -30.0, 2.0),
)


@pytest.mark.parametrize(
    ("about", "meant"),
    [
        (About("red ball"), 0),
        (About("ball"), 1),  # the nearer one
        (About("sofa"), 4),
        (About("green cone"), None),  # hidden
        (About("cone"), None),
        (About("purple ball"), None),
        (About("ball", "left of", "sofa"), 0),
        (About("ball", "right of", "sofa"), 1),
        (About("mug", "right of", "sofa"), None),
        (About("ball", "left of", "green cone"), None),  # its landmark is hidden
        (About("mug", "next to", "red ball"), None),  # 1.03 m
        (About(), None),
    ],
)
def test_request_means_the_nearest_sight_that_fits(about: About, meant: int | None) -> None:
    assert resolve(Request(Kind.GO, "", about), ROOM) == meant


def test_unknown_thing_is_never_resolved() -> None:
    assert resolve(Request(Kind.UNKNOWN, "find the person", About("person")), ROOM) is None


def test_landmark_of_two_is_the_nearer_one() -> None:
    two = view((sight("red ball", 0.0, 2.0),), sight("sofa", 20.0, 3.0), sight("sofa", -20.0, 2.0))
    assert resolve(Request(Kind.GO, "", About("ball", "left of", "sofa")), two) == 0
    assert resolve(Request(Kind.GO, "", About("ball", "right of", "sofa")), two) is None
    assert relations(two) == []


def test_relations_name_exactly_one_thing() -> None:
    found = relations(ROOM)
    assert About("ball", "left of", "sofa") in found
    assert About("ball", "right of", "sofa") in found
    assert not any("person" in about.landmark or "cone" in about.landmark for about in found)
    assert not any(about.name in about.landmark for about in found)
    for about in found:
        assert resolve(Request(Kind.GO, "", about), ROOM) is not None


@pytest.mark.parametrize("side", ["left of", "right of"])
def test_relation_within_five_degrees_is_ambiguous(side: str) -> None:
    sign = 1.0 if side == "left of" else -1.0
    for off, clear in ((math.degrees(CLEAR) - 0.1, False), (math.degrees(CLEAR) + 0.1, True)):
        pair = view((sight("red ball", 3.0 + sign * off, 2.0),), sight("sofa", 3.0, 2.0))
        assert (About("ball", side, "sofa") in relations(pair)) == clear


def test_second_candidate_makes_a_relation_ambiguous() -> None:
    sofa = sight("sofa", 0.0, 3.0)
    near = sight("red ball", 20.0, 2.0)
    for other, clear in (
        (sight("blue ball", -20.0, 2.0), True),
        (sight("blue ball", 30.0, 2.0), False),  # left of it too
        (sight("blue ball", 2.0, 2.0), False),  # neither left nor right
        (sight("blue ball", -20.0, 2.0, visible=0.5), False),  # borderline
        (sight("blue ball", 60.0, 2.0, visible=0.0), True),  # out of view
    ):
        assert (About("ball", "left of", "sofa") in relations(view((near, other), sofa))) == clear


def test_next_to_leaves_a_gap_between_yes_and_no() -> None:
    for away, next_to in (
        (2.0 + NEXT_TO - 0.05, True),
        ((4.0 + NEXT_TO + NOT_NEXT_TO) / 2, False),
        (2.0 + NOT_NEXT_TO + 0.05, False),
    ):
        pair = view((sight("red ball", 0.0, 2.0),), sight("sofa", 0.0, away))
        assert (About("ball", "next to", "sofa") in relations(pair)) == next_to
    between = 2.0 + (NEXT_TO + NOT_NEXT_TO) / 2
    second = view(
        (sight("red ball", 0.0, 1.5), sight("blue ball", 0.0, between)), sight("sofa", 0.0, 2.0)
    )
    assert About("ball", "next to", "sofa") not in relations(second)
