"""The messages of ``messages.py`` to bytes and back; see ``transport/wire.py``."""

from __future__ import annotations

import math
from typing import Any

from collab_llm_nodes.errors import InvalidInput, ProtocolError
from collab_llm_nodes.protocols.jupiter import stages_pb2 as pb
from collab_llm_nodes.protocols.jupiter.messages import (
    STATES,
    Connect,
    Connected,
    Link,
    Linked,
    Load,
    Loaded,
    Order,
    Outcome,
    Pass,
    Ping,
    Pong,
    Report,
    Result,
    Span,
    Step,
    Taken,
    Want,
    WorkerInfo,
)
from collab_llm_nodes.transport.wire import UPDATE, Codec, Failure, MessageCodec, WireRules, at_most
from collab_llm_nodes.transport.wire_pb2 import DescribeRequest

SERVICE = pb.DESCRIPTOR.services_by_name["StageWorker"].full_name
WORK = f"/{SERVICE}/Work"
DESCRIBE = f"/{SERVICE}/Describe"

MAX_STEPS = 256
"""Lanes in a pass."""
MAX_ROWS = 1 << 14
"""New tokens of a pass, all lanes together."""
MAX_LANES = 1 << 16
MAX_GUESSES = 16
_MAX_TOKENS = 1 << 24  # of a lane; also layers, context, vocabulary and width of a model
_MAX_SPANS = 1024
_MAX_NAME = 256  # characters


def encode_question(filler: int = 0) -> bytes:
    """Serialise the request of Describe, padded by ``filler`` bytes to time the link."""
    data: bytes = DescribeRequest(filler=bytes(filler)).SerializeToString()
    return data


def _check_load(m: Any) -> None:
    if m.states not in STATES:
        raise InvalidInput(
            f"{m.states[:20]!r} is unknown", field="states", remedy=f"one of {', '.join(STATES)}"
        )
    at_most(m.lanes, MAX_LANES, "lanes")
    _check_names(m, "coordinator", "chain", "version", "weights")


def _check_step(m: Any) -> None:
    at_most(m.lane, MAX_LANES, "lane")
    at_most(m.fork_of, MAX_LANES, "fork_of")
    at_most(m.want, max(Want), "want")
    at_most(m.guesses, MAX_GUESSES, "guesses")
    for name in ("start", "retain", "position"):
        at_most(getattr(m, name), _MAX_TOKENS, name)
    new, wanted = len(m.ids), m.want != Want.NOTHING
    if m.rows > new or (m.rows > 0) != wanted:
        raise InvalidInput(f"{m.rows} of {new} tokens", field="rows", remedy=UPDATE)
    if m.parents and (len(m.parents) != new - 1 or any(p > i for i, p in enumerate(m.parents))):
        raise InvalidInput("no tree", field="parents", remedy="parents come first")
    if m.parents and m.want == Want.VERDICT and m.rows < new:
        raise InvalidInput("a tree is judged as a whole", field="rows", remedy=UPDATE)
    if m.close and new:
        raise InvalidInput("closed and fed at once", field="close", remedy=UPDATE)
    if m.positions and len(m.positions) not in ((1,) if m.parents else (1, 3 * new)):
        raise InvalidInput(
            f"{len(m.positions)} positions of {new} tokens", field="positions", remedy=UPDATE
        )
    at_most(max(m.positions, default=0), _MAX_TOKENS, "positions")
    at_most(m.features, new, "features")
    if m.allowed and (m.want != Want.VERDICT or len(m.allowed) % m.rows):
        raise InvalidInput("are no rows of a verdict", field="allowed", remedy=UPDATE)


def _check_pass(m: Any) -> None:
    at_most(len(m.steps), MAX_STEPS, "steps")
    at_most(sum(len(step.ids) for step in m.steps), MAX_ROWS, "steps.ids")
    if len({step.lane for step in m.steps}) < len(m.steps):
        raise InvalidInput("a lane comes twice", field="steps.lane", remedy="send two passes")
    at_most(len(m.spans), _MAX_SPANS, "spans")


def _check_span(m: Any) -> None:
    if not (math.isfinite(m.begin) and math.isfinite(m.end)):
        raise InvalidInput("is no time", field="begin", remedy=UPDATE)


def _check_outcome(m: Any) -> None:
    if m.next < -1:
        raise ProtocolError(f"{m.next} is no token", field="next", remedy=UPDATE)


def _check_result(m: Any) -> None:
    at_most(len(m.spans), _MAX_SPANS, "spans")


def _check_info(m: Any) -> None:
    for name in ("num_layers", "context", "vocab_size", "width"):
        if not 0 < getattr(m, name) <= _MAX_TOKENS:
            raise ProtocolError("a model of no size", field=name, remedy=UPDATE)
    if any(token >= m.vocab_size for token in m.eos):
        raise ProtocolError("an end token outside the vocabulary", field="eos", remedy=UPDATE)
    _check_names(m, "version", "model", "weights", "vocabulary")


def _check_names(m: Any, *names: str) -> None:
    for name in names:
        at_most(len(getattr(m, name)), _MAX_NAME, name)


_RULES = WireRules(
    {
        Load: _check_load,
        Connect: lambda m: _check_names(m, "address"),
        Link: lambda m: _check_names(m, "chain"),
        Step: _check_step,
        Pass: _check_pass,
        Span: _check_span,
        Outcome: _check_outcome,
        Result: _check_result,
        WorkerInfo: _check_info,
    }
)
_ORDERS: Codec[Order] = Codec(pb.Order, *(Load, Connect, Link, Pass, Ping), rules=_RULES)
_REPORTS: Codec[Report] = Codec(
    pb.Report, *(Loaded, Connected, Linked, Taken, Result, Pong, Failure), rules=_RULES
)
_INFO: MessageCodec[WorkerInfo] = MessageCodec(WorkerInfo, pb.WorkerInfo, _RULES)

encode_order, decode_order = _ORDERS.encode, _ORDERS.decode
encode_report, decode_report = _REPORTS.encode, _REPORTS.decode
encode_info, decode_info = _INFO.encode, _INFO.decode
