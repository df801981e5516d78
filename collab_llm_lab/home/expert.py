"""The expert: it goes to what is asked for, around what is in the way, and searches what it misses.

It knows the outline of the room, and of what stands there only what has been in view.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from collab_llm_lab.home import planner
from collab_llm_lab.home.answers import ENDS, GIVE_UP, REPLY, STOP, Decision, answer, reply, scene
from collab_llm_lab.home.requests import Kind, Request, resolve
from collab_llm_nodes.robot.search import FULL_TURN, Report, SearchMemory, eighth
from collab_llm_nodes.sim.footprints import Footprint, distances
from collab_llm_nodes.sim.pose import Pose
from collab_llm_nodes.sim.robot import Base
from collab_llm_nodes.sim.rooms import ROBOT_RADIUS, SUCCESS_DISTANCE, Room
from collab_llm_nodes.sim.view import DISTANCES, Sight, View, direction, distance, look, way

PLACES_TO_LOOK_ROUND = 5
LONGEST_WALK = 450
"""cm from one look round to the next."""
MAX_STEPS = 80

_STEPS = (75, 50, 25)
_FORWARD = {"very close": 25, "close": 25, "near": 50, "some way off": 75, "distant": 75}
_SEARCH_STEP = {"short": 50, "open": 75}
_NOTICED = 0.1  # share that is visible of an obstacle that the expert takes note of
_SIDE_COST = 0.3  # m, of a path that begins against the last turn


class Expert:
    """The expert in one room with one request; it keeps what has been in view."""

    def __init__(self, room: Room, request: Request) -> None:
        self.room, self.request = room, request
        self.target: int | None = None
        """Index of what is asked for in ``room.footprints``, once it was in view."""
        self._known: set[int] = set()

    def decide(
        self, view: View, pose: Pose, history: Sequence[str], memory: SearchMemory
    ) -> Decision:
        """Return the decision at ``pose``.

        Args:
            history: phrases of the actions executed so far; the last two are used.
            memory: the robot's memory, made from the answers that it acted on.
        """
        if self.request.kind is Kind.STOP:
            return Decision(STOP)
        if self.request.kind is not Kind.GO:
            return Decision(REPLY, reply=reply(self.request, view))
        sights = (*view.things, *view.furniture)
        self._known |= {i for i, sight in enumerate(sights) if sight.visible > _NOTICED}
        self._touch(pose, view.free)
        found = resolve(self.request, view)
        if self.request.about.side and self.target is not None:
            found = self.target if sights[self.target].in_view else None
        leftwards = not any("right" in a for a in [*_turns(history)][-1:])
        if found is not None:
            self.target = found
            return self._approach(sights, found, view, pose, history)
        if memory.seen is not None:
            return self._return(sights, view, pose, history, memory)
        return self._search(sights, view, memory, leftwards)

    def _touch(self, pose: Pose, free: float) -> None:
        """Take note of what ends the free way, even if it is out of the picture."""
        if free < 1.0:
            x, y = pose.x + free * math.cos(pose.yaw), pose.y + free * math.sin(pose.yaw)
            near = distances(self.room.footprints, x, y) < ROBOT_RADIUS + 0.05
            self._known |= {int(i) for i in np.flatnonzero(near)}

    def _obstacles(self, target: int | None) -> list[Footprint]:
        known = [self.room.footprints[i] for i in sorted(self._known) if i != target]
        return [*known, *self.room.walls]

    def _approach(
        self,
        sights: Sequence[Sight],
        target: int,
        view: View,
        pose: Pose,
        history: Sequence[str],
    ) -> Decision:
        """Go to the target, which is in view."""
        sight = sights[target]
        words = direction(sight.bearing), distance(sight.range)
        others = scene(sights, target)
        if words[1] == DISTANCES[0]:
            return Decision(STOP, Report(sight.name, True, *words), others)
        leg = ""
        action = None
        if planner.straight(
            self._obstacles(target), (pose.x, pose.y), self.room.footprints[target]
        ):
            action = _turn_to(sight.bearing) or _ahead(_FORWARD[words[1]], view.free)
        if action is None:
            action, leg = self._go_round(target, view, pose, history)
        return Decision(action, Report(sight.name, True, *words, "", leg), others)

    def _return(
        self,
        sights: Sequence[Sight],
        view: View,
        pose: Pose,
        history: Sequence[str],
        memory: SearchMemory,
    ) -> Decision:
        """Go to the target, which is remembered."""
        seen = memory.seen
        assert seen is not None
        where = eighth(seen.bearing)
        if self.target is None:
            action, leg = _turn_to(math.radians(seen.bearing)) or _ahead(75, view.free), ""
            action = action or "turn left 45 degree"
        else:
            action, leg = self._go_round(self.target, view, pose, history)
        others = scene(sights, self.target) if action.startswith("turn") else ()
        return Decision(action, Report(seen.name, False, where, "", "", leg), others)

    def _go_round(
        self, target: int, view: View, pose: Pose, history: Sequence[str]
    ) -> tuple[str, str]:
        """Return the action along the shortest path, and the direction of its first leg."""
        turned = [*_turns(history)][-1:]
        obstacles = self._obstacles(target)

        def penalty(to: planner.Point) -> float:
            side = _turn_to(planner.bearing(pose.x, pose.y, pose.yaw, to))
            against = side and turned and side.split()[1] != turned[0].split()[1]
            return _SIDE_COST if against else 0.0

        here = pose.x, pose.y
        corners = planner.path(obstacles, here, self.room.footprints[target], penalty)
        if len(corners) > 1 and math.dist(here, corners[0]) < 0.15:
            corners = corners[1:]
        to = (
            corners[0]
            if corners
            else (self.room.footprints[target].x, self.room.footprints[target].y)
        )
        bearing = planner.bearing(pose.x, pose.y, pose.yaw, to)
        turn = _turn_to(bearing)
        if turn and history and _opposite(turn, history[-1]) and view.free >= 0.25:
            turn = None  # turned by an obstacle's side: pass it first
        length = math.dist(here, to) * 100
        step = next((cm for cm in _STEPS if length >= cm - 12), 25)
        action = turn or _ahead(step, view.free)
        if action is None:
            near = int(distances(obstacles, *here).argmin())
            aside = planner.bearing(pose.x, pose.y, pose.yaw, obstacles[near][:2])
            action = "turn right 30 degree" if aside > 0 else "turn left 30 degree"
        return action, direction(bearing)

    def _search(
        self, sights: Sequence[Sight], view: View, memory: SearchMemory, leftwards: bool
    ) -> Decision:
        """Look round, walk to where the way is open, look round again, give up."""
        name, free = self.request.about.name, way(view.free)
        best = memory.best_way
        turn = f"turn {'left' if leftwards else 'right'} 45 degree"
        action = turn
        if memory.walked:
            if free in _SEARCH_STEP and memory.walked < LONGEST_WALK:
                action = f"move forward {_SEARCH_STEP[free]} cm"
        elif memory.turned >= FULL_TURN:
            towards, least = ("ahead", "short") if best is None else (eighth(best[1]), best[0])
            if memory.place >= PLACES_TO_LOOK_ROUND or (best is None and free not in _SEARCH_STEP):
                return Decision(GIVE_UP, Report(name))
            if "left" in towards or "right" in towards:
                action = f"turn {'left' if 'left' in towards else 'right'} 45 degree"
            elif towards == "ahead" and free in (least, "open"):
                action = f"move forward {_SEARCH_STEP[free]} cm"
        others = scene(sights, None) if action.startswith("turn") else ()
        return Decision(action, Report(name, way=free), others)


def _turns(history: Sequence[str]) -> list[str]:
    return [action for action in history[-2:] if action.startswith("turn ")]


def _turn_to(bearing: float) -> str | None:
    """Return the turn to a bearing in rad; None if it is ahead."""
    degrees = math.degrees(bearing)
    if direction(bearing) == "ahead":
        return None
    size = 15 if abs(degrees) < 25 else 30 if abs(degrees) < 45 else 45
    return f"turn {'left' if degrees > 0 else 'right'} {size} degree"


def _opposite(turn: str, last: str) -> bool:
    return last.startswith("turn ") and turn.split()[1] != last.split()[1]


def _ahead(cm: int, free: float) -> str | None:
    """Return the longest step ahead up to ``cm`` that is free; None if there is none."""
    step = next((s for s in _STEPS if s <= cm and s / 100 <= free), None)
    return None if step is None else f"move forward {step} cm"


@dataclass(frozen=True)
class Step:
    """One step of an episode, before its action is executed."""

    pose: Pose
    memory: str
    """The search memory's text."""
    answer: str
    decision: Decision


