"""A verifier around a fake model, its clients, and what tests of them share."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from fake_models import (
    PROMPT_IDS,
    VOCABULARY,
    FakeEngine,
    as_engine,
    encode,
)

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.protocols.edge_cloud.messages import (
    Failure,
    Open,
    Opened,
    ServerMessage,
)
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.verifier_client import (
    SessionHandle,
    VerifierClient,
)
from collab_llm_nodes.transport.server import ServerHandle

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
