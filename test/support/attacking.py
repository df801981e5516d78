"""Attacks of ``bench/hostile`` that are carried out until they have sent something."""

from __future__ import annotations

import asyncio
import contextlib
import time

from collab_llm_lab.bench.hostile.attacks import Attacker, attack_by_name
from collab_llm_lab.bench.hostile.messages import Session
from collab_llm_lab.bench.hostile.server import Server
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.transport.server import ServerHandle

_LEAST = 3
_WAIT_S = 60.0


def assert_attacks(
    server: Server, name: str, running: ServerHandle, token: str, honest: Session
) -> None:
    """Carry the attack ``name`` out, again if it is cut off, until it has sent some messages."""
    address, metrics = f"127.0.0.1:{running.port}", f"127.0.0.1:{running.metrics_port}"
    attacker = Attacker(address, metrics, None, token, server.method, honest)
    attack = attack_by_name(server.name, name, attacker)

    async def begin() -> None:
        attacking = asyncio.ensure_future(attack())
        deadline = time.monotonic() + _WAIT_S
        while sum(attacker.sent.values()) < _LEAST and time.monotonic() < deadline:
            await asyncio.wait({attacking}, timeout=0.05)
            if attacking.done():
                with contextlib.suppress(CollabError, OSError):  # cut off
                    attacking.result()
                attacking = asyncio.ensure_future(attack())
        attacking.cancel()
        await asyncio.wait({attacking})

    asyncio.run(begin())
    assert sum(attacker.sent.values()) >= _LEAST, attacker.sent
