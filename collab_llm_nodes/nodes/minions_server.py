"""Minion and MinionS (paper 000) as a node: questions about long documents.

Hosts the action ``minions/generate`` and its blocking service ``minions_generate``. With
``host_minion`` also ``minion/generate`` and ``minion_generate``, over the same two models. Started
by ``protocol_server minions``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from collab_llm_nodes.config import fixed, setting
from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.protocols.minions.equipment import Equipment
from collab_llm_nodes.protocols.minions.minion_entry import ENTRY as MINION
from collab_llm_nodes.protocols.minions.running import MinionsRunning
from collab_llm_nodes.protocols.minions.served import IN_PROCESS, ServedMinions
from collab_llm_nodes.ros.generation_host import GenerationHost, HostConfig
from collab_llm_nodes.ros.health import Status
from collab_llm_nodes.ros.protocol_server import ProtocolServer


@dataclass(frozen=True)
class MinionsServerConfig(ServedMinions, HostConfig):
    """Parameters of the node."""

    deadline_s: float = setting(
        300.0, "One answer, when the request names no deadline [s].", low=0.05, high=3600.0
    )
    max_waiting: int = setting(
        16,
        "Answers of one protocol, running or waiting; more are refused as BUSY.",
        low=1,
        high=256,
    )
    host_minion: bool = fixed(
        False,
        "Host minion/generate as well. It sends every word of the local model to the remote,"
        " bounded only by privacy.max_bytes.",
    )


class MinionsServer(ProtocolServer[MinionsServerConfig]):
    """Node of MinionS, and of Minion with ``host_minion``."""

    _chat: GenerationHost | None = None

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("minions", config_type=MinionsServerConfig, **node_arguments)

    def enter_process(self) -> None:
        models = (self.config.local_model, self.config.remote_model)
        here = [model.model for model in models if model.at == IN_PROCESS]
        if here:
            set_threads(*here)

    def configure(self) -> None:
        """Load the models and offer the interfaces; loading blocks the transition."""
        equipment = Equipment(self.config, self.resources())
        self.host = GenerationHost(self, self.entry, MinionsRunning(self.entry.name, equipment))
        if self.config.host_minion:
            lent = MinionsRunning(MINION.name, equipment, owner=False)
            self._chat = GenerationHost(self, MINION, lent)

    def deactivate(self) -> None:
        super().deactivate()
        if self._chat is not None:
            self._chat.cancel_all()

    def cleanup(self) -> None:
        if self._chat is not None:
            self._chat.close()  # first, since the models belong to the other host
            self._chat = None
        super().cleanup()

    def details(self, now: float) -> list[Status]:
        """Return the figures of the last answers of each protocol, and of the models."""
        own = super().details(now)
        if self._chat is None:
            return own
        chat, _ = self._chat.details(now)
        return [*own, replace(chat, name=f"{MINION.name} {chat.name}")]
