"""The load generator's own HTTP/2, against the real server."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest
from fake_models import VOCABULARY, FakeEngine, as_engine, encode

from collab_llm_lab.bench.wire import Connection, connect
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import DeadlineExceeded, Unavailable
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud.messages import (
    Draft,
    EarlyExit,
    Open,
    Opened,
    Verdict,
)
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server
from collab_llm_nodes.transport.server import ServerHandle
from collab_llm_nodes.transport.wire import Failure

WAIT_S = 30.0
OPEN = Open("go to the red box", (), SamplingConfig(), 24, VOCABULARY)
T = TypeVar("T")


@pytest.fixture
def server() -> Iterator[ServerHandle]:
    with start_server(
        VerifierConfig(address="127.0.0.1:0"), as_engine(FakeEngine(1)), encode
    ) as running:
        yield running


def run(job: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(job, WAIT_S))


async def connected(server: ServerHandle) -> Connection:
    return await connect(f"127.0.0.1:{server.port}")


def test_calls_together_and_one_after_another_on_one_connection(server: ServerHandle) -> None:
    async def talk() -> None:
        wire = await connected(server)
        for _ in range(2):
            calls = [wire.call(codec.SESSION, WAIT_S) for _ in range(3)]
            for call in calls:
                await call.write(codec.encode_client(OPEN))
                await call.write(codec.encode_client(Draft(0, 0, ())))
            for call in calls:
                assert isinstance(codec.decode_server(await call.read()), Opened)
                verdict: Any = None
                while not isinstance(verdict, Verdict):  # on a busy machine exits come before it
                    verdict = codec.decode_server(await call.read())
                    assert isinstance(verdict, Verdict | EarlyExit)
                assert len(verdict.tokens) == 1
                call.done_writing()
                with pytest.raises(Unavailable, match="the call has ended"):
                    await call.read()
        wire.close()

    run(talk())


def test_large_messages_wait_for_the_server_to_take_them(server: ServerHandle) -> None:
    big = Open("x", (bytes(1_000_000),), SamplingConfig(), 24, VOCABULARY)  # windows are 64 KB

    async def talk() -> None:
        wire = await connected(server)
        for _ in range(3):
            call = wire.call(codec.SESSION, WAIT_S)
            await call.write(codec.encode_client(big))
            assert isinstance(codec.decode_server(await call.read()), Opened | Failure)
        wire.close()

    run(talk())


def test_a_call_that_fails_or_never_ends_is_an_error(server: ServerHandle) -> None:
    async def talk() -> None:
        wire = await connected(server)
        call = wire.call("/no.such/Method", WAIT_S)
        with pytest.raises(Unavailable):
            await call.read()
        call = wire.call(codec.SESSION, 0.05)
        with pytest.raises(DeadlineExceeded):
            await call.read()
        call = wire.call(codec.SESSION, WAIT_S)
        await call.write(codec.encode_client(OPEN))
        await call.read()
        reading = asyncio.ensure_future(call.read())
        await asyncio.get_running_loop().run_in_executor(None, server.stop)
        with pytest.raises(Unavailable):
            await reading
        wire.close()

    run(talk())
