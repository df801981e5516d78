"""A running graph as a WebSocket server for Foxglove, without apt's bridge; it only listens.

Viewers need no token, so the server listens on this machine alone. They can publish nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from foxglove import Channel, Context, Schema, start_server
from foxglove.websocket import ChannelView, Client, ServerListener
from rclpy.serialization import deserialize_message, serialize_message

from collab_llm.msg import Observation
from collab_llm_nodes.errors import Unavailable
from collab_llm_nodes.replay.bag import definition
from collab_llm_nodes.replay.raw_topics import LOOK_S, RawTopic, RawTopics
from collab_llm_nodes.ros.client import GraphClient
from collab_llm_nodes.ros.clock import STEADY

HOST = "127.0.0.1"
_OBSERVATION, _IMAGE = "collab_llm/msg/Observation", "sensor_msgs/msg/CompressedImage"


class LiveView(GraphClient):
    """Serves ``topics`` while it is open.

    An observation is served a second time as its picture, ``<topic>/image``, which viewers know.

    Args:
        port: 0: any.
        namespace: of the robot's nodes.

    Attributes:
        port: where it listens.

    Raises:
        Unavailable: the port is in use, or not allowed.
    """

    def __init__(self, topics: Sequence[str], port: int, namespace: str = "") -> None:
        super().__init__("foxglove", namespace)
        self._context_of_channels = Context()
        self._channels: dict[str, Channel] = {}
        self._states: dict[str, bytes] = {}
        try:
            self._server = start_server(
                name="collab_llm",
                host=HOST,
                port=port,
                context=self._context_of_channels,
                server_listener=_Listener(self),
            )
        except RuntimeError as error:
            raise Unavailable(
                f"cannot listen on {HOST}:{port}: {error}", field="port", remedy="choose another"
            ) from error
        self.port: int = self._server.port
        self._raw = RawTopics(self.node, topics, self._on_message)
        self.node.create_timer(LOOK_S, self._raw.look, clock=STEADY)

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._server.stop()

    def repeat_state(self, topic: str) -> None:
        """Send the last message of a latched topic, which a new viewer has missed."""
        if topic in self._states:
            self._channels[topic].log(self._states[topic], log_time=time.time_ns())

    def _on_message(self, topic: RawTopic, data: bytes) -> None:
        if topic.latched:
            self._states[topic.name] = data
        self._send(topic.name, topic.type_name, data)
        if topic.type_name == _OBSERVATION:
            picture = deserialize_message(data, Observation).image
            self._send(f"{topic.name}/image", _IMAGE, serialize_message(picture))

    def _send(self, topic: str, type_name: str, data: bytes) -> None:
        channel = self._channels.get(topic)
        if channel is None:
            text, _ = definition(type_name)
            schema = Schema(name=type_name, encoding="ros2msg", data=text.encode())
            channel = self._channels[topic] = Channel(
                topic, schema=schema, message_encoding="cdr", context=self._context_of_channels
            )
        channel.log(data, log_time=time.time_ns())


class _Listener(ServerListener):
    def __init__(self, view: LiveView) -> None:
        self._view = view

    def on_subscribe(self, client: Client, channel: ChannelView) -> None:
        self._view.repeat_state(channel.topic)
