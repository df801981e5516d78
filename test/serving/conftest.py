"""A verifier around a fake model, and robots that speak to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_models import FakeEngine, as_engine, encode
from passes_bed import (
    TAKE_ALL_EXITS,
    Join,
    Serve,
    StillClock,
    client_of,
)
from raw_client import RawClient

from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server
from collab_llm_nodes.serving import compute as compute_module
from collab_llm_nodes.transport.server import ServerHandle


@pytest.fixture
def serve() -> Iterator[Serve]:
    running: list[ServerHandle] = []

    def start(engine: FakeEngine, **options: Any) -> ServerHandle:
        options = {"address": "127.0.0.1:0", "exits": TAKE_ALL_EXITS, **options}
        running.append(start_server(VerifierConfig(**options), as_engine(engine), encode))
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def join() -> Iterator[Join]:
    robots: list[RawClient] = []

    def make(server: ServerHandle) -> RawClient:
        robots.append(client_of(server))
        return robots[-1]

    yield make
    for robot in robots:
        robot.close()


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> StillClock:
    clock = StillClock()
    monkeypatch.setattr(compute_module, "time", clock)
    return clock
