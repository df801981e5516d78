"""One row for each attack, and the goals of the robots beside it.

To add an attack, add a row here and a function of the same name in ``messages.py``. This module
imports nothing heavy: the commands' help lists the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

GOALS = {
    "normal_p99_ratio": 2.0,
    "opening_p99_ratio": 2.0,
    "wrong": 0,
    "failed": 0,
    "rss_growth_mb": 50.0,
    "thread_growth": 32,
    "raw_log_lines": 0,
    "tracebacks": 0,
    "metrics_s": 1.0,
}
"""Largest value allowed of each figure, for every attack."""
FRONT_ONLY = frozenset({"silent_connections", "slow_handshakes", "headers_flood", "rapid_reset"})
"""Attacks before authentication that a proxy must hold off: gRPC for Python cannot."""


@dataclass(frozen=True)
class Attack:
    """An attack, and for one by a client with a token its pace.

    Attributes:
        text: One sentence.
        per_s: Streams begun per second.
        burst: Streams begun at once.
        most: Streams held at most; 0: all that the server lets live.
        renew: Reset the oldest stream for a new one; otherwise begin none while ``most`` are held.
        end: What follows a stream's messages: "", "finish" (half-close) or "reset".
        repeat: Send the messages after the first again at each burst, on all streams held.
        mutate: Change the messages after the first at random, and send one to nine of them.
        unread: Leave the server no window to send in.
        connection_s: Lifetime of a connection; 0: as long as the server lets it live.
    """

    text: str
    per_s: float = 0.0
    burst: int = 1
    most: int = 0
    renew: bool = False
    end: str = ""
    repeat: bool = False
    mutate: bool = False
    unread: bool = False
    connection_s: float = 0.0


def _held(text: str, burst: int, *, unread: bool = False) -> Attack:
    return Attack(text, per_s=10 * burst, burst=burst, most=600, unread=unread)


def _renewed(text: str) -> Attack:
    return Attack(text, per_s=20, most=300, renew=True)


_STREAMS = {
    "streams": _held("Hold 600 streams of one connection without an Open.", 50),
    "idle_sessions": _held("Hold 600 sessions of one connection that send no draft.", 50),
    "abandoned": Attack(
        "Open ten sessions a second as a robot does, send a draft and give them up at once.",
        per_s=10,
        end="reset",
        connection_s=1.0,
    ),
    "garbage": Attack(
        "Send 500 messages a second that were valid before a few bytes were changed.",
        per_s=100,
        mutate=True,
        end="finish",
    ),
}
STRANGERS = {
    "silent_connections": Attack("Hold 280 connections that say nothing."),
    "slow_handshakes": Attack("Hold 280 connections that have sent half of a TLS greeting."),
    "headers_flood": Attack("Begin 5,000 calls a second without a token on one connection."),
    "rapid_reset": Attack(
        "Begin 5,000 calls a second without a token on one connection and reset each at once."
    ),
    "forged_log": Attack("Say goodbye with lines for the log, and give metadata that are no text."),
    "metrics_slow": Attack("Hold 400 half-sent requests to the port of the metrics."),
}
"""Attacks before authentication; ``attacks.py`` has a coroutine for each."""
_VERIFIER = {
    "progressive_scans": Attack(
        "Ask for a picture of 25 megapixels in 500 scans (22 kB, half a minute), and hang up.",
        per_s=0.5,
        connection_s=2.0,
    ),
    "large_pictures": Attack(
        "Open 60 sessions with four pictures of 25 megapixels each (0.7 kB, 1.5 s).",
        per_s=12,
        burst=60,
        connection_s=5.0,
    ),
    "png_bomb": Attack(
        "Open two sessions a second with four pictures of 100 kB that unpack to 100 MB each.",
        per_s=2,
    ),
    "large_messages": Attack(
        "Open 60 sessions with four pictures of 64 pixels and 2 MB each, most of them a comment.",
        per_s=12,
        burst=60,
        connection_s=5.0,
    ),
    **_STREAMS,
    "replays": _renewed(
        "Open 20 sessions a second that replay 200 tokens, and keep the last 300 of them."
    ),
    **STRANGERS,
}
_DRAGON = {
    "long_questions": _renewed("Open 20 sessions a second with questions that fill the context."),
    "endless_questions": _renewed(
        "Open 20 sessions a second with questions of 8,000 characters, for which there is no room."
    ),
    "replays": _renewed("Open 20 sessions a second that replay 900 tokens."),
    "far_ahead": _renewed("Open 20 sessions a second for which the cloud drafts 64 tokens ahead."),
    "slow_readers": _held(
        "Hold 600 sessions that want 64 drafts each, and read none of them.", 20, unread=True
    ),
    "large_drafts": Attack(
        "Send five drafts of 3 MB a second, each a distribution over a million tokens.",
        per_s=5,
        most=1,
        renew=True,
    ),
    "stale_drafts": Attack(
        "Send drafts and targets that are not due, 2,000 a second on ten sessions.",
        per_s=400,
        burst=10,
        most=10,
        repeat=True,
    ),
    "wrong_hashes": Attack(
        "Open 200 sessions a second as devices with other models, scorers or laws would.",
        per_s=200,
        burst=5,
    ),
    "describes": Attack(
        "Ask 500 times a second for model and limits.", per_s=500, burst=10, end="finish"
    ),
    **_STREAMS,
    **STRANGERS,
}
_JUPITER = {
    "foreign_loads": Attack(
        "Ask for the worker's layers 200 times a second, in the name of other coordinators.",
        per_s=200,
    ),
    "wrong_loads": Attack(
        "Ask 200 times a second for other weights, versions, layers, lanes, forms and paths.",
        per_s=200,
    ),
    "guessed_links": Attack(
        "Claim 200 times a second to be the worker before, with guessed names of the chain.",
        per_s=200,
    ),
    "malformed_tensors": Attack(
        "Send 100 passes a second with states that are not finite, too few, too many, or no tree.",
        per_s=100,
    ),
    "huge_shapes": Attack(
        "Send 50 passes a second whose few bytes speak of millions of tokens, lanes and logits.",
        per_s=50,
    ),
    "large_messages": Attack("Begin two streams a second with states of 16 MB.", per_s=2),
    "slow_readers": _held(
        "Hold 600 streams that ask for layers, and read no refusal.", 20, unread=True
    ),
    "pings": Attack(
        "Ask 2,000 times a second for signs of life, on streams that hold no layers.",
        per_s=50,
        end="finish",
    ),
    "describes": Attack(
        "Ask 500 times a second for version and model.", per_s=500, burst=10, end="finish"
    ),
    **_STREAMS,
    **STRANGERS,
}
ATTACKS = {"verifier": _VERIFIER, "dragon": _DRAGON, "jupiter": _JUPITER}
"""All attacks, by the kind of server and by name."""
