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
"""Parts of ``collab-llm bench minions``, in their order."""
