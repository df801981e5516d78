"""Messages to bytes and back; what no peer may send."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verifier_bed import (
    OPEN,
)

from collab_llm_nodes.config import MAX_TOKENS
from collab_llm_nodes.decoding.sampling import (
    Distribution,
    SamplingConfig,
    SparseDistribution,
    to_wire,
)
from collab_llm_nodes.errors import (
    BY_CODE,
    CollabError,
    InvalidInput,
    ProtocolError,
    Replay,
)
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud import verifier_pb2 as pb
from collab_llm_nodes.protocols.edge_cloud.messages import (
    ClientMessage,
    Close,
    Draft,
    EarlyExit,
    Open,
    Opened,
    ServerMessage,
    Verdict,
)
from collab_llm_nodes.transport.wire import Failure
from collab_llm_nodes.transport.wire_pb2 import Sampling

# --- The codec ----------------------------------------------------------------------------------

IDS = st.integers(0, 2**31 - 1)
COUNTS = st.integers(0, 2**32 - 1)
TEXT = st.text(max_size=20)
FIGURES = st.floats(0, 1e6)


@st.composite
def distributions(draw: st.DrawFn) -> SparseDistribution:
    raw = draw(st.lists(st.floats(1e-3, 1), min_size=1, max_size=40))
    p = np.array(raw) / sum(raw)
    q = to_wire(Distribution.from_dense(p), 32)
    shift = draw(st.integers(0, 2**31 - 100))
    return SparseDistribution((q.ids + shift).astype(np.int32), q.probs)


LAWS = st.builds(
    SamplingConfig,
    st.floats(0, 10),
    st.integers(0, 1000),
    st.floats(0.001, 1),
    st.integers(0, 2**64 - 1),
    st.sampled_from(["rejection", "coupled"]),
)
OPENS = st.builds(
    Open,
    TEXT,
    st.lists(st.binary(max_size=20), max_size=3).map(tuple),
    LAWS,
    COUNTS,
    TEXT,
    st.lists(IDS, max_size=5).map(tuple),
    st.integers(0, MAX_TOKENS),
    for_motion=st.booleans(),
)
DRAFTS = st.builds(
    Draft,
    COUNTS,
    COUNTS,
    st.lists(IDS, max_size=8).map(tuple),
    st.none() | st.lists(distributions(), max_size=4).map(tuple),
    st.booleans(),
    st.none() | st.lists(IDS, min_size=1, max_size=8).map(tuple),
    COUNTS,
)
OUTCOMES = st.lists(IDS, min_size=2, max_size=9).map(tuple)
EXITS = OUTCOMES.flatmap(
    lambda tokens: st.builds(
        EarlyExit,
        COUNTS,
        COUNTS,
        st.just(tokens),
        st.just(len(tokens) - 1),
        st.booleans(),
        st.floats(0, 1),
    )
)
CODES = st.sampled_from([*BY_CODE, Replay.code])
VERDICTS = OUTCOMES.flatmap(
    lambda tokens: st.builds(
        Verdict,
        COUNTS,
        st.just(tokens),
        st.sampled_from([len(tokens) - 1, len(tokens)]),
        st.booleans(),
        FIGURES,
        FIGURES,
    )
)


@settings(max_examples=150)
@given(OPENS | DRAFTS | st.just(Close()))
def test_client_messages_cross_the_wire_unchanged(message: ClientMessage) -> None:
    assert codec.decode_client(codec.encode_client(message)) == message


@settings(max_examples=150)
@given(
    EXITS | VERDICTS | st.builds(Opened, TEXT, COUNTS) | st.builds(Failure, CODES, TEXT, TEXT, TEXT)
)
def test_server_messages_cross_the_wire_unchanged(message: ServerMessage) -> None:
    assert codec.decode_server(codec.encode_server(message)) == message


def test_what_is_sampled_from_is_what_arrives_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(5000, 0.01))
    q = to_wire(Distribution.from_dense(p), 64)
    sent = Draft(0, 0, (int(q.ids[0]),), (q,))
    arrived = codec.decode_client(codec.encode_client(sent))
    assert isinstance(arrived, Draft)
    assert arrived.probs is not None
    assert arrived.probs[0].ids.tobytes() == q.ids.tobytes()
    assert arrived.probs[0].law.tobytes() == q.law.tobytes()
    assert len(codec.encode_client(sent)) < 6 * 64  # about 4 bytes an entry


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Draw a valid message in which a few bytes are changed, lost or added."""
    sent = (OPENS | DRAFTS).map(codec.encode_client)
    data = bytearray(draw(sent | (EXITS | VERDICTS).map(codec.encode_server)))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
    return bytes(data)


