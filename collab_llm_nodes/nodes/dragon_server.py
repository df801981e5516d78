"""DRAGON (paper 001) as a node: answers from the robot's own documents and those of a cloud.

Hosts the action ``dragon/generate``, the service ``dragon_generate``, and ``dragon_index`` for the
documents. The documents that an answer rests on are published on ``dragon/retrieval``. With
``memory.fill`` the node listens to the robot while it drives, and writes what it sees and does into
the documents, so that it can be asked later. Started by ``protocol_server dragon``.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from nav_msgs.msg import Odometry
from rclpy.subscription import Subscription
from std_msgs.msg import Header, String

from collab_llm.msg import DragonRetrieval, NavigationAction
from collab_llm_nodes.config import setting
from collab_llm_nodes.errors import CollabError, ConfigError
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.knowledge.retrieval import Retrieved
from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.protocols.base import Request
from collab_llm_nodes.protocols.dragon.index import Index
from collab_llm_nodes.protocols.dragon.running import start
from collab_llm_nodes.protocols.dragon.settings import DragonConfig
from collab_llm_nodes.robot.diary import Diary
from collab_llm_nodes.robot.episodes import (
    MOST_THINGS,
    EpisodeConfig,
    is_episode,
    remember,
    store_of,
)
from collab_llm_nodes.ros.clock import STEADY
from collab_llm_nodes.ros.document_index import IndexService
from collab_llm_nodes.ros.generation_host import GenerationHost, HostConfig
from collab_llm_nodes.ros.health import Faults, Level, Status
from collab_llm_nodes.ros.managed_node import guarded
from collab_llm_nodes.ros.motion_inputs import action_from, pose_from
from collab_llm_nodes.ros.protocol_server import ProtocolServer
from collab_llm_nodes.ros.qos import CAMERA, RESULT, STATE

_LOOK_S = 1.0
"""Period at which the age of the episode under way is looked at."""


@dataclass(frozen=True)
class MemoryConfig(EpisodeConfig):
    """The robot's memory of what it saw and did."""

    fill: bool = setting(
        False,
        "Write what the robot sees and does into the documents, in episodes.",
        read_only=True,
    )
    world: str = setting(
        "world",
        "Name of the simulated world that the robot is in, where use_sim_time is set.",
        read_only=True,
    )


@dataclass(frozen=True)
class DragonServerConfig(DragonConfig, HostConfig):
    """Parameters of the node."""

    memory: MemoryConfig = field(default_factory=MemoryConfig)
    deadline_s: float = setting(
        60.0,
        "One answer, or one change of the documents, when the request names no deadline [s].",
        low=0.05,
        high=3600.0,
    )
    max_waiting: int = setting(
        16, "Answers in progress or waiting; more are refused as BUSY.", low=1, high=256
    )


