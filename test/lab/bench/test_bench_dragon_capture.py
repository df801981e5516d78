"""All bytes that leave the device are captured where they enter the link, below gRPC."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from dragon_sides import Serve, Tables, TableSide, ask, connect, serve
from waiting import wait_for

from collab_llm_lab.bench import http2, wire
from collab_llm_lab.bench.dragon.served import Audit, messages_in, served
from collab_llm_lab.bench.link.proxy import LinkProxy
from collab_llm_nodes.decoding.aggregation import Party
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.protocols.base import Control
from collab_llm_nodes.protocols.dragon import codec
from collab_llm_nodes.protocols.dragon.device import DeviceAnswer, Question, Rules
from collab_llm_nodes.protocols.dragon.messages import Draft, Open, Target
from collab_llm_nodes.protocols.dragon.scheduler import ScheduleConfig

__all__ = ["ask", "connect", "serve"]  # fixtures
WAIT_S = 60.0
QUERY = "where is the red ball that nobody else asks for?"


def test_messages_of_several_streams_are_put_together_from_their_frames() -> None:
    long = bytes(range(256)) * 200
    whole = http2.message(3, long)
    cut = len(whole) // 2  # in the middle of its payload
    parts = [
        http2.frame(http2.DATA, 0, 3, whole[9:cut]),
        http2.message(1, b"first"),
        http2.frame(http2.DATA, 0, 3, whole[cut:]),
        http2.frame(http2.PING, payload=bytes(8)),
        http2.message(1, b"last", last=True),
    ]
    data = http2.PREFACE + http2.frame(http2.SETTINGS) + b"".join(parts)
    assert messages_in(data) == [b"first", long, b"last"]
    assert messages_in(data[:-1]) == [b"first", long]
    compressed = http2.frame(http2.DATA, 0, 1, b"\1\0\0\0\1x")
    with pytest.raises(CollabError, match="compressed"):
        messages_in(http2.PREFACE + compressed)


@pytest.mark.parametrize("policy", ["device", "cloud", "follow"])
def test_what_the_device_says_stands_on_the_wire_and_nothing_else(policy: str) -> None:
    model = Tables()
    rules = Rules(schedule=ScheduleConfig(aggregate_on=policy))
    with (
        served(TableSide(Party.CLOUD, model), "tables") as way,
        ThreadPoolExecutor(1) as compute,
    ):
        for seed in range(2):
            audit = Audit(way)
            question = Question(QUERY, 12, 1.0, seed)
            side = TableSide(Party.DEVICE, model)
            answer = DeviceAnswer(side, compute, way.client, rules, question)
            told = answer.run(lambda told: None, Control(), 0.0)
            raw, sent = audit.end()
            messages = [codec.decode_device(data) for data in sent]
            assert [type(message) for message in messages].count(Open) == 1
            assert QUERY.encode() in raw
            assert sum(map(len, sent)) == told.metrics.bytes_up < len(raw)
            if policy == "device":
                targets = [m.token for m in messages if isinstance(m, Target)]
                assert targets == list(told.tokens)
                assert not any(isinstance(m, Draft) for m in messages)
            else:
                assert any(isinstance(m, Draft) for m in messages)


def test_a_message_past_the_client_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collab_llm_lab.bench.dragon.served._ARRIVAL_S", 0.5)
    with served(TableSide(Party.CLOUD, Tables()), "tables") as way:
        audit = Audit(way)
        assert audit.end()[1] == ()

        async def leak() -> None:
            connection = await wire.connect(way.link.address)
            await connection.call(codec.ANSWER, WAIT_S).write(b"my diary")
            connection.close()

        asyncio.run(leak())
        wait_for(way.capture.messages)
        with pytest.raises(CollabError, match="1 messages on the wire, 0 from the client"):
            audit.end()


def test_the_proxy_tells_both_directions_by_connection(serve: Serve) -> None:
    cloud = serve(TableSide(Party.CLOUD, Tables()))
    seen: dict[str, bytes] = {}

    def tap(lane: str, data: bytes) -> None:
        seen[lane] = seen.get(lane, b"") + data

    async def describe(address: str) -> None:
        connection = await wire.connect(address)
        call = connection.call(codec.DESCRIBE, WAIT_S)
        await call.write(b"")
        call.done_writing()
        await call.read()
        connection.close()

    with LinkProxy(f"127.0.0.1:{cloud.port}", tap=tap) as link:
        for _ in range(2):
            asyncio.run(describe(link.address))
    assert {"up 1", "down 1", "up 2", "down 2"} <= set(seen)
    assert seen["up 1"].startswith(http2.PREFACE)
    assert not seen["down 1"].startswith(http2.PREFACE)
