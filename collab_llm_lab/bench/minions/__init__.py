"""Benchmark of Minion, MinionS and their baselines on long robot logs."""

PARTS = (
    "parallel",
    "protocols",
    "trained",
    "privacy",
    "attacks",
    "contexts",
    "sweeps",
    "requests",
    "workers",
    "reality",
    "reality_encoder",
)
"""Parts that ``collab-llm bench minions`` runs, in this order."""
