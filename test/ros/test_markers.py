"""Markers for RViz and Foxglove, and the Foxglove layout."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from folders import ROOT

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from nav_msgs.msg import Odometry
from reports import metrics, odometry, start, traffic
from std_msgs.msg import Header, String
from visualization_msgs.msg import Marker, MarkerArray

from collab_llm.msg import MotionState, NavigationAction
from collab_llm_nodes.nodes.markers import Markers, MarkersConfig, Picture
from collab_llm_nodes.nodes.navigator import Navigator
from collab_llm_nodes.robot.executor import Pose2D
from collab_llm_nodes.robot.grammar import Kind
from collab_llm_nodes.ros.health import ActionLimits, Actions, AnswerLimits, Answers, TopicLimits
from collab_llm_nodes.ros.qos import CAMERA, RESULT, STATE

pytestmark = pytest.mark.ros


# Markers.


def drawn(picture: Picture) -> dict[str, Marker]:
    return {m.ns: m for m in picture.markers(Header(frame_id="odom")).markers}


def test_markers_show_path_direction_and_step() -> None:
    picture, config = Picture(), MarkersConfig()
    assert not picture.markers(Header()).markers, "nothing is known"
    for x in (0.0, 0.01, 0.1, 0.2):
        picture.on_pose(Pose2D(x, 0.0, math.pi / 2), config)
    markers = drawn(picture)
    assert [p.x for p in markers["path"].points] == [0.0, 0.1, 0.2], "not every message is a point"
    assert markers["path"].header.frame_id == "odom"
    assert markers["step"].action == markers["target_direction"].action == Marker.DELETE

    picture.on_action(Kind.TURN, -math.pi / 2)
    picture.on_pose(Pose2D(0.2, 0.0, math.pi / 4), config)  # half way
    markers = drawn(picture)
    assert markers["target_direction"].type == Marker.ARROW
    assert markers["target_direction"].pose.orientation.z == pytest.approx(0.0), "to the east"
    arc = markers["step"].points
    assert (arc[0].y, arc[-1].x) == (pytest.approx(0.5), pytest.approx(0.7))

    picture.on_action(Kind.FORWARD, 0.5)
    goal = drawn(picture)["step"].pose.position
    half = 0.5 * math.sqrt(0.5)
    assert (goal.x, goal.y) == (pytest.approx(0.2 + half), pytest.approx(half))

    picture.on_action(Kind.STOP, 0.0)
    assert drawn(picture)["step"].action == Marker.DELETE


def test_the_path_is_bounded_and_begins_again_elsewhere() -> None:
    picture, config = Picture(), MarkersConfig(path_points=10, path_spacing=0.1)
    for i in range(50):
        picture.on_pose(Pose2D(0.2 * i, 0.0, 0.0), config)
    assert len(picture.path) == 10
    picture.on_action(Kind.FORWARD, 1.0)
    picture.on_pose(Pose2D(0.0, 0.0, 0.0), config)
    assert list(picture.path) == [(0.0, 0.0)]
    assert picture.step is None


def test_markers_tell_why_the_robot_stands() -> None:
    picture = Picture()
    picture.on_pose(Pose2D(), MarkersConfig())
    assert drawn(picture)["text"].action == Marker.DELETE
    picture.instruction = "find the red ball"
    assert drawn(picture)["text"].text == "find the red ball"
    picture.halted = "emergency stop"
    assert drawn(picture)["text"].text == "emergency stop"


def test_the_marker_node_draws_what_the_graph_says(ros_graph: Any) -> None:
    start(ros_graph, Markers, rate=50.0)
    user = ros_graph.node("user")
    poses = user.create_publisher(Odometry, "odom", CAMERA)
    user.create_timer(0.02, lambda: poses.publish(odometry(user, x=1.5)))
    actions = user.create_publisher(NavigationAction, "navigation_action", RESULT)
    states = user.create_publisher(MotionState, "motion_state", STATE)
    instructions = user.create_publisher(String, "instruction", STATE)
    arrays = ros_graph.collect(user, MarkerArray, "markers", STATE)

    def shows(name: str, fits: Callable[[Marker], bool]) -> None:
        def look() -> bool:
            return any(m.ns == name and fits(m) for a in arrays[-1:] for m in a.markers)

        ros_graph.wait_for(look)

    shows("path", lambda m: len(m.points) == 1 and m.points[0].x == 1.5)
    ros_graph.wait_for(actions.get_subscription_count)
    actions.publish(NavigationAction(kind=NavigationAction.FORWARD, distance=0.5))
    shows("step", lambda m: m.action == Marker.ADD and m.pose.position.x == 2.0)
    instructions.publish(String(data="to the door"))
    shows("text", lambda m: m.text == "to the door")
    states.publish(MotionState(allowed=False, text="the link is down"))
    shows("text", lambda m: m.text == "the link is down")
    states.publish(MotionState(allowed=True))
    instructions.publish(String())
    shows("text", lambda m: m.action == Marker.DELETE)
    shows("step", lambda m: m.action == Marker.DELETE)


# The Foxglove layout names topics, fields and services that exist.

LAYOUT = json.loads((ROOT / "config" / "foxglove.json").read_text(encoding="utf-8"))


def topic_types() -> dict[str, str]:
    """Topics and their types, as docs/interfaces.md lists them."""
    page = (ROOT / "docs" / "interfaces.md").read_text(encoding="utf-8")
    table = page.split("## Topics")[1].split("\n\n")[1]
    types = {}
    for row in table.splitlines()[2:]:
        names, kinds = (re.findall(r"`([^`]+)`", cell) for cell in row.split("|")[1:3])
        for i, name in enumerate(names):
            kind = kinds[min(i, len(kinds) - 1)]
            types["/" + name.lstrip("/")] = kind if "/" in kind else f"collab_llm/{kind}"
    return types


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from strings(key)
            yield from strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from strings(each)
    elif isinstance(value, str):
        yield value


def test_the_layout_names_topics_and_fields_that_exist() -> None:
    types, services = topic_types(), {"/emergency_stop", "/reset_emergency_stop"}
    paths = {s for s in strings(LAYOUT["configById"]) if s.startswith("/")} - services
    assert len(paths) > 15
    for path in paths:
        topic, *fields = re.sub(r"\[[^]]*\]|\{[^}]*\}", "", path).split(".")
        assert topic in types, path
        package, kind = types[topic].split("/")
        message = getattr(import_module(f"{package}.msg"), kind)
        for name in fields:
            known = message.get_fields_and_field_types()
            assert name in known, path
            nested = known[name].removeprefix("sequence<").removesuffix(">")
            if "/" in nested:
                package, kind = nested.split("/")
                message = getattr(import_module(f"{package}.msg"), kind)


def test_the_layout_plots_values_that_the_nodes_report(ros_context: Any) -> None:
    known = {
        "draft_vlm: decoding": _answered().status("", AnswerLimits(), 0.0, 1.0).values,
        "navigation_action_parser: actions": _acted().status(ActionLimits()).values,
        "navigator: observation": traffic(0.1).status(TopicLimits(), 6.0).values,
        "navigator: odom": traffic(0.1).status(TopicLimits(), 6.0).values,
    }
    pairs = re.findall(
        r'name==\\?"([^"\\]+)\\?"\}\.values\[:\]\{key==\\?"([^"\\]+)', json.dumps(LAYOUT)
    )
    assert len(pairs) > 3
    for status, key in pairs:
        assert key in known[status], (status, key)
    navigator = Navigator(context=ros_context)
    assert set(navigator.expected()) == {"observation", "odom"}
    navigator.destroy_node()


def _answered() -> Answers:
    answers = Answers()
    answers.on_answer(metrics())
    return answers


def _acted() -> Actions:
    actions = Actions()
    actions.on_action("OK", "", 0.1, 0.0)
    return actions


def test_the_layout_shows_every_panel_once() -> None:
    shown: list[str] = []

    def walk(part: Any) -> None:
        if isinstance(part, str):
            shown.append(part)
        else:
            walk(part["first"])
            walk(part["second"])

    walk(LAYOUT["layout"])
    assert sorted(shown) == sorted(LAYOUT["configById"])


def test_the_layout_can_stop_the_robot() -> None:
    buttons = {
        SimpleNamespace(**panel).serviceName
        for name, panel in LAYOUT["configById"].items()
        if name.startswith("CallService!")
    }
    assert buttons == {"/emergency_stop", "/reset_emergency_stop"}
