"""``collab-llm bench jupiter`` (paper 004): planner, router, emulated clusters, real workers."""

from __future__ import annotations

REAL_PARTS = ("prefill", "decode", "death")
"""Parts with worker processes on this machine."""
PARTS = ("planner", "router", "emulated", *REAL_PARTS)
"""Parts that ``collab-llm bench jupiter`` runs, in this order."""
