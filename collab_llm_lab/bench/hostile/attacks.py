"""Senders of attacks: one for clients with a token, and a coroutine for each stranger's attack.

Each goes on until the server ends its connection, and is then called again. Sending is paced: an
attacker shares the cores of the server here, and what it computes must not become what is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from collab_llm_lab.bench import http2
from collab_llm_lab.bench.hostile.messages import MESSAGES, Messages, Session
from collab_llm_lab.bench.hostile.table import ATTACKS, Attack
from collab_llm_lab.bench.wire import Call, Connection, connect
from collab_llm_nodes.transport.background import within

ADDRESS = "127.0.0.66"
"""The attackers' own address: limits per address must not meet honest clients."""
CONNECT_S = 5.0
CALL_S = 3600.0
TICK_S = 0.02


@dataclass
class Attacker:
    """The means of an attack.

    Attributes:
        address, metrics_address: Those of the server, host:port.
        tls: How to check its certificate; None: it has none.
        token: The right one, for attacks by a client that has it.
        method: Method of the server's sessions.
        honest: Messages of an honest session.
        sent: What was sent so far, by kind.
    """

    address: str
    metrics_address: str
    tls: ssl.SSLContext | None
    token: str
    method: str
    honest: Session
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

    async def write(self, call: Call, message: bytes) -> None:
        """Send one message."""
        self.sent["messages"] += 1
        self.sent["bytes"] += len(message)
        await call.write(message)


def attack_by_name(server: str, name: str, attacker: Attacker) -> Callable[[], Awaitable[None]]:
    """Return a function that carries out the attack ``name`` on ``server``, with messages made."""
    if name in STRANGERS:
        return lambda: STRANGERS[name](attacker)
    attack, messages = ATTACKS[server][name], MESSAGES[server][name](attacker.honest)
    return lambda: _send(attacker, attack, messages)


async def _send(attacker: Attacker, attack: Attack, messages: Messages) -> None:
    """Begin streams on one connection at the attack's pace, for the connection's lifetime."""
    held: deque[Call] = deque()
    loop = asyncio.get_running_loop()
    async with attacker.connection() as connection:
        if attack.unread:
            connection.send(http2.NO_WINDOW)
        due = loop.time() + (attack.connection_s or CALL_S)
        while connection.open and loop.time() < due:
            held = deque(call for call in held if not call.ended)
            for _ in range(attack.burst):
                if attack.most and len(held) >= attack.most:
                    if not attack.renew:
                        break
                    held.popleft().reset()
                call = await _begin(attacker, connection, messages)
                await _speak(attacker, call, attack, messages)
                if attack.end == "finish":
                    call.done_writing()
                elif attack.end == "reset":
                    call.reset()
                else:
                    held.append(call)
            if attack.repeat:
                for call in [call for call in held if not call.ended]:
                    await _speak(attacker, call, attack, messages)
            await asyncio.sleep(attack.burst / attack.per_s)


async def _begin(attacker: Attacker, connection: Connection, messages: Messages) -> Call:
    """Begin a stream with the first message whose turn it is."""
    turn = attacker.sent["streams"]
    attacker.sent["streams"] += 1
    call = connection.call(messages.method or attacker.method, CALL_S)
    if messages.first:
        await attacker.write(call, messages.first[turn % len(messages.first)])
    return call


async def _speak(attacker: Attacker, call: Call, attack: Attack, messages: Messages) -> None:
    """Send the messages after the first."""
    then, chance = messages.then, attacker.random
    if attack.mutate:
        then = [mutated(message, chance) for message in then[: chance.randrange(1, 10)]]
    for message in then:
        await attacker.write(call, message)


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


# Before authentication.


async def _silent_connections(attacker: Attacker) -> None:
    await _hold_sockets(attacker, attacker.address, 280, b"")


async def _slow_handshakes(attacker: Attacker) -> None:
    greeting = _client_hello()
    await _hold_sockets(attacker, attacker.address, 280, greeting[: len(greeting) // 2])


async def _metrics_slow(attacker: Attacker) -> None:
    await _hold_sockets(attacker, attacker.metrics_address, 400, b"GET /metrics HTTP/1.1\r\n")


async def _headers_flood(attacker: Attacker) -> None:
    await _flood(attacker, b"")


async def _rapid_reset(attacker: Attacker) -> None:
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


async def _forged_log(attacker: Attacker) -> None:
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
    """A connection that has sent its only bytes, as long as the server keeps it."""

    def __init__(self, first: bytes, held: set[_Held]) -> None:
        self._first, self._held = first, held

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._held.add(self)
        transport.write(self._first)

    def connection_lost(self, exc: Exception | None) -> None:
        self._held.discard(self)


async def _hold_sockets(attacker: Attacker, address: str, count: int, first: bytes) -> None:
    """Hold ``count`` connections; replace those that the server ends, at most 500 a second."""
    loop, held = asyncio.get_running_loop(), set[_Held]()
    host, _, port = address.rpartition(":")
    try:
        while True:
            for _ in range(min(count - len(held), 50)):
                connecting = loop.create_connection(
                    lambda: _Held(first, held), host, int(port), local_addr=(ADDRESS, 0)
                )
                await within(connecting, CONNECT_S)
                attacker.sent["connections"] += 1
            await asyncio.sleep(0.1 if len(held) < count else TICK_S)
    finally:
        for one in held:
            one.transport.abort()


def _client_hello() -> bytes:
    """Return the first message of a TLS client."""
    sending = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(
        ssl.MemoryBIO(), sending, server_hostname="localhost"
    )
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return sending.read()


STRANGERS: dict[str, Callable[[Attacker], Awaitable[None]]] = {
    "silent_connections": _silent_connections,
    "slow_handshakes": _slow_handshakes,
    "headers_flood": _headers_flood,
    "rapid_reset": _rapid_reset,
    "forged_log": _forged_log,
    "metrics_slow": _metrics_slow,
}
"""Attacks before authentication."""
