"""Jupiter (paper 004) in the registry."""

from __future__ import annotations

from collab_llm_nodes.protocols.base import Entry
from collab_llm_nodes.protocols.jupiter.running import check, start
from collab_llm_nodes.protocols.jupiter.settings import JupiterConfig

ENTRY = Entry(
    "jupiter",
    JupiterConfig,
    start,
    takes=frozenset({"chat", "images"}),
    check=check,
    service="JupiterGenerate",
)
