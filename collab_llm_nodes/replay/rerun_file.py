"""Bags as recordings of Rerun, with a blueprint: pictures, path, answers, decisions, plots.

Needs ``rerun-sdk`` and no ROS. One view of each kind for each robot of the bag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import rerun as rr
import rerun.blueprint as rrb

from collab_llm_nodes.errors import InvalidInput, printable
from collab_llm_nodes.replay.bag import open_bag
from collab_llm_nodes.replay.recording import as_expected, read_action, status_in, tau_in
from collab_llm_nodes.robot.grammar import Code

TIMELINE = "time"
_LINK = {0: "down", 1: "connecting", 2: "up"}
_LEVELS = {0: rr.TextLogLevel.INFO, 1: rr.TextLogLevel.WARN, 2: rr.TextLogLevel.ERROR}


def write_rerun(path: Path, out: Path, namespace: str | None = None) -> int:
    """Write the bag at ``path`` to ``out`` (.rrd); return the number of messages in it.

    Args:
        namespace: of the only robot that is written; None: all.

    Raises:
        InvalidInput: the bag is damaged, of another version, or holds none of a robot's topics.
    """
    with open_bag(path) as bag:
        topics = {
            topic: (space.strip("/"), name)
            for topic, kind in bag.types.items()
            for space, _, name in [topic.rpartition("/")]
            if kind in _WRITERS.get(name, {}) and namespace in (None, space.strip("/"))
        }
        if not topics:
            raise InvalidInput(
                f"{path} holds none of a robot's topics",
                field="bag",
                remedy=f"leave out --namespace; known are {', '.join(_WRITERS)}",
            )
        robots = {space: _Robot(space) for space in sorted({s for s, _ in topics.values()})}
        with rr.RecordingStream("collab_llm", recording_id=path.name) as stream:
            out.touch(0o600)  # pictures and answers are private
            stream.save(out, _blueprint([*robots]))
            count = 0
            for topic, stamp, message in bag.messages(topics):
                space, name = topics[topic]
                stream.set_time(TIMELINE, timestamp=np.datetime64(stamp, "ns"))
                with as_expected(topic):
                    _WRITERS[name][bag.types[topic]](stream, robots[space], message)
                count += 1
            for robot in robots.values():
                robot.end(stream)
    return count


@dataclass
class _Robot:
    """A robot's part of the recording.

    Attributes:
        space: its namespace, without slashes.
        path: positions by odometry [m], some centimetres apart.
        states: the last text of each line that describes a state.
    """

    space: str
    path: list[tuple[float, float, float]] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)

    def entity(self, name: str) -> str:
        """Return the path of an entity."""
        return f"{self.space}/{name}".strip("/")

    def log(self, stream: rr.RecordingStream, name: str, content: Any, **options: Any) -> None:
        """Log ``content`` as the entity ``name``."""
        stream.log(self.entity(name), content, **options)

    def scalar(self, stream: rr.RecordingStream, name: str, value: float) -> None:
        """Log a value of a plot."""
        self.log(stream, f"plots/{name}", rr.Scalars(value))

    def words(
        self, stream: rr.RecordingStream, name: str, text: str, level: rr.TextLogLevel
    ) -> None:
        """Log a line of the log; text of models cannot break it."""
        self.log(stream, f"log/{name}", rr.TextLog(printable(text), level=level))

    def state(
        self, stream: rr.RecordingStream, name: str, text: str, level: rr.TextLogLevel
    ) -> None:
        """Log a line unless it is the last one of that name."""
        if self.states.get(name) != text:
            self.states[name] = text
            self.words(stream, name, text, level)

    def end(self, stream: rr.RecordingStream) -> None:
        """Log the whole path, for all times."""
        if self.path:
            strip = rr.LineStrips3D([self.path], colors=[78, 152, 226])
            self.log(stream, "map/path", strip, static=True)


def _observation(stream: rr.RecordingStream, robot: _Robot, message: Any) -> None:
    picture = bytes(message.image.data)
    robot.log(stream, "camera", rr.EncodedImage(contents=picture, media_type="image/jpeg"))


def _compressed(stream: rr.RecordingStream, robot: _Robot, message: Any) -> None:
    kind = "image/png" if "png" in message.format else "image/jpeg"
    picture = rr.EncodedImage(contents=bytes(message.data), media_type=kind)
    robot.log(stream, "camera", picture)


def _odometry(stream: rr.RecordingStream, robot: _Robot, message: Any) -> None:
    p, q = message.pose.pose.position, message.pose.pose.orientation
    at, turned = (p.x, p.y, p.z), rr.Quaternion(xyzw=[q.x, q.y, q.z, q.w])
    robot.log(stream, "map/robot", rr.Transform3D(translation=at, quaternion=turned))
    if not robot.path:
        arrow = rr.Arrows3D(vectors=[[0.4, 0, 0]], colors=[255, 165, 0])
        robot.log(stream, "map/robot/heading", arrow, static=True)
    if not robot.path or np.hypot(at[0] - robot.path[-1][0], at[1] - robot.path[-1][1]) > 0.02:
        robot.path.append(at)


def _velocity(name: str, part: Callable[[Any], Any]) -> Callable[..., None]:
    def write(stream: rr.RecordingStream, robot: _Robot, message: Any) -> None:
        twist = part(message)
        robot.scalar(stream, f"velocity/{name}/linear", twist.linear.x)
        robot.scalar(stream, f"velocity/{name}/angular", twist.angular.z)

    return write


def _velocities(name: str) -> dict[str, Callable[..., None]]:
    return {
        "geometry_msgs/msg/Twist": _velocity(name, lambda message: message),
        "geometry_msgs/msg/TwistStamped": _velocity(name, lambda message: message.twist),
    }


def _instruction(stream: rr.RecordingStream, robot: _Robot, message: Any) -> None:
    text = message.data or "(no instruction)"
    robot.words(stream, "instruction", text, rr.TextLogLevel.INFO)


def _text(stream: rr.RecordingStream, robot: _Robot, message: Any) -> None:
    robot.log(stream, "answer", rr.TextDocument(f"{message.prompt}\n\n{message.text}"))
    if not message.final:
        return
    code, why = status_in(message)
    level = rr.TextLogLevel.ERROR if code else rr.TextLogLevel.INFO
    robot.words(stream, "answer", why if code else message.text, level)
    robot.scalar(stream, "answer/first_token_s", message.metrics.time_to_first_token_s)
    robot.scalar(stream, "answer/total_s", message.metrics.total_s)
    robot.scalar(stream, "figures/tau", tau_in(message.metrics))


def _action(stream: rr.RecordingStream, robot: _Robot, message: Any) -> None:
    action = read_action(message)
    level = rr.TextLogLevel.INFO if action.code is Code.OK else rr.TextLogLevel.WARN
    robot.words(stream, "action", str(action), level)


def _motion(stream: rr.RecordingStream, robot: _Robot, message: Any) -> None:
    if np.isfinite(message.speed_limit):
        robot.scalar(stream, "velocity/limit", message.speed_limit)
    text = "motion allowed" if message.allowed else ", ".join(message.reasons)
    level = rr.TextLogLevel.INFO if message.allowed else rr.TextLogLevel.WARN
    robot.state(stream, "motion_guard", text, level)


def _link(stream: rr.RecordingStream, robot: _Robot, message: Any) -> None:
    up = message.state == 2
    robot.scalar(stream, "link/round_trip_s", message.rtt_s)
    level = rr.TextLogLevel.INFO if up else rr.TextLogLevel.ERROR
    text = f"{_LINK.get(message.state, 'unknown')} {message.error_msg}"
    robot.state(stream, "link", text.strip(), level)


def _diagnostics(stream: rr.RecordingStream, robot: _Robot, message: Any) -> None:
    for status in message.status:
        level = int(np.uint8(status.level))
        if level:
            text = f"{status.name}: {status.message}"
            robot.words(stream, "diagnostics", text, _LEVELS.get(level, rr.TextLogLevel.ERROR))


_WRITERS: dict[str, dict[str, Callable[..., None]]] = {
    "observation": {"collab_llm/msg/Observation": _observation},
    "compressed": {"sensor_msgs/msg/CompressedImage": _compressed},
    "odom": {"nav_msgs/msg/Odometry": _odometry},
    "cmd_vel_nav": _velocities("navigator"),
    "cmd_vel": _velocities("guard"),
    "instruction": {"std_msgs/msg/String": _instruction},
    "generated_text": {"collab_llm/msg/GeneratedText": _text},
    "navigation_action": {"collab_llm/msg/NavigationAction": _action},
    "motion_state": {"collab_llm/msg/MotionState": _motion},
    "link_state": {"collab_llm/msg/LinkState": _link},
    "diagnostics": {"diagnostic_msgs/msg/DiagnosticArray": _diagnostics},
}
"""By the last part of a topic's name and by its type."""


def _blueprint(spaces: Sequence[str]) -> rrb.Blueprint:
    """Return the arrangement of views, a tab for each robot."""
    tabs = [_views(_Robot(space)) for space in spaces]
    return rrb.Blueprint(rrb.Tabs(*tabs) if len(tabs) > 1 else tabs[0], collapse_panels=True)


def _views(robot: _Robot) -> rrb.Horizontal:
    plots = [
        ("velocity", "Velocities"),
        ("answer", "Times of answers"),
        ("figures", "Tokens per verification"),
    ]
    return rrb.Horizontal(
        rrb.Vertical(
            rrb.Spatial2DView(origin=robot.entity("camera"), name="Camera"),
            rrb.TextDocumentView(origin=robot.entity("answer"), name="Answer"),
            row_shares=[2, 1],
        ),
        rrb.Vertical(
            rrb.Spatial3DView(origin=robot.entity("map"), name="Path by odometry"),
            rrb.TextLogView(origin=robot.entity("log"), name="What happened"),
        ),
        rrb.Vertical(
            *(
                rrb.TimeSeriesView(origin=robot.entity(f"plots/{name}"), name=title)
                for name, title in [*plots, ("link", "Round trip")]
            )
        ),
        name=robot.space or "robot",
    )
