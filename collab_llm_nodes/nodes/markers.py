"""Markers for RViz and Foxglove (topic ``markers``), in the frame of ``odom``.

Path, the direction in which the last action sends the robot, the step under way (the end of a
drive, the arc of a turn) and, as text, the instruction or why the robot may not move.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from geometry_msgs.msg import Point
from nav_msgs.msg import Odometry
from std_msgs.msg import ColorRGBA, Header, String
from visualization_msgs.msg import Marker, MarkerArray

from collab_llm.msg import MotionState, NavigationAction
from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.robot.executor import Pose2D
from collab_llm_nodes.robot.grammar import Kind
from collab_llm_nodes.ros.clock import STEADY
from collab_llm_nodes.ros.managed_node import ManagedNode, guarded
from collab_llm_nodes.ros.motion_inputs import action_from, pose_from, quaternion_of
from collab_llm_nodes.ros.program import run
from collab_llm_nodes.ros.qos import CAMERA, RESULT, STATE

_JUMP_M = 1.0
"""A larger distance between two odometry messages is no motion: the robot was moved elsewhere."""
_BLUE = ColorRGBA(r=0.2, g=0.5, b=1.0, a=1.0)
_ORANGE = ColorRGBA(r=1.0, g=0.6, b=0.1, a=1.0)
_GREEN = ColorRGBA(r=0.2, g=0.8, b=0.3, a=1.0)
_WHITE = ColorRGBA(r=1.0, g=1.0, b=1.0, a=1.0)
_RED = ColorRGBA(r=1.0, g=0.2, b=0.2, a=1.0)


@dataclass(frozen=True)
class MarkersConfig:
    """Parameters of the node."""

    rate: float = setting(
        5.0,
        "Marker arrays per second at most, machine's time [1/s].",
        low=0.1,
        high=50.0,
        read_only=True,
    )
    path_points: int = setting(
        500, "Points of the path that are kept; older ones are dropped.", low=2, high=10_000
    )
    path_spacing: float = setting(
        0.05, "Distance between points of the path [m].", low=0.001, high=10.0
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Step:
    """An action from where it began: ``value`` in m (FORWARD) or rad, + = left (TURN)."""

    kind: Kind
    start: Pose2D
    value: float

    @property
    def heading(self) -> float:
        """Return the direction of motion [rad]."""
        return self.start.yaw + (self.value if self.kind is Kind.TURN else 0.0)


class Picture:
    """State of the markers, without ROS.

    Attributes:
        changed: since the last call of ``markers``.
    """

    def __init__(self) -> None:
        self.path: deque[tuple[float, float]] = deque()
        self.pose: Pose2D | None = None
        self.step: Step | None = None
        self.instruction = ""
        self.halted = ""  # why the robot may not move
        self.changed = False

    def on_pose(self, pose: Pose2D, config: MarkersConfig) -> None:
        """Take the robot's pose."""
        point = (pose.x, pose.y)
        if self.pose is not None and math.dist((self.pose.x, self.pose.y), point) > _JUMP_M:
            self.path.clear()
            self.step = None
        self.changed |= pose != self.pose
        self.pose = pose
        if not self.path or math.dist(self.path[-1], point) >= config.path_spacing:
            self.path.append(point)
        while len(self.path) > config.path_points:
            self.path.popleft()

    def on_action(self, kind: Kind, value: float) -> None:
        """Take an action; a stop, or a text without an action, ends the step before."""
        self.step = None
        if kind.moves and self.pose is not None:
            self.step = Step(kind, self.pose, value)
        self.changed = True

    def markers(self, header: Header) -> MarkerArray:
        """Return all markers, with deletions of those that are gone."""
        self.changed = False
        if self.pose is None:
            return MarkerArray()
        markers = [_line(header, "path", self.path, 0.03, _BLUE)]
        x, y = self.pose.x, self.pose.y
        if self.step is None:
            markers += [_gone(header, name) for name in ("target_direction", "step")]
        else:
            arrow = _marker(header, "target_direction", Marker.ARROW, _ORANGE, (0.8, 0.06, 0.06))
            arrow.pose.position = Point(x=x, y=y, z=0.3)
            arrow.pose.orientation = quaternion_of(self.step.heading)
            markers += [arrow, _step(header, self.step)]
        words = self.halted or self.instruction
        text = _marker(
            header, "text", Marker.TEXT_VIEW_FACING, _RED if self.halted else _WHITE, (0, 0, 0.15)
        )
        text.pose.position, text.text = Point(x=x, y=y, z=0.8), words
        markers.append(text if words else _gone(header, "text"))
        return MarkerArray(markers=markers)


