"""Attacks of ``bench/hostile`` that are carried out until they have sent something."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from collab_llm_lab.bench.hostile.attacks import Attacker
from collab_llm_nodes.errors import CollabError

_LEAST = 3
_WAIT_S = 60.0


def assert_attacks(attacker: Attacker, attack: Callable[[Attacker], Awaitable[None]]) -> None:
    """Carry an attack out, again if it is cut off, until it has sent some messages."""

    async def begin() -> None:
        attacking = asyncio.ensure_future(attack(attacker))
        deadline = time.monotonic() + _WAIT_S
        while sum(attacker.sent.values()) < _LEAST and time.monotonic() < deadline:
            await asyncio.wait({attacking}, timeout=0.05)
            if attacking.done():
                with contextlib.suppress(CollabError, OSError):  # cut off
                    attacking.result()
                attacking = asyncio.ensure_future(attack(attacker))
        attacking.cancel()
        await asyncio.wait({attacking})

    asyncio.run(begin())
    assert sum(attacker.sent.values()) >= _LEAST, attacker.sent
