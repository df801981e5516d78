"""Recovery of a bag that was never closed, or is truncated: its readable part as a whole bag.

A recorder that was killed leaves a storage file without index and no ``metadata.yaml``. Of an mcap
file everything up to the first incomplete record is kept; of an sqlite3 file everything up to the
last transaction.

Topics in other encodings than ROS's, or without a definition that can be parsed, are left out.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from rosbags.interfaces import Connection, Qos
from rosbags.rosbag2 import Writer
from rosbags.rosbag2.metadata import parse_qos
from rosbags.rosbag2.storage_mcap import decompress

from collab_llm_nodes.errors import InvalidInput, printable
from collab_llm_nodes.replay.bag import (
    CDR,
    MAGIC,
    SUFFIXES,
    close_bag,
    damage,
    new_bag,
    packed_files,
    storage_files,
    type_hash,
    zstd,
)

log = logging.getLogger(__name__)

_PIECE = 1 << 20
"""Bytes that are unpacked at once."""
_MOST_TIMES = 100
_MOST_UNPACKED = 1 << 28
"""Bytes to which a bag may always be unpacked; larger ones by ``_MOST_TIMES`` at most."""
_SCHEMA, _CHANNEL, _MESSAGE, _CHUNK, _DATA_END = 0x03, 0x04, 0x05, 0x06, 0x0F


@dataclass(frozen=True)
class _Topic:
    name: str
    type_name: str
    definition: str
    qos: str


_Message = tuple[_Topic, int, bytes]


def mend(path: Path, out: Path | None = None) -> tuple[Path, int]:
    """Write the readable part of ``path`` as a new bag; the original stays as it is.

    Args:
        path: a bag's folder or storage file.
        out: the new bag's folder; ``<path>_mended`` by default.

    Returns:
        The new bag and the number of its messages.

    Raises:
        InvalidInput: there is no bag, ``out`` exists, or no message can be read.
    """
    out = out or path.with_name(
        f"{path.name.partition('.')[0] if path.is_file() else path.name}_mended"
    )
    if out.exists():
        raise InvalidInput(
            f"{out} exists; it may be what an earlier --mend made",
            field="mend",
            remedy="use it, or move or delete it and mend again",
        )
    with tempfile.TemporaryDirectory(prefix="collab_llm_") as folder:
        return out, _mend(path, _unpacked_files(path, Path(folder)), out)


def _unpacked_files(path: Path, folder: Path) -> list[Path]:
    """Return the storage files of a bag; compressed ones are unpacked into ``folder``.

    A truncated file is unpacked as far as it goes.
    """
    packed = packed_files(path)
    packed_size = sum(file.stat().st_size for file in packed)
    size = 0
    for file in packed:
        with (folder / file.stem).open("wb") as written:
            for piece in _pieces(file):
                size += len(piece)
                _check_size(size, packed_size, file)
                written.write(piece)
    return [folder / file.stem for file in packed] or storage_files(path)


def _pieces(file: Path) -> Iterator[bytes]:
    """Yield the content of a compressed file in small pieces, as far as it can be unpacked."""
    decompressor = zstd.ZstdDecompressor()
    with (
        file.open("rb") as read,
        contextlib.suppress(zstd.ZstdError, EOFError),  # damaged, or something follows it
    ):
        while packed := read.read(_PIECE):
            yield decompressor.decompress(packed, _PIECE)
            while not (decompressor.needs_input or decompressor.eof):
                yield decompressor.decompress(b"", _PIECE)


def _check_size(size: int, packed_size: int, what: object) -> None:
    """Refuse to unpack more than a recording holds: a few bytes may stand for terabytes.

    Raises:
        InvalidInput: ``size`` is too large for ``packed_size`` bytes.
    """
    most = max(_MOST_UNPACKED, _MOST_TIMES * packed_size)
    if size > most:
        raise InvalidInput(
            f"{what} unpacks {packed_size} bytes to over {most}: no recording compresses so far",
            field="mend",
            remedy="if it is one, unpack it (zstd -d) and mend the result",
        )


def _mend(path: Path, files: list[Path], out: Path) -> int:
    """Write ``out`` from ``files``; return the number of messages."""
    storage = SUFFIXES[files[0].suffix]
    read = _read_mcap if storage == "mcap" else _read_sqlite3
    writer = new_bag(out, storage)
    try:
        with damage(path, "nothing of it can be saved"):
            count = _copy(chain.from_iterable(map(read, files)), writer)
            if not count:
                raise InvalidInput(f"no message of {path} can be read", field="bag")
            close_bag(writer)
    except InvalidInput:
        writer.abort()
        shutil.rmtree(out)
        raise
    return count


def _copy(messages: Iterator[_Message], writer: Writer) -> int:
    """Write ``messages``; return their number."""
    connections: dict[_Topic, Connection | None] = {}
    count = 0
    for topic, stamp, data in messages:
        if topic not in connections:
            connections[topic] = _connection(topic, writer)
        if (connection := connections[topic]) is not None:
            writer.write(connection, stamp, data)
            count += 1
    return count


def _connection(topic: _Topic, writer: Writer) -> Connection | None:
    try:
        digest = type_hash(topic.type_name, topic.definition)
    except Exception as error:  # noqa: BLE001 text of any kind can make a parser raise anything
        why = " ".join(str(error).split())
        words = f"left out {topic.name}: no definition of {topic.type_name}: {why}"
        log.warning("%s", printable(words))
        return None
    return writer.add_connection(
        topic.name,
        topic.type_name,
        msgdef=topic.definition,
        rihs01=digest,
        offered_qos_profiles=_parsed(topic.qos),
    )


def _parsed(qos: str) -> list[Qos]:
    """Return the profiles; none if they cannot be read, since only players need them."""
    try:
        return parse_qos(qos)
    except Exception:  # noqa: BLE001 as above
        return []


def _read_mcap(file: Path) -> Iterator[_Message]:
    """Yield the messages in whole chunks, up to the first truncated record.

    See https://mcap.dev/spec.
    """
    schemas: dict[int, tuple[str, str]] = {}
    topics: dict[int, _Topic] = {}
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            return
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for kind, record in _unchunked(data):
                try:
                    if kind == _SCHEMA:
                        name, encoding, text = _strings(record, 2, 3)
                        if encoding == "ros2msg":
                            schemas[struct.unpack_from("<H", record)[0]] = name, text
                    elif kind == _CHANNEL:
                        number, schema = struct.unpack_from("<HH", record)
                        (topic, encoding), qos = _strings(record, 4, 2), _qos(record)
                        if encoding == CDR:
                            topics[number] = _Topic(topic, *schemas[schema], qos)
                    elif kind == _MESSAGE:
                        number, _, stamp = struct.unpack_from("<HIQ", record)
                        yield topics[number], stamp, record[22:]
                except KeyError:
                    continue  # of a topic in another encoding, or named in a chunk that is lost
                except struct.error:
                    return


def _unchunked(data: mmap.mmap) -> Iterator[tuple[int, bytes]]:
    for kind, body in _records(data, len(MAGIC)):
        if kind != _CHUNK:
            yield kind, body
        elif (inside := _unpacked(body)) is not None:
            yield from _records(inside, 0)


def _records(data: bytes | mmap.mmap, position: int) -> Iterator[tuple[int, bytes]]:
    """Yield operation and content of each whole record of the data section."""
    while position + 9 <= len(data):
        kind, size = struct.unpack_from("<BQ", data, position)
        position += 9
        if kind in (0, _DATA_END) or position + size > len(data):
            return
        yield kind, bytes(data[position : position + size])
        position += size


def _unpacked(chunk: bytes) -> bytes | None:
    """Return the records in a chunk; None if it cannot be unpacked, or is too large."""
    try:
        size, crc, name_size = struct.unpack_from("<QII", chunk, 16)
        name = chunk[32 : 32 + name_size].decode()
        packed = chunk[40 + name_size :]
        _check_size(size, len(packed), name)
        if name == "zstd":  # lz4 cannot expand to more than 255 times
            packed, name = zstd.ZstdDecompressor().decompress(packed, size + 1), ""
        return decompress(packed, name, size, crc)
    except Exception:  # noqa: BLE001 each compression has errors of its own
        return None


def _strings(record: bytes, position: int, count: int) -> list[str]:
    """Return ``count`` strings, each preceded by its length."""
    found = []
    for _ in range(count):
        (size,) = struct.unpack_from("<I", record, position)
        position += 4 + size
        found.append(record[position - size : position].decode("utf-8", "replace"))
    return found


def _qos(channel: bytes) -> str:
    """Return ``offered_qos_profiles`` of a channel's metadata, or ""."""
    position = 4
    for _ in ("topic", "encoding"):
        position += 4 + int(struct.unpack_from("<I", channel, position)[0])
    (size,) = struct.unpack_from("<I", channel, position)
    end, position = position + 4 + size, position + 4
    while position < end:
        key, value = _strings(channel, position, 2)
        if key == "offered_qos_profiles":
            return value
        position += 8 + len(key.encode()) + len(value.encode())
    return ""


def _read_sqlite3(file: Path) -> Iterator[_Message]:
    """Yield the messages up to the last transaction, of a copy: SQLite mends what it opens."""
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
                number: _Topic(name, kind, definitions.get(kind, ""), qos)
                for number, name, kind, qos in connection.execute(
                    "SELECT id, name, type, offered_qos_profiles FROM topics"
                    " WHERE serialization_format = ?",
                    (CDR,),
                )
            }
            for number, stamp, data in connection.execute(
                "SELECT topic_id, timestamp, data FROM messages ORDER BY id"
            ):
                if number in topics:
                    yield topics[number], stamp, data
        except (sqlite3.DatabaseError, KeyError) as error:
            raise InvalidInput(f"{file} cannot be mended: {error}", field="bag") from error
        finally:
            connection.close()
