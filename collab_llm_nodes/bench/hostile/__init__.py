"""``collab-llm bench verifier --hostile``: honest clients of a verifier beside attackers.

``attacks.py`` lists the attacks, one coroutine each; ``attacker.py`` is the process that runs one;
``robots.py`` holds the honest clients; ``report.py`` starts a verifier for each attack and judges.
"""

ATTACK_NAMES = (
    "progressive_scans",
    "large_pictures",
    "png_bomb",
    "large_messages",
    "streams",
    "idle_sessions",
    "abandoned",
    "garbage",
    "replays",
    "silent_connections",
    "slow_handshakes",
    "headers_flood",
    "rapid_reset",
    "forged_log",
    "metrics_slow",
)
"""Names of the attacks, here because the command's help must not import gRPC to list them."""