@settings(max_examples=600)
@given(damaged() | st.binary(max_size=60))
def test_no_bytes_cause_anything_but_a_typed_error(data: bytes) -> None:
    """``test_fuzz.py`` sends messages that reach the checks after the parser, and counts them."""
    for decode in (codec.decode_client, codec.decode_server, codec.decode_info):
        with contextlib.suppress(CollabError):
            decode(data)


def half(*values: float) -> bytes:
    return np.array(values, dtype="<f2").tobytes()


@pytest.mark.parametrize(
    ("sizes", "gaps", "probs"),
    [
        ([2], [1, 0], half(0.5, 0.5)),  # an id twice
        ([2], [1, 1], half(0.5, math.nan)),
        ([2], [1, 1], half(0.5, -0.5)),
        ([2], [1, 1], half(1.0, 0.0)),
        ([2], [1, 1], half(0.5, math.inf)),
        ([2], [1, 1], half(0.5)),  # fewer probabilities than promised
        ([2], [1, 1], half(0.5, 0.5) + b"x"),
        ([3], [1, 1], half(0.5, 0.5)),
        ([0], [], b""),
        ([2], [2**31, 1], half(0.5, 0.5)),
        ([5000], [1] * 5000, half(*[0.5] * 5000)),
        ([1] * 65, [1] * 65, half(*[1.0] * 65)),
    ],
)
def test_malformed_distributions_are_refused(
    sizes: list[int], gaps: list[int], probs: bytes
) -> None:
    draft = pb.Draft(tokens=[1], probs=pb.Distributions(sizes=sizes, gaps=gaps, probs=probs))
    with pytest.raises(InvalidInput, match="probs"):
        codec.decode_client(pb.ClientMessage(draft=draft).SerializeToString())


@pytest.mark.parametrize(
    "law",
    [
        Sampling(temperature=math.nan, top_p=1, law="rejection"),
        Sampling(temperature=-1, top_p=1, law="rejection"),
        Sampling(top_p=0, law="rejection"),
        Sampling(top_p=1, law="greedy"),
    ],
)
def test_malformed_laws_are_refused(law: Sampling) -> None:
    data = pb.ClientMessage(open=pb.Open(text="go", sampling=law)).SerializeToString()
    with pytest.raises(InvalidInput, match="sampling"):
        codec.decode_client(data)


@pytest.mark.parametrize(
    "message",
    [
        pb.ServerMessage(),
        pb.ServerMessage(verdict=pb.Verdict(tokens=[], accepted=0)),
        pb.ServerMessage(verdict=pb.Verdict(tokens=[1], accepted=2)),
        pb.ServerMessage(verdict=pb.Verdict(tokens=[1, 2, 3], accepted=1)),
        pb.ServerMessage(verdict=pb.Verdict(tokens=[1], compute_s=math.nan)),
        pb.ServerMessage(early_exit=pb.EarlyExit(tokens=[1], confidence=math.nan)),
    ],
)
def test_answers_that_make_no_sense_are_protocol_errors(message: pb.ServerMessage) -> None:
    with pytest.raises(ProtocolError):
        codec.decode_server(message.SerializeToString())


@pytest.mark.parametrize(
    "message",
    [
        Draft(0, 0, (-1,)),
        Draft(-1, 0, ()),
        replace(OPEN, text="\ud800"),
        Draft(
            0,
            0,
            (1,),
            (SparseDistribution(np.array([1], np.int32), np.array([1 / 3], np.float32)),),
        ),
    ],
)
def test_what_cannot_be_sent_is_invalid_input(message: ClientMessage) -> None:
    with pytest.raises(InvalidInput, match="cannot be sent"):
        codec.encode_client(message)
