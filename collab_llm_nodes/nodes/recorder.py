"""Records a drive as a bag: pictures, instructions, answers, actions, motion.

It only listens, and stores messages without parsing them. A topic is recorded from its first
publisher on, whatever its quality of service. The bag also holds the parameters that
``collab-llm replay`` needs to ask the same questions again (topic ``recording``).

A bag is complete when the node ends or a part is full. That of a killed recorder lacks the last
``flush_period`` at most (``collab-llm record --mend``). A full disk ends the recording, not the
node, and is an error on ``/diagnostics``.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from rcl_interfaces.msg import ParameterEvent
from rcl_interfaces.srv import GetParameters, ListParameters
from rclpy.client import Client
from rclpy.duration import Duration
from rclpy.parameter import parameter_value_to_python
from rclpy.qos import QoSProfile
from rclpy.serialization import serialize_message
from rclpy.task import Future
from rosbags.interfaces import (
    Qos,
    QosDurability,
    QosHistory,
    QosLiveliness,
    QosReliability,
    QosTime,
)
from std_msgs.msg import String

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.replay.bag import STORAGES, BagWriter
from collab_llm_nodes.replay.raw_topics import LOOK_S, RawTopic, RawTopics
from collab_llm_nodes.ros.clock import STEADY
from collab_llm_nodes.ros.health import Level
from collab_llm_nodes.ros.managed_node import ManagedNode, guarded
from collab_llm_nodes.ros.program import run
from collab_llm_nodes.ros.qos import REQUESTS, RESULT

TOPICS = (
    "observation",
    "instruction",
    "draft",
    "early_exit",
    "verdict",
    "generated_text",
    "navigation_action",
    "motion_state",
    "link_state",
    "odom",
    "imu",
    "cmd_vel_nav",
    "cmd_vel",
    "/diagnostics",
)
ASKED = ("navigator", "draft_vlm", "navigation_action_parser")
"""Nodes whose parameters shape questions and the reading of answers. They hold no secrets."""
INFO = "recording"
_MB = 10**6


@dataclass(frozen=True)
class RecorderConfig:
    """Parameters of the node."""

    folder: str = setting("bags", "Folder of the bags; created if missing.", read_only=True)
    prefix: str = setting(
        "drive", "Name of a bag, before the date and the number of its part.", read_only=True
    )
    storage: str = setting(
        "mcap", "Format; ros2 bag reads both.", choices=tuple(STORAGES), read_only=True
    )
    topics: tuple[str, ...] = setting(TOPICS, "Topics that are recorded.", read_only=True)
    max_size: float = setting(
        1000.0,
        "A larger bag is closed and another begun [MB], before compression.",
        low=0.1,
        high=1e6,
        read_only=True,
    )
    max_parts: int = setting(
        0,
        "Keep so many bags of this recording and delete older ones; 0 = keep all.",
        low=0,
        high=100_000,
        read_only=True,
    )
    min_free: float = setting(
        500.0, "The recording ends when the disk has less left [MB].", low=0.0, high=1e6
    )
    flush_period: float = setting(
        1.0,
        "Longest time lost when the process is killed [s].",
        low=0.05,
        high=60.0,
        read_only=True,
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.topics:
            raise ConfigError("empty", field="topics", remedy="name topics to record")
        if not re.fullmatch(r"[\w.-]+", self.prefix):
            raise ConfigError(
                f"{self.prefix!r} is no name", field="prefix", remedy="letters, digits, . _ -"
            )


class Recorder(ManagedNode[RecorderConfig]):
    """See the module docstring."""

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("recorder", RecorderConfig, **node_arguments)
        self._writer: BagWriter | None = None
        self._topics = RawTopics(self, (), self._on_message)
        self._asked: dict[str, dict[str, Any]] = {}
        self._askers: dict[str, tuple[Client, Client]] = {}
        self._failure = ""

    # Lifecycle.

    def configure(self) -> None:
        folder = Path(self.config.folder)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free / _MB
        except OSError as error:
            raise ConfigError(f"cannot be used: {error}", field="folder") from error
        if free < self.config.min_free:
            raise ConfigError(
                f"only {free:.0f} MB are free in {folder.resolve()}",
                field="min_free",
                remedy="delete old bags, or name another folder",
            )

    def activate(self) -> None:
        name = f"{self.config.prefix}_{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"
        self._failure = ""
        self._topics = RawTopics(self, self.config.topics, self._on_message)
        self._writer = BagWriter(
            Path(self.config.folder),
            name,
            self.config.storage,
            max_bytes=int(self.config.max_size * _MB),
            max_parts=self.config.max_parts,
        )
        self._announced = self.create_subscription(
            ParameterEvent, "/parameter_events", self._on_parameters, RESULT
        )
        self._clocks = [
            self.create_timer(LOOK_S, self._look, clock=STEADY),
            self.create_timer(self.config.flush_period, self._flush, clock=STEADY),
        ]

    def deactivate(self) -> None:
        for timer in self._clocks:
            self.destroy_timer(timer)
        self.destroy_subscription(self._announced)
        for pair in self._askers.values():
            for client in pair:
                self.destroy_client(client)
        self._askers.clear()
        self._asked.clear()
        try:
            self._topics.take_waiting()
        finally:
            self._end()

    def diagnose(self) -> tuple[bytes, str, dict[str, Any]]:
        level, message, _ = super().diagnose()
        writer = self._writer
        values: dict[str, Any] = {"topics": len(self._topics)}
        if writer is not None:
            values |= {
                "bag": writer.path or "",
                "messages": writer.messages,
                "megabytes": f"{writer.size / _MB:.1f}",
            }
        if self._failure:
            return Level.ERROR, f"not recording: {self._failure}", values
        if self._topics.refused:
            left_out = ", ".join(sorted(self._topics.refused))
            return Level.WARN, f"left out: {left_out}", values
        return level, message, values

    def _end(self, failure: str = "") -> None:
        """Stop listening and complete the bag."""
        self._topics.close()
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                writer.close()
        except Exception as error:  # noqa: BLE001 sqlite, rosbags and the disk have errors of their own
            failure = failure or f"{type(error).__name__}: {error}"
        if failure:
            self._failure = failure
            self.get_logger().error(f"the recording ended: {failure}")
            self.report_health()
        elif writer is not None and writer.messages:
            size = f"{writer.size / _MB:.1f} MB before compression"
            self.get_logger().info(f"{writer.messages} messages, {size}, in {self.config.folder}")

    # Topics.

    @guarded
    def _look(self) -> None:
        """Follow topics as their publishers come and change."""
        if self._writer is None:
            return
        self._topics.look()
        for node in ASKED:
            self._ask_parameters(node)

    def _on_message(self, topic: RawTopic, data: bytes) -> None:
        offered = tuple(map(_recorded, topic.offered))
        self._write(topic.name, topic.type_name, data, offered, keep=topic.latched)

    def _write(
        self, topic: str, type_name: str, data: bytes, offered: tuple[Qos, ...], *, keep: bool
    ) -> None:
        if self._writer is None:
            return
        now = self.get_clock().now().nanoseconds
        try:
            self._writer.write(topic, type_name, now, data, offered, keep=keep)
        except Exception as error:  # noqa: BLE001 sqlite, rosbags and the disk have errors of their own
            self._end(f"{type(error).__name__}: {error}")

    @guarded
    def _flush(self) -> None:
        if self._writer is None:
            return
        try:
            self._writer.flush()
            free = shutil.disk_usage(self.config.folder).free / _MB
        except Exception as error:  # noqa: BLE001 as above
            self._end(f"{type(error).__name__}: {error}")
            return
        if free < self.config.min_free:
            self._end(f"only {free:.0f} MB are free (min_free)")

    # Parameters.

    def _ask_parameters(self, node: str) -> None:
        """Ask a node for its parameters once it is there; later changes are announced."""
        if node in self._asked:
            return
        if node not in self._askers:
            self._askers[node] = (
                self.create_client(ListParameters, f"{node}/list_parameters", qos_profile=REQUESTS),
                self.create_client(GetParameters, f"{node}/get_parameters", qos_profile=REQUESTS),
            )
        names, values = self._askers[node]
        if not (names.service_is_ready() and values.service_is_ready()):
            return
        self._asked[node] = {}  # a node that dies before it answers is not asked again
        asked = names.call_async(ListParameters.Request())
        asked.add_done_callback(partial(self._on_names, node, values))

    @guarded
    def _on_names(self, node: str, values: Client, answered: Future) -> None:
        names = list(answered.result().result.names)
        asked = values.call_async(GetParameters.Request(names=names))
        asked.add_done_callback(partial(self._on_values, node, names))

    @guarded
    def _on_values(self, node: str, names: list[str], answered: Future) -> None:
        values = answered.result().values
        for name, value in zip(names, values, strict=True):
            self._asked[node][name] = _plain(parameter_value_to_python(value))
        self._write_parameters()

    @guarded
    def _on_parameters(self, event: ParameterEvent) -> None:
        node = event.node.rpartition("/")[2]
        space = self.get_namespace().rstrip("/")
        if event.node != f"{space}/{node}" or not self._asked.get(node):
            return
        for parameter in (*event.new_parameters, *event.changed_parameters):
            value = parameter_value_to_python(parameter.value)
            self._asked[node][parameter.name] = _plain(value)
        self._write_parameters()

    def _write_parameters(self) -> None:
        known = {node: values for node, values in self._asked.items() if values}
        info = String(data=json.dumps({"nodes": known}, sort_keys=True))
        topic = self.resolve_topic_name(INFO)
        self._write(topic, "std_msgs/msg/String", serialize_message(info), (), keep=True)


def _recorded(qos: QoSProfile) -> Qos:
    """Return a profile as bags hold it; ROS and rosbags number the policies alike."""
    return Qos(
        QosHistory(int(qos.history)),
        qos.depth,
        QosReliability(int(qos.reliability)),
        QosDurability(int(qos.durability)),
        _time(qos.deadline),
        _time(qos.lifespan),
        QosLiveliness(int(qos.liveliness)),
        _time(qos.liveliness_lease_duration),
        bool(qos.avoid_ros_namespace_conventions),
    )


def _time(duration: Duration) -> QosTime:
    return QosTime(*divmod(duration.nanoseconds, 10**9))


def _plain(value: Any) -> Any:
    """Return ``value`` for the JSON: rclpy gives arrays of numbers, and bytes one by one."""
    if isinstance(value, bytes):
        return int.from_bytes(value, "little")
    if isinstance(value, (str, int, float)) or value is None:
        return value
    return [_plain(v) for v in value]


def main() -> int:
    """Run the node."""
    return run(Recorder)


if __name__ == "__main__":
    raise SystemExit(main())
