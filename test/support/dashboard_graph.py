"""A graph for the node ``dashboard``, and hostile text to show on its page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from collab_llm_nodes.protocols.edge_cloud.client import Source

A, R, B, U = Source.ACCEPTED, Source.RECOVERED, Source.BONUS, Source.UNVERIFIED
EVIL = '<img src=x onerror="window.evil=1"><script>window.evil=2</script>'


@pytest.fixture
def graph(ros_graph: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The running graph; nodes started in it are stopped in the thread that ran them."""
    pytest.importorskip("nicegui", reason="pip install -r requirements/dashboard.txt")
    monkeypatch.delenv("COLLAB_LLM_DASHBOARD_TOKEN", raising=False)
    ros_graph.started = []
    yield ros_graph
    for node in ros_graph.started:
        node.post(node.stop)
    ros_graph.wait_for(lambda: not any(node.active for node in ros_graph.started), 30.0)


def start(graph: Any, node_type: type, **parameters: Any) -> Any:
    """Start a node in the graph's own thread; ``__`` stands for the dot of a nested parameter."""
    from rclpy.parameter import Parameter

    overrides = [Parameter(name.replace("__", "."), value=v) for name, v in parameters.items()]
    node = node_type(context=graph.context, parameter_overrides=overrides)
    graph.add(node)
    graph.started.append(node)
    node.post(node.start)
    graph.wait_for(lambda: node.active, 60.0)
    return node
