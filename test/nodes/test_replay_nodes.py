"""The recorder as a node and as a process, and the recorded room through the real nodes."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from folders import ROOM

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from rclpy.context import Context
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.serialization import serialize_message
from rosbags.interfaces import QosDurability, QosReliability
from rosbags.rosbag2 import Reader
from std_msgs.msg import Bool, String

from collab_llm_nodes.errors import ConfigError, InvalidInput
from collab_llm_nodes.nodes.recorder import Recorder
from collab_llm_nodes.replay.bag import open_bag
from collab_llm_nodes.replay.compare import compare
from collab_llm_nodes.replay.mend import mend
from collab_llm_nodes.replay.recording import read_recording
from collab_llm_nodes.replay.replayers import Models, through_nodes
from collab_llm_nodes.ros.health import Level
from collab_llm_nodes.ros.qos import CAMERA, RESULT, STATE

pytestmark = pytest.mark.ros

STORAGES = ("mcap", "sqlite3")
PATIENCE_S = 30.0


class Robot:
    """Somebody who publishes, and a recorder that listens."""

    def __init__(self, graph: Any, folder: Path) -> None:
        self.graph, self.folder = graph, folder
        self.node: Node = graph.node("robot")
        self.texts = self.node.create_publisher(String, "text", RESULT)
        self.frames = self.node.create_publisher(String, "frame", CAMERA)
        self.state = self.node.create_publisher(String, "state", STATE)
        self.state.publish(String(data="latched"))

    def record(self, **parameters: Any) -> Recorder:
        values = {"folder": str(self.folder), "topics": ["text", "frame", "state", "later"]}
        overrides = [Parameter(n, value=v) for n, v in {**values, **parameters}.items()]
        recorder = Recorder(context=self.graph.context, parameter_overrides=overrides)
        self.graph.add(recorder)
        recorder.start()
        return recorder

    def heard(self) -> bool:
        """Return True if a recorder listens on every topic."""
        publishers = (self.texts, self.frames, self.state)
        return all(p.get_subscription_count() > 0 for p in publishers)

    def written(self, recorder: Recorder, count: int) -> None:
        """Wait until so many messages are in the bag."""

        def values() -> dict[str, Any]:
            return recorder.diagnose()[2]

        self.graph.wait_for(lambda: values().get("messages", 0) >= count, PATIENCE_S)


@pytest.fixture
def robot(ros_graph: Any, tmp_path: Path) -> Robot:
    return Robot(ros_graph, tmp_path / "bags")


def contents(path: Path) -> list[tuple[str, str]]:
    with open_bag(path) as bag:
        return [(topic, m.data) for topic, _, m in bag.messages(["/text", "/frame", "/state"])]


@pytest.mark.parametrize("storage", STORAGES)
def test_topics_of_every_quality_are_recorded_as_they_come(robot: Robot, storage: str) -> None:
    recorder = robot.record(storage=storage)
    robot.graph.wait_for(robot.heard, PATIENCE_S)
    robot.written(recorder, 1)  # the latched state was published before anybody listened
    sent = [String(data=f"number {n}") for n in range(100)]
    for message in sent:
        robot.texts.publish(message)
    robot.written(recorder, 101)
    robot.frames.publish(String(data="best effort"))
    robot.written(recorder, 102)
    robot.graph.do(recorder.stop)
    (path,) = robot.folder.iterdir()
    assert contents(path) == [
        ("/state", "latched"),
        *(("/text", m.data) for m in sent),
        ("/frame", "best effort"),
    ]
    with Reader(path) as reader:
        offered = {c.topic: c.ext.offered_qos_profiles[0] for c in reader.connections}  # type: ignore[union-attr]
        stored = [bytes(d) for c, _, d in reader.messages() if c.topic == "/text"]
    assert stored == [serialize_message(m) for m in sent]
    assert offered["/frame"].reliability is QosReliability.BEST_EFFORT
    assert offered["/state"].durability is QosDurability.TRANSIENT_LOCAL


def test_a_topic_that_appears_or_changes_later_is_followed(robot: Robot) -> None:
    recorder = robot.record()
    robot.graph.wait_for(robot.heard, PATIENCE_S)
    reliable = QoSProfile(depth=5, reliability=ReliabilityPolicy.RELIABLE)
    first = robot.node.create_publisher(String, "later", reliable)
    robot.graph.wait_for(first.get_subscription_count, PATIENCE_S)
    first.publish(String(data="reliable"))
    robot.written(recorder, 2)
    # A second one that a reliable subscription would not receive from.
    second = robot.node.create_publisher(String, "later", CAMERA)
    robot.graph.wait_for(second.get_subscription_count, PATIENCE_S)
    second.publish(String(data="best effort"))
    robot.written(recorder, 3)
    robot.graph.do(recorder.stop)
    (path,) = robot.folder.iterdir()
    with open_bag(path) as bag:
        told = [m.data for _, _, m in bag.messages(["/later"])]
    assert told == ["reliable", "best effort"]


def test_a_topic_that_comes_back_with_another_type_is_recorded(robot: Robot) -> None:
    """``cmd_vel`` does so when motion_guard is restarted with stamps."""
    recorder = robot.record()
    robot.graph.wait_for(robot.heard, PATIENCE_S)
    first = robot.node.create_publisher(String, "later", RESULT)
    robot.graph.wait_for(first.get_subscription_count, PATIENCE_S)
    first.publish(String(data="text"))
    robot.written(recorder, 2)
    robot.graph.do(robot.node.destroy_publisher, first)
    elsewhere = Context()  # one DDS participant cannot have both
    elsewhere.init(domain_id=robot.graph.domain_id)
    try:
        second = Node("other", context=elsewhere).create_publisher(Bool, "later", RESULT)
        robot.graph.wait_for(second.get_subscription_count, PATIENCE_S)
        second.publish(Bool(data=True))
        robot.written(recorder, 3)
    finally:
        elsewhere.shutdown()
    robot.graph.do(recorder.stop)
    (path,) = robot.folder.iterdir()
    with open_bag(path) as bag:
        assert [m.data for _, _, m in bag.messages(["/later"])] == ["text", True]


def test_a_type_without_its_definition_costs_its_own_topic_only(
    robot: Robot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class can be imported while its ``.msg`` file, which goes into the bag, is not there."""
    from collab_llm_nodes.replay import bag, raw_topics

    def lacks(type_name: str) -> tuple[str, str]:
        if type_name == "std_msgs/msg/Bool":
            raise ConfigError("not installed", field="topics")
        return text_of(type_name)

    text_of = bag.definition
    for module in (bag, raw_topics):
        monkeypatch.setattr(module, "definition", lacks)
    flags = robot.node.create_publisher(Bool, "later", STATE)
    recorder = robot.record(topics=["later", "text", "frame", "state"])
    robot.graph.wait_for(robot.heard, PATIENCE_S)
    flags.publish(Bool())
    robot.texts.publish(String(data="goes on"))
    robot.written(recorder, 2)
    level, message, _ = recorder.diagnose()
    assert (level, "/later" in message) == (Level.WARN, True)
    robot.graph.do(recorder.stop)


