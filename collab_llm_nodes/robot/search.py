"""Memory of a search, made from the robot's own actions and answers: part of the prompt.

A model that sees one picture at a time cannot know how far it has looked round, where the way was
open, or where a thing stood that has left the picture. The robot keeps that for it, by dead
reckoning from executed actions and from the words of the answers. Words it does not know change
nothing. Lengths are metres, headings degrees (+ = left) from where the search began.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

BEARINGS = {"far left": 35.0, "left": 17.0, "ahead": 0.0, "right": -17.0, "far right": -35.0}
"""Degrees that a direction word of an answer stands for."""
RANGES = {"very close": 0.3, "close": 0.5, "near": 0.8, "some way off": 1.6, "distant": 3.2}
"""Metres that a distance word of an answer stands for."""
RANGE_EDGES = (0.4, 0.65, 0.9, 2.4)
WAYS = {"blocked": "very short", "short": "short", "open": "open"}
"""The free way ahead, and its words in an answer; a plain observation has no "blocked"."""
EIGHTHS = (
    "ahead",
    "ahead left",
    "left",
    "behind left",
    "behind",
    "behind right",
    "right",
    "ahead right",
)
"""Directions all round, 45 degrees each, counter-clockwise."""
PLACES = {
    "far left": "on the far left",
    "left": "on the left",
    "ahead": "straight ahead",
    "right": "on the right",
    "far right": "on the far right",
    "ahead left": "ahead on the left",
    "ahead right": "ahead on the right",
    "behind left": "behind me on the left",
    "behind": "behind me",
    "behind right": "behind me on the right",
}
"""Words of an answer for each direction."""
FULL_TURN = 315
"""Degrees of a look round: the next picture would be the first one again."""

_PLACES = sorted(PLACES.items(), key=lambda item: -len(item[1]))
_DISTANCES = sorted(RANGES, key=len, reverse=True)
MARKER = "the next action is"
_LONGEST_ANSWER, _LONGEST_NAME = 1000, 3
_WORD = re.compile(r"[a-z]+|[,.]")
_STEP = re.compile(r"move forward ([0-9]{1,4})\b|turn (left|right) ([0-9]{1,3})\b")
_UNSEEN = {"not", "no", "cannot"}
_ENDS_NAME = {
    *("is", "stands", "and", "on", "in", "straight", "ahead", "behind", ",", "."),
    *("far", "left", "right", "way", "near", "close", "very", "some", "distant"),
}
_FORGET_AFTER = 20  # steps
_CUT_SHORT = 0.5
"""A step of which less is done was cut short ..."""
_PACE, _LEAST_TURN = 25, 15
"""... and counts by whole paces [cm] or least turns [degree]."""
_MOST_PLACES = 16
_REACH = {"short": 1.0, "open": 2.0}  # m, a way of this word is at least about this long


@dataclass(frozen=True)
class Report:
    """Words of the last sentence before an answer's action; "" where it says nothing."""

    name: str = ""
    """Name of the thing that is looked for."""
    in_view: bool = False
    direction: str = ""
    """A key of ``PLACES``."""
    distance: str = ""
    """A key of ``RANGES``."""
    way: str = ""
    """A key of ``WAYS``: the free way ahead."""
    leg: str = ""
    """A key of ``PLACES``: where a way round an obstacle goes."""


def read_report(answer: str) -> Report:
    """Return what an answer reports on the thing asked for; any text is read."""
    reason = answer[:_LONGEST_ANSWER].lower().split(MARKER)[0]
    sentences = [part for part in reason.split(".") if part.strip()]
    if not sentences:
        return Report()
    words = _WORD.findall(sentences[-1])
    said, way = _without_way(words)
    text = " ".join(said)
    return Report(
        name=_name(said),
        in_view=not _UNSEEN.intersection(said),
        direction=_place(text),
        distance=next((word for word in _DISTANCES if word in text), ""),
        way=next((word for word, said_as in WAYS.items() if said_as == way), ""),
        leg=_place(way),
    )


