"""The process that attacks: ``python -m collab_llm_lab.bench.hostile.attacker BRIEFING``.

Says "attacking" when its first words are sent, goes on for as long as the briefing says, and ends
with what it sent, as JSON. It is of low priority: on a machine of its own it would take nothing
from the server.
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

from collab_llm_lab.bench.hostile import dragon_attacks, jupiter_attacks, verifier_attacks
from collab_llm_lab.bench.hostile.attacks import Attacker
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.transport.background import within

ATTACKS = {
    "verifier": verifier_attacks.ATTACKS,
    "dragon": dragon_attacks.ATTACKS,
    "jupiter": jupiter_attacks.ATTACKS,
}
"""All attacks, by the kind of server and by name."""
NICE = 10
"""An attacker with 19 would hardly send anything where others use the cores as well."""


@dataclass(frozen=True)
class Briefing:
    """The orders of an attacker's process, in a file of JSON.

    Attributes:
        server, attack: names in ``ATTACKS``.
        seconds: how long.
        address, metrics_address: of the server.
        ca: file with the authority of its certificate; empty: no TLS.
        token: the right one.
        method, opened, light, drafts: see ``Attacker``; messages in Base64.
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
    drafts: tuple[str, ...]

    def write(self, file: Path) -> None:
        """Leave it in ``file``."""
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")


def base64(message: bytes) -> str:
    """Return ``message`` as a briefing holds it."""
    return b64encode(message).decode()


def tls_context(ca: str) -> ssl.SSLContext | None:
    """Return how a client of HTTP/2 checks a certificate by the authority ``ca``; empty: None."""
    if not ca:
        return None
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(["h2"])
    return context


def main() -> None:
    """Attack as the briefing says that the first argument names."""
    briefing = Briefing(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    attacker = Attacker(
        briefing.address,
        briefing.metrics_address,
        tls_context(briefing.ca),
        briefing.token,
        briefing.method,
        b64decode(briefing.opened),
        b64decode(briefing.light),
        [b64decode(draft) for draft in briefing.drafts],
    )
    os.nice(NICE)
    asyncio.run(_attack(briefing, attacker))
    print(json.dumps(attacker.sent))


async def _attack(briefing: Briefing, attacker: Attacker) -> None:
    """Again and again until the time is over, whatever the server does against it."""

    attack = ATTACKS[briefing.server][briefing.attack]

    async def go_on() -> None:
        while True:
            try:
                await attack(attacker)
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
