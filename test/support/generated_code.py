"""Comparison of committed protobuf code with the file that it is generated from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def check_generated(pb: ModuleType, proto: str, folder: Path) -> None:
    """Fail unless ``pb`` is what protoc makes of ``proto``, a path below the project's root."""
    pytest.importorskip("grpc_tools")
    out = folder / "descriptor"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--descriptor_set_out={out}"]
    subprocess.run([*command, proto], cwd=ROOT, check=True, timeout=60)
    from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

    fresh = FileDescriptorSet.FromString(out.read_bytes()).file[0]
    committed = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(committed)
    for file in (fresh, committed):
        for message in file.message_type:
            for f in message.field:
                f.ClearField("json_name")
    assert committed == fresh
