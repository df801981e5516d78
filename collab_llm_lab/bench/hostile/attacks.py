"""Attacks on any server: each a coroutine that goes through one, and is called again at its end.

Those on one server's own messages are in ``verifier_attacks.py``, ``dragon_attacks.py`` and
``jupiter_attacks.py``. To add one, write a coroutine with one sentence of documentation, put it
into the table at the end of its file, and its name into the package's list. Payloads are made
beforehand and sending is paced: an attacker shares the cores of the server here, and what it
computes must not become what is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from collab_llm_lab.bench import http2
from collab_llm_lab.bench.wire import Call, Connection, connect
from collab_llm_nodes.transport.background import within

ADDRESS = "127.0.0.66"
"""The attackers' own: limits per address must not meet honest clients."""
CONNECT_S = 5.0
CALL_S = 3600.0
TICK_S = 0.02


@dataclass
class Attacker:
    """The means of an attack.

    Attributes:
        address, metrics_address: of the server, host:port.
        tls: how to check its certificate; None: it has none.
        token: the right one, for attacks by somebody who has it.
        method: of the server's stream.
        opened, drafts: encoded messages of an honest session; the first opens it.
        light: another first message, which costs the server as little as possible.
        sent: what was sent so far, by kind.
    """

    address: str
    metrics_address: str
    tls: ssl.SSLContext | None
    token: str
    method: str
    opened: bytes
    light: bytes
    drafts: Sequence[bytes]
    sent: Counter[str] = field(default_factory=Counter)
    random: random.Random = field(default_factory=lambda: random.Random(1))

    @contextlib.asynccontextmanager
    async def connection(self, *, token: bool = True) -> AsyncIterator[Connection]:
        """Hold a connection, whose calls carry the right token or none."""
        own = self.token if token else ""
        connecting = connect(self.address, tls=self.tls, token=own, source=ADDRESS)
        connection = await within(connecting, CONNECT_S)
        self.sent["connections"] += 1
        try:
            yield connection
        finally:
            connection.close()

    def begin(self, connection: Connection) -> Call:
        """Begin a stream and send nothing on it."""
        self.sent["streams"] += 1
        return connection.call(self.method, CALL_S)

    async def open(self, connection: Connection, opened: bytes) -> Call:
        """Begin a stream and send one message."""
        call = self.begin(connection)
        await self.write(call, opened)
        return call

    async def write(self, call: Call, message: bytes) -> None:
        """Send one message."""
        self.sent["messages"] += 1
        self.sent["bytes"] += len(message)
        await call.write(message)


# Streams, by somebody with a token.


async def streams(attacker: Attacker) -> None:
    """Hold 600 streams of one connection without an Open."""

    async def begin(connection: Connection) -> Call:
        return attacker.begin(connection)

    await _hold_calls(attacker, 600, begin)


async def idle_sessions(attacker: Attacker) -> None:
    """Hold 600 sessions of one connection that send no draft."""
    await _hold_calls(attacker, 600, lambda connection: attacker.open(connection, attacker.light))


async def _hold_calls(
    attacker: Attacker, count: int, begin: Callable[[Connection], Awaitable[Call]]
) -> None:
    async with attacker.connection() as connection:
        calls: list[Call] = []
        while connection.open:
            calls = [call for call in calls if not call.ended]
            for _ in range(min(count - len(calls), 50)):  # at most 500 a second
                calls.append(await begin(connection))
            await asyncio.sleep(0.1)


async def abandoned(attacker: Attacker) -> None:
    """Open ten sessions a second as a robot does, send a draft and give them up at once."""
    while True:
        async with attacker.connection() as connection:
            for _ in range(10):
                call = await attacker.open(connection, attacker.opened)
                await attacker.write(call, attacker.drafts[0])
                call.reset()
                await asyncio.sleep(0.1)


async def garbage(attacker: Attacker) -> None:
    """Send 500 messages a second that were valid before a few bytes were changed."""
    messages = (attacker.light, *attacker.drafts)
    async with attacker.connection() as connection:
        while connection.open:
            call = await attacker.open(connection, messages[0])
            for message in messages[: attacker.random.randrange(1, 10)]:
                await attacker.write(call, mutated(message, attacker.random))
            call.done_writing()
            await asyncio.sleep(TICK_S / 2)


