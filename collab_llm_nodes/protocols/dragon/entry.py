"""DRAGON (paper 001) in the registry."""

from __future__ import annotations

from collab_llm_nodes.protocols.base import Entry
from collab_llm_nodes.protocols.dragon.running import check, start
from collab_llm_nodes.protocols.dragon.settings import DragonConfig

ENTRY = Entry("dragon", DragonConfig, start, check=check, service="DragonGenerate")