def _without_way(words: list[str]) -> tuple[list[str], str]:
    """Return the words but those of "the way is ...", and these as a text."""
    for i in range(len(words) - 2):
        if words[i : i + 3] == ["the", "way", "is"]:
            end = i + 3
            while end < len(words) and words[end] not in (",", "and"):
                end += 1
            return words[:i] + words[end:], " ".join(words[i + 3 : end])
    return words, ""


def _place(text: str) -> str:
    return next((word for word, said_as in _PLACES if said_as in text), "")


def _name(words: list[str]) -> str:
    """Return the first name after "the" or "no", of at most three words."""
    for i, word in enumerate(words):
        if word in ("the", "no"):
            name = words[i + 1 : i + 2 + _LONGEST_NAME]
            end = next((k for k, w in enumerate(name) if w in _ENDS_NAME), len(name))
            if 0 < end <= _LONGEST_NAME:
                return " ".join(name[:end])
    return ""


def eighth(bearing: float) -> str:
    """Return the word of a bearing in degrees (+ = left), in eighths of a turn."""
    return EIGHTHS[round(bearing / 45.0) % 8]


def range_word(metres: float) -> str:
    """Return the distance word of a range."""
    return list(RANGES)[sum(metres >= edge for edge in RANGE_EDGES)]


@dataclass(frozen=True)
class Remembered:
    """A thing that was in view, by dead reckoning."""

    name: str
    bearing: float
    """[degree], + = left."""
    range: float
    """[m]"""

    def __str__(self) -> str:
        return f"{self.name} {eighth(self.bearing)}, {range_word(self.range)}"


