"""The robot's memory: what the graph says becomes documents, and is found by a question."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from dragon_served import LONG_S, Served
from nav_msgs.msg import Odometry
from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.parameter import Parameter
from std_msgs.msg import String
from tiny_models import tiny_folder

from collab_llm.msg import NavigationAction, Status
from collab_llm.srv import DragonIndex
from collab_llm_nodes.errors import Unavailable
from collab_llm_nodes.nodes.dragon_server import DragonServer
from collab_llm_nodes.processes import free_port
from collab_llm_nodes.protocols.dragon.index import Index
from collab_llm_nodes.robot.episodes import is_episode
from collab_llm_nodes.robot.grammar import parse
from collab_llm_nodes.ros.health import Level
from collab_llm_nodes.ros.qos import CAMERA, RESULT, STATE

pytestmark = pytest.mark.ros

BALL = "the red ball is straight ahead and near. the next action is move forward 50 cm."
BOX = "the blue box is on the left and near. the next action is turn left 15 degree."


class Drive:
    """A graph that drives, for a node with a memory."""

    def __init__(self, graph: Any, folder: Path, **parameters: Any) -> None:
        self.served = Served(
            graph,
            folder,
            free_port(),
            use_cloud=False,
            memory__fill=True,
            side__document_tokens=200,
            **parameters,
        )
        self.graph = graph
        user = self.served.user
        self._odometry = user.create_publisher(Odometry, "odom", CAMERA)
        self._actions = user.create_publisher(NavigationAction, "navigation_action", RESULT)
        self._instructions = user.create_publisher(String, "instruction", STATE)
        for publisher in (self._odometry, self._actions, self._instructions):
            graph.wait_for(lambda publisher=publisher: publisher.get_subscription_count())

    def stand(self, x: float, y: float, yaw: float = 0.0) -> None:
        """Tell the pose until the node has it."""
        msg = Odometry()
        msg.pose.pose.position.x, msg.pose.pose.position.y = x, y
        msg.pose.pose.orientation.z = math.sin(yaw / 2)
        msg.pose.pose.orientation.w = math.cos(yaw / 2)

        def heard() -> bool:
            self._odometry.publish(msg)  # best effort
            diary = self.served.server._diary
            pose = diary is not None and diary._pose
            return bool(pose and math.hypot(pose.x - x, pose.y - y) < 1e-6)

        self.graph.wait_for(heard)

    def answer(self, session: str, text: str) -> None:
        """Tell the action that was read from a text."""
        action = parse(text)
        msg = NavigationAction(session_id=session, text=text, words=action.words)
        msg.kind, (msg.span_begin, msg.span_end) = int(action.kind), action.span
        msg.distance = action.value if action.kind.name == "FORWARD" else 0.0
        msg.angle = action.value if action.kind.name == "TURN" else 0.0
        self._actions.publish(msg)

    def follow(self, instruction: str) -> None:
        """Tell what is followed; empty: nothing any more."""
        self._instructions.publish(String(data=instruction))

    def wait_for_episodes(self, count: int) -> None:
        """Wait until the documents are there; asked through the service."""
        while sum(map(is_episode, self.served.index(DragonIndex.Request.LIST).names)) < count:
            self.graph.wait_for(lambda: True)


@pytest.fixture
def drive(ros_graph: Any, tmp_path: Path) -> Iterator[Drive]:
    made = Drive(ros_graph, tmp_path / "private")
    yield made
    ros_graph.do(made.served.server.stop)


def test_the_robot_is_asked_where_it_saw_the_ball(drive: Drive) -> None:
    drive.follow("find the red ball")
    drive.stand(1.0, 2.0)
    drive.answer("a", BALL)
    drive.follow("")
    drive.wait_for_episodes(1)
    drive.stand(7.0, 5.0)
    drive.answer("b", BOX)
    drive.follow("")
    drive.wait_for_episodes(2)
    served = drive.served
    question = "Where did you last see the red ball?"
    answer = served.ask(prompt=question)
    assert answer.status.code == Status.OK
    served.graph.wait_for(lambda: served.found)
    found = served.found[-1]
    assert found.prompt == question
    assert "seen from (1.0, 2.0): the red ball" in found.texts[0]
    assert found.weights[0] > found.weights[-1]
    assert found.names[0] == "last sighting of red ball"
    assert all(name.startswith(("episode ", "last sighting ")) for name in found.names)
    parts = {part.name: part for part in served.graph.do(served.server.details, 0.0)}
    assert parts["memory"].level == Level.OK
    assert parts["memory"].values["written"] == 2


def test_the_last_of_two_sightings_is_told_word_for_word(ros_graph: Any, tmp_path: Path) -> None:
    drive = Drive(ros_graph, tmp_path / "private", side__answers="quote")
    for number, x in enumerate((1.0, 4.0)):
        drive.follow("find the red ball")
        drive.stand(x, 2.0)
        drive.answer(str(number), BALL)
        drive.follow("")
        drive.wait_for_episodes(number + 1)
    answer = drive.served.ask(prompt="Where did you last see the red ball?", max_tokens=200)
    names = drive.served.index(DragonIndex.Request.LIST).names
    ros_graph.do(drive.served.server.stop)
    assert answer.status.code == Status.OK
    assert "the red ball was last seen from (4.0, 2.0): the red ball is straight" in answer.text
    assert sum(name.startswith("last sighting ") for name in names) == 1


def test_old_episodes_are_forgotten(ros_graph: Any, tmp_path: Path) -> None:
    drive = Drive(ros_graph, tmp_path / "private", memory__episodes=1)
    for number in (1, 2):
        drive.follow("find the red ball")
        drive.stand(float(number), 2.0)
        drive.answer(str(number), BALL)
        drive.follow("")
        ros_graph.wait_for(lambda number=number: drive.served.server._written == number)
    names = drive.served.index(DragonIndex.Request.LIST).names
    ros_graph.do(drive.served.server.stop)
    assert sum(map(is_episode, names)) == 1


def test_the_episode_under_way_is_written_when_the_node_stops(drive: Drive) -> None:
    drive.stand(1.0, 2.0)
    drive.answer("a", BALL)
    server = drive.served.server

    def noted() -> bool:
        return server._diary is not None and server._diary._step is not None

    drive.graph.wait_for(noted)
    drive.served.restart()
    assert len(drive.served.listed()) == 1


def test_an_episode_that_cannot_be_written_is_told(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **options: Any) -> int:
        raise Unavailable("no room on the disk")

    monkeypatch.setattr(Index, "add", full)
    drive.stand(1.0, 2.0)
    drive.answer("a", BALL)
    drive.follow("")
    server = drive.served.server

    def told() -> bool:
        parts = {part.name: part for part in drive.graph.do(server.details, 0.0)}
        return bool(parts["memory"].values.get("UNAVAILABLE"))

    drive.graph.wait_for(told, LONG_S)
    assert drive.served.ask().status.code == Status.OK


def test_a_memory_needs_a_store(ros_graph: Any) -> None:
    parameters = [
        Parameter("model.path", value=str(tiny_folder("llama"))),
        Parameter("memory.fill", value=True),
    ]
    node = DragonServer(context=ros_graph.context, parameter_overrides=parameters)
    ros_graph.add(node)
    assert ros_graph.do(node.trigger_configure) == TransitionCallbackReturn.FAILURE


def test_a_simulated_robot_has_a_store_of_its_own_that_only_its_owner_can_read(
    ros_graph: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "private"
    asked = {"use_cloud": False, "use_sim_time": True, "memory__world": "room-3"}
    served = Served(ros_graph, folder, free_port(), **asked)
    try:
        served.add("ball")
        assert not folder.exists()
        own = tmp_path / "private.simulated-room-3"
        assert own.stat().st_mode & 0o777 == 0o700
        files = [file for file in own.rglob("*") if file.is_file()]
        assert files
        assert all(file.stat().st_mode & 0o077 == 0 for file in files)
    finally:
        ros_graph.do(served.server.stop)
