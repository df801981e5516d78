"""A verifier around a fake model, and clients of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from fake_models import (
    FakeEngine,
    as_engine,
    encode,
)
from raw_client import RawClient
from verifier_bed import (
    Connect,
    Serve,
)

from collab_llm_nodes.protocols.edge_cloud.link import LinkConfig
from collab_llm_nodes.protocols.edge_cloud.server import ExitConfig
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server
from collab_llm_nodes.protocols.edge_cloud.verifier_client import (
    ClientLinkConfig,
    LinkStatus,
    VerifierClient,
)
from collab_llm_nodes.transport.server import ServerHandle


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start verifiers around fakes; they are stopped in the end."""
    running: list[ServerHandle] = []

    def start(engine: FakeEngine, **settings_: Any) -> ServerHandle:
        # The fake's passes take no time: its exits never precede the verdict by much.
        exits = ExitConfig(min_lead_s=0.0)
        config = VerifierConfig(**{"address": "127.0.0.1:0", "exits": exits, **settings_})
        running.append(start_server(config, as_engine(engine), encode))
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Make clients; they are closed in the end."""
    clients: list[VerifierClient] = []

    def make(
        port: int,
        on_state: Callable[[LinkStatus], None] = lambda status: None,
        verdict_deadline_s: float = 30.0,
        **settings_: Any,
    ) -> VerifierClient:
        link = LinkConfig(verdict_deadline_s=verdict_deadline_s)
        config = ClientLinkConfig(**{"address": f"127.0.0.1:{port}", "link": link, **settings_})
        clients.append(VerifierClient(config, on_state))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def raw() -> Iterator[Callable[[int], RawClient]]:
    streams: list[RawClient] = []

    def make(port: int) -> RawClient:
        streams.append(RawClient(grpc.insecure_channel(f"localhost:{port}")))
        return streams[-1]

    yield make
    for stream in streams:
        stream.close()
