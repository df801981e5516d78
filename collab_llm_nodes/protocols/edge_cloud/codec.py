"""Messages to bytes and back. What comes from a peer is checked here before anyone else sees it.

``decode(encode(m)) == m``, draft distributions bit for bit: they cross the wire in half precision,
which holds them exactly (``decoding.sampling.to_wire``). A seed comes back modulo 2**64, which is
how it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from google.protobuf.message import Message

from collab_llm_nodes.config import MAX_TOKENS
from collab_llm_nodes.decoding.sampling import SamplingConfig, SparseDistribution
from collab_llm_nodes.errors import (
    BY_CODE,
    CollabError,
    ConfigError,
    InvalidInput,
    ProtocolError,
    Replay,
)
from collab_llm_nodes.models.turns import MAX_TURNS, Turn
from collab_llm_nodes.protocols.edge_cloud import verifier_pb2 as pb
from collab_llm_nodes.protocols.edge_cloud.info import Limits, ServerInfo
from collab_llm_nodes.protocols.edge_cloud.messages import (
    ClientMessage,
    Close,
    Draft,
    EarlyExit,
    Failure,
    Open,
    Opened,
    ServerMessage,
    Verdict,
)
from collab_llm_nodes.transport.wire import UPDATE, at_most, parse

SERVICE = pb.DESCRIPTOR.services_by_name["Verifier"].full_name
SESSION = f"/{SERVICE}/Session"
DESCRIBE = f"/{SERVICE}/Describe"

MAX_DRAFT = 64
MAX_SUPPORT = 4096
MAX_IMAGES = 64


def encode(message: ClientMessage | ServerMessage) -> bytes:
    """Serialise one message.

    Raises:
        InvalidInput: a value does not fit its field, such as a negative token id or text that is
            not Unicode.
    """
    try:
        return _WRITERS[type(message)](message).SerializeToString()
    except (ValueError, TypeError) as error:
        raise InvalidInput(
            f"cannot be sent: {error}",
            field=type(message).__name__,
            remedy="token ids and counts are >= 0, text is Unicode",
        ) from error


def decode_client(data: bytes) -> ClientMessage:
    """Parse what a client sent.

    Raises:
        ProtocolError: not a message of this protocol.
        InvalidInput: a field holds what the message's definition forbids.
    """
    parsed = parse(pb.ClientMessage, data)
    kind = parsed.WhichOneof("message")
    if kind == "open":
        return _read_open(parsed.open)
    if kind == "draft":
        return _read_draft(parsed.draft)
    if kind == "close":
        return Close()
    raise ProtocolError("empty or unknown message", field="message", remedy=UPDATE)


def decode_server(data: bytes) -> ServerMessage:
    """Parse what a verifier sent.

    Raises:
        ProtocolError: not a message of this protocol, or one that makes no sense.
    """
    parsed = parse(pb.ServerMessage, data)
    kind = parsed.WhichOneof("message")
    if kind == "opened":
        return Opened(parsed.opened.session_id, parsed.opened.prompt_tokens)
    if kind == "failure":
        f = parsed.failure
        # Codes become statuses, parts of metrics, decisions: only those that are known.
        code = f.code if f.code in BY_CODE or f.code == Replay.code else CollabError.code
        return Failure(code, f.message, f.field, f.remedy)
    if kind == "early_exit":
        e = parsed.early_exit
        _check_outcome(e.tokens, e.accepted, e.confidence)
        return EarlyExit(e.round, e.layer, tuple(e.tokens), e.accepted, e.finished, e.confidence)
    if kind == "verdict":
        v = parsed.verdict
        _check_outcome(v.tokens, v.accepted, v.compute_s)
        _check_figure(v.queue_s)
        return Verdict(v.round, tuple(v.tokens), v.accepted, v.finished, v.compute_s, v.queue_s)
    raise ProtocolError("empty or unknown message", field="message", remedy=UPDATE)


def encode_info(info: ServerInfo) -> bytes:
    """Serialise the answer to Describe."""
    fields = {**asdict(info), "limits": pb.Limits(**asdict(info.limits))}
    return pb.ServerInfo(**fields).SerializeToString()


def decode_info(data: bytes) -> ServerInfo:
    """Parse the answer to Describe.

    Raises:
        ProtocolError: it is none.
    """
    parsed = parse(pb.ServerInfo, data)
    limits = {
        field.name: getattr(parsed.limits, field.name) for field in pb.Limits.DESCRIPTOR.fields
    }
    try:
        checked = Limits(**limits)
    except ConfigError as error:
        raise ProtocolError(str(error), field="limits", remedy=UPDATE) from error
    return ServerInfo(
        parsed.model,
        parsed.vocabulary,
        parsed.vocab_size,
        tuple(parsed.exit_layers),
        parsed.version,
        checked,
        parsed.sessions,
    )


def _write_open(m: Open) -> pb.ClientMessage:
    s = m.sampling
    sampling = pb.Sampling(
        temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, seed=s.seed % 2**64, law=s.law
    )
    return pb.ClientMessage(
        open=pb.Open(
            text="" if m.turns or m.raw else m.text,
            raw=m.text if m.raw else "",
            turns=[pb.Turn(role=turn.role, content=turn.content) for turn in _chat(m)],
            images=m.images,
            sampling=sampling,
            max_tokens=m.max_tokens,
            vocabulary=m.vocabulary,
            replay=m.replay,
            round=m.round,
            for_motion=m.for_motion,
        )
    )


def _chat(m: Open) -> tuple[Turn, ...]:
    """Return the turns of ``m`` as they are sent: the question is the last one."""
    return (*m.turns, Turn("user", m.text)) if m.turns else ()


def _read_open(m: pb.Open) -> Open:
    # Checked before Python objects are made of them: 16 MB of bytes could become 500.
    at_most(len(m.images), MAX_IMAGES, "images")
    at_most(len(m.replay), MAX_TOKENS, "replay")
    at_most(m.round, MAX_TOKENS, "round")  # each yields a token at least
    text, turns = _read_text(m)
    s = m.sampling
    try:
        sampling = SamplingConfig(s.temperature, s.top_k, s.top_p, s.seed, s.law)
    except ConfigError as error:
        raise InvalidInput(
            error.args[0], field=f"sampling.{error.field}", remedy=error.remedy
        ) from error
    return Open(
        text,
        tuple(m.images),
        sampling,
        m.max_tokens,
        m.vocabulary,
        tuple(m.replay),
        m.round,
        turns,
        bool(m.raw),
        m.for_motion,
    )


def _read_text(m: pb.Open) -> tuple[str, tuple[Turn, ...]]:
    """Return the question and the turns before it."""
    at_most(len(m.turns), MAX_TURNS + 1, "turns")
    if bool(m.text) + bool(m.raw) + bool(m.turns) > 1:
        raise InvalidInput("excludes raw and turns", field="text", remedy="send one of the three")
    if not m.turns:
        return m.raw or m.text, ()
    *turns, last = (Turn(turn.role, turn.content) for turn in m.turns)
    if last.role != "user":
        raise InvalidInput(
            f"is {last.role[:20]!r}",
            field=f"turns[{len(turns)}].role",
            remedy="end with the user's turn",
        )
    return last.content, tuple(turns)


def _write_draft(m: Draft) -> pb.ClientMessage:
    probs = None if m.probs is None else _write_distributions(m.probs)
    draft = pb.Draft(
        round=m.round,
        start=m.start,
        tokens=m.tokens,
        cached=m.cached,
        probs=probs,
        ahead=m.after is not None,
        after=m.after or (),
        solo=m.autoregressive_rounds,
    )
    return pb.ClientMessage(draft=draft)


def _read_draft(m: pb.Draft) -> Draft:
    at_most(len(m.tokens), MAX_DRAFT, "tokens")
    at_most(len(m.after), MAX_TOKENS, "after")
    probs = _read_distributions(m.probs) if m.HasField("probs") else None
    if m.after and not m.ahead:
        raise InvalidInput("only a draft sent ahead has it", field="after", remedy=UPDATE)
    after = tuple(m.after) if m.ahead else None
    return Draft(m.round, m.start, tuple(m.tokens), probs, m.cached, after, m.solo)


def _write_distributions(probs: Sequence[SparseDistribution]) -> pb.Distributions:
    half = [q.probs.astype("<f2") for q in probs]
    for q, h in zip(probs, half, strict=True):
        if not np.array_equal(h.astype(np.float32), q.probs):
            raise ValueError("probabilities must be exact in half precision; make them by to_wire")
    gaps = [gap for q in probs for gap in np.diff(q.ids, prepend=0).tolist()]
    packed = b"".join(h.tobytes() for h in half)
    return pb.Distributions(sizes=[len(q.ids) for q in probs], gaps=gaps, probs=packed)


def _read_distributions(m: pb.Distributions) -> tuple[SparseDistribution, ...]:
    sizes = list(m.sizes)
    if len(sizes) > MAX_DRAFT or not all(1 <= size <= MAX_SUPPORT for size in sizes):
        raise InvalidInput(
            f"at most {MAX_DRAFT} distributions of 1 to {MAX_SUPPORT} entries",
            field="probs.sizes",
            remedy="lower gamma or max_support",
        )
    if sum(sizes) != len(m.gaps) or 2 * sum(sizes) != len(m.probs):
        raise InvalidInput(
            f"sizes promise {sum(sizes)} entries; {len(m.gaps)} ids, {len(m.probs)} bytes came",
            field="probs",
            remedy=UPDATE,
        )
    gaps = np.array(m.gaps, dtype=np.int64)
    values = np.frombuffer(m.probs, dtype="<f2").astype(np.float32)
    out = []
    end = 0
    for size in sizes:
        part = slice(end, end := end + size)
        ids = np.cumsum(gaps[part])
        if ids[-1] > np.iinfo(np.int32).max:
            raise InvalidInput(f"token id {ids[-1]} is too large", field="probs.ids", remedy=UPDATE)
        out.append(SparseDistribution(ids.astype(np.int32), values[part]))
    return tuple(out)


def _write_exit(m: EarlyExit) -> pb.ServerMessage:
    return pb.ServerMessage(
        early_exit=pb.EarlyExit(
            round=m.round,
            layer=m.layer,
            tokens=m.tokens,
            accepted=m.accepted,
            finished=m.finished,
            confidence=m.confidence,
        )
    )


def _write_verdict(m: Verdict) -> pb.ServerMessage:
    return pb.ServerMessage(
        verdict=pb.Verdict(
            round=m.round,
            tokens=m.tokens,
            accepted=m.accepted,
            finished=m.finished,
            compute_s=m.compute_s,
            queue_s=m.queue_s,
        )
    )


def _check_outcome(tokens: Sequence[int], accepted: int, figure: float) -> None:
    """An outcome is 1 to MAX_DRAFT + 1 tokens, drafted but for at most one; figures are >= 0."""
    if not (1 <= len(tokens) <= MAX_DRAFT + 1 and len(tokens) - accepted in (0, 1)):
        raise ProtocolError(
            f"{len(tokens)} tokens of which {accepted} accepted", field="accepted", remedy=UPDATE
        )
    _check_figure(figure)


def _check_figure(figure: float) -> None:
    if not (math.isfinite(figure) and figure >= 0):
        raise ProtocolError(f"{figure} is no confidence or time", field="message", remedy=UPDATE)


_WRITERS: dict[type, Callable[[Any], Message]] = {
    Open: _write_open,
    Draft: _write_draft,
    Close: lambda m: pb.ClientMessage(close=pb.Close()),
    Opened: lambda m: pb.ServerMessage(
        opened=pb.Opened(session_id=m.session_id, prompt_tokens=m.prompt_tokens)
    ),
    EarlyExit: _write_exit,
    Verdict: _write_verdict,
    Failure: lambda m: pb.ServerMessage(
        failure=pb.Failure(code=m.code, message=m.message, field=m.field, remedy=m.remedy)
    ),
}
