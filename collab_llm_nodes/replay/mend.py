"""What can be read of a bag that was never closed, or is cut short, as a whole bag.

A recorder that was killed leaves a storage file without index and no ``metadata.yaml``. Of an mcap
file everything up to the first incomplete record is kept; of an sqlite3 file everything up to the
last transaction.
"""

from __future__ import annotations

import mmap
import shutil
import sqlite3
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lz4.frame import decompress as decompress_lz4
from rosbags.interfaces import Connection
from rosbags.rosbag2 import Writer
from rosbags.rosbag2.metadata import parse_qos

from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.replay.bag import STORAGES, SUFFIXES, storage_file, type_hash

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_MAGIC = b"\x89MCAP0\r\n"
_SCHEMA, _CHANNEL, _MESSAGE, _CHUNK, _DATA_END = 0x03, 0x04, 0x05, 0x06, 0x0F
_UNPACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    "lz4": decompress_lz4,
    "zstd": zstd.decompress,
}


@dataclass(frozen=True)
class _Topic:
    name: str
    type_name: str
    definition: str
    qos: str


_Message = tuple[_Topic, int, bytes]


def mend(path: Path, out: Path | None = None) -> tuple[Path, int]:
    """Write what can be read of ``path`` as a new bag; the original stays as it is.

    Args:
        path: a bag's folder or storage file.
        out: the new bag's folder; ``<path>_mended`` by default.

    Returns:
        The new bag and the number of its messages.

    Raises:
        InvalidInput: there is no bag, ``out`` exists, or no message can be read.
    """
    file = storage_file(path)
    out = out or path.with_name(f"{path.stem if path.is_file() else path.name}_mended")
    if out.exists():
        raise InvalidInput(f"{out} exists", field="out", remedy="name another folder, or move it")
    storage = SUFFIXES[file.suffix]
    messages = _read_mcap(file) if storage == "mcap" else _read_sqlite3(file)
    first = next(messages, None)
    if first is None:
        raise InvalidInput(f"no message of {path} can be read", field="bag")
    writer = Writer(out, version=9, storage_plugin=STORAGES[storage])
    writer.open()
    connections: dict[_Topic, Connection] = {}
    count = 0
    message: _Message | None = first
    while message is not None:
        topic, stamp, data = message
        if topic not in connections:
            connections[topic] = writer.add_connection(
                topic.name,
                topic.type_name,
                msgdef=topic.definition,
                rihs01=type_hash(topic.type_name, topic.definition),
                offered_qos_profiles=parse_qos(topic.qos),
            )
        writer.write(connections[topic], stamp, data)
        count += 1
        message = next(messages, None)
    writer.close()
    return out, count


def _read_mcap(file: Path) -> Iterator[_Message]:
    """All messages before the first record that is not whole (https://mcap.dev/spec)."""
    schemas: dict[int, tuple[str, str]] = {}
    topics: dict[int, _Topic] = {}
    with file.open("rb") as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            return
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for kind, body in _records(data, len(_MAGIC)):
                inside = _records(_unpacked(body), 0) if kind == _CHUNK else [(kind, body)]
                for op, record in inside:
                    if op == _SCHEMA:
                        name, _, text = _strings(record, 2, 3)
                        schemas[struct.unpack_from("<H", record)[0]] = name, text
                    elif op == _CHANNEL:
                        number, schema = struct.unpack_from("<HH", record)
                        topic, _, *metadata = _strings(record, 4, 2) + _metadata(record)
                        topics[number] = _Topic(topic, *schemas[schema], qos="".join(metadata))
                    elif op == _MESSAGE:
                        number, _, stamp = struct.unpack_from("<HIQ", record)
                        yield topics[number], stamp, record[22:]


def _records(data: bytes | mmap.mmap, position: int) -> Iterator[tuple[int, bytes]]:
    """Operation and content of each record, until one is not whole or the data section ends."""
    while position + 9 <= len(data):
        kind, size = struct.unpack_from("<BQ", data, position)
        position += 9
        if kind in (0, _DATA_END) or position + size > len(data):
            return
        yield kind, bytes(data[position : position + size])
        position += size


def _unpacked(chunk: bytes) -> bytes:
    """The records in a chunk; none if what it holds cannot be unpacked."""
    (name_size,) = struct.unpack_from("<I", chunk, 28)
    name = chunk[32 : 32 + name_size].decode("ascii", "replace")
    try:
        return _UNPACK[name](chunk[40 + name_size :])
    except (KeyError, RuntimeError, zstd.ZstdError):  # lz4 raises RuntimeError
        return b""


def _strings(record: bytes, position: int, count: int) -> list[str]:
    """``count`` strings with their lengths before them."""
    found = []
    for _ in range(count):
        (size,) = struct.unpack_from("<I", record, position)
        position += 4 + size
        found.append(record[position - size : position].decode("utf-8", "replace"))
    return found


def _metadata(channel: bytes) -> list[str]:
    """The value of ``offered_qos_profiles`` in a channel's map; an empty list without it."""
    topic, encoding = _strings(channel, 4, 2)
    position = 4 + 8 + len(topic.encode()) + len(encoding.encode())
    (size,) = struct.unpack_from("<I", channel, position)
    end, position = position + 4 + size, position + 4
    while position < end:
        key, value = _strings(channel, position, 2)
        if key == "offered_qos_profiles":
            return [value]
        position += 8 + len(key.encode()) + len(value.encode())
    return []


def _read_sqlite3(file: Path) -> Iterator[_Message]:
    """All messages of the last transaction. A copy is opened: SQLite itself mends what it opens."""
    with tempfile.TemporaryDirectory(prefix="collab_llm_") as folder:
        for part in (
            file,
            file.with_name(file.name + "-journal"),
            file.with_name(f"{file.name}-wal"),
        ):
            if part.is_file():
                shutil.copy(part, folder)
        connection = sqlite3.connect(Path(folder) / file.name)
        try:
            definitions = dict(
                connection.execute(
                    "SELECT topic_type, encoded_message_definition FROM message_definitions"
                )
            )
            topics = {
                number: _Topic(name, kind, definitions[kind], qos)
                for number, name, kind, qos in connection.execute(
                    "SELECT id, name, type, offered_qos_profiles FROM topics"
                )
            }
            for number, stamp, data in connection.execute(
                "SELECT topic_id, timestamp, data FROM messages ORDER BY timestamp, id"
            ):
                yield topics[number], stamp, data
        except (sqlite3.DatabaseError, KeyError) as error:
            raise InvalidInput(f"{file} cannot be mended: {error}", field="bag") from error
        finally:
            connection.close()
