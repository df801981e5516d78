"""Requests to the robot: their kinds, their subjects, and which sight of a view they mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from collab_llm_nodes.sim.view import Sight, View

SIDES = ("left of", "right of", "next to")
CLEAR = math.radians(5.0)
"""Least difference in bearing by which one sight is left or right of another."""
NEXT_TO = 1.0
"""m between two sights that are next to each other."""
NOT_NEXT_TO = 1.5
"""m between two sights that are clearly not."""


class Kind(Enum):
    """A kind of request; the value heads its frames in wording.txt."""

    GO = "go"
    STOP = "stop"
    DO_NOT = "do not"
    UNKNOWN = "unknown"
    """Request about a thing that no model here can know."""
    IS_THERE = "is there"
    HOW_MANY = "how many"
    WHAT_COLOUR = "what colour"
    WHAT_DO_YOU_SEE = "what do you see"


QUESTIONS = (Kind.IS_THERE, Kind.HOW_MANY, Kind.WHAT_COLOUR, Kind.WHAT_DO_YOU_SEE)


@dataclass(frozen=True)
class About:
    """The subject of a request in plain words; empty for STOP and WHAT_DO_YOU_SEE.

    ``About("ball", "left of", "sofa")`` is a ball by its relation to a landmark.
    """

    name: str = ""
    """Name such as "red ball", "ball", "sofa", "chair"; for HOW_MANY also "red", or "" for all."""
    side: str = ""
    """One of ``SIDES``, or ""."""
    landmark: str = ""
    """Name of a thing or of furniture."""

    def matches(self, name: str) -> bool:
        """Return True if a thing or furniture of this name may be meant; relations aside."""
        return set(self.name.split()) <= set(name.split())


NOTHING = About()


@dataclass(frozen=True)
class Request:
    """A request as it is given to the robot."""

    kind: Kind
    text: str
    about: About = NOTHING


def resolve(request: Request, view: View) -> int | None:
    """Return which sight of ``view`` a request means: the nearest in view that fits.

    Returns:
        an index into ``(*view.things, *view.furniture)``, or None if nothing in view fits.
    """
    if not request.about.name or request.kind is Kind.UNKNOWN:
        return None
    sights = (*view.things, *view.furniture)
    return _nearest(sights, _meant(sights, request.about))


def _meant(sights: Sequence[Sight], about: About) -> list[int]:
    """Return the indices of the sights in view that fit."""
    named = [i for i, sight in enumerate(sights) if sight.in_view and about.matches(sight.name)]
    if not about.side:
        return named
    landmarks = [i for i, sight in enumerate(sights) if sight.in_view]
    landmark = _nearest(sights, [i for i in landmarks if sights[i].name == about.landmark])
    if landmark is None:
        return []
    at = sights[landmark]
    return [i for i in named if i != landmark and _beside(sights[i], about.side, at)]


def _nearest(sights: Sequence[Sight], among: Sequence[int]) -> int | None:
    return min(among, key=lambda i: sights[i].range, default=None)


def _beside(sight: Sight, side: str, landmark: Sight) -> bool:
    if side == "next to":
        return _apart(sight, landmark) < NEXT_TO
    left = sight.bearing - landmark.bearing
    return (left if side == "left of" else -left) > CLEAR


def _apart(a: Sight, b: Sight) -> float:
    """Return the distance between two sights [m]."""
    product = a.range * b.range * math.cos(a.bearing - b.bearing)
    return math.sqrt(max(0.0, a.range**2 + b.range**2 - 2 * product))


def relations(view: View) -> list[About]:
    """Return all relations by which exactly one thing of ``view`` is meant, beyond doubt."""
    sights = (*view.things, *view.furniture)
    things = [sight for sight in view.things if sight.in_view]
    named = [s for s in sights if s.name != "person" and s.visible > 0]
    return [
        about
        for shape in dict.fromkeys(thing.name.split()[-1] for thing in things)
        for landmark in named
        if landmark.in_view and shape not in landmark.name.split()
        for side in SIDES
        for about in [About(shape, side, landmark.name)]
        if len(_meant(sights, about)) == 1 and _beyond_doubt(named, about, landmark)
    ]


def _beyond_doubt(sights: Sequence[Sight], about: About, landmark: Sight) -> bool:
    """Return True if no sight is borderline, in what is seen of it or in the relation."""
    if sum(sight.name == landmark.name for sight in sights) > 1 or landmark.borderline:
        return False
    named = [sight for sight in sights if about.matches(sight.name)]
    if any(sight.borderline for sight in named):
        return False
    if about.side == "next to":
        return not any(NEXT_TO <= _apart(sight, landmark) < NOT_NEXT_TO for sight in named)
    return all(abs(sight.bearing - landmark.bearing) > CLEAR for sight in named)
