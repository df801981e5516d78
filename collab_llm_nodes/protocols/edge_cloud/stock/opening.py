"""The client of a verifier of any kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collab_llm_nodes.protocols.edge_cloud.sessions import LinkStatus, SessionClient
from collab_llm_nodes.protocols.edge_cloud.stock.settings import OURS, TargetLinkConfig
from collab_llm_nodes.protocols.edge_cloud.verifier_client import VerifierClient
from collab_llm_nodes.transport.heartbeat import HeartbeatConfig


def open_client(
    config: TargetLinkConfig,
    on_state: Callable[[LinkStatus], None] = lambda status: None,
    heartbeat: HeartbeatConfig | None = None,
) -> SessionClient[Any]:
    """Return a client of what ``config.kind`` names; see ``SessionClient`` for the arguments.

    Raises:
        ConfigError: a certificate, key or token file cannot be read.
        ModelError: the tokenizer of a stock server's model cannot be read.
    """
    if config.kind == OURS:
        return VerifierClient(config, on_state, heartbeat)
    from collab_llm_nodes.protocols.edge_cloud.stock.client import StockClient  # loads torch

    return StockClient(config, on_state, heartbeat)
