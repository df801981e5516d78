"""The live view for Foxglove, read by a WebSocket client as Foxglove does."""

from __future__ import annotations

import contextlib
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from folders import ROOM

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")
pytest.importorskip("foxglove", reason="pip install -r requirements/foxglove.txt")

from rclpy.serialization import deserialize_message
from rosbags.highlevel import AnyReader
from sensor_msgs.msg import CompressedImage
from std_msgs.msg import String
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from collab_llm.msg import LinkState, Observation
from collab_llm_nodes.errors import Unavailable
from collab_llm_nodes.replay.bag import definition
from collab_llm_nodes.replay.foxglove_live import LiveView
from collab_llm_nodes.ros.qos import RESULT, STATE

pytestmark = pytest.mark.ros
WAIT_S = 20.0


class Viewer:
    """A client of Foxglove's protocol that subscribes to each channel it hears of."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.channels: dict[int, dict[str, Any]] = {}
        self.received: dict[str, list[bytes]] = {}
        self.said: list[dict[str, Any]] = []

    def until(self, condition: Any) -> None:
        """Receive until ``condition()`` is true."""
        while not condition():
            message = self.socket.recv(WAIT_S)
            if isinstance(message, bytes):
                opcode, subscription, _ = struct.unpack_from("<BIQ", message)
                assert opcode == 1
                topic = self.channels[subscription]["topic"]
                self.received.setdefault(topic, []).append(message[13:])
                continue
            told = json.loads(message)
            self.said.append(told)
            if told["op"] == "advertise":
                for channel in told["channels"]:
                    self.channels[channel["id"]] = channel
                self.subscribe([channel["id"] for channel in told["channels"]])
            elif told["op"] == "status" and "unknown channel" in told["message"].lower():
                # The SDK announces a channel a moment before it knows it.
                self.subscribe([int(re.findall(r"\d+", told["message"])[-1])])

    def subscribe(self, channels: list[int]) -> None:
        wanted = [{"id": channel, "channelId": channel} for channel in channels]
        self.socket.send(json.dumps({"op": "subscribe", "subscriptions": wanted}))

    def topics(self) -> set[str]:
        return {channel["topic"] for channel in self.channels.values()}


def viewer(port: int) -> Any:
    return connect(f"ws://127.0.0.1:{port}", subprotocols=[Subprotocol("foxglove.sdk.v1")])


@pytest.fixture
def recorded() -> dict[str, list[bytes]]:
    """Messages of the room of the tests, as they were recorded."""
    topics = ("/observation", "/generated_text", "/link_state")
    found: dict[str, list[bytes]] = {topic: [] for topic in topics}
    with AnyReader([Path(ROOM)]) as reader:
        connections = [c for c in reader.connections if c.topic in topics]
        for connection, _, data in reader.messages(connections):
            found[connection.topic].append(bytes(data))
    return found


def test_a_viewer_gets_the_messages_of_a_drive_as_they_are(
    ros_graph: Any, recorded: dict[str, list[bytes]]
) -> None:
    robot = ros_graph.node("robot")
    publishers = {
        "/observation": robot.create_publisher(Observation, "observation", RESULT),
        "/link_state": robot.create_publisher(LinkState, "link_state", STATE),
    }
    shown = {topic: recorded[topic][:10] for topic in publishers}
    with LiveView(("observation", "link_state"), 0) as view, viewer(view.port) as socket:
        foxglove = Viewer(socket)
        ros_graph.wait_for(lambda: all(p.get_subscription_count() for p in publishers.values()))
        for topic, publisher in publishers.items():
            publisher.publish(shown[topic][0])  # announces the channel
        foxglove.until(lambda: {*shown, "/observation/image"} <= foxglove.topics())
        foxglove.until(lambda: "/link_state" in foxglove.received)  # latched: not missed
        for topic, publisher in publishers.items():
            for data in shown[topic][1:]:
                publisher.publish(data)
        foxglove.until(lambda: shown["/link_state"][-1] in foxglove.received["/link_state"])
        foxglove.until(lambda: len(foxglove.received.get("/observation/image", ())) >= 9)
    assert set(foxglove.received["/observation"]) <= set(shown["/observation"])
    pictures = [deserialize_message(d, Observation).image for d in shown["/observation"]]
    for data in foxglove.received["/observation/image"]:
        assert deserialize_message(data, CompressedImage) in pictures
    by_topic = {channel["topic"]: channel for channel in foxglove.channels.values()}
    channel = by_topic["/observation"]
    assert (channel["encoding"], channel["schemaEncoding"]) == ("cdr", "ros2msg")
    assert channel["schema"] == definition("collab_llm/msg/Observation")[0]
    assert by_topic["/observation/image"]["schemaName"] == "sensor_msgs/msg/CompressedImage"


def test_a_viewer_can_publish_nothing(ros_graph: Any) -> None:
    robot = ros_graph.node("robot")
    heard = ros_graph.collect(robot, String, "instruction", RESULT)
    with LiveView(("instruction",), 0) as view, viewer(view.port) as socket:
        foxglove = Viewer(socket)
        foxglove.until(lambda: any(said["op"] == "serverInfo" for said in foxglove.said))
        info = next(said for said in foxglove.said if said["op"] == "serverInfo")
        assert "clientPublish" not in info["capabilities"]
        assert "services" not in info["capabilities"]
        advertised = {"id": 1, "topic": "/instruction", "encoding": "cdr", "schemaName": "x"}
        socket.send(json.dumps({"op": "advertise", "channels": [advertised]}))
        socket.send(struct.pack("<BI", 1, 1) + b"\x00\x01\x00\x00move")
        socket.send("not JSON")
        with contextlib.suppress(ConnectionClosed):
            foxglove.until(lambda: any(said["op"] == "status" for said in foxglove.said))
    assert not heard
    assert robot.count_publishers("instruction") == 0


def test_a_port_in_use_is_said(ros_context: Any) -> None:
    with (
        LiveView(("instruction",), 0) as view,
        pytest.raises(Unavailable, match=f"{view.port}"),
    ):
        LiveView(("instruction",), view.port)
