"""Abilities of every node's topics and services beyond rclpy's.

- Quality of service can be overridden by parameter (``qos_overrides./topic.subscription.depth``).
- Incompatible publishers and subscribers (QoS, type) are logged once, and reported while they last.
- Messages are counted: rates and ages for the diagnostics.
- Calls of services can be published (service introspection).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import rclpy
from rclpy.duration import Duration
from rclpy.node import Node
from rclpy.publisher import Publisher
from rclpy.qos import (
    QoSCompatibility,
    QoSPolicyKind,
    QoSProfile,
    ReliabilityPolicy,
    qos_check_compatible,
)
from rclpy.qos_overriding_options import QoSOverridingOptions
from rclpy.service import Service
from rclpy.subscription import Subscription

from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.ros.health import Level, Status, TopicLimits, Traffic

try:
    from rclpy.event_handler import PublisherEventCallbacks, SubscriptionEventCallbacks
except ImportError:  # ROS 2 Humble
    from rclpy.qos_event import PublisherEventCallbacks, SubscriptionEventCallbacks

T = TypeVar("T")

_EVENTS = QoSProfile(depth=50, reliability=ReliabilityPolicy.RELIABLE)
"""Profile of service events."""

_LOOK_S = 2.0
"""Seconds between two checks of the other ends of the topics."""

_NEVER_NS = 2**62

# The middleware's own events report the same. But the executor prepares to wait for each of them
# anew whenever it wakes: a third of an idle graph's processor time.
SILENT_PUBLISHER = PublisherEventCallbacks(use_default_callbacks=False)
SILENT_SUBSCRIPTION = SubscriptionEventCallbacks(use_default_callbacks=False)


class Endpoints:
    """The topics and services of one node.

    Args:
        node: their owner.
        commands: profile of velocities. No parameter may make a queue of them: it would be outdated
            motion.
    """

    def __init__(self, node: Node, commands: QoSProfile) -> None:
        self._node = node
        self._commands = commands
        self._received: dict[Subscription, Traffic] = {}
        self._published: dict[Publisher, Traffic] = {}
        self._mismatches: dict[str, str] = {}  # what is wrong, by topic
        self._looked_at = -math.inf
        self._services: weakref.WeakSet[Service] = weakref.WeakSet()
        self._profiles: dict[tuple[str, bool], list[tuple[Any, ...]]] = {}

    # Making topics and services: ``make`` is rclpy's method.

    def publisher(
        self,
        make: Callable[..., Publisher],
        kind: type,
        topic: str,
        profile: QoSProfile | int,
        options: dict[str, Any],
    ) -> Publisher:
        """Return a publisher that counts. Raises ConfigError for an impossible override."""
        with self._overridden(topic, profile, True, options) as qos:
            publisher = make(kind, topic, qos, **options)
        traffic = self._published[publisher] = Traffic(topic, time.monotonic())
        publish = publisher.publish

        def counted(message: Any) -> None:
            traffic.on_message(time.monotonic(), self._age(message))
            publish(message)

        publisher.publish = counted  # type: ignore[method-assign, assignment]
        return publisher

    def subscription(
        self,
        make: Callable[..., Subscription],
        kind: type,
        topic: str,
        callback: Callable[..., Any],
        profile: QoSProfile | int,
        options: dict[str, Any],
    ) -> Subscription:
        """Return a subscription that counts. Raises ConfigError for an impossible override."""
        traffic = Traffic(topic, time.monotonic())

        @functools.wraps(callback)  # rclpy looks at its signature
        def counted(message: Any, *information: Any) -> Any:
            traffic.on_message(time.monotonic(), self._age(message))
            return callback(message, *information)

        with self._overridden(topic, profile, False, options) as qos:
            subscription = make(kind, topic, counted, qos, **options)
        self._received[subscription] = traffic
        return subscription

    def service(self, service: Service, introspection: str) -> Service:
        """Introspect ``service``: off, metadata or contents."""
        self._services.add(service)
        if introspection != "off":
            self._introspect(service, introspection)
        return service

    def introspect(self, introspection: str) -> None:
        """Set service introspection for all services of this node."""
        for service in self._services:
            self._introspect(service, introspection)

    def forget(self, topic: Any) -> None:
        """Stop counting a topic that is about to be destroyed."""
        self._received.pop(topic, None)
        self._published.pop(topic, None)

    # Reports.

    def restart(self) -> None:
        """Expect messages from now on."""
        for traffic in (*self._received.values(), *self._published.values()):
            traffic.restart(time.monotonic())

    def statuses(self, expected: Mapping[str, TopicLimits], now: float) -> list[Status]:
        """Return a status of each topic with limits, and one of all others."""
        statuses, values = [], {}
        for direction, topics in (("received", self._received), ("published", self._published)):
            for traffic in list(topics.values()):
                if traffic.topic in expected:
                    statuses.append(traffic.status(expected[traffic.topic], now))
                else:
                    values[f"{direction} {traffic.topic}"] = traffic.summary(now)
        wrong = "; ".join(self._mismatches.values())
        level = Level.WARN if wrong else Level.OK
        message = wrong or f"{len(values)} of which nothing is expected"
        return [*statuses, Status("topics", level, message, values)]

    def _age(self, message: Any) -> float | None:
        """Return the seconds since the message's stamp; None when it has none."""
        stamp = getattr(getattr(message, "header", None), "stamp", None)
        if stamp is None or not (stamp.sec or stamp.nanosec):
            return None
        now = self._node.get_clock().now().nanoseconds
        return float(now - stamp.sec * 10**9 - stamp.nanosec) * 1e-9

    # Quality of service.

    @contextlib.contextmanager
    def _overridden(
        self, topic: str, profile: QoSProfile | int, offered: bool, options: dict[str, Any]
    ) -> Iterator[QoSProfile]:
        """Complete rclpy's ``options``; raises ConfigError that names the parameter."""
        # A copy: rclpy writes the overrides into the profile that it is given.
        qos = QoSProfile(depth=profile) if isinstance(profile, int) else copy.copy(profile)
        options.setdefault("qos_overriding_options", self._overridable(topic, profile, offered))
        try:
            yield qos
        except (RuntimeError, rclpy.exceptions.InvalidParameterTypeException) as error:
            raise ConfigError(
                str(error),
                field=f"qos_overrides.{self._node.resolve_topic_name(topic)}",
                remedy="reliability: reliable or best_effort; history: keep_last or keep_all;"
                " depth: a number",
            ) from None

    def _overridable(
        self, topic: str, profile: QoSProfile | int, offered: bool
    ) -> QoSOverridingOptions:
        """Return the policies that parameters may change."""
        if profile is self._commands:
            policies = [QoSPolicyKind.RELIABILITY]
        else:
            policies = [QoSPolicyKind.HISTORY, QoSPolicyKind.DEPTH, QoSPolicyKind.RELIABILITY]
        # A topic with two profiles needs two sets of parameters.
        facts = (
            (profile,)
            if isinstance(profile, int)
            else (profile.history, profile.depth, profile.reliability)
        )
        known = self._profiles.setdefault((topic, offered), [])
        if facts not in known:
            known.append(facts)
        number = known.index(facts)
        return QoSOverridingOptions(policies, entity_id=str(number + 1) if number else None)

    def look(self, now: float) -> None:
        """Find incompatible publishers and subscribers, every ``_LOOK_S``; log new ones.

        Args:
            now: ``time.monotonic()``.
        """
        if now < self._looked_at + _LOOK_S:
            return
        self._looked_at, before, self._mismatches = now, self._mismatches, {}
        for topic, publishers in _by_topic(self._published).items():
            for peer in self._node.get_subscriptions_info_by_topic(topic):
                offers = [(own, own.qos_profile, peer.qos_profile) for own in publishers]
                self._compare(topic, "a subscriber asks for", offers, peer)
        for topic, subscriptions in _by_topic(self._received).items():
            for peer in self._node.get_publishers_info_by_topic(topic):
                asked = [(own, peer.qos_profile, own.qos_profile) for own in subscriptions]
                self._compare(topic, "a publisher offers", asked, peer)
        for topic, message in self._mismatches.items():
            if before.get(topic) != message:
                self._node.get_logger().warning(f"{message}; see docs/diagnostics.md")

    def _compare(
        self, topic: str, other: str, offers: list[tuple[Any, QoSProfile, QoSProfile]], peer: Any
    ) -> None:
        """Note what keeps messages from passing between ``peer`` and each of ours.

        Args:
            topic: of both.
            other: what ``peer`` does, in words.
            offers: our publishers or subscriptions, each with the profiles offered and asked for.
            peer: the other end, as the graph has it.
        """
        wrong = ""
        for own, offered, asked in offers:
            if peer.topic_type != (kind := _name_of(own.msg_type)):
                wrong = f"another type ({peer.topic_type}, not {kind})"
            elif why := _why_not(offered, asked):
                wrong = f"incompatible QoS ({why})"
            else:
                return
        self._mismatches[topic] = f"{topic}: {other} {wrong}, nothing is delivered"

    def _introspect(self, service: Service, introspection: str) -> None:
        try:
            from rclpy.service_introspection import ServiceIntrospectionState
        except ImportError:
            raise ConfigError(
                "this ROS 2 has no service introspection",
                field="introspection",
                remedy="off; or ROS 2 Iron or later",
            ) from None
        state = getattr(ServiceIntrospectionState, introspection.upper())
        service.configure_introspection(self._node.get_clock(), _EVENTS, state)


