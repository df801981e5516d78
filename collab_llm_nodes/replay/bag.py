"""Bags on disk, through ``rosbags``: written in parts, read with typed errors. Needs no ROS.

The format is rosbag2's (version 9: Jazzy and newer), so ``ros2 bag`` reads what is written here,
and what it records is read here. Message definitions travel inside.

A bag may hold foreign topics, such as JSON or Protobuf in an mcap file, or types that cannot be
parsed: each topic is read by its own definition, once it is asked for.

An mcap file carries checksums of its chunks and its index, which are checked when it is read; an
sqlite3 file has none, so only damage to its structure is found.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
import sys
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path, PosixPath
from typing import Any, BinaryIO
from zlib import crc32

import yaml
from rosbags.interfaces import Connection, MessageDefinitionFormat, Qos
from rosbags.rosbag2 import CompressionFormat, CompressionMode, Reader, StoragePlugin, Writer
from rosbags.rosbag2.reader import DirectoryReader
from rosbags.typesys import Stores, get_types_from_idl, get_types_from_msg, get_typestore
from rosbags.typesys.store import Typestore

from collab_llm_nodes.errors import CollabError, ConfigError, InvalidInput
from collab_llm_nodes.replay.storages import RESTART_NS, McapFile, Sqlite3File

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

STORAGES = {"mcap": StoragePlugin.MCAP, "sqlite3": StoragePlugin.SQLITE3}
SUFFIXES = {".mcap": "mcap", ".db3": "sqlite3"}
_SEPARATOR = "=" * 80
CDR = "cdr"
"""Encoding of ROS 2's messages."""


