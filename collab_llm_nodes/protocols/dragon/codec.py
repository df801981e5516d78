"""The messages of ``messages.py`` to bytes and back; see ``transport/wire.py``.

``decode(encode(m))`` gives ``m`` with distributions bit for bit; delays come back rounded to
microseconds, and expected acceptances to a thousandth.
"""

from __future__ import annotations

import math
from typing import Any

from collab_llm_nodes.config import MAX_TOKENS
from collab_llm_nodes.decoding.aggregation import AggregationConfig, Party, SideDraft
from collab_llm_nodes.errors import InvalidInput, ProtocolError
from collab_llm_nodes.protocols.dragon import dragon_pb2 as pb
from collab_llm_nodes.protocols.dragon.messages import (
    CloudInfo,
    CloudMessage,
    DeviceMessage,
    Draft,
    Open,
    Opened,
    Target,
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

SERVICE = pb.DESCRIPTOR.services_by_name["Dragon"].full_name
ANSWER = f"/{SERVICE}/Answer"
DESCRIBE = f"/{SERVICE}/Describe"

MAX_SUPPORT = 1 << 20
_MOST_US = (1 << 32) - 1
_MOST_LINE = 1e6
"""Bound of the coefficients of a line of passes; not even NaN is within it."""


def decode_cloud(data: bytes) -> CloudMessage:
    """Parse a message of the cloud; its failure comes back as the error it is.

    Raises:
        ProtocolError: not a message of this protocol.
        InvalidInput: a field holds what its definition forbids.
    """
    said = _CLOUD.decode(data)
    return said.error() if isinstance(said, Failure) else said


def largest_draft(law: AggregationConfig, vocab_size: int) -> int:
    """Return the bytes that a draft has at most: five for each gap, two for each probability."""
    return 128 + 7 * min(law.max_support, vocab_size)


def _check_open(m: Any) -> None:
    at_most(len(m.replay), MAX_TOKENS, "replay")
    if not 0 <= m.temperature < math.inf:
        raise InvalidInput(f"is {m.temperature}", field="temperature", remedy="0 or above")
    if not 0 <= m.rtt_s < 1e4:
        raise InvalidInput(f"is {m.rtt_s}", field="rtt_s", remedy="in seconds")
    _check_line(m)


def _check_line(m: Any) -> None:
    line = m.decode
    if line and not (
        len(line) == 3 and all(abs(x) <= _MOST_LINE for x in line) and line[1] >= 1 / _MOST_LINE
    ):
        raise InvalidInput(
            f"{[*line[:3]]} is no line", field="decode", remedy="k_a, k_b, k_c of section 5.2"
        )


def _write_draft(m: Draft) -> Any:
    kept = m.draft.kept
    gaps, probs = pack_distribution(kept)
    return pb.Draft(
        position=m.position,
        epoch=m.epoch,
        index=int(kept.ids.searchsorted(m.draft.token)),
        gaps=gaps,
        probs=probs,
        log_weight=m.draft.log_weight,
        decode_us=_us(m.decode_s),
        known=m.known,
        held_us=_us(m.held_s),
    )


def _read_draft(m: Any) -> Draft:
    count = len(m.gaps)
    if not (1 <= count <= MAX_SUPPORT and len(m.probs) == 2 * count and m.index < count):
        raise InvalidInput(
            f"{count} ids, {len(m.probs)} bytes of probabilities, token number {m.index}",
            field="gaps",
            remedy=f"1 to {MAX_SUPPORT} ids, two bytes and one of the ids",
        )
    kept = unpack_distribution(m.gaps, m.probs, "gaps")
    draft = SideDraft(int(kept.ids[m.index]), kept, m.log_weight)
    return Draft(m.position, m.epoch, draft, m.decode_us / 1e6, m.known, m.held_us / 1e6)


def _write_target(m: Target) -> Any:
    flags = m.accepted[0] | m.accepted[1] << 1 | m.aggregator << 2 | m.finished << 3 | m.sole << 4
    return pb.Target(
        position=m.position,
        token=m.token,
        flags=flags,
        expected_device=round(1000 * m.expected[0]),
        expected_cloud=round(1000 * m.expected[1]),
        decode_us=_us(m.decode_s),
        rtt_us=_us(m.rtt_s),
    )


def _read_target(m: Any) -> Target:
    if m.flags > 31 or max(m.expected_device, m.expected_cloud) > 1000:
        raise ProtocolError(
            f"flags {m.flags}, acceptance {m.expected_device} and {m.expected_cloud} of 1000",
            field="flags",
            remedy=UPDATE,
        )
    return Target(
        m.position,
        m.token,
        (bool(m.flags & 1), bool(m.flags & 2)),
        Party(m.flags >> 2 & 1),
        bool(m.flags & 8),
        (m.expected_device / 1000, m.expected_cloud / 1000),
        m.decode_us / 1e6,
        m.rtt_us / 1e6,
        bool(m.flags & 16),
    )


def _us(seconds: float) -> int:
    return min(_MOST_US, max(0, round(1e6 * seconds)))


_RULES = WireRules(
    {Open: _check_open, Opened: _check_line},
    {Draft: (_write_draft, _read_draft), Target: (_write_target, _read_target)},
)
_DEVICE: Codec[DeviceMessage] = Codec(pb.DeviceMessage, *(Open, Draft, Target), rules=_RULES)
_CLOUD: Codec[Opened | Draft | Target | Failure] = Codec(
    pb.CloudMessage, *(Opened, Draft, Target, Failure), rules=_RULES
)
_INFO: MessageCodec[CloudInfo] = MessageCodec(CloudInfo, pb.CloudInfo)

encode_device, decode_device = _DEVICE.encode, _DEVICE.decode
encode_cloud = _CLOUD.encode
encode_info, decode_info = _INFO.encode, _INFO.decode
