"""The store: documents and their chunks in a folder, found by words or by vectors.

    FOLDER/store.db         SQLite: document, chunk, words (FTS5, BM25), vector
    FOLDER/kv/              precomputed keys and values of chunks (``kv_files.py``)

A change is a transaction that is on the disk when the call returns (write-ahead log, fsync at each
commit): a process that is killed, or a battery that is pulled, leaves the state before or after
it. Any number of processes may read while one writes; a second writer waits.
"""

from __future__ import annotations

import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import ConfigError, InvalidInput, quoted
from collab_llm_nodes.knowledge.chunking import Chunk
from collab_llm_nodes.knowledge.database import Database
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.knowledge.encoders import Encoder
from collab_llm_nodes.knowledge.kv_files import KvFiles
from collab_llm_nodes.knowledge.vectors import NUMBER, Vectors, is_vector
from collab_llm_nodes.knowledge.words import words

BUSY_S = 10.0
"""Wait for another writer; who needs longer than this is told to try again."""
_BATCH = 1000  # chunks
_QUERY_CHARACTERS = 10_000
_QUERY_TERMS = 64
_UTF8_BYTES = 4  # of a character at most
_COLUMNS = "chunk.id, name, digest, start, end, text, page, section"
_TYPES = (int, str, str, int, int, str, int, str)


@dataclass(frozen=True)
class StoreLimits:
    """Bounds of a store on disk."""

    bytes: int = setting(
        4 << 30,
        "Size of the database at most [bytes]. Lower it on a small disk.",
        low=1 << 20,
        high=1 << 44,
    )
    chunks: int = setting(
        200_000,
        "Chunks of one document at most. Raise it for documents that are refused.",
        low=1,
        high=10_000_000,
    )
    characters: int = setting(
        64 << 20,
        "Text of one document at most [characters]. Raise it likewise.",
        low=1,
        high=1 << 29,
    )
    kv_bytes: int = setting(1 << 30, "Size of all KV files at most [bytes].", low=0, high=1 << 44)

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class StoredDocument:
    """An entry of the store's list.

    Attributes:
        id: ``Document.id``.
        version: of the store when it was added.
        added: seconds since 1970.
    """

    name: str
    id: str
    characters: int
    chunks: int
    version: int
    added: float


@dataclass(frozen=True)
class Hit:
    """A chunk that was found.

    Attributes:
        id: of the chunk in its store, never given to another one.
        name: of its document.
        score: relevance; larger is better. Scores of one search can be compared.
    """

    id: int
    name: str
    chunk: Chunk
    score: float = 0.0


