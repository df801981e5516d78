"""MinionS (paper 000) in the registry."""

from __future__ import annotations

from collab_llm_nodes.protocols.base import Entry
from collab_llm_nodes.protocols.minions.running import MINIONS, check_minions, start_minions
from collab_llm_nodes.protocols.minions.served import ServedMinions

ENTRY = Entry(
    MINIONS,
    ServedMinions,
    start_minions,
    takes=frozenset({"documents"}),
    check=check_minions,
    service="Minions",
)
