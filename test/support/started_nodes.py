"""Nodes that tests start in a running graph, and that are stopped when a test ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stopped_at_the_end(graph: Any) -> Iterator[Any]:
    """Stop the nodes of ``start`` in the thread that ran them."""
    graph.started = []
    yield graph
    for node in graph.started:
        node.post(node.stop)
    graph.wait_for(lambda: not any(node.active for node in graph.started))


def start(graph: Any, node_type: type, **parameters: Any) -> Any:
    """Start a node in the graph's own thread; ``__`` stands for the dot of a nested parameter."""
    from rclpy.parameter import Parameter  # not everybody who imports this has ROS 2

    overrides = [Parameter(name.replace("__", "."), value=v) for name, v in parameters.items()]
    node = node_type(context=graph.context, parameter_overrides=overrides)
    graph.add(node)
    graph.started.append(node)
    node.post(node.start)
    graph.wait_for(lambda: node.active, 60.0)
    return node
