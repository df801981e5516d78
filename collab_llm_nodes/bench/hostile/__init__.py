"""``collab-llm bench verifier --hostile`` and ``bench dragon-hostile``: clients beside attackers.

``attacks.py``, ``verifier_attacks.py`` and ``dragon_attacks.py`` hold the attacks, one coroutine
each; ``attacker.py`` is the process that runs one; ``robots.py`` holds the honest clients;
``verifier_server.py`` and ``dragon_server.py`` say what is attacked; ``report.py`` starts a server
for each attack and judges.
"""

_ANY = (
    "streams",
    "idle_sessions",
    "abandoned",
    "garbage",
)
_STRANGERS = (
    "silent_connections",
    "slow_handshakes",
    "headers_flood",
    "rapid_reset",
    "forged_log",
    "metrics_slow",
)

ATTACK_NAMES = (
    "progressive_scans",
    "large_pictures",
    "png_bomb",
    "large_messages",
    *_ANY,
    "replays",
    *_STRANGERS,
)
"""Names of the attacks, here because the command's help must not import gRPC to list them."""
DRAGON_ATTACK_NAMES = (
    "long_questions",
    "endless_questions",
    "replays",
    "far_ahead",
    "slow_readers",
    "large_drafts",
    "stale_drafts",
    "wrong_hashes",
    "describes",
    *_ANY,
    *_STRANGERS,
)
"""Likewise, of those on DRAGON's cloud."""
