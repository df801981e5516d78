"""Messages to bytes and back; whatever a peer sends is checked here before anyone else sees it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any

from google.protobuf.message import Message

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import BY_CODE, CollabError, ConfigError, InvalidInput, ProtocolError
from collab_llm_nodes.protocols.jupiter import stages_pb2 as pb
from collab_llm_nodes.protocols.jupiter.messages import (
    PATHS,
    STATES,
    Connect,
    Connected,
    Failure,
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
from collab_llm_nodes.transport.wire import UPDATE, at_most, parse

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
_NAME = 256  # characters


def encode(message: Order | Report) -> bytes:
    """Serialise one message."""
    data: bytes = _WRITERS[type(message)](message).SerializeToString()
    return data


def decode_order(data: bytes) -> Order:
    """Parse what a coordinator or an earlier worker sent.

    Raises:
        ProtocolError: not a message of this protocol.
        InvalidInput: a field holds what the message's definition forbids.
    """
    order = parse(pb.Order, data)
    kind = order.WhichOneof("message")
    if kind == "pass":
        return _read_pass(getattr(order, "pass"))
    if kind == "ping":
        return Ping()
    if kind == "load":
        return _read_load(order.load)
    if kind == "connect":
        return Connect(_name(order.connect.address, "address"))
    if kind == "link":
        at_most(order.link.port, 65535, "port")
        return Link(_name(order.link.chain, "chain"), order.link.port)
    raise ProtocolError("empty or unknown message", field="message", remedy=UPDATE)


def decode_report(data: bytes) -> Report:
    """Parse what a worker sent.

    Raises:
        ProtocolError: not a message of this protocol, or one that makes no sense.
    """
    report = parse(pb.Report, data)
    kind = report.WhichOneof("message")
    if kind == "taken":
        return Taken(report.taken.number)
    if kind == "result":
        return _read_result(report.result)
    if kind == "pong":
        pong = report.pong
        return Pong(pong.received, pong.begun, pong.computed, pong.busy)
    if kind == "loaded":
        return Loaded(report.loaded.bytes)
    if kind == "failure":
        f = report.failure
        code = f.code if f.code in BY_CODE else CollabError.code
        return Failure(code, f.message, f.field, f.remedy)
    if kind in _PLAIN:
        return _PLAIN[kind]
    raise ProtocolError("empty or unknown message", field="message", remedy=UPDATE)


def encode_question(filler: int = 0) -> bytes:
    """Serialise the request of Describe, padded by ``filler`` bytes to time the link."""
    data: bytes = pb.DescribeRequest(filler=bytes(filler)).SerializeToString()
    return data


def encode_info(info: WorkerInfo) -> bytes:
    """Serialise the answer to Describe."""
    data: bytes = pb.WorkerInfo(**{**asdict(info), "eos": sorted(info.eos)}).SerializeToString()
    return data


def decode_info(data: bytes) -> WorkerInfo:
    """Parse the answer to Describe.

    Raises:
        ProtocolError: it is none.
    """
    parsed = parse(pb.WorkerInfo, data)
    found = {field.name: getattr(parsed, field.name) for field in fields(WorkerInfo)}
    for name in ("num_layers", "context", "vocab_size", "width"):
        if not 0 < found[name] <= _MAX_TOKENS:
            raise ProtocolError("a model of no size", field=name, remedy=UPDATE)
    if any(token >= parsed.vocab_size for token in parsed.eos):
        raise ProtocolError("an end token outside the vocabulary", field="eos", remedy=UPDATE)
    for name in ("version", "model", "weights", "vocabulary"):
        _name(found[name], name)
    return WorkerInfo(**{**found, "eos": frozenset(parsed.eos)})


def _write_load(m: Load) -> Message:
    return pb.Order(load=pb.Load(**asdict(m)))


def _read_load(m: pb.Load) -> Load:
    if m.states not in STATES:
        raise InvalidInput(
            f"{m.states[:20]!r} is unknown", field="states", remedy=f"one of {', '.join(STATES)}"
        )
    if m.path not in PATHS:
        raise InvalidInput(
            f"{m.path[:20]!r} is unknown", field="path", remedy=f"one of {', '.join(PATHS)}"
        )
    at_most(m.lanes, MAX_LANES, "lanes")
    return Load(
        coordinator=_name(m.coordinator, "coordinator"),
        chain=_name(m.chain, "chain"),
        version=_name(m.version, "version"),
        weights=_name(m.weights, "weights"),
        first=m.first,
        last=m.last,
        lanes=m.lanes,
        states=m.states,
        path=m.path,
    )


def _write_step(m: Step) -> pb.Step:
    s = m.sampling
    sampled = m.want is Want.VERDICT and not s.greedy
    return pb.Step(
        lane=m.lane,
        start=m.start,
        ids=m.ids,
        parents=m.parents,
        retain=0 if m.retain is None else m.retain + 1,
        fork_of=0 if m.fork_of is None else m.fork_of + 1,
        want=int(m.want),
        rows=m.rows,
        position=m.position,
        sampling=pb.Sampling(
            temperature=s.temperature,
            top_k=min(s.top_k, _MAX_TOKENS),  # all of a vocabulary
            top_p=s.top_p,
            seed=s.seed % 2**64,
            law=s.law,
        )
        if sampled
        else None,
        guesses=m.guesses,
        close=m.close,
        positions=m.positions,
        features=m.features,
    )


def _read_step(m: pb.Step) -> Step:
    at_most(m.lane, MAX_LANES, "steps.lane")
    at_most(m.fork_of, MAX_LANES, "steps.fork_of")
    at_most(m.want, max(Want), "steps.want")
    at_most(m.guesses, MAX_GUESSES, "steps.guesses")
    for name in ("start", "retain", "position"):
        at_most(getattr(m, name), _MAX_TOKENS, f"steps.{name}")
    new, wanted = len(m.ids), m.want != Want.NOTHING
    if m.rows > new or (m.rows > 0) != wanted:
        raise InvalidInput(f"{m.rows} of {new} tokens", field="steps.rows", remedy=UPDATE)
    if m.parents and (len(m.parents) != new - 1 or any(p > i for i, p in enumerate(m.parents))):
        raise InvalidInput("no tree", field="steps.parents", remedy="parents come first")
    if m.parents and m.want == Want.VERDICT and m.rows < new:
        raise InvalidInput("a tree is judged as a whole", field="steps.rows", remedy=UPDATE)
    if m.close and new:
        raise InvalidInput("closed and fed at once", field="steps.close", remedy=UPDATE)
    if m.positions and (m.parents or len(m.positions) not in (1, 3 * new)):
        raise InvalidInput(
            f"{len(m.positions)} positions of {new} tokens", field="steps.positions", remedy=UPDATE
        )
    at_most(max(m.positions, default=0), _MAX_TOKENS, "steps.positions")
    at_most(m.features, new, "steps.features")
    return Step(
        m.lane,
        m.start,
        tuple(m.ids),
        tuple(m.parents),
        m.retain - 1 if m.retain else None,
        m.fork_of - 1 if m.fork_of else None,
        Want(m.want),
        m.rows,
        m.position,
        _read_sampling(m.sampling) if m.HasField("sampling") else SamplingConfig(),
        m.guesses,
        m.close,
        tuple(m.positions),
        m.features,
    )


def _read_sampling(m: pb.Sampling) -> SamplingConfig:
    try:
        return SamplingConfig(m.temperature, m.top_k, m.top_p, m.seed, m.law)
    except ConfigError as error:
        raise InvalidInput(
            str(error.args[0]), field=f"steps.sampling.{error.field}", remedy=error.remedy
        ) from error


def _write_pass(m: Pass) -> Message:
    # "pass" is a word of Python: it is set by name.
    steps, spans = [_write_step(step) for step in m.steps], _write_spans(m.spans)
    made = pb.Pass(number=m.number, steps=steps, states=m.states, spans=spans)
    return pb.Order(**{"pass": made})


def _read_pass(m: pb.Pass) -> Pass:
    at_most(len(m.steps), MAX_STEPS, "steps")
    at_most(sum(len(step.ids) for step in m.steps), MAX_ROWS, "steps.ids")
    steps = tuple(_read_step(step) for step in m.steps)
    if len({step.lane for step in steps}) < len(steps):
        raise InvalidInput("a lane comes twice", field="steps.lane", remedy="send two passes")
    return Pass(m.number, steps, m.states, _read_spans(m.spans))


def _write_spans(spans: Sequence[Span]) -> list[pb.Span]:
    return [pb.Span(begin=span.begin, end=span.end) for span in spans]


def _read_spans(spans: Sequence[pb.Span]) -> tuple[Span, ...]:
    at_most(len(spans), _MAX_SPANS, "spans")
    if not all(math.isfinite(s.begin) and math.isfinite(s.end) for s in spans):
        raise InvalidInput("no times", field="spans", remedy=UPDATE)
    return tuple(Span(span.begin, span.end) for span in spans)


def _write_result(m: Result) -> Message:
    outcomes = [
        pb.Outcome(path=o.path, next=o.next + 1, guesses=o.guesses, logits=o.logits)
        for o in m.outcomes
    ]
    result = pb.Result(number=m.number, outcomes=outcomes, spans=_write_spans(m.spans))
    return pb.Report(result=result)


def _read_result(m: pb.Result) -> Result:
    outcomes = [Outcome(tuple(o.path), o.next - 1, tuple(o.guesses), o.logits) for o in m.outcomes]
    return Result(m.number, tuple(outcomes), _read_spans(m.spans))


def _name(text: str, field: str) -> str:
    at_most(len(text), _NAME, field)
    return text


_PLAIN: dict[str | None, Report] = {"connected": Connected(), "linked": Linked()}

_WRITERS: dict[type, Callable[[Any], Message]] = {
    Load: _write_load,
    Connect: lambda m: pb.Order(connect=pb.Connect(address=m.address)),
    Link: lambda m: pb.Order(link=pb.Link(**asdict(m))),
    Pass: _write_pass,
    Ping: lambda m: pb.Order(ping=pb.Ping()),
    Loaded: lambda m: pb.Report(loaded=pb.Loaded(bytes=m.bytes)),
    Connected: lambda m: pb.Report(connected=pb.Connected()),
    Linked: lambda m: pb.Report(linked=pb.Linked()),
    Taken: lambda m: pb.Report(taken=pb.Taken(number=m.number)),
    Result: _write_result,
    Pong: lambda m: pb.Report(
        pong=pb.Pong(received=m.received, begun=m.begun, computed=m.computed, busy=m.busy_s)
    ),
    Failure: lambda m: pb.Report(failure=pb.Failure(**asdict(m))),
}
