"""The messages of ``messages.py`` to bytes and back; see ``transport/wire.py``.

``decode(encode(m)) == m``, draft distributions bit for bit: they cross the wire in half precision,
which holds them exactly (``decoding.sampling.to_wire``). A seed comes back modulo 2**64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from collab_llm_nodes.config import MAX_TOKENS
from collab_llm_nodes.decoding.sampling import SparseDistribution
from collab_llm_nodes.errors import InvalidInput, ProtocolError
from collab_llm_nodes.models.guide import Guide
from collab_llm_nodes.models.turns import MAX_TURNS
from collab_llm_nodes.protocols.edge_cloud import verifier_pb2 as pb
from collab_llm_nodes.protocols.edge_cloud.info import ServerInfo
from collab_llm_nodes.protocols.edge_cloud.messages import (
    MAX_DRAFT,
    ClientMessage,
    Close,
    Draft,
    EarlyExit,
    Open,
    Opened,
    ServerMessage,
    Verdict,
)
from collab_llm_nodes.transport.wire import (
    UPDATE,
    Codec,
    Failure,
    MessageCodec,
    WireRules,
    at_most,
    pack_distribution,
    unpack_distribution,
)

SERVICE = pb.DESCRIPTOR.services_by_name["Verifier"].full_name
SESSION = f"/{SERVICE}/Session"
DESCRIBE = f"/{SERVICE}/Describe"

MAX_SUPPORT = 4096
MAX_IMAGES = 64


def _check_open(m: Any) -> None:
    at_most(len(m.images), MAX_IMAGES, "images")
    at_most(len(m.turns), MAX_TURNS, "turns")
    at_most(len(m.replay), MAX_TOKENS, "replay")
    at_most(m.round, MAX_TOKENS, "round")  # each yields a token at least
    at_most(m.co_located, MAX_DRAFT, "co_located")
    if m.HasField("guide"):
        Guide(m.guide.kind, m.guide.source)  # its error names the field of the user


def _check_draft(m: Any) -> None:
    at_most(len(m.tokens), MAX_DRAFT, "tokens")
    at_most(len(m.after), MAX_TOKENS, "after")


def _write_distributions(probs: Sequence[SparseDistribution]) -> Any:
    packed = [pack_distribution(q) for q in probs]
    return pb.Distributions(
        sizes=[len(gaps) for gaps, _ in packed],
        gaps=[gap for gaps, _ in packed for gap in gaps],
        probs=b"".join(half for _, half in packed),
    )


def _read_distributions(m: Any) -> tuple[SparseDistribution, ...]:
    sizes = list(m.sizes)
    if len(sizes) > MAX_DRAFT or not all(1 <= size <= MAX_SUPPORT for size in sizes):
        raise InvalidInput(
            f"at most {MAX_DRAFT} distributions of 1 to {MAX_SUPPORT} entries",
            field="probs.sizes",
            remedy=UPDATE,
        )
    if sum(sizes) != len(m.gaps) or 2 * sum(sizes) != len(m.probs):
        raise InvalidInput(
            f"sizes promise {sum(sizes)} entries; {len(m.gaps)} ids, {len(m.probs)} bytes came",
            field="probs",
            remedy=UPDATE,
        )
    gaps = list(m.gaps)
    ends = [*accumulate(sizes)]
    return tuple(
        unpack_distribution(gaps[end - n : end], m.probs[2 * (end - n) : 2 * end], "probs.ids")
        for n, end in zip(sizes, ends, strict=True)
    )


def _check_exit(m: Any) -> None:
    _check_outcome(m)
    _check_figures(m.confidence)


def _check_verdict(m: Any) -> None:
    _check_outcome(m)
    _check_figures(m.compute_s, m.queue_s)


def _check_outcome(m: Any) -> None:
    """Check that all tokens but for at most one are drafted."""
    if not (1 <= len(m.tokens) <= MAX_DRAFT + 1 and len(m.tokens) - m.accepted in (0, 1)):
        raise ProtocolError(
            f"{len(m.tokens)} tokens of which {m.accepted} accepted",
            field="accepted",
            remedy=UPDATE,
        )


def _check_figures(*figures: float) -> None:
    for figure in figures:
        if not (math.isfinite(figure) and figure >= 0):
            raise ProtocolError(
                f"{figure} is no confidence or time", field="message", remedy=UPDATE
            )


_CLIENT: Codec[ClientMessage] = Codec(
    pb.ClientMessage,
    *(Open, Draft, Close),
    rules=WireRules(
        {Open: _check_open, Draft: _check_draft},
        {tuple[SparseDistribution, ...]: (_write_distributions, _read_distributions)},
    ),
)
_SERVER_RULES = WireRules({EarlyExit: _check_exit, Verdict: _check_verdict}, refusal=ProtocolError)
_SERVER: Codec[ServerMessage] = Codec(
    pb.ServerMessage, *(Opened, EarlyExit, Verdict, Failure), rules=_SERVER_RULES
)
_INFO: MessageCodec[ServerInfo] = MessageCodec(ServerInfo, pb.ServerInfo, _SERVER_RULES)

encode_client, decode_client = _CLIENT.encode, _CLIENT.decode
encode_server, decode_server = _SERVER.encode, _SERVER.decode
encode_info, decode_info = _INFO.encode, _INFO.decode
