"""A kind of server under attack: all that differs between the verifier, DRAGON and Jupiter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collab_llm_lab.bench.hostile.messages import Session
from collab_llm_lab.bench.hostile.robots import ROBOTS, Converse
from collab_llm_nodes.processes import Process


@dataclass(frozen=True)
class Server:
    """A kind of server.

    Attributes:
        name: Key of its attacks in ``table.ATTACKS``.
        method: Method of its sessions.
        prepare: Prepare a folder from a seed; return the server's settings, as shipped as far as
            possible, and the answers that robots replay.
        converse: Replay one of these answers.
        recorded: Return the messages of one of them.
        start: Run it with a file of settings, its address among them.
        wait: Wait until it answers at an address, given its authority's file and the token.
        last_attack: The attack during which it gets SIGTERM.
        drain_s: Time that it has to end then.
        robots: Honest clients at a time; a single one keeps its connection.
    """

    name: str
    method: str
    prepare: Callable[[Path, int], tuple[dict[str, Any], Sequence[Any]]]
    converse: Converse
    recorded: Callable[[Any], Session]
    start: Callable[[Path], AbstractContextManager[Process]]
    wait: Callable[[Process, str, str, str], None]
    last_attack: str
    drain_s: float
    robots: int = ROBOTS
