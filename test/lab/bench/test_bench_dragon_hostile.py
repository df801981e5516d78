"""The attacks of ``bench dragon-hostile`` attack, and honest devices notice what is wrong.

A cloud with tables for a model, in this process, stands in for the real one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from attacking import assert_attacks
from dragon_sides import EOS, VOCAB, Serve, Tables, TableSide, ask, connect, serve
from waiting import wait_for

from collab_llm_lab.bench import http2, wire
from collab_llm_lab.bench.hostile.dragon_server import DRAGON, CloudAnswer, cloud_answer
from collab_llm_lab.bench.hostile.robots import ROBOTS, Endpoint, Observed, Robots
from collab_llm_lab.bench.hostile.table import ATTACKS
from collab_llm_nodes.decoding.aggregation import Party
from collab_llm_nodes.protocols.dragon import codec
from collab_llm_nodes.protocols.dragon import dragon_pb2 as pb
from collab_llm_nodes.protocols.dragon.service import Limits
from collab_llm_nodes.transport.background import within
from collab_llm_nodes.transport.wire_pb2 import Failure

__all__ = ["ask", "connect", "serve"]  # fixtures
WAIT_S = 60.0
TOKEN = "only-robots-with-this"


def an_answer(seed: int = 3) -> CloudAnswer:
    answer = cloud_answer(TableSide(Party.CLOUD, Tables()), "where is it?", seed)
    assert len(answer.drafts) > 3
    assert len(answer.targets) == len(answer.drafts) - 1
    return answer


def work(port: int, answer: CloudAnswer, token: str = TOKEN) -> Observed:
    async def ask_once() -> Observed:
        robots = Robots(Endpoint(f"127.0.0.1:{port}", token=token), [answer], DRAGON.converse)
        seen = await robots.work(0.0)
        robots.close()
        return seen

    return asyncio.run(within(ask_once(), WAIT_S))


def test_devices_have_the_clouds_own_answer_and_notice_another(serve: Serve) -> None:
    cloud = serve(TableSide(Party.CLOUD, Tables()), token=TOKEN)
    answer = an_answer()
    seen = work(cloud.port, answer)
    assert (seen.wrong, seen.failures) == (0, [])
    assert len(seen.rounds_s) == ROBOTS * len(answer.targets)
    assert len(seen.openings_s) == ROBOTS
    other = replace(answer, drafts=((answer.drafts[0] + 1) % VOCAB, *answer.drafts[1:]))
    assert work(cloud.port, other).wrong == ROBOTS
    assert len(work(cloud.port, answer, "wrong").failures) == ROBOTS


def test_the_answer_ends_where_the_model_ends_it() -> None:
    lengths = set()
    for seed in range(12):
        answer = cloud_answer(TableSide(Party.CLOUD, Tables()), "where is it?", seed)
        assert not set(answer.drafts[:-1]) & EOS
        lengths.add(len(answer.drafts))
    assert len(lengths) > 1


@pytest.mark.parametrize("name", ATTACKS["dragon"])
def test_every_attack_on_the_cloud_sends(name: str, serve: Serve) -> None:
    side = TableSide(Party.CLOUD, Tables())
    metrics = {"metrics_address": "127.0.0.1:0"}
    cloud = serve(side, token=TOKEN, limits=Limits(max_streams=1024), **metrics)
    assert_attacks(DRAGON, name, cloud, TOKEN, DRAGON.recorded(an_answer()))


def test_a_connection_that_is_lost_before_the_first_word_gets_out_leaves_no_trace(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    side = TableSide(Party.CLOUD, Tables())
    cloud = serve(side)

    async def go_silent() -> None:
        connection = await wire.connect(f"127.0.0.1:{cloud.port}")
        connection.send(http2.NO_WINDOW)
        for _ in range(8):
            await connection.call(codec.ANSWER, WAIT_S).write(an_answer().opened)
        deadline = time.monotonic() + WAIT_S
        while cloud.sessions < 8 and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        connection.close()

    asyncio.run(within(go_silent(), WAIT_S))
    assert len(side.decoders) > 0
    wait_for(lambda: cloud.sessions == 0)
    wait_for(lambda: all(decoder.closed for decoder in side.decoders))
    assert [record.getMessage() for record in caplog.records] == []


def failure_of(port: int, *messages: bytes) -> Failure:
    """Return the failure that a stream with these messages ends in."""

    async def talk() -> Failure:
        connection = await wire.connect(f"127.0.0.1:{port}")
        call = connection.call(codec.ANSWER, WAIT_S)
        for message in messages:
            await call.write(message)
        while True:
            reply = pb.CloudMessage.FromString(await call.read())
            if reply.WhichOneof("message") == "failure":
                connection.close()
                return reply.failure

    return asyncio.run(within(talk(), WAIT_S))


def test_a_draft_larger_than_its_law_allows_is_not_even_read(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = serve(TableSide(Party.CLOUD, Tables()))
    opened = pb.DeviceMessage.FromString(an_answer().opened)
    opened.open.aggregate_on = "cloud"
    draft = pb.Draft(gaps=[0, *[1] * (VOCAB - 1)], probs=b"\0\x3c" * VOCAB)
    largest = pb.DeviceMessage(draft=draft).SerializeToString()
    law = codec.decode_device(opened.SerializeToString()).law  # type: ignore[union-attr]
    assert len(largest) <= codec.largest_draft(law, VOCAB)
    read: list[int] = []
    decode: Callable[[bytes], object] = codec.decode_device

    def noted(data: bytes) -> object:
        read.append(len(data))
        return decode(data)

    monkeypatch.setattr(codec, "decode_device", noted)
    too_large = pb.DeviceMessage(draft=pb.Draft(gaps=[1] * 10**6)).SerializeToString()
    failure = failure_of(cloud.port, opened.SerializeToString(), too_large)
    assert (failure.code, failure.field) == ("INVALID_INPUT", "message")
    assert max(read) < 10**6
