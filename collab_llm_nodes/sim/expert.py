"""The camera's view by geometry, and the action of an expert navigator.

Words and actions share one set of thresholds: a direction word and a distance word determine the
action, so an answer's reason and its action never disagree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from collab_llm_nodes.robot.prompt import HISTORY_LENGTH
from collab_llm_nodes.sim.pose import Pose
from collab_llm_nodes.sim.rooms import Room

HALF_FOV = math.radians(45.0)
CAMERA_FORWARD = 0.2
"""m from the base's centre to the camera."""
CAMERA_HEIGHT = 0.35
CAMERA_PITCH = math.radians(12.0)
"""Downwards, so that the foot of a thing, the best cue of its distance, is in the picture."""

DIRECTIONS = ("far left", "left", "ahead", "right", "far right")
_DIRECTION_EDGES = (25.0, 10.0, -10.0, -25.0)  # degrees, + = left
DISTANCES = ("very close", "close", "near", "some way off", "distant")
DISTANCE_EDGES = (0.5, 0.75, 1.0, 2.5)  # m

ACTIONS = (
    "stop",
    "move forward 25 cm",
    "move forward 50 cm",
    "move forward 75 cm",
    "turn left 15 degree",
    "turn left 30 degree",
    "turn left 45 degree",
    "turn right 15 degree",
    "turn right 30 degree",
    "turn right 45 degree",
)
_TURNS = {"far left": 5, "left": 4, "right": 7, "far right": 8}
_FORWARD = {"close": 1, "near": 2, "some way off": 3, "distant": 3}

SUCCESS_DISTANCE = 0.8
"""m from the base's centre to the right thing's centre at the stop."""
HISTORY = HISTORY_LENGTH
"""Past actions in the prompt."""
MAX_STEPS = 40


@dataclass(frozen=True)
class Sight:
    """One thing as seen from the camera: bearing (rad, + = left), range (m), visible share."""

    bearing: float
    range: float
    visible: float
    """Share of the thing's horizontal extent inside the picture and not hidden by nearer things."""

    @property
    def in_view(self) -> bool:
        return self.visible >= 0.5

    @property
    def borderline(self) -> bool:
        """Return True if visibility is ambiguous: left out of training and perception figures."""
        return 0.3 < self.visible < 0.65


def camera_of(base: Pose) -> Pose:
    """Return the camera's pose in the plane for a base pose."""
    return Pose(
        base.x + CAMERA_FORWARD * math.cos(base.yaw),
        base.y + CAMERA_FORWARD * math.sin(base.yaw),
        base.yaw,
    )


def look(room: Room, base: Pose) -> list[Sight]:
    """Return every thing of the room as seen from ``base``, in the order of ``room.things``."""
    camera = camera_of(base)
    spans: list[tuple[float, float, float]] = []  # bearing, range, half width
    for thing in room.things:
        dx, dy = thing.x - camera.x, thing.y - camera.y
        distance = math.hypot(dx, dy)
        bearing = math.remainder(math.atan2(dy, dx) - camera.yaw, math.tau)
        half = math.asin(min(1.0, thing.radius / max(distance, 1e-6)))
        spans.append((bearing, distance, half))
    return [
        Sight(b, r, _visible_share(b, half, [s for s in spans if s[1] < r])) for b, r, half in spans
    ]


def _visible_share(
    bearing: float, half: float, nearer: Sequence[tuple[float, float, float]]
) -> float:
    samples = 21
    seen = 0
    for i in range(samples):
        angle = bearing + half * (2 * (i + 0.5) / samples - 1)
        hidden = abs(angle) > HALF_FOV or any(abs(angle - b) < h for b, _, h in nearer)
        seen += not hidden
    return seen / samples


def direction(bearing: float) -> str:
    """Return the direction word of a bearing in rad (+ = left)."""
    degrees = math.degrees(bearing)
    return DIRECTIONS[sum(degrees <= edge for edge in _DIRECTION_EDGES)]


def distance(metres: float) -> str:
    """Return the distance word of a range in m."""
    return DISTANCES[sum(metres >= edge for edge in DISTANCE_EDGES)]


def action_for(direction_word: str, distance_word: str) -> str:
    """Return the action of two words: stop when very close, else turn, else go ahead."""
    if distance_word == "very close":
        return ACTIONS[0]
    if direction_word != "ahead":
        return ACTIONS[_TURNS[direction_word]]
    return ACTIONS[_FORWARD[distance_word]]


def search(history: Sequence[str]) -> str:
    """Return the action with nothing in view: turn as in the last turn, left if there is none."""
    for action in reversed(history[-HISTORY:]):
        if action.startswith("turn "):
            return "turn right 45 degree" if " right " in action else "turn left 45 degree"
    return "turn left 45 degree"


def decide(sight: Sight, history: Sequence[str]) -> str:
    """Return the expert's action for the thing it looks for."""
    if not sight.in_view:
        return search(history)
    return action_for(direction(sight.bearing), distance(sight.range))


def reached(room: Room, base: Pose) -> bool:
    """Return True if a stop here counts as success."""
    return math.hypot(room.goal.x - base.x, room.goal.y - base.y) <= SUCCESS_DISTANCE
