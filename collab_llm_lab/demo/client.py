"""Client of a running graph: drives rooms and records every answer, for the demo and its film.

It is no node of the robot: it sets the simulator's room, sends the instruction to ``navigate``, and
subscribes to the topics in between.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from geometry_msgs.msg import PoseStamped
from rcl_interfaces.msg import Parameter as ParameterMsg
from rcl_interfaces.msg import ParameterType, ParameterValue
from rcl_interfaces.srv import SetParametersAtomically

from collab_llm.action import Generate, Navigate
from collab_llm.msg import (
    DragonRetrieval,
    GeneratedText,
    NavigationAction,
    Observation,
    Status,
)
from collab_llm.msg import Room as RoomMsg
from collab_llm.srv import DragonIndex
from collab_llm_lab.demo.memory import Piece, Recollection
from collab_llm_lab.demo.tasks import Task
from collab_llm_nodes.errors import DeadlineExceeded
from collab_llm_nodes.protocols.edge_cloud.metrics import EdgeCloudMetrics
from collab_llm_nodes.robot.episodes import is_episode
from collab_llm_nodes.ros.client import GraphClient
from collab_llm_nodes.ros.convert import code_of, figures_from, raise_for
from collab_llm_nodes.ros.goals import action_client
from collab_llm_nodes.ros.qos import COMMAND, RESULT, STATE
from collab_llm_nodes.sim.pose import Pose

Stamp = tuple[int, int]

_TOPICS_S = 10.0
"""Time in which a result's messages on topics must arrive."""
_LATE_S = 1.0
"""Longest wait for an answer that a drive's end has overtaken."""


@dataclass(frozen=True)
class Answer:
    """One answer of the model, with the picture it is about.

    Attributes:
        complete: the answer ended by itself.
        latency_s: from the picture's arrival here to that of the action read from the answer.
        travelled: number of poses in ``Drive.path`` when the answer came.
    """

    picture: bytes
    prompt: str
    text: str
    tokens: tuple[int, ...]
    sources: tuple[int, ...]
    complete: bool
    metrics: EdgeCloudMetrics
    latency_s: float
    travelled: int


@dataclass
class Drive:
    """One task, driven through its room.

    Attributes:
        path: true poses of the robot.
        ending: name of the navigator's status, such as "OK"; empty: it did not end.
        text: the model's words beside it.
    """

    task: Task
    path: list[Pose]
    answers: list[Answer] = field(default_factory=list)
    ending: str = ""
    error: str = ""
    text: str = ""
    steps: int = 0
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Return True if it ended as the task asks for."""
        return self.task.right(self.ending, self.text, self.path[-1])

    @property
    def distance_to_goal(self) -> float | None:
        """Distance from the robot's true pose at the end to the goal [m], None without one."""
        return self.task.distance(self.path[-1])


