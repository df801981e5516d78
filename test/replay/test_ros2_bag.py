"""Bags and ROS's own ``ros2 bag``: it reads our bags, we read its, and it plays into our nodes."""

from __future__ import annotations

import importlib.util
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from folders import ROOM

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")
if not (shutil.which("ros2") and importlib.util.find_spec("ros2bag")):
    pytest.skip("no `ros2 bag` here: apt install ros-jazzy-rosbag2", allow_module_level=True)

from bag_content import drive, write_bag
from builtin_interfaces.msg import Time as TimeMsg
from rclpy.parameter import Parameter
from rosbag2_interfaces.srv import IsPaused, Resume
from rosgraph_msgs.msg import Clock
from std_msgs.msg import String

from collab_llm.msg import GeneratedText, NavigationAction
from collab_llm_nodes.nodes.navigation_action_parser import NavigationActionParser
from collab_llm_nodes.replay.bag import open_bag
from collab_llm_nodes.ros.qos import COMMAND, RESULT, STATE

pytestmark = pytest.mark.ros

PATIENCE_S = 30.0


@pytest.fixture
def ros2_bag() -> Iterator[Any]:
    """Starts ``ros2 bag ...``; what still runs at the end is ended."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: object) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["ros2", "bag", *map(str, arguments)]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("storage", ["mcap", "sqlite3"])
def test_ros2_bag_reads_what_is_written_here(tmp_path: Path, storage: str) -> None:
    path = write_bag(tmp_path, drive(), storage)
    told = subprocess.run(
        ["ros2", "bag", "info", str(path)], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert re.search(rf"Messages:\s+{len(drive())}\b", told)
    assert "Type: collab_llm/msg/GeneratedText | Count: 4" in told


def test_what_ros2_bag_records_is_read_here(ros_graph: Any, tmp_path: Path, ros2_bag: Any) -> None:
    node = ros_graph.node("robot")
    publisher = node.create_publisher(String, "text", STATE)
    publisher.publish(String(data="hello"))
    recorder = ros2_bag("record", "--all", "--storage", "mcap", "-o", tmp_path / "theirs")
    ros_graph.wait_for(publisher.get_subscription_count, PATIENCE_S)
    assert publisher.wait_for_all_acked()
    recorder.send_signal(signal.SIGINT)
    recorder.wait(PATIENCE_S)
    with open_bag(tmp_path / "theirs") as bag:
        assert [m.data for _, _, m in bag.messages(["/text"])] == ["hello"]


def test_a_paused_player_feeds_a_node_that_answers_as_recorded(
    ros_graph: Any, tmp_path: Path, ros2_bag: Any
) -> None:
    """The recipe of docs/replay.md: nothing is played before everybody listens, nothing is lost,
    and what is compared is content."""
    with open_bag(ROOM) as bag:
        recorded = [m for _, _, m in bag.messages(["/navigation_action"])]
        texts = sum(1 for _ in bag.messages(["/generated_text"]))
    use_sim_time = Parameter("use_sim_time", value=True)
    limits = Parameter("max_age", value=600.0)
    parser = NavigationActionParser(
        context=ros_graph.context, parameter_overrides=[use_sim_time, limits]
    )
    ros_graph.add(parser)
    parser.start()
    peer = ros_graph.node("peer")
    heard = ros_graph.collect(peer, GeneratedText, "generated_text", RESULT)
    actions = ros_graph.collect(peer, NavigationAction, "navigation_action", RESULT)
    # The ages of old frames are judged by the time of the drive: that of its end, for all.
    end = recorded[-1].header.stamp
    clock = peer.create_publisher(Clock, "/clock", COMMAND)

    def late() -> bool:
        clock.publish(Clock(clock=TimeMsg(sec=end.sec, nanosec=end.nanosec)))
        return bool(parser.seconds() >= end.sec)

    ros_graph.wait_for(late, PATIENCE_S)

    qos = tmp_path / "qos.yaml"
    qos.write_text(
        "/generated_text: {history: keep_last, depth: 1000, reliability: reliable,"
        " durability: volatile}\n"
    )
    player = ros2_bag(
        *("play", ROOM, "--start-paused", "--disable-keyboard-controls"),
        *("--topics", "/generated_text", "--qos-profile-overrides-path", qos),
        *("--rate", 20, "--read-ahead-queue-size", 1000, "--wait-for-all-acked", 10_000),
    )
    paused = peer.create_client(IsPaused, "/rosbag2_player/is_paused")
    resume = peer.create_client(Resume, "/rosbag2_player/resume")
    ros_graph.wait_for(lambda: paused.service_is_ready() and resume.service_is_ready(), PATIENCE_S)
    # The answer comes only once the player knows this process's endpoints, the parser's included.
    assert ros_graph.ask(paused.call_async, IsPaused.Request(), timeout=PATIENCE_S).paused
    ros_graph.wait_for(lambda: peer.count_publishers("generated_text") == 1, PATIENCE_S)
    ros_graph.ask(resume.call_async, Resume.Request(), timeout=PATIENCE_S)
    assert player.wait(PATIENCE_S) == 0
    ros_graph.wait_for(lambda: len(heard) == texts, PATIENCE_S)
    ros_graph.wait_for(lambda: len(actions) == len(recorded), PATIENCE_S)
    for action, expected in zip(actions, recorded, strict=True):
        assert (action.session_id, action.kind, action.code) == (
            expected.session_id,
            expected.kind,
            expected.code,
        )
        assert (action.distance, action.angle) == (expected.distance, expected.angle)