def test_a_topic_of_two_types_is_left_out_and_said(robot: Robot) -> None:
    robot.node.create_publisher(String, "later", 1)
    elsewhere = Context()  # one DDS participant cannot have both
    elsewhere.init(domain_id=robot.graph.domain_id)
    try:
        other = Node("other", context=elsewhere)
        other.create_publisher(Bool, "later", 1)
        robot.graph.wait_for(lambda: robot.node.count_publishers("later") == 2, PATIENCE_S)
        recorder = robot.record()
        robot.graph.wait_for(lambda: "/later" in recorder.diagnose()[1], PATIENCE_S)
        assert recorder.diagnose()[0] == Level.WARN
    finally:
        elsewhere.shutdown()


def test_the_parameters_of_those_who_ask_and_answer_are_recorded(robot: Robot) -> None:
    navigator = robot.graph.node("navigator")
    navigator.declare_parameter("answer.temperature", 0.5)
    navigator.declare_parameter("answer.stops", ["a", "b"])
    recorder = robot.record()
    robot.graph.wait_for(robot.heard, PATIENCE_S)
    robot.written(recorder, 2)  # the state and the parameters
    navigator.set_parameters([Parameter("answer.temperature", value=0.75)])
    robot.written(recorder, 3)
    robot.graph.do(recorder.stop)
    (path,) = robot.folder.iterdir()
    with open_bag(path) as bag:
        told = [json.loads(m.data)["nodes"] for _, _, m in bag.messages(["/recording"])]
    assert [t["navigator"]["answer.temperature"] for t in told] == [0.5, 0.75]
    assert told[0]["navigator"]["answer.stops"] == ["a", "b"]


