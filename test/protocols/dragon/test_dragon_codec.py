"""Messages and bytes: nothing is lost, nonsense is a typed error, and a draft is small."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collab_llm_nodes.config import MAX_TOKENS
from collab_llm_nodes.decoding.aggregation import (
    AggregationConfig,
    AggregationLaw,
    Party,
    SideDraft,
)
from collab_llm_nodes.decoding.sampling import SparseDistribution
from collab_llm_nodes.errors import Busy, CollabError, InvalidInput, ProtocolError
from collab_llm_nodes.protocols.dragon import codec
from collab_llm_nodes.protocols.dragon import dragon_pb2 as pb
from collab_llm_nodes.protocols.dragon.messages import (
    CloudInfo,
    CloudMessage,
    DeviceMessage,
    Draft,
    Identity,
    Open,
    Opened,
    Target,
)
from collab_llm_nodes.transport.wire_pb2 import Failure

ROOT = Path(__file__).parents[3]
IDENTITY = Identity("v", "m", "s")
KEPT = SparseDistribution(np.array([0, 7, 151_935]), np.array([0.5, 0.25, 2**-24], np.float32))
DRAFT = Draft(3, 1, SideDraft(151_935, KEPT, float(np.float32(-1.3))), 0.05, 2, 0.001)
TARGET = Target(4, 151_935, (True, False), Party.CLOUD, True, (0.25, 1.0), 0.04, 0.3)
SOLE = Target(4, 7, (True, False), Party.DEVICE, False, (1.0, 0.0), 0.04, 0.3, sole=True)
OPEN = Open(
    "where?",
    20,
    IDENTITY,
    AggregationConfig("coin", 0.25, 0.9, 64, False),
    0.7,
    2**64 - 1,
    "follow",
    5,
    0.02,
    (1, 2),
    (0.5, 100.0, 0.03),
)
LAW = pb.Law(law="shared", top_p=1.0, max_support=1)
FROM_DEVICE: list[DeviceMessage] = [OPEN, DRAFT, TARGET, SOLE]
FROM_CLOUD: list[CloudMessage] = [
    Opened("tables"),
    Opened("tables", (0.5, 100.0, 0.03), 7),
    DRAFT,
    TARGET,
    SOLE,
]


@pytest.mark.parametrize("message", FROM_DEVICE)
def test_a_message_of_the_device_comes_back(message: DeviceMessage) -> None:
    assert codec.decode_device(codec.encode_device(message)) == message


@pytest.mark.parametrize("message", FROM_CLOUD)
def test_a_message_of_the_cloud_comes_back(message: CloudMessage) -> None:
    assert codec.decode_cloud(codec.encode_cloud(message)) == message


def test_an_error_comes_back_as_the_error_it_is() -> None:
    found = codec.decode_cloud(codec.encode_cloud(Busy("full", field="session", remedy="later")))
    assert isinstance(found, Busy)
    assert (str(found), found.field, found.remedy) == ("session: full (later)", "session", "later")
    unknown = pb.CloudMessage(failure=Failure(code="../x", message="?")).SerializeToString()
    assert type(codec.decode_cloud(unknown)) is CollabError


def test_the_clouds_account_of_itself_comes_back() -> None:
    info = CloudInfo("model", IDENTITY, 151_936, "1.0", 1024, 8192, 3)
    assert codec.decode_info(codec.encode_info(info)) == info


def test_no_documents_is_minus_infinity_on_the_wire() -> None:
    draft = Draft(0, 0, SideDraft(7, KEPT, -math.inf), 0.0, 0, 0.0)
    found = codec.decode_device(codec.encode_device(draft))
    assert isinstance(found, Draft)
    assert found.draft.log_weight == -math.inf


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), vocab=st.sampled_from([5, 400, 151_936]))
def test_a_proposed_draft_is_judged_alike_on_both_sides(seed: int, vocab: int) -> None:
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(min(vocab, 400), 0.2))
    dense = np.zeros(vocab, np.float32)
    dense[rng.choice(vocab, len(p), replace=False)] = p
    law = AggregationLaw(AggregationConfig(), vocab, 1.0, seed)
    own = [law.propose(dense, float(rng.normal()), 4, side) for side in Party]
    sent = codec.decode_device(codec.encode_device(Draft(4, 0, own[0], 0.1, 0, 0.0)))
    assert isinstance(sent, Draft)
    assert sent.draft == own[0]
    assert law.judge((sent.draft, own[1]), 4) == law.judge((own[0], own[1]), 4)


def test_bytes_per_token_against_json_and_full_vectors() -> None:
    """Paper 001 sends 1/2,363 of plain JSON for a vocabulary of 50,272; here at least 1/1,000."""
    rng = np.random.default_rng(0)
    vocab, ours, plain, vectors = 50_272, 0, 0, 0
    law = AggregationLaw(AggregationConfig(top_p=0.8), vocab, 1.0, 1)
    for position in range(10):
        logits = rng.gumbel(size=vocab) * 1.2
        logits[rng.integers(vocab, size=30)] += 14.0  # a model that knows what it wants
        p = np.exp(logits - logits.max())
        p /= p.sum()
        draft = law.propose(p, 0.5, position, Party.CLOUD)
        ours += len(codec.encode_cloud(Draft(position, 0, draft, 0.05, position, 0.01)))
        plain += len(json.dumps({"token": draft.token, "p": p.tolist()}))
        vectors += 2 * vocab
    assert plain / ours > 1000
    assert vectors / ours > 200
    target = len(codec.encode_device(TARGET))
    assert target < 32  # what the device sends for a token when it aggregates


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.Draft(gaps=[], probs=b"", index=0), "gaps"),
        (pb.Draft(gaps=[1], probs=b"\x00", index=0), "gaps"),
        (pb.Draft(gaps=[1], probs=b"\x00\x3c", index=1), "gaps"),
        (pb.Draft(gaps=[2**32 - 1], probs=b"\x00\x3c", index=0), "gaps"),
        (pb.Draft(gaps=[1, 0], probs=b"\x00\x3c\x00\x3c", index=0), "probs.ids"),
        (pb.Draft(gaps=[1], probs=b"\x00\x00", index=0), "probs.probs"),
        (pb.Draft(gaps=[1], probs=b"\x00\x7e", index=0), "probs.probs"),
        (pb.Draft(gaps=[1], probs=b"\x00\x3c", index=0, log_weight=math.nan), "log_weight"),
        (pb.Draft(gaps=[1], probs=b"\x00\x3c", index=0, log_weight=math.inf), "log_weight"),
        (pb.Target(flags=32), "flags"),
        (pb.Target(expected_cloud=1001), "flags"),
        (pb.Open(law=pb.Law(law="none", top_p=1)), "law.law"),
        (pb.Open(law=pb.Law(law="coin", top_p=2)), "law.top_p"),
        (pb.Open(law=pb.Law(law="coin", top_p=1, max_support=1, gamma=math.nan)), "law.gamma"),
        (pb.Open(temperature=-1.0), "temperature"),
        (pb.Open(rtt_s=math.nan), "rtt_s"),
        (pb.Open(law=LAW, decode=[1.0, 0.0, 0.0]), "decode"),
        (pb.Open(law=LAW, decode=[1.0, 1.0]), "decode"),
        (pb.Open(law=LAW, decode=[math.inf, 1.0, 0.0]), "decode"),
        (pb.Open(replay=[1] * (MAX_TOKENS + 1)), "replay"),
    ],
)
def test_impossible_content_is_a_typed_error(message: object, field: str) -> None:
    name = type(message).__name__.lower()
    data = pb.DeviceMessage(**{name: message}).SerializeToString()  # type: ignore[arg-type]
    with pytest.raises((InvalidInput, ProtocolError)) as caught:
        codec.decode_device(data)
    assert caught.value.field == field


@pytest.mark.parametrize("data", [b"", b"\xff\xff", b"\x0a\xff"])
def test_what_is_no_message_is_a_protocol_error(data: bytes) -> None:
    for decode in (codec.decode_device, codec.decode_cloud):
        with pytest.raises(ProtocolError):
            decode(data)


def test_mutated_messages_are_messages_or_typed_errors() -> None:
    chance = random.Random(4)
    whole = [codec.encode_device(message) for message in FROM_DEVICE]
    whole += [codec.encode_cloud(message) for message in FROM_CLOUD]
    read = refused = 0
    for _ in range(4000):
        data = bytearray(chance.choice(whole))
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        del data[chance.choice([len(data), chance.randrange(1, len(data) + 1)]) :]
        for decode in (codec.decode_device, codec.decode_cloud):
            try:
                decode(bytes(data))
                read += 1
            except (ProtocolError, InvalidInput):
                refused += 1
    assert read > 500
    assert refused > 500


def test_what_cannot_be_sent_is_invalid_input() -> None:
    rounded = SparseDistribution(np.array([1]), np.array([0.1], np.float32))
    with pytest.raises(InvalidInput, match="cannot be sent"):
        codec.encode_device(Draft(0, 0, SideDraft(1, rounded, 0.0), 0.0, 0, 0.0))
    with pytest.raises(InvalidInput, match="cannot be sent"):
        codec.encode_device(Open("\udc80", 1, IDENTITY, AggregationConfig()))
