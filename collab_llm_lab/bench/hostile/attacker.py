"""The process that attacks: ``python -m collab_llm_lab.bench.hostile.attacker BRIEFING``.

It prints "attacking" once its first bytes are sent, goes on for the briefing's time, and ends with
what it sent, as JSON. It has a low priority: on a machine of its own it would take nothing from the
server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import sys
from base64 import b64decode, b64encode
from dataclasses import asdict, dataclass
from pathlib import Path

from collab_llm_lab.bench.hostile.attacks import Attacker, attack_by_name
from collab_llm_lab.bench.hostile.messages import Session
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.transport.background import within

NICE = 10
"""An attacker with 19 would hardly send anything where others use the cores as well."""


@dataclass(frozen=True)
class Briefing:
    """The orders of an attacker's process, in a file of JSON.

    Attributes:
        server, attack: Names in ``table.ATTACKS``.
        seconds: Length of the attack.
        address, metrics_address: Those of the server.
        ca: File with the authority of its certificate; empty: no TLS.
        token: The right one.
        method: Method of the server's sessions.
        opened, light, messages: See ``Session``; in Base64.
    """

    server: str
    attack: str
    seconds: float
    address: str
    metrics_address: str
    ca: str
    token: str
    method: str
    opened: str
    light: str
    messages: tuple[str, ...]

    def write(self, file: Path) -> None:
        """Write it to ``file``."""
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")


def base64(message: bytes) -> str:
    """Return ``message`` as a briefing holds it."""
    return b64encode(message).decode()


def tls_context(ca: str) -> ssl.SSLContext | None:
    """Return a client's TLS context for HTTP/2 with the authority in ``ca``; empty: None."""
    if not ca:
        return None
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(["h2"])
    return context


def main() -> None:
    """Attack according to the briefing in the file that the first argument names."""
    briefing = Briefing(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    attacker = Attacker(
        briefing.address,
        briefing.metrics_address,
        tls_context(briefing.ca),
        briefing.token,
        briefing.method,
        Session(
            b64decode(briefing.opened),
            b64decode(briefing.light),
            [b64decode(message) for message in briefing.messages],
        ),
    )
    os.nice(NICE)
    asyncio.run(_attack(briefing, attacker))
    print(json.dumps(attacker.sent))


async def _attack(briefing: Briefing, attacker: Attacker) -> None:
    """Attack until the time is over; begin again whenever the server cuts the attack off."""
    attack = attack_by_name(briefing.server, briefing.attack, attacker)

    async def go_on() -> None:
        while True:
            try:
                await attack()
            except (CollabError, OSError, asyncio.TimeoutError):
                attacker.sent["cut_off"] += 1
                await asyncio.sleep(0.05)

    attacking = asyncio.ensure_future(go_on())
    while not attacker.sent:
        await asyncio.wait({attacking}, timeout=0.01)
    print("attacking", flush=True)
    with contextlib.suppress(asyncio.TimeoutError):
        await within(attacking, briefing.seconds)


if __name__ == "__main__":
    main()
