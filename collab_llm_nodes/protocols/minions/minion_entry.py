"""Minion, the chat of two models (paper 000), in the registry."""

from __future__ import annotations

from collab_llm_nodes.protocols.base import Entry
from collab_llm_nodes.protocols.minions.running import MINION, check_minion, start_minion
from collab_llm_nodes.protocols.minions.served import ServedMinion

ENTRY = Entry(
    MINION,
    ServedMinion,
    start_minion,
    takes=frozenset({"documents"}),
    check=check_minion,
    service="Minion",
)
