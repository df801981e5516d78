"""Benchmark of Jupiter (paper 004): the planner, emulated clusters."""

from __future__ import annotations

PARTS = ("planner", "emulated")
"""Parts that ``collab-llm bench jupiter`` runs, in this order."""