class BagWriter:
    """One recording: a bag, or several in a row when ``max_bytes`` limits their size.

    Each part is a bag of its own, complete when the next one begins. A part is made by its first
    message, so none is empty.

    Args:
        folder: of the bags; created if missing.
        name: of the bags; ``_000``, ``_001`` ... is appended.
        storage: "mcap" or "sqlite3".
        max_bytes: of message data in a part; 0: no limit.
        max_parts: keep so many of this recording and delete older ones; 0: keep all.

    Attributes:
        messages: written so far.
        size: their data [byte].
        path: the part that is being written; None before the first message and once closed.
    """

    def __init__(
        self, folder: Path, name: str, storage: str, *, max_bytes: int = 0, max_parts: int = 0
    ) -> None:
        self.messages = self.size = 0
        self.path: Path | None = None
        self._folder, self._name, self._storage = folder, name, storage
        self._max_bytes, self._max_parts = max_bytes, max_parts
        self._parts: list[Path] = []
        self._number = 0
        self._part_size = 0
        self._writer: Writer | None = None
        self._connections: dict[tuple[str, str], Connection] = {}
        self._kept: dict[str, tuple[str, bytes, tuple[Qos, ...]]] = {}

    def write(
        self,
        topic: str,
        type_name: str,
        stamp: int,
        data: bytes,
        qos: tuple[Qos, ...] = (),
        *,
        keep: bool = False,
    ) -> None:
        """Append one serialised message.

        Args:
            type_name: such as ``std_msgs/msg/String``.
            stamp: when it was received [ns].
            qos: profiles offered by its publishers.
            keep: it is a state: each further part begins with the last one.

        Raises:
            ConfigError: the type's definition is not installed.
            OSError, apsw.Error, sqlite3.Error: the disk.
        """
        if self._max_bytes and self._part_size >= self._max_bytes:
            self.close()
        begins = self._writer is None
        if begins:
            self._open()
        if keep:
            self._kept[topic] = (type_name, data, qos)
        if begins:
            for other, (kind, content, offered) in self._kept.items():
                if other != topic:
                    self._append(other, kind, stamp, content, offered)
        self._append(topic, type_name, stamp, data, qos)

    def flush(self) -> None:
        """Pass all messages to the operating system, so that they outlive this process."""
        storage: Any = self._writer.storage if self._writer is not None else None
        if storage is None:
            return
        if self._storage == "sqlite3":
            storage.conn.commit()
        elif storage.chunk.msgs:  # rosbags itself closes a chunk only when it has a megabyte
            storage.close_chunk()
            storage.bio.flush()

    def close(self) -> None:
        """Complete the present part: index and ``metadata.yaml``."""
        writer, self._writer = self._writer, None
        self.path = None
        if writer is not None:
            close_bag(writer)

    def _open(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        while (path := self._folder / f"{self._name}_{self._number:03}").exists():
            self._number += 1
        self._number += 1  # never used again, though the oldest parts may go
        self._writer, self.path = new_bag(path, self._storage), path
        self._connections.clear()
        self._part_size = 0
        self._parts.append(path)
        while self._max_parts and len(self._parts) > self._max_parts:
            shutil.rmtree(self._parts.pop(0), ignore_errors=True)

    def _append(
        self, topic: str, type_name: str, stamp: int, data: bytes, qos: tuple[Qos, ...]
    ) -> None:
        assert self._writer is not None
        connection = self._connections.get((topic, type_name))
        if connection is None:
            text, digest = definition(type_name)
            connection = self._connections[topic, type_name] = self._writer.add_connection(
                topic, type_name, msgdef=text, rihs01=digest, offered_qos_profiles=qos
            )
        self._writer.write(connection, stamp, data)
        self.messages += 1
        self.size += len(data)
        self._part_size += len(data)


def new_bag(path: Path, storage: str) -> Writer:
    """Return an empty bag, open for writing, for ``close_bag``; chunks of mcap are compressed.

    Only its owner can read it: pictures, questions and answers are private.
    """
    writer = Writer(path, version=9, storage_plugin=STORAGES[storage])
    if storage == "mcap":
        writer.set_compression(CompressionMode.STORAGE, CompressionFormat.ZSTD)
    writer.open()
    path.chmod(0o700)
    opened: Any = writer.storage
    opened.path.chmod(0o600)
    if storage == "mcap":
        opened.compressor = _compressed  # rosbags itself writes no checksum of a chunk
    return writer


def _compressed(chunk: bytes) -> bytes:
    """Return ``chunk`` compressed, with a checksum that any reader checks."""
    return zstd.compress(chunk, options={zstd.CompressionParameter.checksum_flag: 1})


def close_bag(writer: Writer) -> None:
    """Complete a bag: index, its checksum (mcap), ``metadata.yaml``."""
    storage: Any = writer.storage
    file: Path = storage.path
    writer.close()
    file.with_name("metadata.yaml").chmod(0o600)
    if file.suffix == ".mcap":
        with file.open("r+b") as opened:
            _, computed = _index_checksums(opened)  # rosbags leaves it 0: none
            opened.seek(-_CHECKSUM_FROM_END, os.SEEK_END)
            opened.write(struct.pack("<I", computed))


MAGIC = b"\x89MCAP0\r\n"
_FOOTER = 9 + 20 + len(MAGIC)
"""Bytes of the footer and what ends the file: where the index begins, its offsets, its checksum."""
_CHECKSUM_FROM_END = 4 + len(MAGIC)


def _index_checksums(mcap: BinaryIO) -> tuple[int, int]:
    """Return the checksum of the index (summary) as stored, 0 for none, and as computed.

    See https://mcap.dev/spec, Footer.
    """
    size = mcap.seek(0, os.SEEK_END)
    mcap.seek(size - _FOOTER)
    begin, _, stored = struct.unpack_from("<QQI", mcap.read(_FOOTER), 9)
    mcap.seek(begin or size - _FOOTER)
    return stored, crc32(mcap.read()[:-_CHECKSUM_FROM_END])


@cache
def definition(type_name: str) -> tuple[str, str]:
    """Return the whole definition of a message type, as rosbag2 stores it, and its hash.

    Raises:
        ConfigError: the type, or one it consists of, is not installed.
    """
    texts: dict[str, str] = {}
    _collect(type_name, texts)
    first, *others = texts
    parts = [texts[first], *(f"{_SEPARATOR}\nMSG: {_short(n)}\n{texts[n]}" for n in others)]
    text = "".join(part if part.endswith("\n") else part + "\n" for part in parts)
    return text, type_hash(type_name, text)


def type_hash(type_name: str, text: str) -> str:
    """Return the RIHS01 hash of a type (REP-2016) from its whole definition."""
    store = get_typestore(Stores.EMPTY)
    store.register(get_types_from_msg(text, type_name))
    return store.hash_rihs01(type_name)


def _collect(type_name: str, texts: dict[str, str]) -> None:
    """Add the definitions of ``type_name`` and its parts, from the installed ``.msg`` files."""
    package, _, name = type_name.partition("/msg/")
    prefixes = [Path(p) for p in os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep) if p]
    files = [p / "share" / package / "msg" / f"{name}.msg" for p in prefixes]
    file = next((f for f in files if f.is_file()), None)
    if file is None:
        raise ConfigError(
            f"the definition of {type_name} is not installed",
            field="topics",
            remedy="source the workspace that has it, or leave its topic out",
        )
    texts[type_name] = file.read_text(encoding="utf-8")
    _, fields = get_types_from_msg(texts[type_name], type_name)[type_name]
    for _, description in fields:
        part: Any = description
        while isinstance(part[1], tuple) and isinstance(part[1][0], tuple):  # arrays of arrays
            part = part[1][0]
        if isinstance(part[1], str) and part[1] not in texts:
            _collect(part[1], texts)


