"""The database of a store: transactions, readers beside a writer, and SQLite's errors made typed.

SQLite with a write-ahead log: a transaction is on the disk when it ends (fsync at each commit), and
readers see the state of one moment, whatever a writer does meanwhile.

Folder and files are made for their owner alone (0700, 0600): documents are private.

A file may come from a stranger, or from a failing disk. It is used only if its schema is exactly
the one made here: a foreign trigger, view or generated column would run within our statements.
SQLite keeps any type in any column, so the types of what is read are checked (``checked``).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sqlite3
import stat
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from collab_llm_nodes.durable import replacing, sync_folder
from collab_llm_nodes.errors import (
    Busy,
    CollabError,
    ConfigError,
    InvalidInput,
    Unavailable,
    quoted,
)
from collab_llm_nodes.knowledge.words import normal_form

log = logging.getLogger(__name__)

_FILE = "store.db"
_FORMAT = 3  # PRAGMA user_version
_APPLICATION = 0x434C4C4D  # "CLLM", so that no other database is taken for a store
_RETRY_S = 0.01
_PAGE_BYTES = 4096
_CACHE_KIB = 16384
_LOG_BYTES = 64 << 20  # that the write-ahead log keeps after a larger change

_TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID",
    # Ids are never given again: a KV file cannot pass for that of another chunk.
    """CREATE TABLE document (
        id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, digest TEXT NOT NULL,
        characters INTEGER NOT NULL, content BLOB NOT NULL, version INTEGER NOT NULL,
        added REAL NOT NULL)""",
    """CREATE TABLE chunk (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        document INTEGER NOT NULL REFERENCES document ON DELETE CASCADE,
        start INTEGER NOT NULL, end INTEGER NOT NULL, page INTEGER NOT NULL,
        section TEXT NOT NULL, text TEXT NOT NULL)""",
    "CREATE INDEX chunk_of_document ON chunk (document)",
    """CREATE TABLE vector (
        chunk INTEGER PRIMARY KEY REFERENCES chunk ON DELETE CASCADE, value BLOB NOT NULL)""",
    "CREATE INDEX vector_of_chunk ON vector (chunk)",  # lists the chunks without the blobs
)


# The words' table keeps no copy of the text: it must be given what it is to forget, and reads the
# rest through the view.
def _index(tokenizer: str) -> tuple[str, ...]:
    return (
        "CREATE VIEW indexed AS SELECT id, normal_form(text) AS text FROM chunk",
        f"""CREATE VIRTUAL TABLE words USING fts5(
        text, content='indexed', content_rowid='id', tokenize='{tokenizer}')""",
        "CREATE VIRTUAL TABLE terms USING fts5vocab(words, row)",
        """CREATE TRIGGER chunk_removed AFTER DELETE ON chunk BEGIN
        INSERT INTO words (words, rowid, text)
        VALUES ('delete', old.id, normal_form(old.text)); END""",
    )


_INDEX_1 = (
    """CREATE VIRTUAL TABLE words USING fts5(
        text, content='chunk', content_rowid='id', tokenize='unicode61 remove_diacritics 2')""",
    "CREATE VIRTUAL TABLE terms USING fts5vocab(words, row)",
    """CREATE TRIGGER chunk_removed AFTER DELETE ON chunk BEGIN
        INSERT INTO words (words, rowid, text) VALUES ('delete', old.id, old.text); END""",
)
_INDEX_2 = _index("unicode61 remove_diacritics 2")
_INDEX = _index("porter unicode61 remove_diacritics 2")
_SCHEMAS = {1: _TABLES + _INDEX_1, 2: _TABLES + _INDEX_2, _FORMAT: _TABLES + _INDEX}
"""Statements by format. Format 1 indexed texts as they were, not in their normal form; format 2
without stemming, and with soft hyphens."""
_UPGRADE = (
    "DROP TRIGGER chunk_removed",
    "DROP TABLE terms",
    "DROP TABLE words",
    "DROP VIEW IF EXISTS indexed",
    *_INDEX,
    "INSERT INTO words (words) VALUES ('rebuild')",
    # Hashes of words were those of other forms, too: they are made anew.
    """DELETE FROM vector WHERE EXISTS (SELECT 1 FROM meta WHERE key = 'encoder'
        AND (value LIKE 'word hashes 1 %' OR value LIKE 'word hashes 2 %'))""",
    """DELETE FROM meta WHERE key = 'encoder'
        AND (value LIKE 'word hashes 1 %' OR value LIKE 'word hashes 2 %')""",
    f"PRAGMA user_version = {_FORMAT}",
)

_META = {("store", "text"), ("version", "integer")}
_ANY_META = _META | {("encoder", "text")}
_DAMAGE = (
    *("malformed", "not a database", "corrupt", "no such", "constructor failed", "logic error"),
    "user-defined function",  # the normal form of what is no text
)
"""Words of SQLite that cannot be about a sound store with our schema."""


class Database:
    """Two connections, one that writes and one that reads. Any thread may use them.

    Args:
        folder: made if absent. None: a temporary database, whose one connection does both.
        most_bytes: size of the file at most.
        busy_s: a thread or process waits so long for another.
        create: make a store where there is none.
    """

    def __init__(
        self, folder: Path | None, *, most_bytes: int, busy_s: float, create: bool = True
    ) -> None:
        self._folder, self._busy_s = folder, busy_s
        self._name = "a temporary store" if folder is None else f"the store in {folder}"
        if folder is not None:
            _check_folder(folder, create)
        self._write_lock: Any = threading.RLock()
        self._read_lock = self._write_lock if folder is None else threading.RLock()
        with self._typed_errors():
            self._writer = self._connect()
            self._reader = self._writer if folder is None else self._connect()
        try:
            with self._typed_errors():
                self._set_up(most_bytes)
            self._prepare()
        except BaseException:  # whatever it is: nobody else can close what is half set up
            self.close()
            raise

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Run the body as one transaction: all of it, or nothing if it raises."""
        with self._held(self._write_lock), self._typed_errors():
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:  # an interrupt in mid-write must not leave half of it, either
                if self._writer.in_transaction:  # SQLite may have ended it, as on a full disk
                    self._writer.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Run the body on the state of one moment."""
        with self._held(self._read_lock), self._typed_errors():
            if self._reader.in_transaction:  # within another one of this thread
                yield self._reader
                return
            self._reader.execute("BEGIN")
            try:
                yield self._reader
            finally:
                self._reader.execute("ROLLBACK")

    def vacuum(self) -> None:
        """Write the database anew, without what is not used."""
        with self._held(self._write_lock), self._typed_errors():
            self._writer.execute("VACUUM")

    def copy(self, target: Path) -> None:
        """Write the state of one moment to ``target``, which is replaced as a whole.

        Raises:
            Unavailable: it cannot be written.
        """
        try:
            with replacing(target) as part:
                part.touch(0o600)
                with self._held(self._read_lock), self._typed_errors():
                    self._reader.execute("VACUUM INTO ?", (str(part),))
            sync_folder(target.parent)
        except OSError as error:
            raise Unavailable(
                f"cannot write {target}: {error}", field="file", remedy="give a writable folder"
            ) from error

    def close(self) -> None:
        """Close the files; a temporary database is gone then."""
        with self._write_lock, self._read_lock:
            self._writer.close()
            self._reader.close()

    def _connect(self) -> sqlite3.Connection:
        file = "" if self._folder is None else str(self._folder / _FILE)
        db = sqlite3.connect(
            file, timeout=self._busy_s, isolation_level=None, check_same_thread=False
        )
        db.create_function("normal_form", 1, normal_form, deterministic=True)
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("PRAGMA secure_delete = ON")  # what is removed is overwritten
        db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        db.execute("PRAGMA temp_store = FILE")
        return db

    def _set_up(self, most_bytes: int) -> None:
        if self._folder is not None:
            self._keep_a_log()
            self._writer.execute("PRAGMA synchronous = FULL")  # fsync at each commit
            self._writer.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
        self._writer.execute(f"PRAGMA max_page_count = {most_bytes // _PAGE_BYTES}")

    def _keep_a_log(self) -> None:
        """Have changes written ahead; SQLite does not wait for another process that does so too."""
        due = time.monotonic() + self._busy_s
        while True:
            try:
                self._writer.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() >= due:
                    raise
                time.sleep(_RETRY_S)

    def _prepare(self) -> None:
        """Make the tables of a new store, or check that this is one and bring it up to date."""
        with self.writing() as db:
            (found,) = db.execute("PRAGMA user_version").fetchone()
            (application,) = db.execute("PRAGMA application_id").fetchone()
            schema = _schema(db)
            if not schema:
                for statement in _SCHEMAS[_FORMAT]:
                    db.execute(statement)
                db.execute("INSERT INTO meta VALUES ('store', ?)", (uuid.uuid4().hex,))
                db.execute("INSERT INTO meta VALUES ('version', 0)")
                db.execute(f"PRAGMA application_id = {_APPLICATION}")
                db.execute(f"PRAGMA user_version = {_FORMAT}")
            elif application != _APPLICATION or found not in _SCHEMAS:
                raise ConfigError(
                    f"{self._folder} holds no store of format {_FORMAT}",
                    field="store",
                    remedy="name another folder, or use the release that made it",
                )
            elif difference := schema ^ _own_schema(found):
                kind, name, *_ = min(difference)
                raise ConfigError(
                    f"{self._name} does not have the schema of format {found}:"
                    f" {kind} {quoted(name)}",
                    field="store",
                    remedy="do not use it: it was changed by another program, or is damaged",
                )
            elif not _META <= set(db.execute("SELECT key, typeof(value) FROM meta")) <= _ANY_META:
                raise self.damaged("name, version or encoder")
            elif found != _FORMAT:
                for statement in _UPGRADE:
                    db.execute(statement)

    def checked(self, rows: Iterable[tuple], *types: type) -> Iterator[tuple]:
        """Yield rows whose values have these types.

        Raises:
            Unavailable: a value has another type.
        """
        for row in rows:
            if tuple(map(type, row)) != types:
                raise self.damaged("a value has the wrong type")
            yield row

    def damaged(self, why: str) -> Unavailable:
        """Return the error for content that cannot be what was written."""
        return Unavailable(
            f"{self._name} is damaged: {why}",
            field="store",
            remedy="go back to a snapshot, or remove the folder and add the documents again",
        )

    @contextlib.contextmanager
    def _held(self, lock: Any) -> Iterator[None]:
        if not lock.acquire(timeout=self._busy_s):
            raise self._busy("thread")
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def _typed_errors(self) -> Iterator[None]:
        """Turn SQLite's errors into typed ones that name the store."""
        try:
            yield
        except sqlite3.ProgrammingError as error:
            if "closed" not in str(error):
                raise
            raise Unavailable(
                f"{self._name} is closed", field="store", remedy="open it again"
            ) from error
        except sqlite3.Error as error:
            raise self._typed(error) from error
        except UnicodeDecodeError as error:  # SQLite's words, which quote a damaged schema
            raise self.damaged(str(error)) from error

    def _busy(self, who: str) -> Busy:
        return Busy(
            f"another {who} works on {self._name}",
            field="store",
            remedy="try again once it is done",
        )

    def _typed(self, error: sqlite3.Error) -> CollabError:
        said = str(error)
        if "locked" in said:
            return self._busy("process")
        if "full" in said:
            return Unavailable(
                f"no room in {self._name}",
                field="store",
                remedy="make room on the disk, or raise bytes",
            )
        if "decode" in said:  # SQLite's words quote the text, which is private
            return self.damaged("a text is not UTF-8")
        if any(sign in said for sign in _DAMAGE):
            return self.damaged(said)
        return Unavailable(
            f"cannot use {self._name}: {said}", field="store", remedy="give a writable local folder"
        )


