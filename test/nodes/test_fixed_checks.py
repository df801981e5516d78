"""Checks that nobody can switch off while the robot drives: their parameters are fixed."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from motion_graph import graph
from rclpy.parameter import Parameter
from started_nodes import start

from collab_llm_nodes.nodes.cloud_verifier_bridge import BridgeConfig
from collab_llm_nodes.nodes.dashboard import DashboardConfig
from collab_llm_nodes.nodes.go2_driver import Go2DriverConfig
from collab_llm_nodes.nodes.navigation_action_parser import NavigationActionParser, ParserConfig
from collab_llm_nodes.nodes.navigator import Navigator, NavigatorConfig
from collab_llm_nodes.ros.cameras import CameraConfig
from collab_llm_nodes.ros.parameters import flatten

pytestmark = pytest.mark.ros
__all__ = ["graph"]  # fixture

_SAMPLING = {"temperature", "top_k", "top_p", "seed", "law", "max_tokens"}


@pytest.mark.parametrize(
    ("config_type", "harmless"),
    [
        (NavigatorConfig, {f"answer.{name}" for name in _SAMPLING}),
        (ParserConfig, set()),
        (Go2DriverConfig, set()),
        (BridgeConfig, set()),
        (CameraConfig, {"max_rate", "open_timeout", "frame_id"}),
        (DashboardConfig, {"camera_fov"}),
    ],
)
def test_only_parameters_that_loosen_no_check_can_be_set(
    config_type: Any, harmless: set[str]
) -> None:
    """Limits of ``/diagnostics`` can be: they decide what is reported, not what moves."""
    parameters = flatten(config_type(), "")
    free = {name for name, field, _ in parameters if not field.metadata["read_only"]}
    assert {name for name in free if not name.startswith("health.")} == harmless


@pytest.mark.parametrize(
    ("node_type", "name", "value"),
    [
        (Navigator, "mission.check_thing", False),
        (Navigator, "stop_words", ["xyzzy"]),
        (Navigator, "mission.executor.watchdog", 5.0),
        (Navigator, "answer.prompt", "go to the stairs, not to {instruction}"),
        (NavigationActionParser, "grammar.reason", "lenient"),
        (NavigationActionParser, "grammar.forward", ["stop {distance}"]),
        (NavigationActionParser, "grammar.max_distance", 9.0),
        (NavigationActionParser, "max_age", 600.0),
        (NavigationActionParser, "streaming", True),
    ],
)
def test_a_check_is_not_switched_off_while_the_node_runs(
    graph: Any, node_type: Any, name: str, value: Any
) -> None:
    node = start(graph, node_type)
    before = node.config
    answer = graph.do(node.set_parameters, [Parameter(name, value=value)])[0]
    assert not answer.successful
    assert "read-only" in answer.reason
    assert node.config == before
