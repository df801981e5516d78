"""Benchmark of Minion, MinionS and their baselines on long robot logs."""

PARTS = (
    "parallel",
    "protocols",
    "string_search",
    "trained",
    "privacy",
    "attacks",
    "contexts",
    "sweeps",
    "requests",
    "workers",
    "pretrained",
    "pretrained_encoder",
)
"""Parts of ``collab-llm bench minions``, in their order."""
