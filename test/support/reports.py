"""Topics, nodes and odometry for tests of diagnostics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from nav_msgs.msg import Odometry
from rclpy.parameter import Parameter

from collab_llm_nodes.protocols.edge_cloud.metrics import EdgeCloudMetrics
from collab_llm_nodes.ros.health import TopicLimits, Traffic


def traffic(ages: float | None = None, period: float = 0.1, until: float = 6.0) -> Traffic:
    """A topic with a message every ``period`` from 0 to ``until``, reported once a second."""
    topic = Traffic("odom", 0.0)
    for i in range(1, round(until / period) + 1):
        topic.on_message(i * period, ages)
        if abs(i * period - round(i * period)) < 1e-9:
            topic.status(TopicLimits(), i * period)
    return topic


def metrics(tokens: int = 30, rounds: int = 10, **others: Any) -> EdgeCloudMetrics:
    return EdgeCloudMetrics(
        rounds=rounds, tokens=tokens, drafted=40, accepted=20, total_s=0.5, **others
    )


def start(graph: Any, kind: Callable[..., Any], **parameters: Any) -> Any:
    """A started node with fast diagnostics."""
    values = {"diagnostics.period": 0.1, **parameters}
    overrides = [Parameter(name.replace("__", "."), value=v) for name, v in values.items()]
    node = kind(context=graph.context, parameter_overrides=overrides)
    graph.add(node)
    node.start()
    return node


def odometry(node: Any, x: float = 0.0, yaw: float = 0.0) -> Odometry:
    msg = Odometry()
    msg.header.stamp, msg.header.frame_id = node.get_clock().now().to_msg(), "odom"
    msg.pose.pose.position.x = x
    msg.pose.pose.orientation.z = math.sin(yaw / 2)
    msg.pose.pose.orientation.w = math.cos(yaw / 2)
    return msg