def _short(type_name: str) -> str:
    return type_name.replace("/msg/", "/")


class _DirectoryReader(DirectoryReader):
    STORAGE_PLUGINS = {"mcap": McapFile, "sqlite3": Sqlite3File}

    def open(self) -> None:
        super().open()
        for storage in self.storages:
            storage.connections = [_without_qos(c) for c in storage.connections]


class _Reader(Reader):
    """Reader of bags that rosbags refuses for topics, or settings, that are not asked for."""

    STORAGE_PLUGINS = {"dir": _DirectoryReader, ".mcap": McapFile, ".db3": Sqlite3File}


class _BagPath(PosixPath):
    """A path in a bag, whose ``metadata.yaml`` names only topics in ROS's encoding, and no QoS.

    rosbags finds the messages of a topic by its QoS as well, which users edit for ``ros2 bag play``
    so that it differs from the storage file.
    """

    def read_text(self, *args: Any, **kwargs: Any) -> str:
        text = super().read_text(*args, **kwargs)
        if self.name != "metadata.yaml":
            return text
        content = yaml.safe_load(text)
        if not isinstance(content, dict) or "rosbag2_bagfile_information" not in content:
            raise InvalidInput(
                f"{self} describes no bag: it is empty, or damaged",
                field="bag",
                remedy=_mending(self.parent),
            )
        about = content["rosbag2_bagfile_information"]
        topics = [
            topic
            for topic in about["topics_with_message_count"]
            if topic["topic_metadata"]["serialization_format"] == CDR
        ]
        for topic in topics:
            topic["topic_metadata"]["offered_qos_profiles"] = []
        about["topics_with_message_count"] = topics
        return yaml.safe_dump(content)


def _without_qos(connection: Connection) -> Connection:
    return connection._replace(ext=connection.ext._replace(offered_qos_profiles=[]))  # type: ignore[call-arg]


def _typestore(path: Path, connection: Connection) -> Typestore:
    """Return the types in a connection's definition.

    Raises:
        InvalidInput: there is no definition, or it is not the one that the bag names.
    """
    name, text = connection.msgtype, connection.msgdef.data
    store = get_typestore(Stores.EMPTY)
    if connection.msgdef.format == MessageDefinitionFormat.MSG:
        store.register(get_types_from_msg(text, name))
    elif connection.msgdef.format == MessageDefinitionFormat.IDL:
        for part in text.split(f"{_SEPARATOR}\n"):
            title, _, rest = part.partition("\n")
            store.register(get_types_from_idl(rest if title.startswith("IDL: ") else part))
    if name not in store.fielddefs:
        raise InvalidInput(
            f"{path} holds no definition of {name}",
            field=connection.topic,
            remedy="record it with collab-llm record or rosbag2 of Jazzy or newer",
        )
    if connection.digest and connection.digest != store.hash_rihs01(name):
        raise InvalidInput(
            f"{path}: hash mismatch of {name}",
            field="bag",
            remedy="the bag's types are not those it names: it was edited, or is damaged",
        )
    return store


class Bag:
    """A bag open for reading.

    Attributes:
        path: as it was given.
        types: the type of each topic in ROS's encoding (CDR).
    """

    def __init__(self, path: Path, reader: Reader) -> None:
        self.path = path
        self._reader = reader
        self._connections = [
            c for c in reader.connections if getattr(c.ext, "serialization_format", "") == CDR
        ]
        self.types = {c.topic: c.msgtype for c in self._connections}
        self._typestores: dict[str, Typestore] = {}

    def messages(self, topics: Collection[str]) -> Iterator[tuple[str, int, Any]]:
        """Yield topic, time of reception [ns] and content of the messages of ``topics``, in order.

        The time goes back where the recorder's clock did (``goes_back``).

        Raises:
            InvalidInput: the bag is damaged, lacks the definition of a type, or has another one
                than it says.
        """
        connections = [c for c in self._connections if c.topic in topics]
        if not connections:
            return
        with damage(self.path):
            stored = self._reader.messages(connections)
        missing = sum(c.msgcount for c in connections)
        while True:
            with damage(self.path):
                found = next(stored, None)
                if found is None and missing > 0:
                    raise InvalidInput(
                        f"{self.path} lacks {missing} of the messages that it announces",
                        field="bag",
                        remedy=_mending(self.path),
                    )
                if found is None:
                    return
                missing -= 1
                connection, stamp, data = found
                name = connection.msgtype
                if name not in self._typestores:
                    self._typestores[name] = _typestore(self.path, connection)
                message = self._typestores[name].deserialize_cdr(data, name)
            yield connection.topic, stamp, message


