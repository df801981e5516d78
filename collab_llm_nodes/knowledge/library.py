"""Documents that a request names instead of sending them: files of some folders, and stores."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from collab_llm_nodes.config import setting
from collab_llm_nodes.errors import InvalidInput, quoted
from collab_llm_nodes.knowledge.documents import Document, DocumentLimits, checked
from collab_llm_nodes.knowledge.files import Folders, read_document
from collab_llm_nodes.knowledge.store import Store, StoreLimits

_STORE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True)
class LibraryConfig:
    """The places that requests may name."""

    folders: tuple[str, ...] = setting(
        (), "Folders whose files requests may name; empty: none.", read_only=True
    )
    stores: str = setting(
        "", "Folder that holds the stores, each a folder of its own; empty: none.", read_only=True
    )
    documents: DocumentLimits = field(default_factory=DocumentLimits)
    store: StoreLimits = field(default_factory=StoreLimits)


class Library:
    """Gives documents by content or path, and stores by name. Any thread may use it.

    Raises:
        ConfigError: a folder does not exist.
    """

    def __init__(self, config: LibraryConfig) -> None:
        self._config = config
        self._folders = Folders(config.folders)
        self._open: dict[str, Store] = {}
        self._lock = threading.Lock()

    def document(
        self, name: str, content: str = "", check: Callable[[], None] = lambda: None
    ) -> Document:
        """Return the document with this content, or the file of this name if there is none.

        Args:
            check: called while a PDF is read; what it raises ends that.

        Raises:
            InvalidInput: not usable, not readable, or outside the folders.
        """
        if content:
            return checked(name, content, self._config.documents)
        return read_document(name, self._folders, self._config.documents, name, check)

    def store(self, name: str) -> Store:
        """Return the store of this name, which stays open.

        Raises:
            InvalidInput: there is none.
        """
        if not self._config.stores or not _STORE.fullmatch(name):
            raise InvalidInput(
                f"no store is called {quoted(name)}", field="store", remedy="name one that exists"
            )
        with self._lock:
            if name not in self._open:
                folder = Path(self._config.stores).expanduser() / name
                self._open[name] = Store(folder, self._config.store, create=False)
            return self._open[name]

    def close(self) -> None:
        """Close the stores."""
        with self._lock:
            for store in self._open.values():
                store.close()
            self._open.clear()
