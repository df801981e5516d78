"""Keys and values of documents: computed once, kept beside the index, loaded when one is found."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.session import Feed, Session
from collab_llm_nodes.errors import CollabError, InvalidInput, ModelError
from collab_llm_nodes.knowledge.kv_files import KvFiles
from collab_llm_nodes.knowledge.store import Hit
from collab_llm_nodes.models.fingerprint import fingerprint
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.protocols.dragon.layout import Ids, Layout

log = logging.getLogger(__name__)

_BATCH = 16
"""Documents of one pass."""

Check = Callable[[], None]


class DocumentCaches:
    """Sessions that have read one document each.

    Any thread may use it: what two threads compute at the same time is computed twice.

    Args:
        files: of the store that holds the documents; None: nothing is kept.

    Attributes:
        loaded, computed, refused: documents whose KV came from a file, was computed, and whose
            file could not be used (each of these is computed as well).
    """

    def __init__(self, engine: Engine, files: KvFiles | None, layout: Layout) -> None:
        self._engine, self._files, self._layout = engine, files, layout
        self.loaded = self.computed = self.refused = 0

    def open(self, hits: Sequence[Hit], check: Check | None = None) -> list[Session]:
        """Return a session for each of ``hits`` that holds the document and nothing else.

        Args:
            check: called between two layers; what it raises ends the call, and no session is left.

        Raises:
            InvalidInput: a document is longer than the model's context.
        """
        wanted = [self._layout.document(hit.chunk.text) for hit in hits]
        sessions: dict[int, Session] = {}
        try:
            for number, (hit, ids) in enumerate(zip(hits, wanted, strict=True)):
                session = self._load(hit.id, ids)
                if session is not None:
                    sessions[number] = session
            missing = iter(i for i in range(len(hits)) if i not in sessions)
            while batch := list(islice(missing, _BATCH)):
                opened = [self._engine.open(EncodedPrompt(wanted[i])) for i in batch]
                sessions.update(zip(batch, opened, strict=True))
                self._read(opened, check)
                for i in batch:
                    self._keep(hits[i].id, sessions[i])
        except BaseException:  # free the memory in any case
            for session in sessions.values():
                session.close()
            raise
        return [sessions[i] for i in range(len(hits))]

    def prepare(self, hits: Iterable[Hit], check: Check | None = None) -> int:
        """Compute and keep the KV of documents that have none yet; return how many were computed.

        It stops where the files would push each other out, since later ones are computed on demand.
        """
        if self._files is None:
            return 0
        computed, rest = self.computed, iter(hits)
        while batch := list(islice(rest, _BATCH)):
            new = [hit for hit in batch if self._files.get(hit.id, self._key) is None]
            for session in self.open(new, check):
                session.close()
            held, count = self._files.size(), self._files.count()
            if held + _BATCH * held / max(count, 1) > self._files.most_bytes:
                break
        return self.computed - computed

    @cached_property
    def _key(self) -> str:
        """Key of model, number type and the text before a document."""
        facts = (
            f"{fingerprint(self._engine.loaded.model)} {self._engine.loaded.model.dtype}"
            f" {self._layout.begin}"
        )
        return hashlib.sha256(facts.encode()).hexdigest()

    def _load(self, chunk: int, ids: Ids) -> Session | None:
        """Return the session in the chunk's file; None if there is none that can be used."""
        file = None if self._files is None else self._files.get(chunk, self._key)
        if file is None:
            return None
        try:
            session = self._engine.restore(file)
        except (InvalidInput, ModelError) as error:
            self._refuse(file, error)
            return None
        if session.prompt.ids != ids or session.length != len(ids):
            session.close()
            self._refuse(file, "it holds another text")
            return None
        self.loaded += 1
        return session

    def _refuse(self, file: Path, why: object) -> None:
        self.refused += 1
        log.warning("%s is computed again: %s", file.name, why)

    def _read(self, sessions: Sequence[Session], check: Check | None) -> None:
        feeds = [Feed(session, session.prompt.ids, last=0) for session in sessions]
        for result in self._engine.run(feeds, check=check):
            if isinstance(result, Exception):
                raise result
        self.computed += len(sessions)

    def _keep(self, chunk: int, session: Session) -> None:
        if self._files is None:
            return
        try:
            self._files.put(chunk, self._key, session.save)
        except CollabError as error:  # a full disk costs time, not the answer
            log.warning("the KV of document %d is not kept: %s", chunk, error)
