"""Attacks on the verifier's own messages, by somebody with a token: pictures and replays."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections import deque
from collections.abc import Sequence

from collab_llm_lab.bench.hostile.attacks import STRANGERS, STREAMS, Attacker, by_name
from collab_llm_lab.bench.hostile.pictures import flat_png, progressive_jpeg
from collab_llm_lab.bench.wire import Call
from collab_llm_nodes.protocols.edge_cloud import verifier_pb2 as pb


def open_with(
    attacker: Attacker, pictures: Sequence[bytes] = (), replay: Sequence[int] = ()
) -> bytes:
    """Return the Open of an honest session with other pictures and tokens to replay."""
    changed = pb.ClientMessage.FromString(attacker.opened)
    del changed.open.images[:]
    changed.open.images.extend(pictures)
    changed.open.replay.extend(replay)
    data: bytes = changed.SerializeToString()
    return data


async def progressive_scans(attacker: Attacker) -> None:
    """Ask for a picture of 25 megapixels in 500 scans (22 kB, half a minute), and hang up."""
    for side in (4992, 1024):  # the second may be within a limit of pixels
        opened = open_with(attacker, [progressive_jpeg(side, side, 500)])
        async with attacker.connection() as connection:
            await attacker.open(connection, opened)
            await asyncio.sleep(2.0)


async def large_pictures(attacker: Attacker) -> None:
    """Open 60 sessions with four pictures of 25 megapixels each (0.7 kB, 1.5 s)."""
    opened = open_with(attacker, 4 * [progressive_jpeg(5000, 5000, 14)])
    async with attacker.connection() as connection:
        for _ in range(60):
            await attacker.open(connection, opened)
        await asyncio.sleep(5.0)


async def png_bomb(attacker: Attacker) -> None:
    """Open two sessions a second with four pictures of 100 kB that unpack to 100 MB each."""
    opened = open_with(attacker, 4 * [flat_png(5000, 5000)])
    async with attacker.connection() as connection:
        while connection.open:
            await attacker.open(connection, opened)
            await asyncio.sleep(0.5)


async def large_messages(attacker: Attacker) -> None:
    """Open 60 sessions with four pictures of 64 pixels and 2 MB each, most of them a comment."""
    opened = open_with(attacker, 4 * [_padded_png(2 << 20)])
    async with attacker.connection() as connection:
        for _ in range(60):
            await attacker.open(connection, opened)
        await asyncio.sleep(5.0)


def _padded_png(size: int) -> bytes:
    """Return a picture of ``size`` bytes, all but some of them in a chunk of text."""
    picture = flat_png(8, 8)
    text = b"tEXt" + bytes(size - len(picture) - 12)
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    return picture[:-12] + chunk + picture[-12:]  # before the chunk that ends it


async def replays(attacker: Attacker) -> None:
    """Open 20 sessions a second that replay 200 tokens, and keep the last 300 of them."""
    drafted = pb.ClientMessage.FromString(attacker.drafts[0]).draft.tokens
    opened = open_with(attacker, replay=[drafted[0]] * 200)
    kept: deque[Call] = deque()
    async with attacker.connection() as connection:
        while connection.open:
            kept.append(await attacker.open(connection, opened))
            if len(kept) > 300:
                kept.popleft().reset()
            await asyncio.sleep(0.05)


ATTACKS = {
    **by_name(progressive_scans, large_pictures, png_bomb, large_messages),
    **STREAMS,
    **by_name(replays),
    **STRANGERS,
}
