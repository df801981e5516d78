"""A verifier around a fake model, its clients, and what tests of them share."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
import pytest
from fake_models import (
    PROMPT_IDS,
    VOCABULARY,
    FakeEngine,
    as_engine,
    encode,
)
from raw_client import RawClient

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.interface import ServingEngine
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.protocols.edge_cloud.link import LinkConfig
from collab_llm_nodes.protocols.edge_cloud.messages import (
    Open,
    Opened,
    ServerMessage,
)
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.server import ExitConfig
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server
from collab_llm_nodes.protocols.edge_cloud.verifier import Encode
from collab_llm_nodes.protocols.edge_cloud.verifier_client import (
    ClientLinkConfig,
    LinkStatus,
    SessionHandle,
    VerifierClient,
)
from collab_llm_nodes.transport.server import ServerHandle
from collab_llm_nodes.transport.wire import Failure

WAIT_S = 30.0  # upper bound of waits for what takes milliseconds on an idle machine
PROMPT = Prompt("go to the red box")
GREEDY = SamplingConfig()
OPEN = Open(PROMPT.text, (), GREEDY, 24, VOCABULARY)
M = TypeVar("M")


class Inbox:
    """Receives a session's messages in the test's thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[ServerMessage] = queue.SimpleQueue()
        self.put = self._queue.put

    def get(self, kind: type[M]) -> M:
        """The next message, which must be of this kind."""
        message = self._queue.get(timeout=WAIT_S)
        assert isinstance(message, kind), message
        return message

    def skip_to(self, kind: type[M]) -> M:
        """The next message of this kind, whatever comes before it."""
        while not isinstance(message := self._queue.get(timeout=WAIT_S), kind):
            pass
        return message

    def empty(self) -> bool:
        return self._queue.empty()


Serve = Callable[..., ServerHandle]
Connect = Callable[..., VerifierClient]


def runner(client: VerifierClient) -> RemoteRunner:
    return RemoteRunner(as_engine(FakeEngine(1, noise=0.5)), client, encode=encode)


def opened_session(client: VerifierClient, opened: Open = OPEN) -> tuple[SessionHandle, Inbox]:
    inbox = Inbox()
    session = client.open(opened, inbox.put)
    assert inbox.get(Opened).prompt_tokens == len(PROMPT_IDS) + 4
    return session, inbox


class Gate:
    """Holds a forward pass at a layer until the test lets it go."""

    def __init__(self, layer: int, passes: int = 0) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()
        self._layer = layer
        self._passes_before = passes

    def __call__(self, layer: int) -> None:
        if layer != self._layer:
            return
        if self._passes_before:
            self._passes_before -= 1
            return
        self.reached.set()
        assert self.go.wait(WAIT_S)


def refusal(client: VerifierClient, opened: Open) -> Failure:
    inbox = Inbox()
    client.open(opened, inbox.put)
    failure = inbox.get(Failure)
    assert failure.remedy, failure
    return failure


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start verifiers around fakes; they are stopped in the end."""
    running: list[ServerHandle] = []

    def start(
        engine: FakeEngine, draft: tuple[ServingEngine, Encode] | None = None, **settings_: Any
    ) -> ServerHandle:
        # The fake's passes take no time: its exits never precede the verdict by much.
        exits = ExitConfig(min_lead_s=0.0)
        config = VerifierConfig(**{"address": "127.0.0.1:0", "exits": exits, **settings_})
        running.append(start_server(config, as_engine(engine), encode, draft))
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
