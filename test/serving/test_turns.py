"""Fair turns at something scarce."""

from __future__ import annotations

import asyncio
import gc
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_client import WAIT_S

from collab_llm_nodes.serving.turns import FairQueue, Turns
from collab_llm_nodes.transport.admission import Peer

T = TypeVar("T")


# --- Turns --------------------------------------------------------------------------------------

ROBOT, FLOOD = Peer("robot:1", "robot"), Peer("flood:1", "flood")


def order(line: FairQueue[Any], count: int) -> list[Any]:
    """Return whose turns they are, one after the other."""
    out = []
    for _ in range(count):
        key = line.next()
        assert key is not None
        line.leave(key)
        out.append(key)
    return out


def test_a_flood_waits_for_the_robot() -> None:
    line: FairQueue[str] = FairQueue(1)
    for number in range(60):
        line.join(f"flood {number}", FLOOD, 2e6)
    line.join("robot", ROBOT, 1e4)
    line.join("robot again", ROBOT, 1e4)
    assert order(line, 2) == ["robot", "robot again"]


def test_many_connections_are_one_address() -> None:
    line: FairQueue[str] = FairQueue(1)
    for number in range(60):
        line.join(f"flood {number}", Peer(f"flood:{number}", "flood"), 1.0)
    for number in range(3):
        line.join(f"robot {number}", ROBOT, 1.0)
    turns = order(line, 6)
    assert [key.split()[0] for key in turns].count("robot") == 3


def test_an_urgent_turn_comes_first_in_its_connection_and_is_charged_for() -> None:
    line: FairQueue[str] = FairQueue(1)
    for number in range(3):
        line.join(f"question {number}", ROBOT, 1.0)
    line.join("motion", ROBOT, 2.0, urgent=True)
    assert order(line, 2) == ["motion", "question 0"]
    for number in range(60):
        line.join(f"flood {number}", FLOOD, 1.0, urgent=True)
    turns = order(line, 4)
    assert sorted(t for t in turns if "question" in t) == ["question 1", "question 2"], "charged"


@pytest.mark.parametrize("addresses", ["ab", "rr"])
def test_urgent_turns_that_alternate_do_not_hold_up_another_client(addresses: str) -> None:
    """Neither those of two addresses, nor those of two connections of its own address."""
    line: FairQueue[str] = FairQueue(1)
    peers = [Peer(f"{address}:{i}", address) for i, address in enumerate(addresses)]
    line.join("0", peers[0], 50.0, urgent=True)
    assert line.next() == "0"
    line.join("plain", Peer("r:2", "r"), 0.3)
    for number in range(1, 10):
        line.join(str(number), peers[number % 2], 50.0, urgent=True)
        line.leave(str(number - 1))
        if line.next() == "plain":
            return
    raise AssertionError("it never had its turn")


def test_robots_behind_one_address_share_it() -> None:
    line: FairQueue[str] = FairQueue(1)
    for number in range(60):
        line.join(f"flood {number}", Peer("nat:1", "nat"), 1.0)
    for number in range(3):
        line.join(f"robot {number}", Peer("nat:2", "nat"), 1.0)
    assert [key.split()[0] for key in order(line, 6)].count("robot") == 3


def test_a_place_is_left_for_others() -> None:
    line: FairQueue[str] = FairQueue(3)
    for number in range(3):
        line.join(f"a{number}", Peer("a:1", "a"), 1.0)
        line.join(f"b{number}", Peer("a:2", "a"), 1.0)
    assert {line.next(), line.next()} == {"a0", "b0"}
    assert line.next() is None
    line.join("robot", ROBOT, 1.0)
    assert line.next() == "robot"
    line.leave("a0")
    assert line.next() == "a1"
    line.leave("robot")
    line.leave("b2")  # gone while it waited
    assert line.next() is None


def test_those_who_are_not_known_are_not_one_client() -> None:
    line: FairQueue[int] = FairQueue(3)
    for key in range(4):
        line.join(key, Peer(), 1.0)
    assert [line.next() for _ in range(4)] == [0, 1, 2, None]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 9)), max_size=40),
    st.integers(1, 4),
)
def test_everybody_has_a_turn_and_nothing_is_kept(
    clients: list[tuple[int, int, int]], places: int
) -> None:
    line: FairQueue[int] = FairQueue(places)
    for key, (address, connection, cost) in enumerate(clients):
        line.join(key, Peer(f"{address}:{connection}", str(address)), cost)
    had, running = set[int](), list[int]()
    while len(had) < len(clients):
        while (begun := line.next()) is not None:
            running.append(begun)
        assert 0 < len(running) <= places
        had.add(running[0])
        line.leave(running.pop(0))
    assert not any(vars(line)[name] for name in ("_waiting", "_running", "_addresses"))
    assert not line._connections


def test_turns_of_those_who_have_gone() -> None:
    async def run() -> None:
        turns, release, ran = Turns(1), asyncio.Event(), []

        async def job(name: str) -> None:
            ran.append(name)
            await release.wait()

        def ask(name: str) -> asyncio.Task[None]:
            return asyncio.ensure_future(turns.run(ROBOT, 1.0, lambda: job(name)))

        tasks = [ask(name) for name in "abc"]
        await asyncio.sleep(0)
        tasks[0].cancel()  # it has begun: it keeps its turn
        tasks[1].cancel()
        await asyncio.gather(*tasks[:2], return_exceptions=True)
        assert ran == ["a"]
        assert not await turns.idle(0.0)
        release.set()
        await tasks[2]
        assert ran == ["a", "c"]
        assert await turns.idle(0.0)

    asyncio.run(run())


def test_nobody_hears_of_an_error_whose_caller_has_gone() -> None:
    unheard: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: unheard.append(told))
        turns, release = Turns(1), asyncio.Event()

        async def fail() -> None:
            await release.wait()
            raise OSError

        task = asyncio.ensure_future(turns.run(ROBOT, 1.0, fail))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        release.set()
        assert await turns.idle(WAIT_S)
        await asyncio.sleep(0)
        gc.collect()

    asyncio.run(run())
    assert not unheard
