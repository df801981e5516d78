"""Dataclasses as protobuf messages: the rules that the codecs of all services share."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from types import ModuleType

import pytest

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import Busy, CollabError, InvalidInput, ProtocolError, Replay
from collab_llm_nodes.protocols.dragon import dragon_pb2
from collab_llm_nodes.protocols.edge_cloud import verifier_pb2
from collab_llm_nodes.protocols.edge_cloud.codec import decode_server
from collab_llm_nodes.protocols.jupiter import stages_pb2
from collab_llm_nodes.transport import wire_pb2
from collab_llm_nodes.transport.wire import Codec, Failure, MessageCodec

ROOT = Path(__file__).parents[2]
SAMPLING = MessageCodec(SamplingConfig, wire_pb2.Sampling)


@pytest.mark.parametrize("pb", [wire_pb2, verifier_pb2, dragon_pb2, stages_pb2])
def test_the_committed_code_is_generated_from_its_proto(pb: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    out = tmp_path / "descriptor"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--descriptor_set_out={out}"]
    subprocess.run([*command, pb.DESCRIPTOR.name], cwd=ROOT, check=True, timeout=60)
    from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

    fresh = FileDescriptorSet.FromString(out.read_bytes()).file[0]
    committed = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(committed)
    for file in (fresh, committed):
        for message in file.message_type:
            for f in message.field:
                f.ClearField("json_name")
    assert committed == fresh


def test_a_seed_comes_back_modulo_two_to_the_64() -> None:
    assert SAMPLING.decode(SAMPLING.encode(SamplingConfig(seed=-1))).seed == 2**64 - 1
    assert SAMPLING.decode(SAMPLING.encode(SamplingConfig(seed=2**64 + 5))).seed == 5


def test_values_that_the_dataclass_forbids_are_refused_with_their_field() -> None:
    with pytest.raises(InvalidInput) as refused:
        SAMPLING.decode(wire_pb2.Sampling(top_p=2.0, law="coupled").SerializeToString())
    assert refused.value.field == "top_p"


def test_bytes_that_are_no_message_are_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="3 bytes that are no Sampling"):
        SAMPLING.decode(b"\xff\xff\xff")


def test_values_that_fit_no_field_are_invalid_input() -> None:
    with pytest.raises(InvalidInput, match="cannot be sent"):
        SAMPLING.encode(SamplingConfig(top_k=2**64))


def test_a_dataclass_and_a_message_with_other_fields_do_not_go_together() -> None:
    other = make_dataclass("Sampling", [("temperature", "float")])
    with pytest.raises(AssertionError, match="Sampling"):
        MessageCodec(other, wire_pb2.Sampling)


def test_every_kind_of_a_stream_needs_a_dataclass() -> None:
    @dataclass(frozen=True)
    class Close:
        pass

    with pytest.raises(AssertionError, match="Open"):
        Codec(verifier_pb2.ClientMessage, Close)


def test_an_error_keeps_its_type_and_its_words() -> None:
    error = Busy("full", field="session", remedy="later")
    found = Failure.of(error).error()
    assert type(found) is Busy
    assert (str(found), found.field, found.remedy) == (str(error), "session", "later")


@pytest.mark.parametrize("code", ["", "OK", "header", "__class__", "NEW_IN_VERSION_9", "../x"])
def test_a_failure_never_has_a_code_that_nobody_knows(code: str) -> None:
    """It would become the status of a ROS message: any constant or attribute of that name."""
    failure = wire_pb2.Failure(code=code, message="m")
    data = verifier_pb2.ServerMessage(failure=failure).SerializeToString()
    assert decode_server(data) == Failure(CollabError.code, "m")
    assert Failure(Replay.code, "m").code == Replay.code
