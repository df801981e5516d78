"""Honest devices beside attackers who hold the token: right answers, and nothing is left behind.

The attackers have an address of their own, so that limits per address do not meet honest devices.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Awaitable, Callable

import pytest
from dragon_sides import EOS, INFO, VOCAB, Ask, Serve, Tables, TableSide, ask, connect, serve
from dragon_timeline import plain_answer
from waiting import wait_for

from collab_llm_lab.bench.hostile.attacks import mutated
from collab_llm_lab.bench.wire import Connection
from collab_llm_lab.bench.wire import connect as dial
from collab_llm_nodes.decoding.aggregation import (
    AggregationConfig,
    AggregationLaw,
    Party,
)
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.protocols.dragon import codec
from collab_llm_nodes.protocols.dragon.client import DragonClient
from collab_llm_nodes.protocols.dragon.device import Rules, identity_of
from collab_llm_nodes.protocols.dragon.link import PatienceConfig
from collab_llm_nodes.protocols.dragon.messages import Draft, Open, Target
from collab_llm_nodes.protocols.dragon.service import Limits
from collab_llm_nodes.transport.admission import Shares

__all__ = ["ask", "connect", "serve"]  # fixtures
ATTACKER = "127.0.0.66"
CALL_S = 60.0
OPEN = Open("where is it?", 24, identity_of(INFO), AggregationConfig(), aggregate_on="device")
RULES = Rules(patience=PatienceConfig(patience_s=60.0, silence_s=20.0))
Attack = Callable[[Connection, random.Random], Awaitable[None]]


def a_draft(position: int, epoch: int = 0) -> Draft:
    law = AggregationLaw(AggregationConfig(), VOCAB, 1.0, position)
    p, weight = Tables()(Party.DEVICE, ())
    return Draft(position, epoch, law.propose(p, weight, 0, Party.DEVICE), 0.01, 0, 0.0)


def a_target(position: int, token: int = 3) -> Target:
    return Target(position, token, (True, True), Party.CLOUD, False, (1.0, 1.0), 0.01, 0.1)


OPENED = codec.encode_device(OPEN)
DRAFTS = [codec.encode_device(a_draft(position)) for position in range(8)]
TARGETS = [codec.encode_device(a_target(position)) for position in range(8)]


async def garbage(connection: Connection, chance: random.Random) -> None:
    """Send messages that were valid before a few bytes were changed, Open included."""
    call = connection.call(codec.ANSWER, CALL_S)
    await call.write(OPENED if chance.random() < 0.7 else mutated(OPENED, chance))
    for _ in range(4):
        await call.write(mutated(chance.choice(DRAFTS + TARGETS), chance))
    call.done_writing()


async def lies(connection: Connection, chance: random.Random) -> None:
    """Send well-formed messages that no machine could send: wrong order, epoch, or office."""
    call = connection.call(codec.ANSWER, CALL_S)
    opened = Open(
        "where?",
        24,
        identity_of(INFO),
        AggregationConfig(),
        aggregate_on=chance.choice(["device", "cloud"]),
    )
    await call.write(codec.encode_device(opened))
    for _ in range(6):
        position = chance.randrange(30)
        message = a_draft(position) if chance.random() < 0.5 else a_target(position)
        await call.write(codec.encode_device(message))
    await asyncio.sleep(0.005)


async def flood(connection: Connection, chance: random.Random) -> None:
    """Send a thousand stale drafts at once."""
    call = connection.call(codec.ANSWER, CALL_S)
    await call.write(OPENED)
    for _ in range(1000):
        await call.write(DRAFTS[0])
    await asyncio.sleep(0.02)


async def abandoned(connection: Connection, chance: random.Random) -> None:
    """Open an answer, and reset the stream at once."""
    call = connection.call(codec.ANSWER, CALL_S)
    await call.write(OPENED)
    await asyncio.sleep(chance.choice([0.0, 0.002]))
    call.reset()


async def idle(connection: Connection, chance: random.Random) -> None:
    """Hold as many answers as there are places, and say nothing more."""
    for _ in range(20):
        call = connection.call(codec.ANSWER, CALL_S)
        await call.write(OPENED)
    await asyncio.sleep(0.3)


async def strangers(connection: Connection, chance: random.Random) -> None:
    """Open answers with other vocabularies, endless queries, impossible laws."""
    for broken in (
        Open("where?", 24, identity_of(INFO), AggregationConfig(), max_ahead=4_000_000_000),
        Open("where?" * 100_000, 24, identity_of(INFO), AggregationConfig()),
        Open("where?", 4_000_000_000, identity_of(INFO), AggregationConfig()),
        Open("where?", 24, identity_of(INFO), AggregationConfig(), aggregate_on="nowhere"),
        Open("where?", 24, identity_of(INFO), AggregationConfig(), replay=(0,)),
        Open("where?", 24, identity_of(INFO), AggregationConfig(), replay=(VOCAB,)),
    ):
        call = connection.call(codec.ANSWER, CALL_S)
        await call.write(codec.encode_device(broken))
    await asyncio.sleep(0.01)


ATTACKS: list[Attack] = [garbage, lies, flood, abandoned, idle, strangers]


class Attackers:
    """An attack that goes on in a thread until the ``with`` block ends."""

    def __init__(self, address: str, token: str, attack: Attack) -> None:
        self._address, self._token, self._attack = address, token, attack
        self._over = threading.Event()
        self.under_way = threading.Event()
        self.rounds = 0
        self._thread = threading.Thread(target=lambda: asyncio.run(self._go_on()))

    def __enter__(self) -> Attackers:
        self._thread.start()
        assert self.under_way.wait(60.0)
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join(60.0)
        assert not self._thread.is_alive()

    async def _go_on(self) -> None:
        chance = random.Random(5)
        while not self._over.is_set():
            try:
                connection = await dial(self._address, token=self._token, source=ATTACKER)
            except (CollabError, OSError):
                self.under_way.set()
                await asyncio.sleep(0.05)
                continue
            try:
                while connection.open and not self._over.is_set():
                    await self._attack(connection, chance)
                    self.rounds += 1
                    self.under_way.set()
                    await asyncio.sleep(0.005)
            except (CollabError, OSError, asyncio.TimeoutError):
                pass  # cut off
            finally:
                connection.close()


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_honest_devices_get_right_answers_beside_an_attack(
    serve: Serve,
    connect: Callable[..., DragonClient],
    ask: Ask,
    attack: Attack,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    model = Tables()
    side = TableSide(Party.CLOUD, model)
    cloud = serve(
        side,
        token="secret",
        limits=Limits(max_sessions=4, max_streams=64),
        shares=Shares(sessions_per_s=1000.0),
    )
    address = f"127.0.0.1:{cloud.port}"
    client = connect(address, token="secret")
    own = AggregationLaw(AggregationConfig(), VOCAB, 1.0, 0)
    right = plain_answer(own, model, EOS, 24)
    before = threading.active_count()
    with Attackers(address, "secret", attack) as attackers:
        for _ in range(5):
            told = ask(TableSide(Party.DEVICE, model), client, RULES)
            assert told.tokens == right
            assert told.metrics.unverified == 0
    assert attackers.rounds > 0
    wait_for(lambda: cloud.sessions == 0)
    wait_for(lambda: all(decoder.closed for decoder in side.decoders))
    wait_for(lambda: threading.active_count() <= before + 2)
    assert [record.getMessage() for record in caplog.records] == []
    assert ask(TableSide(Party.DEVICE, model), client, RULES).tokens == right
