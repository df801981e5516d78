"""Attacks on the messages of DRAGON's cloud, by somebody with a token."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from collab_llm_lab.bench.hostile.attacks import (
    STRANGERS,
    STREAMS,
    Attacker,
    ask_often,
    by_name,
    hold_unread,
)
from collab_llm_lab.bench.wire import Call
from collab_llm_nodes.protocols.dragon import codec
from collab_llm_nodes.protocols.dragon import dragon_pb2 as pb

_KEPT = 300
"""Sessions that an attacker holds at most."""


def open_with(attacker: Attacker, change: Callable[[pb.Open], None]) -> bytes:
    """Return the Open of an honest session after ``change``."""
    changed = pb.DeviceMessage.FromString(attacker.opened)
    change(changed.open)
    data: bytes = changed.SerializeToString()
    return data


async def _renew(attacker: Attacker, opened: bytes, per_s: float) -> None:
    """Open ``per_s`` sessions a second on one connection, and keep the last of them."""
    kept: deque[Call] = deque()
    async with attacker.connection() as connection:
        while connection.open:
            kept.append(await attacker.open(connection, opened))
            if len(kept) > _KEPT:
                kept.popleft().reset()
            await asyncio.sleep(1.0 / per_s)


async def long_questions(attacker: Attacker) -> None:
    """Open 20 sessions a second with questions that fill the context."""

    def change(opened: pb.Open) -> None:
        opened.query = "Where is the red ball, and who saw it last in the kitchen? " * 60

    await _renew(attacker, open_with(attacker, change), 20.0)


async def endless_questions(attacker: Attacker) -> None:
    """Open 20 sessions a second with questions of 8,000 characters, for which there is no room."""

    def change(opened: pb.Open) -> None:
        opened.query = "ab cd ! " * 1000

    await _renew(attacker, open_with(attacker, change), 20.0)


async def replays(attacker: Attacker) -> None:
    """Open 20 sessions a second that replay 900 tokens."""

    def change(opened: pb.Open) -> None:
        opened.max_tokens = 1000
        opened.replay.extend([7] * 900)

    await _renew(attacker, open_with(attacker, change), 20.0)


async def far_ahead(attacker: Attacker) -> None:
    """Open 20 sessions a second for which the cloud drafts 64 tokens ahead."""

    def change(opened: pb.Open) -> None:
        opened.max_tokens, opened.max_ahead = 128, 64

    await _renew(attacker, open_with(attacker, change), 20.0)


async def slow_readers(attacker: Attacker) -> None:
    """Hold 600 sessions that want 64 drafts each, and read none of them."""

    def change(opened: pb.Open) -> None:
        opened.max_tokens, opened.max_ahead = 128, 64

    await hold_unread(attacker, open_with(attacker, change))


async def large_drafts(attacker: Attacker) -> None:
    """Send five drafts of 3 MB a second, each a distribution over a million tokens."""

    def change(opened: pb.Open) -> None:
        opened.aggregate_on = "cloud"

    opened = open_with(attacker, change)
    count = codec.MAX_SUPPORT - 1
    draft = pb.Draft(position=0, gaps=[1] * count, probs=b"\0\x3c" * count)
    large = pb.DeviceMessage(draft=draft).SerializeToString()
    async with attacker.connection() as connection:
        while connection.open:
            call = await attacker.open(connection, opened)
            await attacker.write(call, large)
            await asyncio.sleep(0.2)
            call.reset()


async def stale_drafts(attacker: Attacker) -> None:
    """Send drafts and targets that are not due, 2,000 a second on ten sessions."""

    def change(opened: pb.Open) -> None:
        opened.aggregate_on = "cloud"

    opened = open_with(attacker, change)
    draft = pb.Draft(position=0, epoch=0, gaps=[5], probs=b"\0\x3c")
    messages = [pb.DeviceMessage(draft=draft).SerializeToString(), attacker.drafts[-1]]
    async with attacker.connection() as connection:
        calls: list[Call] = []
        while connection.open:
            calls = [call for call in calls if not call.ended]
            for _ in range(10 - len(calls)):
                calls.append(await attacker.open(connection, opened))
            for call in calls:
                for _ in range(4):
                    await attacker.write(call, messages[attacker.random.random() < 0.2])
            await asyncio.sleep(0.02)


async def wrong_hashes(attacker: Attacker) -> None:
    """Open 200 sessions a second as devices with other models, scorers or laws would."""

    def vocabulary(opened: pb.Open) -> None:
        opened.identity.vocabulary = "0" * 4096

    def model(opened: pb.Open) -> None:
        opened.identity.model = "\n{}\n" * 1024

    def scorer(opened: pb.Open) -> None:
        opened.identity.scorer = ""

    def law(opened: pb.Open) -> None:
        opened.temperature = 1e-320
        opened.law.top_p = 3.0

    def policy(opened: pb.Open) -> None:
        opened.aggregate_on = "nowhere\n"

    wrong = [open_with(attacker, each) for each in (vocabulary, model, scorer, law, policy)]
    async with attacker.connection() as connection:
        while connection.open:
            for opened in wrong:
                await attacker.open(connection, opened)
            await asyncio.sleep(0.025)


async def describes(attacker: Attacker) -> None:
    """Ask 500 times a second for model and limits."""
    await ask_often(attacker, codec.DESCRIBE)


ATTACKS = {
    **by_name(
        long_questions,
        endless_questions,
        replays,
        far_ahead,
        slow_readers,
        large_drafts,
        stale_drafts,
        wrong_hashes,
        describes,
    ),
    **STREAMS,
    **STRANGERS,
}