class Store:
    """Documents, chunks and indexes. Any thread may use it.

    Args:
        folder: of the store, made if absent. None: a store of this object's own that is gone when
            it is closed; what does not fit into 16 MB of memory lies in a temporary file.
        create: make a store where there is none.

    Raises:
        InvalidInput: there is no store in the folder, and none is to be made.
        ConfigError: the folder holds something else, a store of a newer format, or one with
            tables, triggers or views that are not ours.
        Unavailable: it cannot be read or written.
    """

    def __init__(
        self,
        folder: str | Path | None,
        limits: StoreLimits | None = None,
        *,
        create: bool = True,
    ) -> None:
        self._limits = limits or StoreLimits()
        folder = None if folder is None else Path(folder)
        self._database = Database(
            folder,
            most_bytes=self._limits.bytes,
            busy_s=BUSY_S,
            create=create,
        )
        self._vectors = Vectors(self._database)
        self.kv: KvFiles | None = None
        if folder is not None:
            self.kv = KvFiles(folder / "kv", self._limits.kv_bytes)
            with self._database.reading() as db:
                self.kv.keep_only(row[0] for row in db.execute("SELECT id FROM chunk"))

    # --- Changes ---------------------------------------------------------------------------------

    def add(
        self,
        document: Document,
        chunks: Iterable[Chunk],
        check: Callable[[], None] = lambda: None,
        *,
        replacing: bool = True,
    ) -> int:
        """Add ``document``, in the place of one of the same name, and return the new version.

        Args:
            chunks: of the document; taken one by one.
            check: called every thousand chunks; what it raises undoes everything.
            replacing: False makes it an error if there is a document of this name.

        Raises:
            InvalidInput: more text or chunks than ``limits`` allow, or the name is taken.
            Unavailable: no room, on the disk or within ``limits.bytes``.
            Busy: another writer took longer than ``BUSY_S``.
        """
        if len(document.content) > self._limits.characters:
            raise InvalidInput(
                f"{quoted(document.name)} has {len(document.content)} characters",
                field="documents",
                remedy=f"at most {self._limits.characters}; split it, or raise the store's limit",
            )
        with self._database.writing() as db:
            replaced = self._ids(db, document.name)
            if (
                not replacing
                and db.execute("SELECT 1 FROM document WHERE name = ?", (document.name,)).fetchone()
            ):
                raise InvalidInput(
                    f"there is a document {quoted(document.name)} already",
                    field="name",
                    remedy="delete it first, ask for its replacement, or choose another name",
                )
            db.execute("DELETE FROM document WHERE name = ?", (document.name,))
            version = _next_version(db)
            row = db.execute(
                "INSERT INTO document (name, digest, characters, content, version, added)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (
                    *(document.name, document.id, len(document.content)),
                    *(zlib.compress(document.content.encode(), 1), version, time.time()),
                ),
            ).lastrowid
            assert row is not None
            self._add_chunks(db, row, document.name, chunks, check)
        self._forget_kv(replaced)
        return version

    def remove(self, name: str) -> int:
        """Remove a document with its chunks, vectors and KV files; return the new version.

        Its words stay in unused parts of the database until ``compact``.

        Raises:
            InvalidInput: there is none of this name.
        """
        with self._database.writing() as db:
            removed = self._ids(db, name)
            if not db.execute("DELETE FROM document WHERE name = ?", (name,)).rowcount:
                raise _no_document(name)
            version = _next_version(db)
        self._forget_kv(removed)
        return version

    def embed(self, encoder: Encoder, most: int = 32) -> int:
        """Give vectors to ``most`` chunks that have none, and return how many are left.

        Call it until that is 0. What is done is kept, so a caller may stop between two calls.

        Raises:
            ConfigError: the store's vectors are those of another encoder.
        """
        with self._database.reading() as db:
            self._check_encoder(db, encoder.fingerprint)
            rows = db.execute(
                "SELECT id, text FROM chunk WHERE id IN"
                " (SELECT id FROM chunk EXCEPT SELECT chunk FROM vector ORDER BY 1 LIMIT ?)"
                " ORDER BY id",
                (most,),
            )
            found = list(self._database.checked(rows, int, str))
        if found:
            vectors = encoder.encode([text for _, text in found]).astype(NUMBER)
            with self._database.writing() as db:
                self._check_encoder(db, encoder.fingerprint)
                db.execute(
                    "INSERT OR IGNORE INTO meta VALUES ('encoder', ?)", (encoder.fingerprint,)
                )
                for (chunk, _), vector in zip(found, vectors, strict=True):
                    db.execute(
                        "INSERT OR IGNORE INTO vector"
                        " SELECT id, ? FROM chunk WHERE id = ?",  # unless it has been removed
                        (vector.tobytes(), chunk),
                    )
                _next_version(db)
        return self.without_vector()

    def without_vector(self) -> int:
        """Return the number of chunks that have no vector yet."""
        with self._database.reading() as db:
            row = db.execute("SELECT (SELECT count(*) FROM chunk) - (SELECT count(*) FROM vector)")
            return int(row.fetchone()[0])

    def forget_vectors(self) -> None:
        """Remove all vectors, so that another encoder may give new ones."""
        with self._database.writing() as db:
            db.execute("DELETE FROM vector")
            db.execute("DELETE FROM meta WHERE key = 'encoder'")
            _next_version(db)

    def mend(self, encoder: Encoder) -> tuple[int, bool]:
        """Remove vectors that cannot be what was written, and a damaged index of words.

        Both come from the chunks' texts: :meth:`embed` gives new vectors, and the index of words is
        made anew at once.

        Returns:
            Vectors removed, and whether the index of words was damaged.

        Raises:
            ConfigError: the store's vectors are those of another encoder.
        """
        with self._database.writing() as db:
            self._check_encoder(db, encoder.fingerprint)
            rows = db.execute("SELECT chunk, value FROM vector")
            wrong = [(chunk,) for chunk, value in rows if not is_vector(value, encoder.width)]
            if wrong:
                db.executemany("DELETE FROM vector WHERE chunk = ?", wrong)
                _next_version(db)
            try:
                db.execute("INSERT INTO words (words, rank) VALUES ('integrity-check', 1)")
            except sqlite3.DatabaseError:
                db.execute("INSERT INTO words (words) VALUES ('rebuild')")
                return len(wrong), True
        return len(wrong), False

    def compact(self) -> None:
        """Write the database anew without what was removed; takes about as long as adding it."""
        with self._database.writing() as db:
            db.execute("INSERT INTO words (words) VALUES ('optimize')")
        self._database.vacuum()

    # --- Questions -------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """Random name of the store; a snapshot has the same."""
        return str(self._meta("store"))

    @property
    def version(self) -> int:
        """Number of changes so far."""
        return int(self._meta("version"))

    @property
    def encoder(self) -> str:
        """Fingerprint of the encoder whose vectors it holds; empty without any."""
        return str(self._meta("encoder") or "")

    def documents(self) -> tuple[StoredDocument, ...]:
        """Return the list of documents, by name."""
        with self._database.reading() as db:
            rows = db.execute(
                "SELECT name, digest, characters,"
                " (SELECT count(*) FROM chunk WHERE chunk.document = document.id), version, added"
                " FROM document ORDER BY name"
            )
            types = (str, str, int, int, int, float)
            return tuple(StoredDocument(*row) for row in self._database.checked(rows, *types))

    def pieces(self) -> int:
        """Return the number of chunks of all documents."""
        with self._database.reading() as db:
            return int(db.execute("SELECT count(*) FROM chunk").fetchone()[0])

    def document(self, name: str) -> Document:
        """Return the document of this name.

        Raises:
            InvalidInput: there is none.
        """
        with self._database.reading() as db:
            rows = db.execute(
                "SELECT content, digest, characters FROM document WHERE name = ?", (name,)
            )
            row = next(self._database.checked(rows, bytes, str, int), None)
        if row is None:
            raise _no_document(name)
        packed, digest, characters = row
        if characters > self._limits.characters:
            raise InvalidInput(
                f"{quoted(name)} has {characters} characters",
                field="name",
                remedy=f"at most {self._limits.characters}; raise the store's limit",
            )
        try:
            document = Document(name, _unpacked(packed, _UTF8_BYTES * characters).decode())
        except (zlib.error, UnicodeDecodeError) as error:
            raise self._database.damaged(str(error)) from error
        if document.id != digest:
            raise self._database.damaged(f"{quoted(name)} is not what was added")
        return document

    def chunks(self, name: str) -> tuple[Hit, ...]:
        """Return the chunks of a document in their order, with score 0."""
        with self._database.reading() as db:
            rows = db.execute(
                f"SELECT {_COLUMNS}, 0.0 FROM chunk JOIN document ON document.id = document"
                " WHERE name = ? ORDER BY chunk.id",
                (name,),
            )
            return tuple(map(_hit, self._database.checked(rows, *_TYPES, float)))

    def search(self, question: str, most: int) -> tuple[Hit, ...]:
        """Return the ``most`` chunks that fit the words of ``question`` best, by BM25.

        Scores are Okapi BM25 (k1 = 1.2, b = 0.75) with the statistics of this store: those of two
        stores cannot be compared. Words that more than half of the chunks hold tell nothing, and
        are left out if there are others.
        """
        with self._database.reading() as db:
            rarest = self._rarest(db, dict.fromkeys(words(question[:_QUERY_CHARACTERS])))
            if not rarest:
                return ()
            rows = db.execute(
                f"SELECT {_COLUMNS}, score FROM"
                " (SELECT rowid, -bm25(words) AS score FROM words WHERE words MATCH ?"
                " ORDER BY bm25(words), rowid LIMIT ?) AS found"
                " JOIN chunk ON chunk.id = found.rowid JOIN document ON document.id = document"
                " ORDER BY score DESC, chunk.id",
                (" OR ".join(f'"{word}"' for word in rarest), most),
            )
            return tuple(map(_hit, self._database.checked(rows, *_TYPES, float)))

    def nearest(self, vector: np.ndarray, encoder: str, most: int) -> tuple[Hit, ...]:
        """Return the ``most`` chunks whose vectors have the largest product with ``vector``.

        Exact: all vectors are compared. They are held in memory, 1.5 KB for each of 384 numbers.

        Args:
            vector: float32 [width].
            encoder: fingerprint of the encoder that it comes from.

        Raises:
            ConfigError: the store's vectors are those of another encoder, or it has none.
        """
        with self._database.reading() as db:
            self._check_encoder(db, encoder)
            if not self._meta("encoder") and db.execute("SELECT 1 FROM chunk").fetchone():
                raise ConfigError(
                    "the store holds no vectors", field="encoder", remedy="embed its chunks first"
                )
            self._vectors.refresh(db)
            best, scores = self._vectors.nearest(vector, most)
            rows = db.execute(
                f"SELECT {_COLUMNS} FROM chunk JOIN document ON document.id = document"
                f" WHERE chunk.id IN ({', '.join('?' * len(best))})",
                best,
            )
            found = {row[0]: row for row in self._database.checked(rows, *_TYPES)}
        if len(found) < len(best):
            raise self._database.damaged("a vector of no chunk")
        return tuple(_hit((*found[i], s)) for i, s in zip(best, scores, strict=True))

    def snapshot(self, file: str | Path) -> None:
        """Write the whole store but its KV files to ``file``, as it is at one moment.

        The file is the ``store.db`` of a new store, to be copied anywhere.

        Raises:
            Unavailable: it cannot be written.
        """
        self._database.copy(Path(file))

    def close(self) -> None:
        """Close the files. A store without a folder is gone then."""
        self._database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- Within ----------------------------------------------------------------------------------

    def _add_chunks(
        self,
        db: sqlite3.Connection,
        document: int,
        name: str,
        chunks: Iterable[Chunk],
        check: Callable[[], None],
    ) -> None:
        rest, room = iter(chunks), self._limits.chunks
        while batch := list(islice(rest, _BATCH)):
            check()
            room -= len(batch)
            if room < 0:
                raise InvalidInput(
                    f"{quoted(name)} has more than {self._limits.chunks} chunks",
                    field="chunks",
                    remedy="cut it into larger ones, or raise the store's limit",
                )
            (last,) = db.execute("SELECT coalesce(max(id), 0) FROM chunk").fetchone()
            db.executemany(
                "INSERT INTO chunk (document, start, end, page, section, text)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                ((document, c.start, c.end, c.page, c.section, c.text) for c in batch),
            )
            # Not by a trigger: that takes three times as long.
            db.execute(
                "INSERT INTO words (rowid, text) SELECT id, text FROM indexed WHERE id > ?",
                (last,),
            )

    def _meta(self, key: str) -> Any:
        with self._database.reading() as db:
            row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    def _ids(self, db: sqlite3.Connection, name: str) -> list[int]:
        """Return the ids of a document's chunks."""
        rows = db.execute(
            "SELECT chunk.id FROM chunk JOIN document ON document.id = document WHERE name = ?",
            (name,),
        )
        return [row[0] for row in rows]

    def _forget_kv(self, chunks: list[int]) -> None:
        if self.kv is not None and chunks:
            self.kv.remove(chunks)

    def _check_encoder(self, db: sqlite3.Connection, fingerprint: str) -> None:
        row = db.execute("SELECT value FROM meta WHERE key = 'encoder'").fetchone()
        if row is not None and row[0] != fingerprint:
            raise ConfigError(
                f"the store holds vectors of encoder {row[0][:12]}, not {fingerprint[:12]}",
                field="encoder",
                remedy="use that one, or give new vectors by `collab-llm knowledge embed`",
            )

    def _rarest(self, db: sqlite3.Connection, asked: Iterable[str]) -> list[str]:
        (total,) = db.execute("SELECT count(*) FROM chunk").fetchone()
        found = []
        for word in asked:
            row = db.execute("SELECT doc FROM terms WHERE term = ?", (word,)).fetchone()
            found.append((row[0] if row else 0, word))
        # A count of 0 may mean that the index spells the word in another way: it is always asked.
        if any(0 < count <= total / 2 for count, _ in found):
            found = [pair for pair in found if pair[0] <= total / 2]
        return [word for _, word in sorted(found)[:_QUERY_TERMS]]


def _hit(row: tuple) -> Hit:
    chunk, name, digest, start, end, text, page, section, score = row
    return Hit(chunk, name, Chunk(digest, start, end, text, page, section), score)


def _unpacked(packed: bytes, most: int) -> bytes:
    """Decompress up to ``most`` bytes: a few kilobytes of a stranger may stand for gigabytes."""
    return zlib.decompressobj().decompress(packed, max(most, 1))  # 0 would mean no limit


def _next_version(db: sqlite3.Connection) -> int:
    row = db.execute("UPDATE meta SET value = value + 1 WHERE key = 'version' RETURNING value")
    return int(row.fetchone()[0])


def _no_document(name: str) -> InvalidInput:
    return InvalidInput(
        f"the store has no document {quoted(name)}", field="name", remedy="list its documents"
    )
