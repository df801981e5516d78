"""Documents of a request, by content, file or store, and passages of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.knowledge.chunking import ChunkPlan, chunks
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.knowledge.encoders import Encoder
from collab_llm_nodes.knowledge.library import Library
from collab_llm_nodes.knowledge.retrieval import RetrievalConfig, retrieve
from collab_llm_nodes.knowledge.store import Store
from collab_llm_nodes.protocols.base import Request

_PASSAGE = 1000
"""Length of a passage, as in appendix E.3 of paper 000 [characters]."""


@dataclass(frozen=True)
class Sources:
    """The documents of one request.

    Attributes:
        documents: documents by content or read from files.
        store: store with further ones; None without.
    """

    documents: tuple[Document, ...]
    store: Store | None

    @property
    def characters(self) -> int:
        """Length of all documents."""
        stored = self.store.documents() if self.store is not None else ()
        given = sum(len(document.content) for document in self.documents)
        return given + sum(document.characters for document in stored)

    def texts(self) -> tuple[str, ...]:
        """Return all documents, those of the store last."""
        return tuple(document.content for document in (*self.documents, *self._stored()))

    def passages(
        self,
        question: str,
        config: RetrievalConfig,
        encoder: Encoder,
        check: Callable[[], None],
    ) -> tuple[str, ...]:
        """Return the passages that match ``question``, the best one first.

        A store alone is searched as it is. Otherwise all documents are cut into passages and
        indexed in a temporary folder.

        Args:
            check: called between steps; if it raises, so does this.
        """
        if self.store is not None and not self.documents:
            return _found(self.store, question, config, encoder)
        plan = ChunkPlan("window", _PASSAGE)
        with tempfile.TemporaryDirectory(prefix="collab_llm_") as folder, Store(folder) as built:
            for number, document in enumerate((*self.documents, *self._stored())):
                named = Document(str(number), document.content)
                built.add(named, chunks(named, plan), check)
            while config.method == "dense" and built.embed(encoder):
                check()
            return _found(built, question, config, encoder)

    def _stored(self) -> tuple[Document, ...]:
        if self.store is None:
            return ()
        return tuple(self.store.document(entry.name) for entry in self.store.documents())


def field_of(request: Request, place: int | None = None) -> str:
    """Return the request's field that contains a document.

    Args:
        place: index of the document, those of the store last; None: any document.
    """
    given = request.documents
    if place is None and len(given) == 1 and not request.config.store:
        place = 0
    if not given or (place is not None and place >= len(given)):
        return "store"
    sent = given[place].content if place is not None else any(each.content for each in given)
    name = "document_contents" if sent else "document_names"
    return name if place is None else f"{name}[{place}]"


def sources_of(request: Request, library: Library, check: Callable[[], None]) -> Sources:
    """Return the documents of ``request``; one without content is a file of the library.

    Raises:
        InvalidInput: a document cannot be read or is not allowed; there is no such store.
    """
    documents = []
    for i, given in enumerate(request.documents):
        check()
        try:
            documents.append(library.document(given.name, given.content, check))
        except CollabError as error:
            if error.field in ("name", "path"):
                error.field = f"document_names[{i}]"
            elif error.field == "documents":
                error.field = field_of(request, i)
            raise
    store = request.config.store
    return Sources(tuple(documents), library.store(store) if store else None)


def _found(
    store: Store, question: str, config: RetrievalConfig, encoder: Encoder
) -> tuple[str, ...]:
    return tuple(hit.chunk.text for hit in retrieve(store, question, config, encoder).hits)