def _step(header: Header, step: Step) -> Marker:
    """Return the goal of a drive, or the arc that a turn sweeps."""
    x, y, yaw = step.start.x, step.start.y, step.start.yaw
    if step.kind is Kind.TURN:
        angles = [yaw + step.value * i / 16 for i in range(17)]
        arc = [(x + 0.5 * math.cos(a), y + 0.5 * math.sin(a)) for a in angles]
        return _line(header, "step", arc, 0.04, _GREEN)
    goal = _marker(header, "step", Marker.CYLINDER, _GREEN, (0.3, 0.3, 0.02))
    goal.pose.position.x = x + step.value * math.cos(yaw)
    goal.pose.position.y = y + step.value * math.sin(yaw)
    return goal


def _line(header: Header, name: str, points: Any, width: float, colour: ColorRGBA) -> Marker:
    line = _marker(header, name, Marker.LINE_STRIP, colour, (width, 0.0, 0.0))
    line.points = [Point(x=x, y=y) for x, y in points]
    return line


def _marker(
    header: Header, name: str, kind: int, colour: ColorRGBA, scale: tuple[float, float, float]
) -> Marker:
    marker = Marker(header=header, ns=name, type=kind, action=Marker.ADD, color=colour)
    marker.scale.x, marker.scale.y, marker.scale.z = map(float, scale)
    marker.pose.orientation.w = 1.0
    return marker


def _gone(header: Header, name: str) -> Marker:
    return Marker(header=header, ns=name, action=Marker.DELETE)


class Markers(ManagedNode[MarkersConfig]):
    """See the module docstring."""

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("markers", MarkersConfig, **node_arguments)
        self._picture = Picture()
        self._header = Header()
        self._watchers = 0

    def configure(self) -> None:
        self._picture = Picture()
        self._markers = self.create_publisher(MarkerArray, "markers", STATE)
        self._subscribed = [
            self.create_subscription(Odometry, "odom", self._on_odometry, CAMERA),
            self.create_subscription(
                NavigationAction, "navigation_action", self._on_action, RESULT
            ),
            self.create_subscription(String, "instruction", self._on_instruction, STATE),
            self.create_subscription(MotionState, "motion_state", self._on_motion, STATE),
        ]
        self._painter = self.create_timer(1.0 / self.config.rate, self._paint, clock=STEADY)

    def cleanup(self) -> None:
        self.destroy_timer(self._painter)
        for subscription in self._subscribed:
            self.destroy_subscription(subscription)
        self.destroy_publisher(self._markers)

    @guarded
    def _on_odometry(self, msg: Odometry) -> None:
        pose = pose_from(msg)
        self._header = msg.header
        self._picture.on_pose(pose, self.config)

    @guarded
    def _on_action(self, msg: NavigationAction) -> None:
        action = action_from(msg)
        self._picture.on_action(action.kind, action.value)

    @guarded
    def _on_instruction(self, msg: String) -> None:
        self._picture.instruction = msg.data
        self._picture.changed = True
        if not msg.data:  # the mission is over
            self._picture.step = None

    @guarded
    def _on_motion(self, msg: MotionState) -> None:
        halted = "" if msg.allowed else msg.text
        self._picture.changed |= halted != self._picture.halted
        self._picture.halted = halted

    @guarded
    def _paint(self) -> None:
        """Publish changed markers; all of them when a subscriber is new."""
        watchers, before = self._markers.get_subscription_count(), self._watchers
        self._watchers = watchers
        if watchers and (self._picture.changed or watchers > before):
            self._markers.publish(self._picture.markers(self._header))


def main() -> int:
    """Run the node."""
    return run(Markers)


if __name__ == "__main__":
    raise SystemExit(main())