def mutated(message: bytes, chance: random.Random) -> bytes:
    """Return ``message`` cut, changed, repeated or prolonged."""
    what, changed = chance.randrange(5), bytearray(message)
    if what == 0:
        return message[: chance.randrange(len(message) + 1)]
    if what == 1 and message:
        for _ in range(chance.randrange(1, 5)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        return bytes(changed)
    if what == 2:
        return message + message
    if what == 3:
        return message + chance.randbytes(chance.randrange(1, 20))
    position = chance.randrange(len(message) + 1)
    return message[:position] + chance.randbytes(chance.randrange(1, 8)) + message[position:]


async def hold_unread(attacker: Attacker, opened: bytes) -> None:
    """Hold 600 streams of one connection that begin with ``opened``, and read nothing of them."""
    calls: list[Call] = []
    async with attacker.connection() as connection:
        connection.send(http2.NO_WINDOW)
        while connection.open:
            calls = [call for call in calls if not call.ended]
            for _ in range(min(600 - len(calls), 20)):
                calls.append(await attacker.open(connection, opened))
            await asyncio.sleep(0.1)


async def ask_often(attacker: Attacker, method: str) -> None:
    """Ask an empty question 500 times a second."""
    async with attacker.connection() as connection:
        while connection.open:
            for _ in range(10):
                attacker.sent["questions"] += 1
                call = connection.call(method, 10.0)
                await call.write(b"")
                call.done_writing()
            await asyncio.sleep(TICK_S)


# Before authentication.


async def silent_connections(attacker: Attacker) -> None:
    """Hold 280 connections that say nothing."""
    await _hold_sockets(attacker, attacker.address, 280, b"")


async def slow_handshakes(attacker: Attacker) -> None:
    """Hold 280 connections that have sent half of a TLS greeting."""
    greeting = _client_hello()
    await _hold_sockets(attacker, attacker.address, 280, greeting[: len(greeting) // 2])


async def metrics_slow(attacker: Attacker) -> None:
    """Hold 400 half-sent requests to the port of the metrics."""
    await _hold_sockets(attacker, attacker.metrics_address, 400, b"GET /metrics HTTP/1.1\r\n")


async def headers_flood(attacker: Attacker) -> None:
    """Begin 5,000 calls a second without a token on one connection."""
    await _flood(attacker, b"")


async def rapid_reset(attacker: Attacker) -> None:
    """Begin 5,000 calls a second without a token on one connection and reset each at once."""
    await _flood(attacker, http2.reset(0))


async def _flood(attacker: Attacker, end: bytes) -> None:
    """Begin streams with a headers frame and ``end``, a frame to be numbered, or nothing."""
    scheme = "http" if attacker.tls is None else "https"
    block = http2.header_block(http2.grpc_fields(attacker.method, attacker.address, scheme=scheme))
    begin, number = http2.headers(0, block), 1
    async with attacker.connection(token=False) as connection:
        while connection.open:
            if connection.unsent < 1 << 20:
                for _ in range(int(5000 * TICK_S)):
                    connection.send(_numbered(begin, number) + _numbered(end, number))
                    number += 2
                    attacker.sent["streams"] += 1
            await asyncio.sleep(TICK_S)


def _numbered(frame: bytes, number: int) -> bytes:
    """Return ``frame``, if there is one, with another stream's number."""
    return frame[:5] + number.to_bytes(4, "big") + frame[9:] if frame else b""


async def forged_log(attacker: Attacker) -> None:
    """Say goodbye with lines for the log, and give metadata that are no text."""
    line = b'\n{"level": "ERROR", "message": "forged"}\nforged\n'
    fields: list[tuple[str, str | bytes]] = [*http2.grpc_fields(attacker.method, attacker.address)]
    broken = [*fields, ("authorization", b"Bearer \xff\xfe"), ("x-\n", b"\xc3\x28\r\n")]
    for why, debug in ((0, line), (11, b"too_many_pings" + line), (2, 50 * line)):
        async with attacker.connection(token=False) as connection:
            connection.send(http2.headers(1, http2.header_block([*fields, broken[-2]])))
            connection.send(http2.headers(3, http2.header_block(broken)))
            await asyncio.sleep(0.1)
        async with attacker.connection(token=False) as connection:
            connection.send(http2.goaway(debug, why))
            attacker.sent["goaways"] += 1
            await asyncio.sleep(0.1)


class _Held(asyncio.Protocol):
    """A connection that has said its only words, as long as the other side keeps it."""

    def __init__(self, words: bytes, held: set[_Held]) -> None:
        self._words, self._held = words, held

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._held.add(self)
        transport.write(self._words)

    def connection_lost(self, exc: Exception | None) -> None:
        self._held.discard(self)


async def _hold_sockets(attacker: Attacker, address: str, count: int, words: bytes) -> None:
    """Hold ``count`` connections; replace those that the other side ends, 500 a second at most."""
    loop, held = asyncio.get_running_loop(), set[_Held]()
    host, _, port = address.rpartition(":")
    try:
        while True:
            for _ in range(min(count - len(held), 50)):
                connecting = loop.create_connection(
                    lambda: _Held(words, held), host, int(port), local_addr=(ADDRESS, 0)
                )
                await within(connecting, CONNECT_S)
                attacker.sent["connections"] += 1
            await asyncio.sleep(0.1 if len(held) < count else TICK_S)
    finally:
        for one in held:
            one.transport.abort()


def _client_hello() -> bytes:
    """Return the first words of a TLS client."""
    sending = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(
        ssl.MemoryBIO(), sending, server_hostname="localhost"
    )
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return sending.read()


Attack = Callable[[Attacker], Awaitable[None]]


def by_name(*attacks: Attack) -> dict[str, Attack]:
    """Return ``attacks`` by their functions' names."""
    return {attack.__name__: attack for attack in attacks}


STREAMS = by_name(streams, idle_sessions, abandoned, garbage)
STRANGERS = by_name(
    silent_connections, slow_handshakes, headers_flood, rapid_reset, forged_log, metrics_slow
)
"""Attacks before authentication."""
