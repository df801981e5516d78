"""Two sides made of tables, and a cloud and a device around them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from enumeration import TableModel
from numpy.typing import NDArray

from collab_llm_nodes.decoding.aggregation import Party
from collab_llm_nodes.errors import Cancelled, InvalidInput
from collab_llm_nodes.knowledge.retrieval import Retrieved
from collab_llm_nodes.protocols.base import Control
from collab_llm_nodes.protocols.dragon.client import CloudConfig, DragonClient
from collab_llm_nodes.protocols.dragon.device import AnswerSoFar, DeviceAnswer, Question, Rules
from collab_llm_nodes.protocols.dragon.service import CloudServiceConfig, DragonService
from collab_llm_nodes.protocols.dragon.side import SideInfo
from collab_llm_nodes.transport.server import ServerHandle

VOCAB = 12
EOS = frozenset({0})
INFO = SideInfo("vocabulary", "model", "scorer", VOCAB, EOS)


class Tables:
    """Distributions and weights of two sides as functions of the prefix; partly alike."""

    def __init__(self, seed: int = 1, likeness: float = 0.6) -> None:
        self.common = TableModel(VOCAB, seed)
        self.own = (TableModel(VOCAB, seed + 1), TableModel(VOCAB, seed + 2))
        self.likeness = likeness

    def __call__(self, party: Party, prefix: tuple[int, ...]) -> tuple[np.ndarray, float]:
        p = self.likeness * self.common(prefix) + (1 - self.likeness) * self.own[party](prefix)
        p = p * np.array([0.3, *[1.0] * (VOCAB - 1)])  # answers that do not end at once
        weight = random.Random(f"{party} {prefix}").uniform(-1, 1)
        return (p / p.sum()).astype(np.float32), weight


class TableDecoder:
    """A ``SideDecoder`` whose passes take a while that ``cancel`` ends."""

    def __init__(self, side: TableSide) -> None:
        self._side = side
        self._pushed: list[int] = []
        self._cancel = threading.Event()
        self.closed = False

    def open(self, prompt_ids: Sequence[int], documents: Retrieved) -> None:
        raise NotImplementedError("the side opens it")

    def next(self) -> tuple[NDArray[np.float32], float]:
        assert not self.closed
        self._side.passes += 1
        self._cancel.clear()
        if self._side.before_pass is not None:
            self._side.before_pass(len(self._pushed))
        if self._side.pass_s and self._cancel.wait(self._side.pass_s):
            raise Cancelled("ended")
        return self._side.model(self._side.party, tuple(self._pushed))

    def read_on(self, tokens: int) -> bool:
        return False

    def push(self, token: int) -> None:
        assert 0 <= token < VOCAB
        self._pushed.append(token)

    def rollback(self, length: int) -> None:
        assert length <= len(self._pushed)
        del self._pushed[length:]

    def cancel(self) -> None:
        self._cancel.set()

    def close(self) -> None:
        self.closed = True


class TableSide:
    """A ``Side`` that reads its distributions from tables.

    Attributes:
        pass_s: duration of a pass.
        before_pass: called at the begin of each pass with the number of pushed tokens.
    """

    def __init__(
        self, party: Party, model: Tables, pass_s: float = 0.0, info: SideInfo = INFO
    ) -> None:
        self.party, self.model, self.pass_s, self.info = party, model, pass_s, info
        self.before_pass: Callable[[int], None] | None = None
        self.decoders: list[TableDecoder] = []
        self.queries: list[str] = []
        self.passes = 0
        self.pieces = 1

    def decoder(self, query: str, max_tokens: int) -> TableDecoder:
        if query == "unreadable":
            raise InvalidInput("cannot be read", field="query", remedy="ask otherwise")
        self.queries.append(query)
        self.decoders.append(TableDecoder(self))
        return self.decoders[-1]


Serve = Callable[..., ServerHandle[DragonService]]
Ask = Callable[..., AnswerSoFar]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start clouds around tables; they are stopped in the end."""
    running: list[ServerHandle[DragonService]] = []

    def start(side: TableSide, **settings: Any) -> ServerHandle[DragonService]:
        config = CloudServiceConfig(**{"address": "127.0.0.1:0", **settings})
        running.append(ServerHandle(DragonService(config, side, "tables", "1.0")))
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def connect() -> Iterator[Callable[..., DragonClient]]:
    """Make clients; they are closed in the end."""
    clients: list[DragonClient] = []

    def make(address: str, **settings: Any) -> DragonClient:
        clients.append(DragonClient(CloudConfig(**{"address": address, **settings})))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def ask() -> Iterator[Ask]:
    """Write answers on a device, each with a compute thread of its own."""
    threads = [ThreadPoolExecutor(1, "device-compute")]

    def answer(
        side: TableSide,
        client: DragonClient | None,
        rules: Rules | None = None,
        *,
        query: str = "where is the red ball?",
        seed: int = 0,
        max_tokens: int = 24,
        temperature: float = 1.0,
        emit: Callable[[AnswerSoFar], None] = lambda told: None,
        control: Control | None = None,
    ) -> AnswerSoFar:
        question = Question(query, max_tokens, temperature, seed)
        made = DeviceAnswer(side, threads[0], client, rules or Rules(), question)
        return made.run(emit, control or Control(), 0.0)

    yield answer
    threads[0].shutdown(wait=False)
