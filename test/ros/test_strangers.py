"""Foreign publishers, as the graph shows them look after look."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from collab_llm_nodes.protocols.registry import PROTOCOLS
from collab_llm_nodes.ros.strangers import GO2_TOPICS, MOTION_TOPICS, NAMELESS, Strangers


class Graph:
    """A node that sees ``publishers``, by topic; ``broken``: the graph cannot be read."""

    def __init__(self, name: str = "motion_guard", **publishers: list[str]) -> None:
        self.name, self.broken = name, False
        self.publishers: dict[str, list[str]] = publishers
        self.faults: list[Exception] = []
        self.lines: list[str] = []

    def create_timer(self, *_: Any, **options: Any) -> None:
        """Make none: the tests look."""

    def get_name(self) -> str:
        return self.name

    def resolve_topic_name(self, topic: str) -> str:
        return topic

    def get_publishers_info_by_topic(self, topic: str) -> list[Any]:
        if self.broken:
            raise RuntimeError("shared memory is full")
        names = self.publishers.get(topic, [])
        return [SimpleNamespace(node_name=name, node_namespace="/") for name in names]

    def get_logger(self) -> Any:
        def log(line: str, **options: Any) -> None:
            self.lines.append(line)

        return SimpleNamespace(error=log, info=log)

    def note_fault(self, error: Exception, where: str) -> None:
        self.faults.append(error)

    def report_health(self) -> None:
        pass


def strangers(graph: Graph, owners: Mapping[str, Any]) -> Strangers:
    """Return ``graph``'s view of the topics of ``owners``."""
    node: Any = graph
    return Strangers(node, owners, lambda: None)


def looks_until_named(found: Strangers) -> int:
    """Return how many looks it takes; 100 if nobody is ever named."""
    for count in range(1, 100):
        found.look()
        if found.trouble:
            return count
    return 100


@pytest.mark.parametrize("name", ["_ros2cli_4711", "_hidden", "_", "gamepad"])
def test_every_node_with_a_name_is_named_within_a_second(name: str) -> None:
    graph = Graph(cmd_vel=["motion_guard", name])
    found = strangers(graph, {"cmd_vel": ("motion_guard",)})
    assert looks_until_named(found) == 2
    assert found.trouble == f"cmd_vel by /{name}"


@pytest.mark.parametrize("name", NAMELESS)
def test_a_publisher_whose_name_is_not_known_yet_is_given_time(name: str) -> None:
    graph = Graph(cmd_vel=["motion_guard", name])
    assert looks_until_named(strangers(graph, {"cmd_vel": ("motion_guard",)})) == 10


def test_who_cannot_read_the_graph_must_not_move_the_robot() -> None:
    graph = Graph(cmd_vel=["motion_guard"])
    found = strangers(graph, {"cmd_vel": ("motion_guard",)})
    troubles = []
    for graph.broken in (False, True, False):
        found.look()
        troubles.append(found.trouble)
    assert troubles == ["", "the graph cannot be read: RuntimeError: shared memory is full", ""]
    assert graph.faults


def test_what_decides_about_motion_has_an_owner() -> None:
    """The guard watches each topic from an answer to a velocity, and those that allow motion."""
    answer = {"image", "image/compressed", "camera_info", "observation", "draft", "verdict"}
    motion = {"generated_text", "navigation_action", "odom", "link_state", "obstacle_avoidance"}
    assert set(MOTION_TOPICS) == {*answer, "early_exit", *motion, "cmd_vel", "motion_state"}
    hosts = {"draft_vlm", *(f"{name}_server" for name in PROTOCOLS)}
    assert set(MOTION_TOPICS["generated_text"]) == hosts


@pytest.mark.parametrize("topic", [*GO2_TOPICS, "state"])
def test_the_robots_own_programs_have_no_names_and_everybody_else_is_named(topic: str) -> None:
    owners = {**GO2_TOPICS, "state": NAMELESS}
    graph = Graph("go2_driver")
    graph.publishers[topic] = [*owners[topic], *NAMELESS]
    found = strangers(graph, owners)
    assert looks_until_named(found) == 100
    graph.publishers[topic].append("rosbag2_player")
    assert looks_until_named(found) == 2
    assert found.trouble == f"{topic} by /rosbag2_player"


def test_an_imitation_of_the_robot_may_take_its_place_but_not_that_of_the_driver() -> None:
    graph = Graph("go2_driver", state=["imitation"])
    found = strangers(graph, {"state": NAMELESS, "request": ("go2_driver", *NAMELESS)})
    assert looks_until_named(found) == 100
    graph.publishers["request"] = ["dance_app"]  # where the driver itself has no publisher
    assert looks_until_named(found) == 2
