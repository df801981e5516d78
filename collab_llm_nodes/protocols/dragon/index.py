"""The documents of one side: add, delete, list, count."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from collab_llm_nodes.errors import InvalidInput, quoted
from collab_llm_nodes.knowledge.chunking import chunks
from collab_llm_nodes.knowledge.documents import checked, decoded
from collab_llm_nodes.knowledge.encoders import Encoder
from collab_llm_nodes.knowledge.store import Store, StoredDocument
from collab_llm_nodes.protocols.dragon.document_kv import DocumentCaches
from collab_llm_nodes.protocols.dragon.layout import Layout
from collab_llm_nodes.protocols.dragon.side_settings import SideConfig

log = logging.getLogger(__name__)

_EMBEDDED = 64
"""Chunks that get their vectors in one transaction."""
_SILENCE_S = 5.0
"""While vectors are made, their count is logged this often."""


@dataclass(frozen=True)
class IndexStats:
    """Figures of an index.

    Attributes:
        chunks: retrievable pieces; ``without_vector`` of them cannot be found yet.
        kv_files, kv_bytes: precomputed keys and values on disk.
        version: of the store; each change raises it.
        encoder: fingerprint of the one whose vectors the store holds; empty without any.
    """

    documents: int
    chunks: int
    characters: int
    without_vector: int
    kv_files: int
    kv_bytes: int
    version: int
    encoder: str


class Index:
    """A store whose chunks fit into a prompt, with vectors and precomputed KV. For any thread.

    What a process that was killed has committed stays; its missing vectors are made when the index
    is opened again, or by the next change. Vectors and an index of words that are damaged are made
    anew when it is opened.

    Args:
        caches: precomputes the KV of what is added; None: they are computed on demand.
        check: as in :meth:`add`, while vectors are made that were missing.
    """

    def __init__(
        self,
        store: Store,
        layout: Layout,
        encoder: Encoder,
        config: SideConfig,
        caches: DocumentCaches | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._layout, self._encoder = store, layout, encoder
        self._config, self._caches = config, caches
        self._changing = threading.Lock()
        vectors, words = store.mend(encoder)
        if vectors or words:
            log.warning(
                "the index was damaged: %d vectors%s are made anew",
                vectors,
                " and the index of words" if words else "",
            )
        self._embed(check)

    def add(
        self,
        name: str,
        content: str | bytes,
        *,
        replacing: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> int:
        """Add a document and return the version of the store.

        The document is on the disk before its vectors and KV are made. If ``check`` ends that, they
        are made later.

        Args:
            content: text, or the bytes of a text in UTF-8 (or UTF-16 with a byte order mark).
            replacing: a document of this name is replaced; otherwise it is an error.
            check: called every thousand chunks, and between passes; what it raises ends the call.

        Raises:
            InvalidInput: the name is taken; or no text, too much of it, or another encoding.
            Unavailable: no room on the disk or within the limits of the store.
            Busy: another process changes the store for longer than ``store.BUSY_S``.
        """
        limits = self._config.documents
        if len(content) > (limits.file_bytes if isinstance(content, bytes) else limits.characters):
            raise InvalidInput(  # before anything is copied
                f"{quoted(name)} has {len(content)} bytes or characters",
                field="documents",
                remedy=f"at most {min(limits.file_bytes, limits.characters)}; split it",
            )
        text = decoded(name, content) if isinstance(content, bytes) else content
        document = checked(name, text, limits)
        with self._changing:
            pieces = chunks(document, self._config.plan, self._layout.pieces)
            version = self._store.add(document, pieces, check, replacing=replacing)
            self._embed(check)
        if self._caches is not None:
            self._caches.prepare(self._store.chunks(name), check)
        return version

    def delete(self, *names: str) -> int:
        """Delete documents with all derived data, and return the version of the store.

        The database is written anew, so that none of their words remain on the disk.

        Raises:
            InvalidInput: there is none of a name; those before it are deleted.
        """
        with self._changing:
            try:
                for name in names:
                    self._store.remove(name)
            finally:
                self._store.compact()
        return self._store.version

    def documents(self) -> tuple[StoredDocument, ...]:
        """Return the list of documents, by name."""
        return self._store.documents()

    def stats(self) -> IndexStats:
        """Return figures of the index."""
        documents = self._store.documents()
        kv = self._store.kv
        return IndexStats(
            len(documents),
            sum(document.chunks for document in documents),
            sum(document.characters for document in documents),
            self._store.without_vector(),
            0 if kv is None else kv.count(),
            0 if kv is None else kv.size(),
            self._store.version,
            self._store.encoder,
        )

    def _embed(self, check: Callable[[], None]) -> None:
        total = self._store.without_vector()
        due = time.monotonic() + _SILENCE_S
        while left := self._store.embed(self._encoder, _EMBEDDED):
            if time.monotonic() >= due:
                log.warning("vectors of the documents: %d of %d made", total - left, total)
                due = time.monotonic() + _SILENCE_S
            check()
