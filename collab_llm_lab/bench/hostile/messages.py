"""The messages of the attacks by a client with a token: oversized, absurd, stale or merely many.

``MESSAGES`` has an entry for each row of ``table.py`` that is not a stranger's. They are made from
an honest session's messages once, before the attack: an attacker shares the cores of the server
here, and what it computes must not become what is measured.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collab_llm_lab.bench.hostile.pictures import flat_png, progressive_jpeg
from collab_llm_nodes.protocols.dragon import codec as dragon_codec
from collab_llm_nodes.protocols.dragon import dragon_pb2 as dragon_pb
from collab_llm_nodes.protocols.edge_cloud import verifier_pb2 as verifier_pb
from collab_llm_nodes.protocols.jupiter import codec as jupiter_codec
from collab_llm_nodes.protocols.jupiter import stages_pb2 as jupiter_pb


@dataclass(frozen=True)
class Session:
    """Encoded messages of an honest session.

    Attributes:
        opened: The first one.
        light: Another first one, which costs the server as little as possible.
        messages: Those after it.
    """

    opened: bytes
    light: bytes
    messages: Sequence[bytes]


@dataclass(frozen=True)
class Messages:
    """Encoded messages of an attack.

    Attributes:
        first: First message of each stream, in turn; without any, streams begin with nothing.
        then: Messages after it on each stream.
        method: Method of the streams; empty: that of the server's sessions.
    """

    first: Sequence[bytes] = ()
    then: Sequence[bytes] = ()
    method: str = ""


Make = Callable[[Session], Messages]
_OPENS: Mapping[str, tuple[Any, str]] = {
    "verifier": (verifier_pb.ClientMessage, "open"),
    "dragon": (dragon_pb.DeviceMessage, "open"),
    "jupiter": (jupiter_pb.Order, "load"),
}
"""Type of a session's first message, and its field that opens the session."""
_NAN = struct.pack("<f", float("nan"))


def opened_with(server: str, honest: Session, changes: Mapping[str, Any]) -> bytes:
    """Return the first message of ``honest`` with other values of the fields ``changes`` names.

    A list takes the place of a repeated field; "a.b" names the field ``b`` of the message ``a``.
    """
    kind, opening = _OPENS[server]
    message = kind.FromString(honest.opened)
    for name, value in changes.items():
        *path, field = name.split(".")
        part = getattr(message, opening)
        for step in path:
            part = getattr(part, step)
        if isinstance(value, list):
            del getattr(part, field)[:]
            getattr(part, field).extend(value)
        else:
            setattr(part, field, value)
    data: bytes = message.SerializeToString()
    return data


def _opens(server: str, *changes: Mapping[str, Any], then: Sequence[bytes] = ()) -> Make:
    """Open sessions with each of ``changes`` in turn."""
    return lambda honest: Messages([opened_with(server, honest, one) for one in changes], then)


def _pictures(honest: Session, *pictures: bytes, times: int = 4) -> Messages:
    """Open sessions with each of ``pictures`` in turn, ``times`` in one session."""
    return Messages(
        [opened_with("verifier", honest, {"images": times * [picture]}) for picture in pictures]
    )


def _padded_png(size: int) -> bytes:
    """Return a picture of ``size`` bytes, all but some of them in a chunk of text."""
    picture = flat_png(8, 8)
    text = b"tEXt" + bytes(size - len(picture) - 12)
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    return picture[:-12] + chunk + picture[-12:]  # before the chunk that ends it


def _verifier_replays(honest: Session) -> Messages:
    """Replay a drafted token: the target has one to read."""
    drafted = verifier_pb.ClientMessage.FromString(honest.messages[0]).draft.tokens
    replay = {"images": [], "replay": [drafted[0]] * 200}
    return Messages([opened_with("verifier", honest, replay)])


def _draft(**fields: Any) -> bytes:
    """Return DRAGON's encoded draft for the first position."""
    data: bytes = dragon_pb.DeviceMessage(draft=dragon_pb.Draft(**fields)).SerializeToString()
    return data


def _stale_drafts(honest: Session) -> Messages:
    stale = _draft(gaps=[5], probs=b"\0\x3c")
    then = [stale, stale, honest.messages[-1], stale, stale]
    return _opens("dragon", {"aggregate_on": "cloud"}, then=then)(honest)


def _large_drafts(honest: Session) -> Messages:
    count = dragon_codec.MAX_SUPPORT - 1
    large = _draft(gaps=[1] * count, probs=b"\0\x3c" * count)
    return _opens("dragon", {"aggregate_on": "cloud"}, then=[large])(honest)


