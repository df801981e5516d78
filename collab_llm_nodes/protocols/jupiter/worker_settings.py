"""Everything ``collab-llm jupiter-worker`` can be told."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from collab_llm_nodes.config import setting
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.protocols.jupiter.link import LinkConfig
from collab_llm_nodes.transport.admission import Shares
from collab_llm_nodes.transport.settings import ServerConfig, StreamLimits, read_server_config


@dataclass(frozen=True)
class WorkerLimits(StreamLimits):
    """Bounds on what a coordinator can ask of a worker."""

    max_streams: int = setting(
        16,
        "Streams at a time: one coordinator, one worker before; an address may have half of them.",
        low=4,
        high=1024,
    )
    max_message_bytes: int = setting(64 << 20, "One message [byte].", low=4096, high=1 << 30)
    max_waiting_bytes: int = setting(
        256 << 20, "Passes that wait to be computed, together [byte].", low=4096, high=1 << 34
    )
    max_lanes: int = setting(32, "Lanes, each with a KV cache.", low=1, high=1 << 16)
    idle_s: float = setting(
        5.0, "Longest silence of a coordinator, which asks for signs of life [s].", low=0.5
    )


@dataclass(frozen=True)
class WorkerConfig(ServerConfig):
    """Everything a stage worker needs. File names are PEM files."""

    address: str = setting("127.0.0.1:50561", "Listen here, host:port; port 0 takes a free one.")
    limits: WorkerLimits = field(default_factory=WorkerLimits)
    # A chain has two streams here, the second perhaps from the first one's address; what comes on
    # them is not counted.
    shares: Shares = field(
        default_factory=lambda: Shares(connection=0.25, address=0.5, sessions_per_s=10.0)
    )
    drain_s: float = setting(
        0.5, "When told to stop, wait this long for the coordinator to leave [s].", low=0.0
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    heads: str = setting(
        "beside",
        "Folder of trained Medusa heads for self-drafting; 'beside': those beside the checkpoint,"
        " if there are any; empty: none.",
    )
    # To the worker behind; without a token of its own it gives this worker's.
    next: LinkConfig = field(default_factory=LinkConfig)
    allow_gloo: bool = setting(
        False,
        "Let hidden states come and go by torch.distributed's gloo, which neither encrypts nor asks"
        " for a token. Only in a network where everybody is trusted.",
    )
    emulated_slowdown: float = setting(
        1.0,
        "EMULATION: a pass takes so many times as long as its computation, to stand for a slower"
        " device.",
        low=1.0,
        high=1000.0,
    )

    @property
    def link_to_next(self) -> LinkConfig:
        """The way to speak to the worker behind."""
        if self.next.token or self.next.token_file:
            return self.next
        return replace(self.next, token=self.token, token_file=self.token_file)


def load_config(
    file: str | Path | None = None, *, model: str | None = None, address: str | None = None
) -> WorkerConfig:
    """Return the configuration in ``file``, with ``model`` and ``address`` in place of its own.

    Args:
        file: YAML, a path or the name of a shipped file.

    Raises:
        ConfigError: no such file, unknown keys, values out of range, or no model at all.
    """
    return read_server_config(WorkerConfig, file, model=model, address=address)
