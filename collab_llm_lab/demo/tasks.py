"""Tasks of the demo: a request in a room, and what counts as a right ending."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from collab_llm_lab.home.answers import reply
from collab_llm_lab.home.asking import draw_for_view, draw_request
from collab_llm_lab.home.requests import About, Kind, Request, resolve
from collab_llm_lab.home.wording import TRAINED
from collab_llm_lab.training.nav.driving import as_shown
from collab_llm_nodes.sim.footprints import Footprint
from collab_llm_nodes.sim.pose import Pose
from collab_llm_nodes.sim.rooms import SUCCESS_DISTANCE, Room, Style, make_room
from collab_llm_nodes.sim.view import look

SHOWN = "red mug"
"""Thing of the room that somebody would show; no training room has one."""
SHOWN_SEED = 3772
"""Seed of a room where a table stands between the robot and the thing shown."""
WORDINGS = replace(TRAINED, plain=True)
"""All verbs and frames, without misspellings: a film is to be read."""


@dataclass(frozen=True)
class Task:
    """One request in one room."""

    room: Room
    instruction: str
    goals: tuple[Footprint, ...]
    """Things that the request may mean; empty if nothing in the room fits."""
    within: float
    """Largest distance of the robot's centre to one of ``goals`` at a success [m]."""
    ending: str = "OK"
    """Name of the status that the request asks for: OK, NOT_FOUND or ANSWERED."""
    reply: str = ""
    """Words that an answered question asks for."""
    thing: str = ""
    """The simulator's parameter ``thing``."""
    name: str = ""
    """Thing that the robot's memory is asked about; empty: nothing was seen for certain."""

    def distance(self, pose: Pose) -> float | None:
        """Return the distance from ``pose`` to the nearest goal [m], None if there is none."""
        return min((goal.distance(pose.x, pose.y) for goal in self.goals), default=None)

    def right(self, ending: str, text: str, pose: Pose) -> bool:
        """Return True if the ending is right.

        Args:
            ending: name of the navigator's status.
            text: the model's words beside it.
            pose: where the robot stands in truth.
        """
        if ending != self.ending:
            return False
        if ending == "ANSWERED":
            return text.strip(" .").lower() == self.reply
        distance = self.distance(pose)
        return ending == "NOT_FOUND" or (distance is not None and distance <= self.within)


def draw_tasks(count: int, seed: int, *, show: bool = True) -> Iterator[Task]:
    """Yield ``count`` tasks, each in a room of its own.

    The second is a question and the last of three or more is for something absent; all others are
    for something in the room.

    Args:
        show: begin with a red mug behind a table.
    """
    for number in range(count):
        if show and number == 0:
            yield _shown()
        elif number == 1:
            yield _question(seed + number)
        else:
            yield _going(seed + number, absent=number > 1 and number == count - 1)


def _shown() -> Task:
    room = make_room(SHOWN_SEED, Style(first=SHOWN))
    return _task(room, Request(Kind.GO, f"please go to the {SHOWN}", About(SHOWN)), thing=SHOWN)


def _question(seed: int) -> Task:
    room = make_room(seed)
    view = look(as_shown(room), room.start)
    request = draw_for_view(room, view, _random(seed), WORDINGS)
    return Task(room, request.text, (), 0.0, "ANSWERED", reply(request, view))


def _going(seed: int, *, absent: bool) -> Task:
    room, rng = make_room(seed), _random(seed)
    while True:
        request = draw_request(room, rng, WORDINGS)
        if request.kind is Kind.GO and bool(_meant(room, request)) != absent:
            return _task(room, request)


def _task(room: Room, request: Request, thing: str = "") -> Task:
    goals = tuple(room.footprints[i] for i in _meant(room, request))
    ending = "OK" if goals else "NOT_FOUND"
    name = request.about.name if goals else ""
    return Task(room, request.text, goals, SUCCESS_DISTANCE, ending, "", thing, name)


def _meant(room: Room, request: Request) -> list[int]:
    """Return the indices of the parts of ``room`` that a GO request may mean."""
    if request.about.side:
        found = resolve(request, look(as_shown(room), room.start))
        return [] if found is None else [found]
    return [i for i, part in enumerate(room.parts) if request.about.matches(part.name)]


def _random(seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, 0xDE30])