def _order(**fields: Any) -> bytes:
    """Return Jupiter's encoded order."""
    data: bytes = jupiter_pb.Order(**fields).SerializeToString()
    return data


def _pass(*steps: jupiter_pb.Step, states: bytes = b"") -> bytes:
    """Return Jupiter's encoded pass; ``pass`` is a word of Python, so it is set by name."""
    return _order(**{"pass": jupiter_pb.Pass(steps=steps, states=states)})


def _malformed_tensors(honest: Session) -> Messages:
    row = jupiter_pb.Step(ids=[1], want=1, rows=1)
    tree = jupiter_pb.Step(ids=[1, 2, 3], parents=[2, 2], want=1, rows=3)
    states = (b"", _NAN, _NAN * 1000, b"\0" * 4001)
    return Messages([*(_pass(row, states=data) for data in states), _pass(tree, states=_NAN * 3)])


def _huge_shapes(honest: Session) -> Messages:
    far = jupiter_pb.Step(lane=2**32 - 1, start=2**32 - 1, ids=[2**32 - 1], retain=2**32 - 1)
    rows = jupiter_codec.MAX_ROWS
    wide = jupiter_pb.Step(ids=[1] * rows, want=2, rows=rows)
    lanes = (
        jupiter_pb.Step(lane=n, ids=[1], want=2, rows=1) for n in range(4 * jupiter_codec.MAX_STEPS)
    )
    return Messages([_pass(far), _pass(wide), _pass(*lanes)])


_STREAMS: dict[str, Make] = {
    "streams": lambda honest: Messages(),
    "idle_sessions": lambda honest: Messages([honest.light]),
    "abandoned": lambda honest: Messages([honest.opened], honest.messages[:1]),
    "garbage": lambda honest: Messages([honest.light], [honest.light, *honest.messages]),
}
MESSAGES: dict[str, dict[str, Make]] = {
    "verifier": {
        # The second picture may be within a limit of pixels.
        "progressive_scans": lambda honest: _pictures(
            honest, *(progressive_jpeg(side, side, 500) for side in (4992, 1024)), times=1
        ),
        "large_pictures": lambda honest: _pictures(honest, progressive_jpeg(5000, 5000, 14)),
        "png_bomb": lambda honest: _pictures(honest, flat_png(5000, 5000)),
        "large_messages": lambda honest: _pictures(honest, _padded_png(2 << 20)),
        "replays": _verifier_replays,
        **_STREAMS,
    },
    "dragon": {
        "long_questions": _opens(
            "dragon",
            {"query": "Where is the red ball, and who saw it last in the kitchen? " * 60},
        ),
        "endless_questions": _opens("dragon", {"query": "ab cd ! " * 1000}),
        "replays": _opens("dragon", {"max_tokens": 1000, "replay": [7] * 900}),
        "far_ahead": _opens("dragon", {"max_tokens": 128, "max_ahead": 64}),
        "slow_readers": _opens("dragon", {"max_tokens": 128, "max_ahead": 64}),
        "large_drafts": _large_drafts,
        "stale_drafts": _stale_drafts,
        "wrong_hashes": _opens(
            "dragon",
            {"identity.vocabulary": "0" * 4096},
            {"identity.model": "\n{}\n" * 1024},
            {"identity.scorer": ""},
            {"temperature": 1e-320, "law.top_p": 3.0},
            {"aggregate_on": "nowhere\n"},
        ),
        "describes": lambda honest: Messages([b""], method=dragon_codec.DESCRIBE),
        **_STREAMS,
    },
    "jupiter": {
        "foreign_loads": _opens(
            "jupiter", *({"coordinator": f"{n:032x}", "chain": f"{n:032x}"} for n in range(50))
        ),
        "wrong_loads": _opens(
            "jupiter",
            {"weights": "\n{}\n" * 10_000},
            {"version": "0.0"},
            {"first": 2**32 - 1, "last": 0},
            {"lanes": 2**32 - 1},
            {"states": "float64"},
        ),
        "guessed_links": lambda honest: Messages(
            [_order(link=jupiter_pb.Link(chain=f"{n:032x}")) for n in range(50)]
        ),
        "malformed_tensors": _malformed_tensors,
        "huge_shapes": _huge_shapes,
        "large_messages": lambda honest: Messages(
            [_pass(jupiter_pb.Step(ids=[1]), states=bytes(16 << 20))]
        ),
        "slow_readers": lambda honest: Messages([honest.opened]),
        "pings": lambda honest: Messages([honest.opened], 40 * [_order(ping=jupiter_pb.Ping())]),
        "describes": lambda honest: Messages([b""], method=jupiter_codec.DESCRIBE),
        **_STREAMS,
    },
}
