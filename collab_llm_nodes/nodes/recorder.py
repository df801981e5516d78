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
from importlib import import_module
from pathlib import Path
from typing import Any

from rcl_interfaces.msg import ParameterEvent
from rcl_interfaces.srv import GetParameters, ListParameters
from rclpy.client import Client
from rclpy.duration import Duration
from rclpy.parameter import parameter_value_to_python
from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy
from rclpy.serialization import serialize_message
from rclpy.subscription import Subscription
from rclpy.task import Future
from rclpy.topic_endpoint_info import TopicEndpointInfo
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
from collab_llm_nodes.replay.bag import STORAGES, BagWriter, definition
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
_TYPE = re.compile(r"([a-z][a-z0-9_]*)/msg/([A-Z][A-Za-z0-9]*)")
_LOOK_S = 0.2
"""Period of the search for new topics."""
_MB = 10**6
_DEPTH = 1000
"""Messages that wait for the disk, per topic."""


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


@dataclass
class _Heard:
    """A topic that is being recorded."""

    type_name: str
    qos: QoSProfile
    offered: tuple[Qos, ...]
    subscription: Subscription


class Recorder(ManagedNode[RecorderConfig]):
    """See the module docstring."""

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("recorder", RecorderConfig, **node_arguments)
        self._writer: BagWriter | None = None
        self._heard: dict[str, _Heard] = {}
        self._refused: set[str] = set()  # topics that cannot be recorded; logged once
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
        self._refused.clear()
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
            self.create_timer(_LOOK_S, self._look, clock=STEADY),
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
            self._take_waiting()
        finally:
            self._end()

    def diagnose(self) -> tuple[bytes, str, dict[str, Any]]:
        level, message, _ = super().diagnose()
        writer = self._writer
        values: dict[str, Any] = {"topics": len(self._heard)}
        if writer is not None:
            values |= {
                "bag": writer.path or "",
                "messages": writer.messages,
                "megabytes": f"{writer.size / _MB:.1f}",
            }
        if self._failure:
            return Level.ERROR, f"not recording: {self._failure}", values
        if self._refused:
            left_out = ", ".join(sorted(self._refused))
            return Level.WARN, f"left out: {left_out}", values
        return level, message, values

    def _end(self, failure: str = "") -> None:
        """Stop listening and complete the bag."""
        for heard in self._heard.values():
            self.destroy_subscription(heard.subscription)
        self._heard.clear()
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
        for name in self.config.topics:
            topic = self.resolve_topic_name(name)
            publishers = self.get_publishers_info_by_topic(topic)
            if publishers and topic not in self._refused:
                try:
                    self._listen(topic, publishers)
                except Exception as error:  # noqa: BLE001 one topic must not cost the others
                    self._refused.add(topic)
                    self.get_logger().warning(f"{topic} is not recorded: {error}")
        for node in ASKED:
            self._ask_parameters(node)

    def _listen(self, topic: str, publishers: list[TopicEndpointInfo]) -> None:
        """Subscribe, or subscribe again when the publishers' quality of service asks for it."""
        qos = _fitting([p.qos_profile for p in publishers])
        types = sorted({p.topic_type for p in publishers})
        known = self._heard.get(topic)
        if known is not None and known.qos == qos and known.type_name in types:
            return
        if len(types) > 1:
            raise ConfigError(f"has several types: {', '.join(types)}", field="topics")
        if known is not None:
            self.destroy_subscription(known.subscription)
        offered = tuple(_recorded(p.qos_profile) for p in publishers)
        subscription = self.create_subscription(
            _message_class(types[0]), topic, partial(self._on_message, topic), qos, raw=True
        )
        self._heard[topic] = _Heard(types[0], qos, offered, subscription)

    def _on_message(self, topic: str, data: bytes) -> None:
        heard = self._heard.get(topic)
        if heard is not None:
            latched = heard.qos.durability == DurabilityPolicy.TRANSIENT_LOCAL
            self._write(topic, heard.type_name, data, heard.offered, keep=latched)

    def _take_waiting(self) -> None:
        """Take the queued messages, which their publishers believe received."""
        waiting = []
        for topic, heard in self._heard.items():
            subscription = heard.subscription
            with subscription.handle:
                for _ in range(_DEPTH):
                    taken = subscription.handle.take_message(subscription.msg_type, True)
                    if taken is None:
                        break
                    data, info = taken
                    waiting.append((info["received_timestamp"], topic, data))
        for _, topic, data in sorted(waiting):
            self._on_message(topic, data)

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


def _message_class(type_name: str) -> type:
    """Return the class of a message type.

    Raises:
        ConfigError: it is no message type, or its package or its definition is not installed.
    """
    parts = _TYPE.fullmatch(type_name)
    if parts is None:
        raise ConfigError(f"{type_name} is no message type", field="topics")
    definition(type_name)  # before the import, since any publisher may choose this name
    try:
        found = getattr(import_module(f"{parts[1]}.msg"), parts[2])
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{type_name} is not installed here", field="topics", remedy="source its workspace"
        ) from error
    assert isinstance(found, type)
    return found


def _fitting(offered: list[QoSProfile]) -> QoSProfile:
    """Return a profile that receives from all publishers, as reliably as they allow."""
    reliable = all(q.reliability == ReliabilityPolicy.RELIABLE for q in offered)
    latched = all(q.durability == DurabilityPolicy.TRANSIENT_LOCAL for q in offered)
    return QoSProfile(
        depth=_DEPTH,
        history=HistoryPolicy.KEEP_LAST,
        reliability=ReliabilityPolicy.RELIABLE if reliable else ReliabilityPolicy.BEST_EFFORT,
        durability=DurabilityPolicy.TRANSIENT_LOCAL if latched else DurabilityPolicy.VOLATILE,
    )


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
