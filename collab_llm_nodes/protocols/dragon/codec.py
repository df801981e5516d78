"""Messages to bytes and back. Messages of a peer are checked here before anyone else sees them.

``decode(encode(m))`` gives ``m`` with distributions bit for bit; delays come back rounded to
microseconds, and expected acceptances to a thousandth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from google.protobuf.message import Message as Parsed

from collab_llm_nodes.config import MAX_TOKENS
from collab_llm_nodes.decoding.aggregation import AggregationConfig, Party, SideDraft
from collab_llm_nodes.decoding.sampling import SparseDistribution
from collab_llm_nodes.errors import BY_CODE, CollabError, ConfigError, InvalidInput, ProtocolError
from collab_llm_nodes.protocols.dragon import dragon_pb2 as pb
from collab_llm_nodes.protocols.dragon.messages import (
    CloudInfo,
    CloudMessage,
    DeviceMessage,
    Draft,
    Identity,
    Line,
    Open,
    Opened,
    Target,
)
from collab_llm_nodes.transport.wire import UPDATE, parse

SERVICE = pb.DESCRIPTOR.services_by_name["Dragon"].full_name
ANSWER = f"/{SERVICE}/Answer"
DESCRIBE = f"/{SERVICE}/Describe"

MAX_SUPPORT = 1 << 20
_MOST_US = (1 << 32) - 1
_MOST_LINE = 1e6
"""Bound of the coefficients of a line of passes; not even NaN is within it."""


def encode_device(message: DeviceMessage) -> bytes:
    """Serialise a message of the device.

    Raises:
        InvalidInput: a value does not fit its field.
    """
    return _encode(pb.DeviceMessage, message)


def encode_cloud(message: CloudMessage) -> bytes:
    """Serialise a message of the cloud.

    Raises:
        InvalidInput: a value does not fit its field.
    """
    return _encode(pb.CloudMessage, message)


def decode_device(data: bytes) -> DeviceMessage:
    """Parse a message of the device.

    Raises:
        ProtocolError: not a message of this protocol.
        InvalidInput: a field holds what its definition forbids.
    """
    parsed = parse(pb.DeviceMessage, data)
    kind = parsed.WhichOneof("message")
    if kind == "open":
        return _read_open(parsed.open)
    if kind == "draft":
        return _read_draft(parsed.draft)
    if kind == "target":
        return _read_target(parsed.target)
    raise ProtocolError("empty or unknown message", field="message", remedy=UPDATE)


def decode_cloud(data: bytes) -> CloudMessage:
    """Parse a message of the cloud; its failure comes back as the error it is.

    Raises:
        ProtocolError: not a message of this protocol.
        InvalidInput: a field holds what its definition forbids.
    """
    parsed = parse(pb.CloudMessage, data)
    kind = parsed.WhichOneof("message")
    if kind == "opened":
        return Opened(parsed.opened.model, _read_line(parsed.opened), parsed.opened.documents)
    if kind == "draft":
        return _read_draft(parsed.draft)
    if kind == "target":
        return _read_target(parsed.target)
    if kind == "failure":
        f = parsed.failure
        return BY_CODE.get(f.code, CollabError)(f.message, field=f.field, remedy=f.remedy)
    raise ProtocolError("empty or unknown message", field="message", remedy=UPDATE)


def largest_draft(law: AggregationConfig, vocab_size: int) -> int:
    """Return the bytes that a draft has at most: five for each gap, two for each probability."""
    return 128 + 7 * min(law.max_support, vocab_size)


def encode_info(info: CloudInfo) -> bytes:
    """Serialise the answer to Describe."""
    return pb.CloudInfo(
        **{**asdict(info), "identity": pb.Identity(**asdict(info.identity))}
    ).SerializeToString()


def decode_info(data: bytes) -> CloudInfo:
    """Parse the answer to Describe.

    Raises:
        ProtocolError: it is none.
    """
    m = parse(pb.CloudInfo, data)
    return CloudInfo(
        m.model,
        _identity(m.identity),
        m.vocab_size,
        m.version,
        m.max_tokens,
        m.max_query_chars,
        m.sessions,
    )


def _encode(kind: Any, message: Any) -> bytes:
    try:
        name, content = _WRITERS[_key(message)](message)
        data: bytes = kind(**{name: content}).SerializeToString()
    except (ValueError, TypeError) as error:
        raise InvalidInput(
            f"cannot be sent: {error}",
            field=type(message).__name__,
            remedy="ids and counts are >= 0, text is Unicode",
        ) from error
    return data


def _key(message: Any) -> type:
    return CollabError if isinstance(message, CollabError) else type(message)


def _write_open(m: Open) -> tuple[str, Parsed]:
    law = m.law
    return "open", pb.Open(
        query=m.query,
        max_tokens=m.max_tokens,
        replay=m.replay,
        identity=pb.Identity(**asdict(m.identity)),
        law=pb.Law(
            name=law.law,
            gamma=law.gamma,
            top_p=law.top_p,
            max_support=law.max_support,
            paper_faithful=law.paper_faithful,
            temperature=m.temperature,
            seed=m.seed % 2**64,
        ),
        aggregate_on=m.aggregate_on,
        max_ahead=m.max_ahead,
        rtt_s=m.rtt_s,
        decode=_write_line(m.decode),
    )


def _read_open(m: Any) -> Open:
    if len(m.replay) > MAX_TOKENS:
        raise InvalidInput(
            f"{len(m.replay)} tokens", field="replay", remedy=f"at most {MAX_TOKENS}"
        )
    w = m.law
    if not 0 <= w.temperature < math.inf:
        raise InvalidInput(f"is {w.temperature}", field="law.temperature", remedy="0 or above")
    if not 0 <= m.rtt_s < 1e4:
        raise InvalidInput(f"is {m.rtt_s}", field="rtt_s", remedy="in seconds")
    try:
        law = AggregationConfig(w.name, w.gamma, w.top_p, w.max_support, w.paper_faithful)
    except ConfigError as error:
        raise InvalidInput(
            error.args[0], field=f"law.{error.field}", remedy=error.remedy
        ) from error
    return Open(
        m.query,
        m.max_tokens,
        _identity(m.identity),
        law,
        w.temperature,
        w.seed,
        m.aggregate_on,
        m.max_ahead,
        m.rtt_s,
        tuple(m.replay),
        _read_line(m),
    )


def _write_line(line: Line | None) -> Any:
    return None if line is None else pb.DecodeLine(k_a=line[0], k_b=line[1], k_c=line[2])


def _read_line(m: Any) -> Line | None:
    if not m.HasField("decode"):
        return None
    line = (m.decode.k_a, m.decode.k_b, m.decode.k_c)
    if not (all(abs(x) <= _MOST_LINE for x in line) and line[1] >= 1 / _MOST_LINE):
        raise InvalidInput(f"{line} is no line", field="decode", remedy="see section 5.2")
    return line


def _identity(m: Any) -> Identity:
    return Identity(m.vocabulary, m.model, m.scorer)


def _write_draft(m: Draft) -> tuple[str, Parsed]:
    kept = m.draft.kept
    half = kept.probs.astype("<f2")
    if not np.array_equal(half.astype(np.float32), kept.probs):
        raise ValueError("probabilities must be exact in half precision; make them by to_wire")
    return "draft", pb.Draft(
        position=m.position,
        epoch=m.epoch,
        index=int(kept.ids.searchsorted(m.draft.token)),
        gaps=np.diff(kept.ids, prepend=0).tolist(),
        probs=half.tobytes(),
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
    ids = np.cumsum(np.array(m.gaps, dtype=np.int64))
    if ids[-1] > np.iinfo(np.int32).max:
        raise InvalidInput(f"token id {ids[-1]} is too large", field="gaps", remedy=UPDATE)
    values = np.frombuffer(m.probs, dtype="<f2").astype(np.float32)
    kept = SparseDistribution(ids.astype(np.int32), values)
    draft = SideDraft(int(ids[m.index]), kept, m.log_weight)
    return Draft(m.position, m.epoch, draft, m.decode_us / 1e6, m.known, m.held_us / 1e6)


def _write_target(m: Target) -> tuple[str, Parsed]:
    flags = m.accepted[0] | m.accepted[1] << 1 | m.aggregator << 2 | m.finished << 3 | m.sole << 4
    return "target", pb.Target(
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


def _write_failure(m: CollabError) -> tuple[str, Parsed]:
    return "failure", pb.Failure(
        code=m.code, message=str(m.args[0]), field=m.field, remedy=m.remedy
    )


def _us(seconds: float) -> int:
    return min(_MOST_US, max(0, round(1e6 * seconds)))


_WRITERS: dict[type, Callable[[Any], tuple[str, Parsed]]] = {
    Open: _write_open,
    Opened: lambda m: (
        "opened",
        pb.Opened(model=m.model, decode=_write_line(m.decode), documents=m.documents),
    ),
    Draft: _write_draft,
    Target: _write_target,
    CollabError: _write_failure,
}