def _schema(db: sqlite3.Connection) -> set[tuple[str, ...]]:
    """Return type, name, table and SQL of all that a database holds."""
    rows = db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master")
    return {tuple(" ".join(str(value).split()) for value in row) for row in rows}


@functools.cache
def _own_schema(number: int) -> set[tuple[str, ...]]:
    """Return what ``_schema`` gives for a new store of a format."""
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        for statement in _SCHEMAS[number]:
            db.execute(statement)
        return _schema(db)


def _check_folder(folder: Path, create: bool) -> None:
    if not create and not (folder / _FILE).is_file():
        raise InvalidInput(
            f"no store in {folder}", field="store", remedy="add a document to it first"
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_folder(folder.parent)
        # Before SQLite, whose log gets the mode of its database. Not opened: closing it again
        # would drop the locks that other threads hold on it.
        with contextlib.suppress(FileExistsError):
            os.mknod(folder / _FILE, 0o600)
        mode = (folder / _FILE).stat().st_mode
    except OSError as error:
        raise Unavailable(
            f"cannot make {folder}: {error}", field="store", remedy="give a writable folder"
        ) from error
    if mode & (stat.S_IRGRP | stat.S_IROTH):  # of an earlier release, or shared on purpose
        log.warning("others can read the store in %s: chmod -R go= it", folder)