@dataclass
class Episode:
    """One request, driven by the expert."""

    room: Room
    request: Request
    outcome: str = "step limit"
    """reached | wrong place | given up | replied | step limit"""
    steps: list[Step] = field(default_factory=list)


def drive(room: Room, request: Request, seed: int = 0) -> Episode:
    """Return the expert's episode in the simulated base."""
    expert, base = Expert(room, request), Base(room, seed)
    memory, history = SearchMemory(), list[str]()
    episode = Episode(room, request)
    for _ in range(MAX_STEPS):
        decision = expert.decide(look(room, base.pose), base.pose, history, memory)
        said = answer(decision)
        episode.steps.append(Step(base.pose, memory.text, said, decision))
        if decision.action in ENDS:
            episode.outcome = _outcome(expert, base.pose, decision.action)
            break
        done = base.execute(decision.action)
        memory = memory.after(decision.action, said, done)
        history.append(decision.action)
    return episode


def _outcome(expert: Expert, pose: Pose, action: str) -> str:
    if action != STOP:
        return "given up" if action == GIVE_UP else "replied"
    near = expert.target is not None and reached(expert.room, expert.target, pose)
    return "reached" if near else "wrong place"


def reached(room: Room, target: int, pose: Pose) -> bool:
    """Return True if a stop at ``pose`` is a success for the thing or furniture ``target``."""
    return room.footprints[target].distance(pose.x, pose.y) <= SUCCESS_DISTANCE