class DragonServer(ProtocolServer[DragonServerConfig]):
    """See the module docstring."""

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("dragon", config_type=DragonServerConfig, **node_arguments)
        self._diary: Diary | None = None
        self._written, self._lost = 0, Faults()  # episodes

    def enter_process(self) -> None:
        set_threads(self.config.model)

    def configure(self) -> None:
        """Load model and documents and offer the interfaces; the load blocks the transition."""
        config = self.config
        if config.memory.fill and not config.side.store:
            raise ConfigError(
                "a memory needs documents", field="side.store", remedy="name their folder"
            )
        running = start(self._with_own_store(config), self.resources())
        self._retrievals = self.create_publisher(DragonRetrieval, "dragon/retrieval", RESULT)
        running.on_found = self._tell_found
        self.host = GenerationHost(self, self.entry, running)
        self._documents = IndexService(self, running.index)
        self._heard: list[Subscription] = []
        if config.memory.fill:
            self._diary = Diary(config.memory)
            self._heard = [
                self.create_subscription(kind, topic, callback, qos)
                for kind, topic, callback, qos in (
                    (Odometry, "odom", self._on_odometry, CAMERA),
                    (NavigationAction, "navigation_action", self._on_action, RESULT),
                    (String, "instruction", self._on_instruction, STATE),
                )
            ]
        self._looks = self.create_timer(_LOOK_S, self._keep, clock=STEADY)

    def _with_own_store(self, config: DragonServerConfig) -> DragonServerConfig:
        """Return ``config`` with the store of this robot in its world in place of ``side.store``.

        A simulation must not fill the memory of a real robot, nor read its private documents.
        """
        if not config.side.store:
            return config
        simulated = self.get_parameter("use_sim_time").value
        world = config.memory.world if simulated else ""
        store = store_of(config.side.store, self.get_namespace(), world)
        self.get_logger().info(f"documents in {store}")
        return replace(config, side=replace(config.side, store=store))

    def deactivate(self) -> None:
        """End what others asked for; the episode under way is written."""
        super().deactivate()
        self._documents.cancel_all()
        if self._diary is not None:
            self._write(self._diary.take(time.time(), all_of_it=True))

    def cleanup(self) -> None:
        self.destroy_timer(self._looks)
        for subscription in self._heard:
            self.destroy_subscription(subscription)
        self._diary = None
        self._documents.close()  # first: the host closes the store
        documents, retrievals = self._documents, self._retrievals

        def release() -> None:
            documents.destroy()
            self.destroy_publisher(retrievals)

        self.host.close(release)

    def details(self, now: float) -> list[Status]:
        """The last answers, the protocol's figures, the documents and the memory."""
        found, stats = super().details(now), self._documents.stats
        if stats is not None:
            blind = stats.without_vector
            told = (
                f"{blind} pieces cannot be found yet" if blind else f"{stats.documents} documents"
            )
            level = Level.WARN if blind else Level.OK
            found.append(Status("documents", level, told, vars(stats)))
        if self._diary is not None:
            lost = self._lost.recent(now, self.common.diagnostics.recent)
            told = f"an episode was lost: {lost}" if lost else f"{self._written} episodes written"
            values = {"written": self._written, **self._lost.counts}
            found.append(Status("memory", Level.WARN if lost else Level.OK, told, values))
        return found

    def _tell_found(self, request: Request, found: Retrieved) -> None:
        """Publish the documents of an answer; in the thread that computes it."""
        header = Header(frame_id=request.frame_id)
        header.stamp.sec, header.stamp.nanosec = divmod(request.stamp_ns, 10**9)
        self._retrievals.publish(
            DragonRetrieval(
                header=header,
                session_id=request.id,
                prompt=request.prompt,
                names=[hit.name for hit in found.hits],
                texts=[hit.chunk.text for hit in found.hits],
                weights=array("f", found.weights.tolist()),
            )
        )

    # The memory.

    @guarded
    def _on_odometry(self, msg: Odometry) -> None:
        assert self._diary is not None
        self._diary.on_pose(pose_from(msg))

    @guarded
    def _on_action(self, msg: NavigationAction) -> None:
        assert self._diary is not None
        self._diary.on_action(msg.session_id, action_from(msg), time.time())
        self._keep()

    @guarded
    def _on_instruction(self, msg: String) -> None:
        assert self._diary is not None
        self._diary.on_instruction(msg.data, time.time())
        self._keep()

    @guarded
    def _keep(self) -> None:
        """Write the episode if it has ended."""
        if self._diary is not None:
            self._write(self._diary.take(time.time()))

    def _write(self, episode: Document | None) -> None:
        """Have the last sightings of an episode written, then the episode."""
        if episode is not None and self._diary is not None:
            for document in (*self._diary.take_sightings(), episode):
                self._documents.submit(partial(self._remember, document))

    def _remember(self, document: Document, index: Index) -> None:
        """Write a document of the memory; in the thread of the changes."""
        memory = self.config.memory
        try:
            if is_episode(document.name):
                remember(index, document, memory.episodes)
                self._written += 1
            else:
                remember(index, document, MOST_THINGS)
        except CollabError as error:
            self.warn_of("memory", error)
            self._lost.add(error.code, str(error), time.monotonic())
