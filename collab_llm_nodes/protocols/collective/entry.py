"""Collective speculation (paper 002) in the registry."""

from __future__ import annotations

from collab_llm_nodes.protocols.base import Entry
from collab_llm_nodes.protocols.collective.running import check, start
from collab_llm_nodes.protocols.collective.settings import CollectiveConfig

ENTRY = Entry("collective", CollectiveConfig, start, takes=frozenset({"chat"}), check=check)
