"""Messages come back as they were; what no message may hold is refused by type."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collab_llm_lab.bench.hostile.attacks import mutated
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import CollabError, InvalidInput, ModelError, ProtocolError
from collab_llm_nodes.protocols.jupiter import codec
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
from collab_llm_nodes.protocols.jupiter.states import pack, packed_bytes, unpack
from collab_llm_nodes.transport.wire import Failure
from collab_llm_nodes.transport.wire_pb2 import Sampling

IDS = st.integers(0, 2**31 - 1)
COUNTS = st.integers(0, 1 << 16)
TIMES = st.floats(0, 1e9)
TEXT = st.text(max_size=20)
spans = st.lists(st.builds(Span, TIMES, TIMES), max_size=3).map(tuple)


@st.composite
def steps(draw: st.DrawFn, lane: int) -> Step:
    ids = tuple(draw(st.lists(IDS, max_size=6)))
    if not ids:
        return Step(lane, close=draw(st.booleans()))
    tree = draw(st.booleans())
    parents = tuple(draw(st.integers(0, i)) for i in range(len(ids) - 1)) if tree else ()
    want = draw(st.sampled_from(Want))
    sampling = SamplingConfig(draw(st.sampled_from([0.5, 1.0])), 3, 0.5, draw(COUNTS), "coupled")
    return Step(
        lane,
        draw(COUNTS),
        ids,
        parents,
        draw(st.none() | COUNTS),
        draw(st.none() | st.integers(0, 1000)),
        want,
        draw(st.integers(1, len(ids))) if want else 0,
        draw(COUNTS),
        sampling if want is Want.VERDICT else SamplingConfig(),
        draw(st.integers(0, 16)),
        positions=tuple(draw(positions(len(ids), tree))),
        features=draw(st.integers(0, len(ids))),
    )


def positions(new: int, tree: bool) -> st.SearchStrategy[list[int]]:
    """None, that of the first of ``new`` tokens, or M-RoPE's three of each."""
    return st.sampled_from([0, 1, 1 if tree else 3 * new]).flatmap(
        lambda count: st.lists(COUNTS, min_size=count, max_size=count)
    )


@st.composite
def passes(draw: st.DrawFn) -> Pass:
    made = tuple(draw(steps(lane)) for lane in range(draw(st.integers(0, 4))))
    return Pass(draw(st.integers(0, 2**60)), made, draw(st.binary(max_size=20)), draw(spans))


orders: st.SearchStrategy[Order] = st.one_of(
    passes(),
    st.builds(
        Load,
        TEXT,
        TEXT,
        TEXT,
        TEXT,
        COUNTS,
        COUNTS,
        COUNTS,
        st.sampled_from(STATES),
    ),
    st.builds(Connect, TEXT),
    st.builds(Link, TEXT),
    st.just(Ping()),
)
outcomes = st.builds(
    Outcome,
    st.lists(COUNTS, max_size=4).map(tuple),
    st.integers(-1, 2**31),
    st.lists(IDS, max_size=4).map(tuple),
    st.binary(max_size=8),
)
reports: st.SearchStrategy[Report] = st.one_of(
    st.builds(Result, COUNTS, st.lists(outcomes, max_size=3).map(tuple), spans),
    st.builds(Loaded, st.integers(0, 2**40)),
    st.builds(Taken, COUNTS),
    st.builds(Failure, st.sampled_from(["BUSY", "INTERNAL"]), TEXT, TEXT, TEXT),
    st.sampled_from([Connected(), Linked()]),
    st.builds(Pong, COUNTS, COUNTS, COUNTS, st.floats(0.0, 1e6)),
)


@settings(max_examples=40)
@given(orders)
def test_orders_come_back_as_they_were(order: Order) -> None:
    assert codec.decode_order(codec.encode_order(order)) == order


@settings(max_examples=60)
@given(reports)
def test_reports_come_back_as_they_were(report: Report) -> None:
    assert codec.decode_report(codec.encode_report(report)) == report


@given(st.frozensets(st.just(0), max_size=1), TEXT, st.integers(1, 1000))
def test_what_a_worker_is_comes_back_as_it_was(eos: frozenset[int], name: str, size: int) -> None:
    info = WorkerInfo(name, name, name, size, size, size, size, size, eos, size, name)
    assert codec.decode_info(codec.encode_info(info)) == info


def test_errors_keep_their_type() -> None:
    for kind in (InvalidInput, ModelError, ProtocolError):
        error = kind("bad", field="x", remedy="mend it")
        came = codec.decode_report(codec.encode_report(error))
        assert isinstance(came, Failure)
        assert type(came.error()) is kind
        assert str(came.error()) == str(error)


