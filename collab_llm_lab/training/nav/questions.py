"""Questions about a picture, with their answers: short ones, then requests.

The model learns to see before it learns to act: where named things are, and how far the way is
free. Colour and shape are words of their own, so that pairs never shown can be named too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from collab_llm_lab.home.asking import TRAINED_PAIRS
from collab_llm_lab.training.nav.pictures import Pictures
from collab_llm_nodes.sim.rooms import NAMED_FURNITURE
from collab_llm_nodes.sim.view import (
    DIRECTIONS,
    DISTANCES,
    Sight,
    View,
    direction,
    distance,
    way,
)

KNOWN = (*TRAINED_PAIRS, *NAMED_FURNITURE)
"""Names that training asks for."""
QUESTIONS = 3
"""Questions with answers per picture."""
_WAY_SHARE, _UNSEEN_SHARE, _LIKE_SHARE = 0.15, 0.4, 0.6
WAY_QUESTION = "how far is the way free?"


def found(view: View, name: str) -> tuple[int, int] | None:
    """Return the numbers of direction and distance of the nearest thing of this name.

    They are one past the last if none is in view; None if a borderline one makes that uncertain.
    """
    named = [s for s in (*view.things, *view.furniture) if s.name == name]
    if any(sight.borderline for sight in named):
        return None
    seen = [sight for sight in named if sight.in_view]
    if not seen:
        return len(DIRECTIONS), len(DISTANCES)
    nearest = min(seen, key=lambda sight: sight.range)
    return DIRECTIONS.index(direction(nearest.bearing)), DISTANCES.index(distance(nearest.range))


def question(name: str) -> str:
    """Return the short question for a thing."""
    return f"where is the {name}?"


def short_answer(where: tuple[int, int]) -> str:
    """Return the answer to it: "far left, near"."""
    if where[0] == len(DIRECTIONS):
        return "not in view"
    return f"{DIRECTIONS[where[0]]}, {DISTANCES[where[1]]}"


def draw_name(view: View, rng: np.random.Generator) -> tuple[str, tuple[int, int]]:
    """Return a name to ask for and where it is: in view, or like something that is."""
    sights: list[Sight] = [s for s in (*view.things, *view.furniture) if s.name in KNOWN]
    while True:
        seen = [s.name for s in sights if s.in_view]
        if seen and rng.random() >= _UNSEEN_SHARE:
            name = seen[int(rng.integers(len(seen)))]
        else:
            among: Sequence[str] = KNOWN
            if seen and rng.random() < _LIKE_SHARE:
                like = set(seen[int(rng.integers(len(seen)))].split())
                among = [name for name in KNOWN if like & set(name.split())]
            name = among[int(rng.integers(len(among)))]
        where = found(view, name)
        if where is not None:
            return name, where


def seeing_questions(
    pictures: Pictures, index: int, flip: bool, rng: np.random.Generator
) -> list[tuple[str, str]]:
    """Return short questions about a picture and their answers."""
    view = pictures.view(index, flip)
    asked = []
    for _ in range(QUESTIONS):
        if rng.random() < _WAY_SHARE:
            asked.append((WAY_QUESTION, way(view.free)))
        else:
            name, where = draw_name(view, rng)
            asked.append((question(name), short_answer(where)))
    return asked


@dataclass(frozen=True)
class Answering:
    """Draws requests at a picture, in words, with the expert's answers."""

    count: int
    """Requests drawn of each picture, which has at least as many."""
    reworded: float
    """Share that is not in plain words."""

    def __call__(
        self, pictures: Pictures, index: int, flip: bool, rng: np.random.Generator
    ) -> list[tuple[str, str]]:
        at_hand = pictures.asks[index]
        chosen = [at_hand[int(i)] for i in rng.permutation(len(at_hand))[: self.count]]
        return [(ask.mirror() if flip else ask).texts(rng, self.reworded) for ask in chosen]
