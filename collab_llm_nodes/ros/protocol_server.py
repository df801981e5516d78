"""The server node of a protocol."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from collab_llm_nodes.protocols import registry
from collab_llm_nodes.protocols.base import Entry, Resources
from collab_llm_nodes.ros.generation_host import GenerationHost, HostConfig
from collab_llm_nodes.ros.health import Status
from collab_llm_nodes.ros.managed_node import ManagedNode

C = TypeVar("C", bound=HostConfig)


class ProtocolServer(ManagedNode[C]):
    """Hosts ``<protocol>/generate``.

    Args:
        protocol: a name of the registry.
        name: of the node; by default ``<protocol>_server``.
        config_type: the protocol's configuration and ``HostConfig`` in one frozen dataclass, for a
            node with further parameters; by default just these two.
    """

    host: GenerationHost

    def __init__(
        self,
        protocol: str,
        *,
        name: str = "",
        config_type: type[C] | None = None,
        **node_arguments: Any,
    ) -> None:
        self.entry = registry.find(protocol)
        super().__init__(
            name or f"{protocol}_server", config_type or server_config(self.entry), **node_arguments
        )

    def resources(self) -> Resources:
        """Return the resources of the protocol."""
        return Resources(log=self.get_logger())

    # Lifecycle.

    def configure(self) -> None:
        """Load the models and offer the interfaces; the load blocks the transition."""
        running = self.entry.start(self.config, self.resources())
        self.host = GenerationHost(self, self.entry, running)

    def deactivate(self) -> None:
        self.host.cancel_all()

    def cleanup(self) -> None:
        self.host.close()

    def diagnose(self) -> tuple[bytes, str, dict[str, Any]]:
        level, message, values = super().diagnose()
        loaded = hasattr(self, "host")
        return level, message, {**values, **(self.host.diagnose() if loaded else {})}

    def details(self, now: float) -> list[Status]:
        """Return the state of the last answers, and the protocol's own figures."""
        return self.host.details(now)


def server_config(entry: Entry) -> type:
    """Return the parameters of a server of ``entry``: the protocol's, and the host's."""
    return dataclasses.make_dataclass(
        f"{entry.config.__name__}Server", (), bases=(entry.config, HostConfig), frozen=True
    )