@dataclass(frozen=True)
class SearchMemory:
    """Memory of one search; :meth:`after` returns that of the next step."""

    place: int = 1
    """Number of the place at which the robot looks round, or from which it walks."""
    turned: int = 0
    """Degrees turned at this place, in the direction of the last turn; at most ``FULL_TURN``."""
    walked: int = 0
    """cm walked since the look round."""
    x: float = 0.0
    y: float = 0.0
    heading: float = 0.0
    ways: tuple[tuple[float, str], ...] = ()
    """Headings of this look round, with the key of ``WAYS`` reported there."""
    left_turn: bool = True
    """Direction of the last turn."""
    earlier: tuple[tuple[float, float], ...] = ()
    """Places of earlier look rounds."""
    thing: tuple[str, float, float] | None = None
    """Name and place of the thing that was seen last."""
    unseen: int = 0
    """Steps since then."""
    blocked: bool = False
    """Whether something cut the last step ahead short."""

    @property
    def text(self) -> str:
        """The words for the prompt: "place 1, turned 135", "seen red ball left, near, blocked"."""
        return f"{self._state}, blocked" if self.blocked else self._state

    @property
    def _state(self) -> str:
        if self.seen:
            return f"seen {self.seen}"
        if self.walked:
            return f"place {self.place}, walked {self.walked}"
        if self.turned < FULL_TURN:
            return f"place {self.place}, turned {self.turned}"
        best = self.best_way
        way = "open nowhere" if best is None else f"{best[0]} {eighth(best[1])}"
        return f"place {self.place}, turned {self.turned}, {way}"

    @property
    def seen(self) -> Remembered | None:
        """The thing that was seen, as it lies from here; None if there is none to go to."""
        if self.thing is None:
            return None
        name, x, y = self.thing
        dx, dy = x - self.x, y - self.y
        bearing = math.remainder(math.degrees(math.atan2(dy, dx)) - self.heading, 360.0)
        return Remembered(name, bearing, math.hypot(dx, dy))

    @property
    def best_way(self) -> tuple[str, float] | None:
        """Key of ``WAYS`` and bearing [degree] of the way of this look round to walk next.

        It is an open one, if there is any; of equal ones that which leads farthest from earlier
        places, then that with free ways beside it.
        """
        ways = [(heading, way) for heading, way in self.ways if way in _REACH]
        if not ways:
            return None
        heading, way = max(ways, key=self._merit)
        return way, math.remainder(heading - self.heading, 360.0)

    def _merit(self, heading_and_way: tuple[float, str]) -> tuple[float, float, float]:
        heading, way = heading_and_way
        x, y = _ahead(self.x, self.y, heading, _REACH[way])
        new = min((math.hypot(x - a, y - b) for a, b in self.earlier), default=0.0)
        beside = sum(
            _REACH.get(other, 0.0)
            for at, other in self.ways
            if abs(math.remainder(at - heading, 360.0)) < 60.0
        )
        return _REACH[way], new, beside

    def after(
        self, action: str, answer: str, done: float = 1.0, *, obstacle: bool = True
    ) -> SearchMemory:
        """Return the memory after an executed action, such as "turn left 45 degree".

        Args:
            answer: the model's text from which the action was taken.
            done: share of the action that was carried out, as measured.
            obstacle: what cut the action short, if anything did, stands in the way.
        """
        step = _STEP.match(action)
        memory = replace(self._with_report(read_report(answer)), blocked=False)
        if step is None:
            return memory
        if step[1]:
            return memory._walk(int(step[1]), done, obstacle)
        return memory._turn(int(step[3]), step[2] == "left", done)

    def _with_report(self, report: Report) -> SearchMemory:
        memory = self._with_way(report.way) if report.way else self
        if report.in_view and report.direction in BEARINGS and report.distance and report.name:
            heading = self.heading + BEARINGS[report.direction]
            place = _ahead(self.x, self.y, heading, RANGES[report.distance])
            return replace(memory, thing=(report.name, *place), unseen=0)
        if self.seen is None:
            return memory
        passed = eighth(self.seen.bearing) == "ahead" and self.seen.range < RANGE_EDGES[1]
        if passed or self.unseen >= _FORGET_AFTER:
            return replace(memory, thing=None, turned=0, walked=0, ways=())
        return replace(memory, unseen=self.unseen + 1)

    def _with_way(self, way: str) -> SearchMemory:
        """Take note of the free way at this heading of a look round."""
        if self.walked:
            return self
        apart = [w for w in self.ways if abs(math.remainder(w[0] - self.heading, 360.0)) > 22.5]
        return replace(self, ways=(*apart, (self.heading, way)))

    def _walk(self, cm: int, done: float, obstacle: bool) -> SearchMemory:
        if done < _CUT_SHORT:
            blocked = replace(self._with_way("blocked"), blocked=True) if obstacle else self
            return blocked._walk(_PACE * max(0, round(cm * done / _PACE)), 1.0, obstacle)
        x, y = _ahead(self.x, self.y, self.heading, cm / 100.0)
        if self.thing is not None or not cm:
            return replace(self, x=x, y=y)
        left = () if self.walked else ((self.x, self.y),)
        earlier = (*self.earlier, *left)[-_MOST_PLACES:]
        return replace(self, x=x, y=y, walked=self.walked + cm, earlier=earlier)

    def _turn(self, degrees: int, left: bool, done: float) -> SearchMemory:
        if done < _CUT_SHORT:
            degrees = _LEAST_TURN * round(degrees * done / _LEAST_TURN)
        heading = math.remainder(self.heading + (degrees if left else -degrees), 360.0)
        turning = replace(self, heading=heading, left_turn=left)
        if self.thing is not None:
            return turning
        if self.walked:
            return replace(turning, place=self.place + 1, turned=degrees, walked=0, ways=())
        if self.turned >= FULL_TURN:
            return turning
        turned = self.turned + degrees if left == self.left_turn else degrees
        return replace(turning, turned=min(turned, FULL_TURN))


def _ahead(x: float, y: float, heading: float, metres: float) -> tuple[float, float]:
    angle = math.radians(heading)
    return x + metres * math.cos(angle), y + metres * math.sin(angle)
