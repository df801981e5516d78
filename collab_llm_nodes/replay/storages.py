"""Storage files of bags, read in order of time, or in order of recording if the clock went back.

A restarted simulator begins at zero, and a computer's clock may be set. Sorting by time would mix
the messages before and after that.
"""

from __future__ import annotations

from collections.abc import Collection, Generator

import numpy as np
from rosbags.interfaces import Connection
from rosbags.rosbag2.storage_mcap import Channel, McapReader, Schema
from rosbags.rosbag2.storage_sqlite3 import Sqlite3Reader

RESTART_NS = 10**9
"""A clock that goes back by more was set, or belongs to a restarted simulator."""
_INDEX_HEAD = 1 + 8 + 2 + 4
"""Bytes before the entries of a message index in an mcap file."""

Messages = Generator[tuple[Connection, int, bytes], None, None]


class _Schemas(dict[int, Schema]):
    """Schemas of an mcap file; those of other systems count as no definition."""

    def __setitem__(self, key: int, schema: Schema) -> None:
        known = schema.encoding in ("ros2msg", "ros2idl")
        super().__setitem__(key, schema if known else schema._replace(encoding="", data=""))


class _Channels(dict[int, Channel]):
    """Channels of an mcap file, without QoS."""

    def __setitem__(self, key: int, channel: Channel) -> None:
        super().__setitem__(key, channel._replace(metadata=b""))


class McapFile(McapReader):
    """An mcap file; one without an index is read in order of recording."""

    def __init__(self, path: object) -> None:
        super().__init__(path)  # type: ignore[arg-type]
        self.schemas, self.channels = _Schemas(), _Channels()

    def messages(self, connections: Collection[Connection], *interval: int | None) -> Messages:
        unsorted = not self.chunks or self._goes_back()
        read = self.messages_scan if unsorted else super().messages
        return read(connections, *interval)

    def _goes_back(self) -> bool:
        """Return True if the clock of a topic goes back, by the index alone."""
        assert self.bio is not None
        newest: dict[int, int] = {}
        for chunk in sorted(self.chunks, key=lambda chunk: chunk.chunk_start_offset):
            for channel, offset in chunk.message_index_offsets.items():
                self.bio.seek(offset + _INDEX_HEAD)
                entries = self.bio.read(16 * chunk.channel_count.get(channel, 0))
                times = np.frombuffer(entries, "<u8")[::2].astype(np.int64)
                if not times.size:
                    continue
                times = np.concatenate([[newest.get(channel, times[0])], times])
                if np.diff(times).min() < -RESTART_NS:
                    return True
                newest[channel] = int(times[-1])
        return False


class Sqlite3File(Sqlite3Reader):
    """An sqlite3 file."""

    def messages(self, connections: Collection[Connection], *interval: int | None) -> Messages:
        read = self._messages_scan if self._goes_back() else super().messages
        return read(connections, *interval)

    def _goes_back(self) -> bool:
        """Return True if the clock of a topic goes back."""
        assert self.dbconn is not None
        steps = "timestamp - lag(timestamp) OVER (PARTITION BY topic_id ORDER BY id) AS step"
        query = f"SELECT 1 FROM (SELECT {steps} FROM messages) WHERE step < ? LIMIT 1"
        return bool(list(self.dbconn.execute(query, (-RESTART_NS,))))

    def _messages_scan(self, connections: Collection[Connection], *_: int | None) -> Messages:
        assert self.dbconn is not None
        wanted = {connection.id: connection for connection in connections}
        rows = self.dbconn.execute("SELECT topic_id, timestamp, data FROM messages ORDER BY id")
        for topic, stamp, data in rows:
            if topic in wanted:
                yield wanted[topic], stamp, data
