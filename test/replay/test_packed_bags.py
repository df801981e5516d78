"""Bags that rosbag2 has compressed file by file: read, or mended where something is missing."""

from __future__ import annotations

import resource
import shutil
import struct
from pathlib import Path

import pytest
import yaml
from folders import ROOM
from rosbags.rosbag2 import Reader

from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.replay.bag import MAGIC, zstd
from collab_llm_nodes.replay.mend import mend
from collab_llm_nodes.replay.recording import read_recording


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """``test/bags/room`` with its file compressed."""
    bag = tmp_path / "room"
    shutil.copytree(ROOM, bag)
    file = bag / "room.mcap"
    (bag / "room.mcap.zstd").write_bytes(zstd.compress(file.read_bytes()))
    file.unlink()
    content = yaml.safe_load((bag / "metadata.yaml").read_text(encoding="utf-8"))
    content["rosbag2_bagfile_information"].update(
        compression_format="zstd",
        compression_mode="FILE",
        relative_file_paths=["room.mcap.zstd"],
    )
    (bag / "metadata.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return bag


def test_a_compressed_bag_is_read_and_mended(packed: Path) -> None:
    whole = len(read_recording(packed).steps)
    (packed / "metadata.yaml").unlink()
    with pytest.raises(InvalidInput, match="--mend"):
        read_recording(packed)
    mended, _ = mend(packed)
    assert len(read_recording(mended).steps) == whole


def test_of_a_compressed_file_alone_everything_is_mended(packed: Path) -> None:
    said = yaml.safe_load((packed / "metadata.yaml").read_text(encoding="utf-8"))
    mended, count = mend(packed / "room.mcap.zstd")
    assert mended == packed / "room_mended"
    assert count == said["rosbag2_bagfile_information"]["message_count"]


def test_a_compressed_file_that_is_cut_short_is_mended_as_far_as_it_goes(packed: Path) -> None:
    file = packed / "room.mcap.zstd"
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(InvalidInput, match="--mend"):
        read_recording(packed)
    mended, count = mend(packed)
    with Reader(mended) as reader:
        assert reader.message_count == count > 0


@pytest.mark.parametrize("files", [1, 3])
def test_a_few_bytes_that_stand_for_gigabytes_are_refused(tmp_path: Path, files: int) -> None:
    bag = tmp_path / "bomb"
    bag.mkdir()
    for number in range(files):
        packer = zstd.ZstdCompressor()
        mebibyte = bytes(1 << 20)
        pieces = [packer.compress(mebibyte) for _ in range(1200 // files)]
        (bag / f"bomb_{number}.db3.zstd").write_bytes(b"".join([*pieces, packer.flush()]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidInput, match="no recording compresses so far"):
        mend(bag)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB
    assert not bag.with_name("bomb_mended").exists()


@pytest.mark.parametrize("declared", [0, 1 << 20, 1 << 30, 1 << 62])
def test_a_chunk_that_stands_for_gigabytes_is_left_out(tmp_path: Path, declared: int) -> None:
    packer = zstd.ZstdCompressor()
    packed = b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(400)), packer.flush()])
    head = struct.pack("<QQQII", 0, 0, declared, 0, 4) + b"zstd" + struct.pack("<Q", len(packed))
    file = tmp_path / "bomb.mcap"
    file.write_bytes(MAGIC + struct.pack("<BQ", 0x06, len(head) + len(packed)) + head + packed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidInput, match="no message"):
        mend(file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


@pytest.mark.parametrize("text", ["", "[]", "a: 1"])
def test_metadata_that_says_nothing_is_named(tmp_path: Path, text: str) -> None:
    bag = tmp_path / "room"
    shutil.copytree(ROOM, bag)
    (bag / "metadata.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInput, match="metadata.yaml describes no bag"):
        read_recording(bag)
    assert read_recording(mend(bag)[0]).steps
