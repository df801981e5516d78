"""``collab-llm bench jupiter`` (paper 004): the planner, the router, emulated clusters."""

from __future__ import annotations

PARTS = ("planner", "router", "emulated")
"""Parts that ``collab-llm bench jupiter`` runs, in this order."""