def _by_topic(endpoints: Mapping[T, Traffic]) -> dict[str, list[T]]:
    """Return our endpoints of each topic, of which a node may have several."""
    topics: dict[str, list[T]] = {}
    for own, traffic in endpoints.items():
        topics.setdefault(traffic.topic, []).append(own)
    return topics


def _why_not(offered: QoSProfile, asked: QoSProfile) -> str:
    """Return why a publisher and a subscription are incompatible; "" if they are not."""
    compatibility, reason = qos_check_compatible(_comparable(offered), _comparable(asked))
    return str(reason).rstrip(";") if compatibility == QoSCompatibility.ERROR else ""


def _comparable(profile: QoSProfile) -> QoSProfile:
    """Return ``profile`` with 0 for infinite times.

    Unset times are infinite in the graph's view and 0 in our own endpoints, which rclpy's check
    takes for a difference.
    """
    plain = copy.copy(profile)
    for name in ("deadline", "liveliness_lease_duration"):
        if getattr(plain, name).nanoseconds >= _NEVER_NS:
            setattr(plain, name, Duration())
    return plain


def _name_of(message_type: Any) -> str:
    """Return a message type's name as the graph has it: ``std_msgs/msg/String``."""
    package, kind, *_ = message_type.__module__.split(".")
    return f"{package}/{kind}/{message_type.__name__}"