@pytest.mark.parametrize(
    "step",
    [
        pb.Step(lane=1 << 20),
        pb.Step(fork_of=1 << 20),
        pb.Step(start=1 << 30),
        pb.Step(ids=[1], want=3, rows=1),
        pb.Step(ids=[1], want=1, rows=2),
        pb.Step(ids=[1], want=1),
        pb.Step(ids=[1], rows=1),
        pb.Step(ids=[1, 2, 3], parents=[0]),
        pb.Step(ids=[1, 2, 3], parents=[0, 2]),
        pb.Step(ids=[1], close=True),
        pb.Step(guesses=1000),
        pb.Step(ids=[1], want=1, rows=1, sampling=Sampling(temperature=-1.0, law="coupled")),
        pb.Step(ids=[1], want=1, rows=1, sampling=Sampling(temperature=1.0, top_p=1, law="x")),
        pb.Step(ids=[1] * (codec.MAX_ROWS + 1)),
        pb.Step(ids=[1, 2], positions=[0, 1]),
        pb.Step(ids=[1], positions=[1 << 30]),
        pb.Step(ids=[1, 2, 3], parents=[0, 0], positions=[4] * 9),
        pb.Step(ids=[1], features=2),
    ],
)
def test_steps_that_make_no_sense_are_refused(step: pb.Step) -> None:
    order = pb.Order(**{"pass": pb.Pass(steps=[step])})
    with pytest.raises(InvalidInput) as refused:
        codec.decode_order(order.SerializeToString())
    assert refused.value.field.startswith("steps")


def test_passes_and_loads_that_make_no_sense_are_refused() -> None:
    twice = pb.Pass(steps=[pb.Step(lane=3), pb.Step(lane=3)])
    many = pb.Pass(steps=[pb.Step(lane=i) for i in range(codec.MAX_STEPS + 1)])
    never = pb.Pass(spans=[pb.Span(begin=float("nan"))])
    for made in (twice, many, never):
        with pytest.raises(InvalidInput):
            codec.decode_order(pb.Order(**{"pass": made}).SerializeToString())
    for load in (
        pb.Load(states="float64"),
        pb.Load(states="int8", chain="x" * 1000),
    ):
        with pytest.raises(InvalidInput):
            codec.decode_order(pb.Order(load=load).SerializeToString())


def test_noise_and_damaged_messages_are_refused_by_type_or_read() -> None:
    chance = random.Random(3)
    step = Step(1, 5, (3, 4, 5), (0, 1), 2, None, Want.VERDICT, 3, 7, guesses=2)
    whole = codec.encode_order(Pass(3, (step,), b"12345678", (Span(1.0, 2.0),)))
    result = codec.encode_report(Result(3, (Outcome((1,), 5, (1, 2)),), (Span(1.0, 2.0),)))
    refused = 0
    for _ in range(20_000):
        for decode, message in ((codec.decode_order, whole), (codec.decode_report, result)):
            try:
                decode(mutated(message, chance))
            except (ProtocolError, InvalidInput):
                refused += 1
    assert refused > 5000


@pytest.mark.parametrize("form", STATES)
def test_states_survive_the_wire_as_well_as_their_form_allows(form: str) -> None:
    torch.manual_seed(0)
    states = torch.randn(7, 48) * torch.logspace(-3, 3, 7)[:, None]
    states[3] = 0.0
    data = pack(states, form)
    assert len(data) == packed_bytes(7, 48, form)
    found = unpack(data, 7, 48, form)
    largest = states.abs().amax(1, keepdim=True)
    error = (found - states).abs()
    bound = {
        "float32": torch.zeros_like(states),
        "float16": states.abs() * 2**-11 + 2**-25,
        "int8": (largest / 254 * 1.001).expand_as(states),
    }[form]
    assert bool((error <= bound).all())
    assert unpack(pack(states[:0], form), 0, 48, form).shape == (0, 48)


@pytest.mark.filterwarnings("error")
def test_states_that_cannot_be_are_refused() -> None:
    for form in STATES:
        with pytest.raises(ModelError, match="not finite") as refused:
            pack(torch.full((1, 4), float("nan")), form)
        assert refused.value.field == "model.dtype"
        with pytest.raises(ProtocolError, match="bytes of hidden states"):
            unpack(b"123", 1, 4, form)
    with pytest.raises(ModelError, match="the range of float16"):
        pack(torch.full((1, 4), 1e6), "float16")
    with pytest.raises(ProtocolError, match="not finite"):
        unpack(torch.full((1, 4), float("inf")).numpy().tobytes(), 1, 4, "float32")
    for scale in (3e38, float("inf"), float("nan")):
        data = np.float32(scale).tobytes() + np.array([100, 0, 1, -1], np.int8).tobytes()
        with pytest.raises(ProtocolError, match="not finite"):
            unpack(data, 1, 4, "int8")


def test_all_errors_of_the_codec_name_field_and_remedy() -> None:
    for data in (b"", b"\xff\xff", codec.encode_report(Pong())):
        with pytest.raises(CollabError) as refused:
            codec.decode_order(data)
        assert refused.value.field
        assert refused.value.remedy
