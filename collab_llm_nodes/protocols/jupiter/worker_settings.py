"""Configuration of a stage worker (``collab-llm jupiter-worker``)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from collab_llm_nodes.config import setting
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.protocols.jupiter.link import LinkConfig
from collab_llm_nodes.transport.admission import Shares
from collab_llm_nodes.transport.settings import ServerConfig, StreamLimits


@dataclass(frozen=True)
class WorkerLimits(StreamLimits):
    """Limits for coordinators and other clients of a worker."""

    max_streams: int = setting(
        16,
        "Streams at a time. A chain needs two; an address may have half of them.",
        low=4,
        high=1024,
    )
    max_message_bytes: int = setting(64 << 20, "Largest message [byte].", low=4096, high=1 << 30)
    max_waiting_bytes: int = setting(
        256 << 20, "Passes waiting to be computed, all together [byte].", low=4096, high=1 << 34
    )
    max_lanes: int = setting(
        32,
        "Lanes, each with a KV cache."
        " At least those of every coordinator (pipeline.lanes); lower it where memory is short.",
        low=1,
        high=1 << 16,
    )
    idle_s: float = setting(
        5.0, "Longest silence of a coordinator, which sends pings [s].", low=0.5
    )


@dataclass(frozen=True)
class WorkerConfig(ServerConfig):
    """Configuration of a stage worker. File names are PEM files."""

    address: str = setting("127.0.0.1:50561", "Listen here, host:port; port 0 takes a free one.")
    limits: WorkerLimits = field(default_factory=WorkerLimits)
    # A chain has two streams, possibly from one address; only their first messages are counted.
    shares: Shares = field(
        default_factory=lambda: Shares(connection=0.25, address=0.5, sessions_per_s=10.0)
    )
    drain_s: float = setting(
        0.5, "At shutdown, wait this long for the coordinator to leave [s].", low=0.0
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    heads: str = setting(
        "beside",
        "Folder of trained Medusa heads for self-drafting; 'beside': the checkpoint's own, if any;"
        " empty: none.",
    )
    # To the next worker; the default token is this worker's own.
    next: LinkConfig = field(default_factory=LinkConfig)
    emulated_slowdown: float = setting(
        1.0,
        "EMULATION of a slower device: factor on the time of a pass.",
        low=1.0,
        high=1000.0,
    )

    @property
    def link_to_next(self) -> LinkConfig:
        """Settings of the link to the next worker."""
        if self.next.token or self.next.token_file:
            return self.next
        return replace(self.next, token=self.token, token_file=self.token_file)