class DemoClient(GraphClient):
    """Drives rooms and asks the robot's memory, over topics and actions."""

    def __init__(self) -> None:
        super().__init__("demo_client")
        self._room_seed = -1  # of the room that the simulator has entered
        self._drive: Drive | None = None
        self._pictures: dict[Stamp, tuple[bytes, float]] = {}
        self._texts: dict[Stamp, GeneratedText] = {}
        self._latency: dict[Stamp, float] = {}
        subscribe = self.node.create_subscription
        subscribe(RoomMsg, "ground_truth/room", self._on_room, STATE)
        subscribe(PoseStamped, "ground_truth/pose", self._on_pose, COMMAND)
        subscribe(Observation, "observation", self._on_observation, RESULT)
        subscribe(GeneratedText, "generated_text", self._on_text, RESULT)
        subscribe(NavigationAction, "navigation_action", self._on_action, RESULT)
        self._parameters = self.node.create_client(
            SetParametersAtomically, "sim_go2/set_parameters_atomically"
        )
        self._navigate = action_client(self.node, Navigate, "navigate")
        self._recalled: dict[str, GeneratedText] = {}  # answers of the memory, by session
        self._found: dict[str, DragonRetrieval] = {}
        subscribe(DragonRetrieval, "dragon/retrieval", self._on_found, RESULT)
        self._recall = action_client(self.node, Generate, "dragon/generate")
        self._index = self.node.create_client(DragonIndex, "dragon_index")

    def wait_for_graph(self, deadline_s: float, alive: Callable[[], None]) -> None:
        """Wait until simulator and navigator are ready; ``alive`` raises if their process ended."""

        def ready() -> bool:
            alive()
            return self._navigate.server_is_ready() and self._parameters.service_is_ready()

        self.wait(ready, deadline_s, "the graph to come up")

    def wait_for_recorder(self, deadline_s: float, alive: Callable[[], None]) -> None:
        """Wait until the recorder is subscribed; ``alive`` raises if its process ended."""

        def subscribed() -> bool:
            alive()
            topics = ("generated_text", "navigation_action", "observation", "instruction")
            infos = (self.node.get_subscriptions_info_by_topic(f"/{t}") for t in topics)
            return all(any(i.node_name == "recorder" for i in each) for each in infos)

        self.wait(subscribed, deadline_s, "the recorder")

    def wait_for_memory(self, deadline_s: float, alive: Callable[[], None]) -> None:
        """Wait until the robot's memory is ready; ``alive`` raises if a process of it ended."""

        def ready() -> bool:
            alive()
            return self._recall.server_is_ready() and self._index.service_is_ready()

        self.wait(ready, deadline_s, "the robot's memory")

    def recall(self, question: str, episodes: int, deadline_s: float) -> Recollection:
        """Ask the robot's memory, once it holds ``episodes`` or some seconds have passed.

        Raises:
            DeadlineExceeded: no answer in time.
            CollabError: the answer failed.
        """
        self._wait_for_episodes(episodes)
        begun = time.monotonic()
        goal = Generate.Goal(protocol="dragon", prompt=question, deadline_s=deadline_s)
        spare_s = deadline_s + _TOPICS_S
        result = self.carry_out(self._recall, goal, spare_s, "the memory's answer")
        seconds = time.monotonic() - begun
        found_nothing = result.status.code == Status.NOT_FOUND
        if not found_nothing:
            raise_for(result.status)
        session = result.session_id
        self.wait(
            lambda: session in self._recalled and session in self._found,
            _TOPICS_S,
            "the words and documents of the answer",
        )
        text, found = self._recalled[session], self._found[session]
        begins = [0, *text.ends]
        words = [text.text[a:b] for a, b in zip(begins, text.ends, strict=False)]
        pieces = zip(found.names, found.texts, found.weights, strict=True)
        return Recollection(
            question,
            result.text,
            tuple(zip(words, text.sources, strict=True)),
            tuple(Piece(*piece) for piece in pieces),
            result.verified,
            seconds,
            result.status.message if found_nothing else "",
        )

    def _wait_for_episodes(self, episodes: int) -> None:
        """Wait for the episodes of the drives; some drives leave none, so the wait is bounded."""
        due, held = time.monotonic() + _TOPICS_S, 0
        asked = DragonIndex.Request(operation=DragonIndex.Request.LIST)
        while held < episodes and time.monotonic() < due:
            answer = self.result(lambda: self._index.call_async(asked), _TOPICS_S, "dragon_index")
            raise_for(answer.status)
            held = sum(map(is_episode, answer.names))
            with self.changed:
                self.changed.wait(0.2)

    def drive(self, task: Task, deadline_s: float) -> Drive:
        """Enter the room, give the instruction, wait for the end, ``deadline_s`` at most.

        Raises:
            DeadlineExceeded: the simulator did not enter the room.
            Unavailable: the navigator refused the instruction.
        """
        self._enter(task.room.seed, task.thing)
        drive = Drive(task, [task.room.start])
        with self._recording(drive):
            started = time.monotonic()
            goal = Navigate.Goal(instruction=task.instruction)
            try:
                result = self.carry_out(self._navigate, goal, deadline_s, "the drive's end")
            except DeadlineExceeded as error:
                drive.error = str(error)
            else:
                drive.ending, drive.error = code_of(result.status), result.status.message
                drive.text, drive.steps = result.text, result.steps
            drive.seconds = time.monotonic() - started
            with contextlib.suppress(DeadlineExceeded):  # not every drive has a last answer
                self.wait(lambda: len(drive.answers) >= drive.steps, _LATE_S, "the answer")
        return drive

    def _enter(self, seed: int, thing: str) -> None:
        number = ParameterValue(type=ParameterType.PARAMETER_INTEGER, integer_value=seed)
        word = ParameterValue(type=ParameterType.PARAMETER_STRING, string_value=thing)
        values = {"thing": word, "seed": number}
        changes = [ParameterMsg(name=name, value=value) for name, value in values.items()]
        request = SetParametersAtomically.Request(parameters=changes)
        self._room_seed = -1
        self.result(lambda: self._parameters.call_async(request), 10.0, "sim_go2")
        self.wait(lambda: self._room_seed == seed, 10.0, "the room")

    @contextlib.contextmanager
    def _recording(self, drive: Drive) -> Iterator[None]:
        with self.changed:
            self._texts.clear()
            self._latency.clear()
            self._drive = drive
        try:
            yield
        finally:
            with self.changed:
                self._drive = None

    # Callbacks in the executor's thread.

    def _on_room(self, msg: RoomMsg) -> None:
        with self.changed:
            self._room_seed = msg.seed
            self.changed.notify_all()

    def _on_pose(self, msg: PoseStamped) -> None:
        p, q = msg.pose.position, msg.pose.orientation
        pose = Pose(p.x, p.y, 2 * math.atan2(q.z, q.w))
        with self.changed:
            if self._drive is not None and self._drive.path[-1] != pose:
                self._drive.path.append(pose)

    def _on_observation(self, msg: Observation) -> None:
        with self.changed:  # also before a drive: its first answer may be about the last picture
            self._pictures[_key(msg)] = (bytes(msg.image.data), time.monotonic())
            while len(self._pictures) > 200:  # answers are about recent ones
                self._pictures.pop(next(iter(self._pictures)))

    def _on_found(self, msg: DragonRetrieval) -> None:
        with self.changed:
            self._found[msg.session_id] = msg
            self.changed.notify_all()

    def _on_text(self, msg: GeneratedText) -> None:
        with self.changed:
            if not msg.for_motion:
                if msg.final:
                    self._recalled[msg.session_id] = msg
                    self.changed.notify_all()
                return
            self._texts[_key(msg)] = msg
            self._record(_key(msg))

    def _on_action(self, msg: NavigationAction) -> None:
        with self.changed:
            seen = self._pictures.get(_key(msg))
            if self._drive is not None and seen is not None:
                self._latency[_key(msg)] = time.monotonic() - seen[1]
            self._record(_key(msg))

    def _record(self, key: Stamp) -> None:
        """Record an answer once the final text and the action of a picture are both here."""
        msg, latency = self._texts.get(key), self._latency.get(key)
        picture = self._pictures.get(key)
        if self._drive is None or msg is None or not msg.final:
            return
        if latency is None or picture is None:
            return
        m, own = msg.metrics, figures_from(msg.metrics)
        counted = ("drafted", "accepted", "cache_lookups", "cache_hits", "early_exits")
        metrics = EdgeCloudMetrics(
            rounds=m.rounds,
            tokens=m.tokens,
            total_s=m.total_s,
            **{name: int(own[name]) for name in counted},
        )
        self._drive.answers.append(
            Answer(
                picture[0],
                msg.prompt,
                msg.text,
                tuple(msg.tokens),
                tuple(msg.sources),
                msg.status.code == Status.OK,
                metrics,
                latency,
                len(self._drive.path),
            )
        )
        del self._texts[key], self._latency[key]
        self.changed.notify_all()


def _key(msg: Any) -> Stamp:
    return msg.header.stamp.sec, msg.header.stamp.nanosec
