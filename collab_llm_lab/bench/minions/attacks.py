"""Hostile programs (``attack_programs.py``) against the sandbox, and a host with canaries."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from collab_llm_lab.bench.minions.attack_programs import BOMBS, LEAKS, program
from collab_llm_nodes.protocols.minions.jobs import Fault, JobList
from collab_llm_nodes.protocols.minions.sandbox.host import Sandbox
from collab_llm_nodes.protocols.minions.sandbox.limits import SandboxLimits

CANARY = "canary_7f3a91"
_VARIABLE = "COLLAB_CANARY"
LEAK_LIMITS = SandboxLimits(run_s=30, wall_s=100, memory_mb=64)
BOMB_LIMITS = SandboxLimits(run_s=0.2, wall_s=100, memory_mb=64)
ENDS_WITHIN_S = 30.0
"""Deadline of a bomb, which its limit of computing time must end."""


@dataclass
class Host:
    """Canaries that a program must not reach."""

    folder: Path
    listener: socket.socket

    @property
    def file(self) -> Path:
        """File that contains the canary, also as its name."""
        return self.folder / CANARY

    @property
    def trace(self) -> Path:
        """File that a successful program creates."""
        return self.folder / "trace"

    def connected(self) -> bool:
        """Return True after a connection since the last call."""
        try:
            self.listener.accept()[0].close()
        except BlockingIOError:
            return False
        return True

    def leak(self, name: str) -> str:
        """Return the leak of this name, aimed at this host."""
        body = LEAKS[name].replace("FILE", str(self.file)).replace("FOLDER", str(self.folder))
        port = str(self.listener.getsockname()[1])
        return program(body.replace("TRACE", str(self.trace)).replace("PORT", port))

    def leaked(self, output: str) -> bool:
        """Return True if a program put the canary into ``output`` or left a trace."""
        return CANARY in output or self.trace.exists() or self.connected()


@contextmanager
def host() -> Iterator[Host]:
    """Yield a host with a canary in a file, in its name and in the environment."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        listener.setblocking(False)
        found = Host(Path(folder), listener)
        found.file.write_text(CANARY)
        (found.folder / "canary_module.py").write_text(f"text = '{CANARY}'")
        os.environ[_VARIABLE] = CANARY
        try:
            yield found
        finally:
            del os.environ[_VARIABLE]


def run_attacks() -> dict[str, int]:
    """Run all programs, and count those ``tried``, ``escaped`` and ``hung``."""
    escaped = hung = 0
    with host() as victim:
        with _sandbox(LEAK_LIMITS) as sandbox:
            for name in LEAKS:
                escaped += victim.leaked(str(sandbox.run(victim.leak(name), ["text"])))
        with _sandbox(BOMB_LIMITS) as sandbox:
            for body in BOMBS.values():
                begun = time.monotonic()
                result = sandbox.run(program(body), ["text"])
                late = time.monotonic() - begun >= ENDS_WITHIN_S
                flood = not isinstance(result, Fault) and len(result.jobs) > SandboxLimits().jobs
                hung += late or flood or not lives(sandbox)
    return {"tried": len(LEAKS) + len(BOMBS), "escaped": escaped, "hung": hung}


def lives(sandbox: Sandbox) -> bool:
    """Return True if the sandbox runs a program, within attempts for a slow machine."""
    return any(isinstance(sandbox.run(program(""), ["text"]), JobList) for _ in range(5))


@contextmanager
def _sandbox(limits: SandboxLimits) -> Iterator[Sandbox]:
    sandbox = Sandbox(limits)
    try:
        yield sandbox
    finally:
        sandbox.close()