def test_large_recordings_come_in_parts(robot: Robot) -> None:
    recorder = robot.record(max_size=0.1, max_parts=2)
    robot.graph.wait_for(robot.heard, PATIENCE_S)
    robot.written(recorder, 1)  # the state
    for n in range(40):
        robot.texts.publish(String(data=f"{n}" * 5000))
    assert robot.texts.wait_for_all_acked()
    robot.graph.do(recorder.stop)
    parts = sorted(robot.folder.iterdir())
    assert len(parts) == 2
    assert all(contents(part)[0] == ("/state", "latched") for part in parts)
    assert contents(parts[-1])[-1][1] == "39" * 5000


def test_a_full_disk_ends_the_recording_and_not_the_node(
    robot: Robot, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = robot.record(flush_period=0.05)
    robot.graph.wait_for(robot.heard, PATIENCE_S)
    robot.written(recorder, 1)
    done = recorder.set_parameters([Parameter("min_free", value=1e6)])
    assert done[0].successful
    robot.graph.wait_for(lambda: "min_free" in recorder.diagnose()[1], PATIENCE_S)
    level, message, _ = recorder.diagnose()
    assert level == Level.ERROR
    assert "not recording" in message
    (path,) = robot.folder.iterdir()
    assert contents(path) == [("/state", "latched")], "what was recorded is whole"
    assert recorder.active


def test_a_folder_that_cannot_be_used_is_refused(robot: Robot) -> None:
    robot.folder.parent.joinpath("bags").write_text("a file")
    with pytest.raises(ConfigError, match="recorder did not start"):
        robot.record()


# As a process.


@pytest.fixture
def recorder_process(robot: Robot) -> Iterator[Any]:
    started: list[subprocess.Popen[bytes]] = []

    def start(storage: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "collab_llm_nodes.cli", "record"]
        command += ["--out", str(robot.folder), "--storage", storage]
        for topic in ("text", "frame", "state"):
            command += ["--topic", topic]
        started.append(subprocess.Popen(command))
        robot.graph.wait_for(robot.heard, PATIENCE_S)
        assert robot.state.wait_for_all_acked()
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("storage", STORAGES)
def test_a_signal_leaves_a_whole_bag_and_a_kill_one_that_can_be_mended(
    robot: Robot, recorder_process: Any, storage: str
) -> None:
    process = recorder_process(storage)
    for n in range(50):
        robot.texts.publish(String(data=f"number {n}"))
    assert robot.texts.wait_for_all_acked()
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    (path,) = robot.folder.iterdir()
    texts = [data for topic, data in contents(path) if topic == "/text"]
    assert texts == [f"number {n}" for n in range(50)]
    assert ("/state", "latched") in contents(path)

    killed = recorder_process(storage)
    robot.texts.publish(String(data="before"))
    copies = itertools.count()

    def saved() -> bool:
        """Out of the process's hands: it is in what another one can read."""
        with contextlib.suppress(InvalidInput):  # nothing yet
            (now,) = {*robot.folder.iterdir()} - {path}
            out, _ = mend(now, robot.folder.parent / f"copy{next(copies)}")
            return {("/state", "latched"), ("/text", "before")} <= {*contents(out)}
        return False

    robot.graph.wait_for(lambda: len([*robot.folder.iterdir()]) == 2, PATIENCE_S)
    robot.graph.wait_for(saved, PATIENCE_S)
    robot.texts.publish(String(data="after"))
    killed.kill()
    killed.wait()
    (broken,) = {*robot.folder.iterdir()} - {path}
    with pytest.raises(InvalidInput, match="was not closed"):
        contents(broken)
    out, _ = mend(broken)
    saved_for_certain = {c for c in contents(out) if c[1] != "after"}
    assert saved_for_certain == {("/state", "latched"), ("/text", "before")}


# The recorded room.


def test_the_recorded_room_through_the_real_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROS_AUTOMATIC_DISCOVERY_RANGE", "ROS_DOMAIN_ID"):  # through_nodes sets its own
        monkeypatch.setenv(name, "")
    recording = read_recording(ROOM)
    with through_nodes(recording, Models().named(recording)) as replayer:
        report = compare(recording, replayer)
    assert not report.differences(texts=True)
    assert len(report.compared) == len(recording.steps) >= 5
