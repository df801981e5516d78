"""Topics as serialised messages, followed as their publishers come and change."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module

from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy
from rclpy.subscription import Subscription
from rclpy.topic_endpoint_info import TopicEndpointInfo

from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.replay.bag import definition

LOOK_S = 0.2
"""Period in which ``RawTopics.look`` should be called [s]."""
_TYPE = re.compile(r"([a-z][a-z0-9_]*)/msg/([A-Z][A-Za-z0-9]*)")
_DEPTH = 1000
"""Messages that wait to be taken, per topic."""


@dataclass
class RawTopic:
    """A topic that is followed.

    Attributes:
        offered: profiles of its publishers.
    """

    name: str
    type_name: str
    qos: QoSProfile
    offered: tuple[QoSProfile, ...]
    subscription: Subscription

    @property
    def latched(self) -> bool:
        """Return True if late joiners get its last message: it is a state."""
        return bool(self.qos.durability == DurabilityPolicy.TRANSIENT_LOCAL)


class RawTopics:
    """Subscriptions of ``node`` to ``names``, each from its first publisher on.

    Args:
        on_message: called with the topic and the serialised message.

    Attributes:
        refused: topics that cannot be followed; logged once.
    """

    def __init__(
        self, node: Node, names: Sequence[str], on_message: Callable[[RawTopic, bytes], None]
    ) -> None:
        self._node, self._names, self._on_message = node, names, on_message
        self._followed: dict[str, RawTopic] = {}
        self.refused: set[str] = set()

    def __len__(self) -> int:
        """Return the number of topics that are followed."""
        return len(self._followed)

    def look(self) -> None:
        """Follow topics as their publishers come and change."""
        for name in self._names:
            topic = self._node.resolve_topic_name(name)
            publishers = self._node.get_publishers_info_by_topic(topic)
            if publishers and topic not in self.refused:
                try:
                    self._follow(topic, publishers)
                except Exception as error:  # noqa: BLE001 one topic must not cost the others
                    self.refused.add(topic)
                    self._node.get_logger().warning(f"{topic} is left out: {error}")

    def take_waiting(self) -> None:
        """Take the queued messages, which their publishers believe received."""
        waiting = []
        for topic in self._followed.values():
            with topic.subscription.handle:
                for _ in range(_DEPTH):
                    taken = topic.subscription.handle.take_message(
                        topic.subscription.msg_type, True
                    )
                    if taken is None:
                        break
                    data, info = taken
                    waiting.append((info["received_timestamp"], topic.name, data))
        for _, name, data in sorted(waiting):
            self._take(name, data)

    def close(self) -> None:
        """End all subscriptions."""
        for topic in self._followed.values():
            self._node.destroy_subscription(topic.subscription)
        self._followed.clear()

    def _follow(self, topic: str, publishers: list[TopicEndpointInfo]) -> None:
        """Subscribe, or subscribe again when the publishers' quality of service asks for it."""
        qos = _fitting([p.qos_profile for p in publishers])
        types = sorted({p.topic_type for p in publishers})
        known = self._followed.get(topic)
        if known is not None and known.qos == qos and known.type_name in types:
            return
        if len(types) > 1:
            raise ConfigError(f"has several types: {', '.join(types)}", field="topics")
        if known is not None:
            self._node.destroy_subscription(known.subscription)
        subscription = self._node.create_subscription(
            _message_class(types[0]), topic, partial(self._take, topic), qos, raw=True
        )
        offered = tuple(p.qos_profile for p in publishers)
        self._followed[topic] = RawTopic(topic, types[0], qos, offered, subscription)

    def _take(self, name: str, data: bytes) -> None:
        topic = self._followed.get(name)
        if topic is not None:
            self._on_message(topic, data)


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
