"""Edge-cloud speculation (paper 003) in the registry."""

from __future__ import annotations

from collab_llm_nodes.protocols.base import Entry
from collab_llm_nodes.protocols.edge_cloud.running import EdgeCloudConfig, check, start

ENTRY = Entry(
    "edge_cloud",
    EdgeCloudConfig,
    start,
    takes=frozenset({"chat", "images"}),
    check=check,
    service="EdgeCloudGenerate",
)
