"""Sessions that share passes of a fake model: what tests of them need."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest
from fake_models import VOCABULARY, FakeEngine, as_engine, encode
from raw_client import RawClient
from torch import Tensor

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.session import Feed
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud.messages import (
    ClientMessage,
    Draft,
    Open,
    ServerMessage,
)
from collab_llm_nodes.protocols.edge_cloud.server import ExitConfig
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server
from collab_llm_nodes.protocols.edge_cloud.target import TargetJudge, TargetSession
from collab_llm_nodes.serving import compute as compute_module
from collab_llm_nodes.serving.compute import Compute
from collab_llm_nodes.serving.scheduler import (
    BatchConfig,
)
from collab_llm_nodes.transport.server import ServerHandle

WAIT_S = 30.0
GREEDY = SamplingConfig()
OPEN = Open("go to the red box", (), GREEDY, 24, VOCABULARY)
TAKE_ALL_EXITS = ExitConfig(min_lead_s=0.0)


class Passes(FakeEngine):
    """Writes down who took part in each pass; can be held up at the start of one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(1, **options)
        self.sizes: list[tuple[int, ...]] = []  # tokens of each feed
        self.entered = threading.Semaphore(0)
        self.hold = threading.Event()
        self.hold.set()

    @contextlib.contextmanager
    def held(self, start: Callable[[], object]) -> Iterator[None]:
        """The pass that ``start`` causes ends with the context."""
        self.hold.clear()
        while self.entered.acquire(blocking=False):
            pass
        start()
        assert self.entered.acquire(timeout=WAIT_S)
        yield
        self.hold.set()

    def run(self, feeds: Sequence[Feed], **exits: Any) -> list[Tensor | Exception]:
        self.sizes.append(tuple(len(feed.ids) for feed in feeds))
        self.entered.release()
        assert self.hold.wait(WAIT_S)
        return super().run(feeds, **exits)


Serve = Callable[..., ServerHandle]
Join = Callable[[ServerHandle], RawClient]


def client_of(server: ServerHandle) -> RawClient:
    """Return a client on a connection of its own."""
    return RawClient(grpc.insecure_channel(f"127.0.0.1:{server.port}"))


class StillClock:
    """The compute thread's ``time``: it goes on only while that thread sleeps."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


class Posted:
    """One of its clients."""

    def __init__(self) -> None:
        self.id = "0" * 32
        self.owner = ""
        self.urgent = False
        self.gone = threading.Event()
        self._posted: queue.SimpleQueue[object] = queue.SimpleQueue()

    def post(self, message: object, more: bool = False) -> None:
        self._posted.put(message)

    def next(self) -> Any:
        return self._posted.get(timeout=WAIT_S)


def compute_of(engine: FakeEngine, **options: Any) -> Compute:
    judge = TargetJudge(TAKE_ALL_EXITS)
    options = {"max_sessions": 1, "batch": BatchConfig(), "judge": judge, **options}
    return Compute(as_engine(engine), **options)


def target_of(engine: FakeEngine, text: str = OPEN.text) -> TargetSession:
    return TargetSession(as_engine(engine), encode(Prompt(text)), OPEN)


class Wire:
    """A stream made of two queues."""

    def __init__(self, *messages: ClientMessage) -> None:
        self._incoming: asyncio.Queue[bytes | None] = asyncio.Queue()
        for message in messages:
            self._incoming.put_nowait(codec.encode_client(message))
        self._sent: asyncio.Queue[ServerMessage] = asyncio.Queue()
        self.next = self._sent.get

    def end(self) -> None:
        """The client has no more to say."""
        self._incoming.put_nowait(None)

    async def read(self) -> bytes | None:
        return await self._incoming.get()

    async def write(self, data: bytes) -> None:
        self._sent.put_nowait(codec.decode_server(data))


def share_a_pass(
    engine: Passes,
    server: ServerHandle,
    first: RawClient,
    others: Sequence[tuple[RawClient, Draft]],
) -> None:
    """Have ``others`` send while a pass for ``first`` is held up."""
    with engine.held(lambda: first.send(Draft(0, 0, (5,)))):
        for robot, draft in others:
            robot.send(draft)
        inbox = server._server.service._compute._inbox
        deadline = time.monotonic() + WAIT_S
        while len(inbox) < len(others):  # all are at the compute thread's door
            assert time.monotonic() < deadline


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
