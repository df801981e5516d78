"""Honest clients beside attackers of a verifier, of DRAGON's cloud and of Jupiter's stage workers.

``collab-llm bench verifier --hostile``, ``bench dragon-hostile`` and ``bench jupiter-hostile`` run
it. ``attacks.py`` holds the attacks on any of them and ``<kind>_attacks.py`` those on one, a
coroutine each; ``attacker.py`` is the process that runs one; ``robots.py`` holds the honest
clients; ``<kind>_server.py`` says what is attacked; ``report.py`` starts a server for each attack
and judges.
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
JUPITER_ATTACK_NAMES = (
    "foreign_loads",
    "wrong_loads",
    "guessed_links",
    "malformed_tensors",
    "huge_shapes",
    "large_messages",
    "slow_readers",
    "pings",
    "describes",
    *_ANY,
    *_STRANGERS,
)
"""Likewise, of those on a stage worker."""
