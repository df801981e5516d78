"""Attacks on the messages of a stage worker, by somebody with a token beside its coordinator."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence

from collab_llm_lab.bench.hostile.attacks import (
    STRANGERS,
    STREAMS,
    Attacker,
    ask_often,
    by_name,
    hold_unread,
)
from collab_llm_nodes.protocols.jupiter import codec
from collab_llm_nodes.protocols.jupiter import stages_pb2 as pb

_NAN = struct.pack("<f", float("nan"))


def load_with(attacker: Attacker, change: Callable[[pb.Load], None]) -> bytes:
    """Return the Load of another coordinator after ``change``."""
    changed = pb.Order.FromString(attacker.opened)
    change(changed.load)
    data: bytes = changed.SerializeToString()
    return data


def pass_of(steps: Sequence[pb.Step], states: bytes = b"") -> bytes:
    """Return an encoded pass; ``pass`` is a word of Python, so it is set by name."""
    order = pb.Order(**{"pass": pb.Pass(number=0, steps=steps, states=states)})
    data: bytes = order.SerializeToString()
    return data


async def _begin_with(attacker: Attacker, messages: Sequence[bytes], per_s: float) -> None:
    """Begin ``per_s`` streams a second on one connection, each with one of ``messages``."""
    async with attacker.connection() as connection:
        while connection.open:
            for message in messages:
                await attacker.open(connection, message)
                await asyncio.sleep(1.0 / per_s)


async def foreign_loads(attacker: Attacker) -> None:
    """Ask for the worker's layers 200 times a second, in the name of other coordinators."""

    def of(number: int) -> Callable[[pb.Load], None]:
        def change(load: pb.Load) -> None:
            load.coordinator, load.chain = f"{number:032x}", f"{number:032x}"

        return change

    await _begin_with(attacker, [load_with(attacker, of(n)) for n in range(50)], 200.0)


async def wrong_loads(attacker: Attacker) -> None:
    """Ask 200 times a second for other weights, versions, layers, lanes, forms and paths."""

    def weights(load: pb.Load) -> None:
        load.weights = "\n{}\n" * 10_000

    def version(load: pb.Load) -> None:
        load.version = "0.0"

    def layers(load: pb.Load) -> None:
        load.first, load.last = 2**32 - 1, 0

    def lanes(load: pb.Load) -> None:
        load.lanes = 2**32 - 1

    def states(load: pb.Load) -> None:
        load.states = "float64"

    def path(load: pb.Load) -> None:
        load.path = "gloo"

    changes = (weights, version, layers, lanes, states, path)
    await _begin_with(attacker, [load_with(attacker, change) for change in changes], 200.0)


async def guessed_links(attacker: Attacker) -> None:
    """Claim 200 times a second to be the worker before, with guessed names of the chain."""
    names = [f"{n:032x}" for n in range(50)]
    links = [pb.Order(link=pb.Link(chain=name, port=1)).SerializeToString() for name in names]
    await _begin_with(attacker, links, 200.0)


async def malformed_tensors(attacker: Attacker) -> None:
    """Send 100 passes a second with states that are not finite, too few, too many, or no tree."""
    row = pb.Step(ids=[1], want=1, rows=1)
    tree = pb.Step(ids=[1, 2, 3], parents=[2, 2], want=1, rows=3)
    states = (b"", _NAN, _NAN * 1000, b"\0" * 4001)
    messages = [pass_of([row], data) for data in states] + [pass_of([tree], _NAN * 3)]
    await _begin_with(attacker, messages, 100.0)


async def huge_shapes(attacker: Attacker) -> None:
    """Send 50 passes a second whose few bytes speak of millions of tokens, lanes and logits."""
    far = pb.Step(lane=2**32 - 1, start=2**32 - 1, ids=[2**32 - 1], retain=2**32 - 1)
    wide = pb.Step(ids=[1] * codec.MAX_ROWS, want=2, rows=codec.MAX_ROWS)
    lanes = [pb.Step(lane=n, ids=[1], want=2, rows=1) for n in range(4 * codec.MAX_STEPS)]
    await _begin_with(attacker, [pass_of([far]), pass_of([wide]), pass_of(lanes)], 50.0)


async def large_messages(attacker: Attacker) -> None:
    """Begin two streams a second with states of 16 MB."""
    await _begin_with(attacker, [pass_of([pb.Step(ids=[1])], bytes(16 << 20))], 2.0)


async def slow_readers(attacker: Attacker) -> None:
    """Hold 600 streams that ask for layers, and read no refusal."""
    await hold_unread(attacker, attacker.opened)


async def pings(attacker: Attacker) -> None:
    """Ask 2,000 times a second for signs of life, on streams that hold no layers."""
    ping = pb.Order(ping=pb.Ping()).SerializeToString()
    async with attacker.connection() as connection:
        while connection.open:
            call = await attacker.open(connection, attacker.opened)
            for _ in range(40):
                await attacker.write(call, ping)
            call.done_writing()
            await asyncio.sleep(0.02)


async def describes(attacker: Attacker) -> None:
    """Ask 500 times a second for version and model."""
    await ask_often(attacker, codec.DESCRIBE)


ATTACKS = {
    **by_name(
        foreign_loads,
        wrong_loads,
        guessed_links,
        malformed_tensors,
        huge_shapes,
        large_messages,
        slow_readers,
        pings,
        describes,
    ),
    **STREAMS,
    **STRANGERS,
}