def goes_back(before: int, stamp: int) -> bool:
    """Return True if the clock was set back between two messages, received one after the other."""
    return stamp < before - RESTART_NS


@contextmanager
def open_bag(path: Path) -> Iterator[Bag]:
    """Open a bag: its folder, or one of its storage files.

    Raises:
        InvalidInput: there is none, it was not closed, or it is damaged.
    """
    _check_complete(path)
    with damage(path):
        reader = _Reader(_BagPath(path))
        reader.open()
    try:
        yield Bag(path, reader)
    finally:
        reader.close()


def storage_files(path: Path) -> list[Path]:
    """Return the storage files of a bag, even one without its ``metadata.yaml``.

    Raises:
        InvalidInput: there is none.
    """
    if path.is_file() and path.suffix in SUFFIXES:
        return [path]
    files = sorted(f for f in path.glob("*") if f.suffix in SUFFIXES) if path.is_dir() else []
    if not files and packed_files(path):
        raise InvalidInput(
            f"{path} holds compressed files without their metadata.yaml",
            field="bag",
            remedy=_mending(path),
        )
    if not files:
        raise InvalidInput(
            f"{path} is no bag" if path.exists() else f"{path} does not exist",
            field="bag",
            remedy=f"give a bag's folder, or its {' or '.join(SUFFIXES)} file",
        )
    return files


def packed_files(path: Path) -> list[Path]:
    """Return the storage files of a bag that rosbag2 has compressed as a whole."""
    files = sorted(path.glob("*.zstd")) if path.is_dir() else [path]
    return [f for f in files if f.suffix == ".zstd" and Path(f.stem).suffix in SUFFIXES]


def _check_complete(path: Path) -> None:
    if (path / "metadata.yaml").is_file():
        files, closed = [f for f in path.glob("*") if f.suffix in SUFFIXES], True
    else:
        files, closed = storage_files(path), path.is_file()
    if not closed or not all(_ends_well(f) for f in files if f.suffix == ".mcap"):
        raise InvalidInput(
            f"{path} was not closed: the recorder was killed or lost power, or a copy is truncated",
            field="bag",
            remedy=_mending(path),
        )
    for file in files:
        with damage(path):
            fault = _fault_of_mcap(file) if file.suffix == ".mcap" else _fault_of_sqlite3(file)
        if fault:
            raise InvalidInput(f"{file} is damaged: {fault}", field="bag", remedy=_mending(path))


def _ends_well(file: Path) -> bool:
    with file.open("rb") as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - len(MAGIC)))
        return opened.read() == MAGIC


def _fault_of_mcap(file: Path) -> str:
    """Return the fault of the index, "" if there is none; chunks are checked as they are read."""
    with file.open("rb") as opened:
        stored, computed = _index_checksums(opened)
    return "its index does not have its checksum" if stored not in (0, computed) else ""


def _fault_of_sqlite3(file: Path) -> str:
    """Return the fault of the structure, "" if there is none; there are no checksums."""
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?immutable=1", uri=True)) as base:
        (found,) = base.execute("PRAGMA integrity_check(1)").fetchone()
    return "" if found == "ok" else " ".join(str(found).split())


def _mending(path: Path) -> str:
    return f"collab-llm record --mend {path} makes a whole bag of what can be read"


@contextmanager
def damage(path: Path, remedy: str = "") -> Iterator[None]:
    """Turn any error of a parser on a damaged bag into one typed error."""
    try:
        yield
    except CollabError:
        raise
    except Exception as error:  # bytes that were changed can make a parser raise anything
        raise InvalidInput(
            f"{path} cannot be read: {str(error) or type(error).__name__}",
            field="bag",
            remedy=remedy or _mending(path),
        ) from error
