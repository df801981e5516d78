"""A kind of server that can be attacked, with all that differs between one kind and another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collab_llm_lab.bench.hostile.robots import ROBOTS, Converse
from collab_llm_nodes.processes import Process


@dataclass(frozen=True)
class Recorded:
    """Messages of an honest session, for attackers: the first, a cheap first, and the others."""

    opened: bytes
    light: bytes
    messages: Sequence[bytes]


@dataclass(frozen=True)
class Server:
    """See the module's text.

    Attributes:
        name: the key of its attacks in ``attacker.ATTACKS``.
        method: of its stream.
        prepare: makes what it needs in a folder, by a seed; returns its settings, which are those
            of its shipped file as far as possible, and the answers that robots replay.
        converse: replays one of these answers.
        recorded: the messages of one of them.
        start: runs it with a file of settings, its address among them.
        wait: waits until it answers at an address, given its authority's file and the token.
        last_attack: the one under which it is told to end.
        drain_s: time that it has for that.
        robots: honest clients at a time; a single one keeps its connection.
    """

    name: str
    method: str
    prepare: Callable[[Path, int], tuple[dict[str, Any], Sequence[Any]]]
    converse: Converse
    recorded: Callable[[Any], Recorded]
    start: Callable[[Path], AbstractContextManager[Process]]
    wait: Callable[[Process, str, str, str], None]
    last_attack: str
    drain_s: float
    robots: int = ROBOTS
