"""Turns at the robot: order, limits, and clients that call again and again."""

from __future__ import annotations

import asyncio

import pytest

from collab_llm_nodes.agents.turns import Rate, Turns
from collab_llm_nodes.errors import Busy


def test_a_client_that_calls_again_waits_until_others_had_their_turn() -> None:
    order = []

    async def use(turns: Turns, client: str, times: int) -> None:
        for _ in range(times):
            async with turns.take(client):
                order.append(client)
                await asyncio.sleep(0)

    async def all_at_once() -> None:
        turns = Turns(1, 60.0)
        await asyncio.gather(use(turns, "greedy", 5), use(turns, "modest", 2))

    asyncio.run(all_at_once())
    assert order[:4] == ["greedy", "modest", "greedy", "modest"]
    assert order.count("greedy") == 5


def test_a_client_has_one_turn_and_a_wait_ends() -> None:
    async def calls() -> None:
        turns = Turns(1, 0.01)
        async with turns.take("a"):
            with pytest.raises(Busy, match="your last call"):
                async with turns.take("a"):
                    pass
            with pytest.raises(Busy, match=r"others used the robot for 0.01 s"):
                async with turns.take("b"):
                    pass
        async with turns.take("b"):
            pass  # neither refusal has left anything taken

    asyncio.run(calls())


def test_a_turn_that_is_cancelled_is_given_back() -> None:
    async def calls() -> None:
        turns = Turns(1, 60.0)

        async def hold(client: str) -> None:
            async with turns.take(client):
                await asyncio.Event().wait()

        holding = asyncio.create_task(hold("a"))
        waiting = asyncio.create_task(hold("b"))
        await asyncio.sleep(0)
        for task in (waiting, holding):
            task.cancel()
        await asyncio.gather(holding, waiting, return_exceptions=True)
        for client in ("a", "b"):
            async with turns.take(client):
                pass

    asyncio.run(calls())


def test_a_rate_allows_a_burst_and_then_so_many_a_second() -> None:
    rate = Rate(2.0, burst=3)
    for _ in range(3):
        rate.take("a", 10.0)
    with pytest.raises(Busy, match="more than 2 calls a second"):
        rate.take("a", 10.0)
    rate.take("b", 10.0)
    rate.take("a", 10.5)
    with pytest.raises(Busy):
        rate.take("a", 10.5)
    for _ in range(3):
        rate.take("a", 100.0)
