"""Bags as a log document in words: for people, and for questions (docs/replay.md, docs/minions.md).

A line has one event, with its time and the robot's position, so that it can be understood when a
document is cut into pieces::

    ## 2026-11-23 11:00:02 UTC: instruction "find the red ball"

    - 2026-11-23 11:00:02 UTC, in the kitchen (x 1.2 m, y 0.3 m): told to "find the red ball"
    - 2026-11-23 11:00:04 UTC, in the kitchen (x 1.2 m, y 0.3 m): saw and decided: "the red ball is
      on the left, the next action is turn left 45 degree."
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

from collab_llm_nodes.errors import InvalidInput, printable
from collab_llm_nodes.replay.bag import SUFFIXES, Bag, goes_back, open_bag
from collab_llm_nodes.replay.recording import as_expected, for_motion, read_action, status_in
from collab_llm_nodes.robot.grammar import Code

TOPICS = {
    "instruction": "std_msgs/msg/String",
    "generated_text": "collab_llm/msg/GeneratedText",
    "navigation_action": "collab_llm/msg/NavigationAction",
    "motion_state": "collab_llm/msg/MotionState",
    "link_state": "collab_llm/msg/LinkState",
    "odom": "nav_msgs/msg/Odometry",
}
"""Topics of the log, each with its type."""
_LINK = {0: "lost", 1: "being set up", 2: "up"}
_AGAIN = "times begin again here: the clock was set back, or an older bag follows"
_STEP_M = 1.0
"""Distance after which a position is logged although nothing else happens [m]."""
_TEXT = 1000
"""Longest text in a line [characters]."""


@dataclass(frozen=True)
class Place:
    """A rectangle of the odometry frame with a name [m]."""

    name: str
    x1: float
    y1: float
    x2: float
    y2: float

    @classmethod
    def read(cls, text: str) -> Place:
        """Read ``NAME=X1,Y1,X2,Y2``, two opposite corners.

        Raises:
            InvalidInput: it is of another form.
        """
        name, _, corners = text.partition("=")
        try:
            x1, y1, x2, y2 = map(float, corners.split(","))
            if not name.strip() or not all(map(math.isfinite, (x1, y1, x2, y2))):
                raise ValueError
        except ValueError:
            raise InvalidInput(
                f"{text!r} is no place", field="place", remedy="such as kitchen=0,0,3.5,4"
            ) from None
        return cls(name.strip(), min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2))

    def holds(self, x: float, y: float) -> bool:
        """Return True if the point [m] lies in it."""
        return self.x1 <= x <= self.x2 and self.y1 <= y <= self.y2


@dataclass
class _Robot:
    """State of one robot while its bags are read.

    Attributes:
        name: its namespace, on one line; empty without.
        newest: time of the last message [ns].
        at: newest position [m]; None before the first.
        logged_at: position in the last line.
    """

    name: str
    newest: int = 0
    at: tuple[float, float] | None = None
    logged_at: tuple[float, float] | None = None
    instruction: str = ""
    reasons: str = ""
    link: int | None = None
    actions: dict[str, str] = field(default_factory=dict)


class Log:
    """Writes events of bags as lines of Markdown.

    Args:
        places: names of parts of the odometry frame; the first that holds a position counts.
        since: time of the first event that is logged [ns since 1970].

    Attributes:
        lines: events written so far.
    """

    def __init__(self, out: TextIO, places: Sequence[Place] = (), since: int = 0) -> None:
        self._out = out
        self._places = places
        self._since = since
        self._robots: dict[str, _Robot] = {}
        self.lines = 0

    def add(self, bag: Bag, namespace: str | None = None) -> None:
        """Write the events of ``bag``.

        Args:
            namespace: of the only robot that is logged; None: all.

        Raises:
            InvalidInput: the bag is damaged, or of another version.
        """
        topics = {
            topic: (space, name)
            for topic, kind in bag.types.items()
            for space, _, name in [topic.rpartition("/")]
            if TOPICS.get(name) == kind and namespace in (None, space.strip("/"))
        }
        for robot in self._robots.values():
            robot.at = None  # it may have been carried elsewhere since the last bag
        for topic, stamp, message in bag.messages(topics):
            space, name = topics[topic]
            robot = self._robots.setdefault(space, _Robot(printable(space.strip("/"))))
            if goes_back(robot.newest, stamp):
                robot = self._robots[space] = _Robot(robot.name)  # all else is of an earlier run
                if stamp >= self._since:
                    self._write(robot, stamp, _AGAIN)
            robot.newest = stamp
            with as_expected(topic):
                for event in _events(robot, name, message):
                    if stamp >= self._since:
                        self._write(robot, stamp, event)

    def _write(self, robot: _Robot, stamp: int, event: str) -> None:
        when = datetime.fromtimestamp(stamp / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        who = f", {robot.name}" if robot.name else ""
        if event.startswith("told to "):
            self._out.write(f"\n## {when}{who}: instruction {event.removeprefix('told to ')}\n\n")
        self._out.write(f"- {when}{who}{self._where(robot)}: {event}\n")
        robot.logged_at = robot.at
        self.lines += 1

    def _where(self, robot: _Robot) -> str:
        if robot.at is None:
            return ""
        x, y = robot.at
        place = next((place.name for place in self._places if place.holds(x, y)), "")
        position = f"x {x:.1f} m, y {y:.1f} m"
        return f", in the {place} ({position})" if place else f", at {position}"


def _events(robot: _Robot, name: str, message: Any) -> Iterator[str]:
    """Yield the events in a message that are new, in words."""
    match name:
        case "odom":
            yield from _moved(robot, message.pose.pose.position)
        case "instruction" if message.data != robot.instruction:
            ended, robot.instruction = robot.instruction, message.data
            yield f"told to {_quoted(message.data)}" if message.data else f"ended: {_quoted(ended)}"
        case "generated_text" if message.final:
            yield _answer(message)
        case "navigation_action":
            yield from _action(robot, message)
        case "motion_state":
            reasons = _on_one_line(str(message.text))
            if reasons != robot.reasons:
                robot.reasons = reasons
                yield f"motion forbidden or limited: {reasons}" if reasons else "motion allowed"
        case "link_state" if message.state != robot.link:
            before, robot.link = robot.link, int(message.state)
            if before is not None or robot.link != max(_LINK):
                yield f"connection to the cloud {_LINK.get(robot.link, 'unknown')}"


def _moved(robot: _Robot, position: Any) -> Iterator[str]:
    """Take the position; yield an event after ``_STEP_M`` without any other."""
    at = float(position.x), float(position.y)
    if not all(map(math.isfinite, at)):
        return
    robot.at = at
    if robot.logged_at is None or math.dist(at, robot.logged_at) >= _STEP_M:
        yield "was here"


def _answer(text: Any) -> str:
    code, why = status_in(text)
    if code:
        return f"the answer to {_quoted(text.prompt)} failed: {_on_one_line(why)}"
    if for_motion(text):
        return f"saw and decided: {_quoted(text.text)}"
    return f"was asked {_quoted(text.prompt)} and answered {_quoted(text.text)}"


def _action(robot: _Robot, message: Any) -> Iterator[str]:
    """Yield the action, unless it is already logged for this answer."""
    action = read_action(message)
    words = str(action) if action.code is Code.OK else f"none, because {message.reason}"
    if robot.actions.get(message.session_id) != words:
        robot.actions = {message.session_id: words}
        yield f"action: {_on_one_line(words)}"


def _quoted(text: str) -> str:
    """Return a text of a model or a person on one line, so that it cannot forge lines."""
    return '"' + _on_one_line(text).replace('"', "'") + '"'


def _on_one_line(text: str) -> str:
    return printable(" ".join(text.split())[:_TEXT])


def bags_in(path: Path) -> list[Path]:
    """Return the bags at ``path``: itself, or those in the folder, by name.

    Raises:
        InvalidInput: there is none.
    """
    if path.is_file() or (path / "metadata.yaml").is_file():
        return [path]
    entries = sorted(path.iterdir()) if path.is_dir() else []
    found = [entry for entry in entries if looks_like_a_bag(entry)]
    if found:
        return found
    raise InvalidInput(
        f"{path} holds no bag" if path.exists() else f"{path} does not exist",
        field="bag",
        remedy="give a bag, or the folder that the recorder writes to",
    )


def looks_like_a_bag(path: Path) -> bool:
    """Return True for a bag's folder or file, also of one that was never closed."""
    if path.is_file():
        return path.suffix in SUFFIXES
    return any(file.suffix in SUFFIXES for file in path.iterdir())


def write_log(
    bags: Iterable[Path],
    out: TextIO,
    *,
    namespace: str | None = None,
    places: Sequence[Place] = (),
    since: int = 0,
) -> tuple[int, list[str]]:
    """Write the log of ``bags``, the oldest first.

    Returns:
        the number of lines, and why bags were left out, one sentence each.

    Raises:
        InvalidInput: no bag could be read.
    """
    log, left_out, read = Log(out, places, since), [], 0
    last: InvalidInput | None = None
    out.write("# Log of the robot\n")
    for bag in bags:
        try:
            with open_bag(bag) as opened:
                log.add(opened, namespace)
            read += 1
        except InvalidInput as error:
            last = error
            left_out.append(str(error))
    if not read and last is not None:
        raise last
    return log.lines, left_out
